"""Compare finished and unfinished runs by their folders: results, what differs between their recipes, curves."""

from __future__ import annotations

import html
import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ....common.errors import CheckpointError, DataError, RecipeError
from ....common.pictures import check_picture, displayed, save_picture
from ....common.storage.addresses import is_address
from ....common.table import Table
from ...describe.pipeline_spec import PipelineSpec
from ...recipes.convert import to_recipe
from ...recipes.files import RECIPE, read_recipe
from ...recipes.flat import flattened
from ...tasks.metrics import format_metric
from ...telemetry.history import HISTORY, Epoch, History, Monitor, read_history
from ..checkpoints.remote import opened

WIDTH = 80  # of a printed table, if it can be
KEYS = 4
"""Differing keys up to which each has a column of its own; of more, a row has those of its run as a text."""
ABSENT = "–"


@dataclass(frozen=True, eq=False)
class RunSummary:
    """What the folder of a run says about it.

    Attributes:
        name: how the table names it.
        folder: where it is: a path, an address, or None of a result in memory.
        history: its finished epochs; empty if there are none.
        recipe: the values of its recipe by dotted key; empty if it has none.
        problem: why it is not a finished run, as a sentence's end; "" if it is.
    """

    name: str
    folder: str | Path | None
    history: History
    recipe: dict[str, Any]
    problem: str = ""

    @property
    def epochs(self) -> int:
        """Finished epochs."""
        return len(self.history.epochs)

    @property
    def planned(self) -> int | None:
        """Epochs that it was to train; None if it is unknown."""
        return self.history.planned(self.recipe)

    @property
    def monitor(self) -> Monitor:
        """What decides which of its epochs is best."""
        return self.history.monitor

    @property
    def best(self) -> Epoch | None:
        """The epoch with the best monitored value; None if none was evaluated."""
        return self.history.best

    @property
    def seconds(self) -> float:
        """Duration of the finished epochs, with their evaluations."""
        return sum(epoch.seconds for epoch in self.history.epochs)

    @property
    def images_per_s(self) -> float | None:
        """Median of the epochs' training throughput over all ranks; None without a finished epoch."""
        return statistics.median(e.images_per_s for e in self.history.epochs) if self.epochs else None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        best, last = self.best, self.history.epochs[-1] if self.epochs else None
        return {
            "run": self.name, "folder": self.folder and str(self.folder), "problem": self.problem,
            "epochs": self.epochs, "planned": self.planned, "monitor": self.monitor.name,
            "best": None if best is None else self.monitor.of(best), "best_epoch": best and best.epoch,
            "last": self.history.monitored, "loss": last and last.loss, "val_loss": last and last.val_loss,
            "seconds": self.seconds, "images_per_s": self.images_per_s,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Runs side by side; `compare_runs` returns it. It prints as a table.

    Attributes:
        runs: in the order given.
        differences: the recipes' values by dotted key, one per run, of the keys that differ; None where a recipe does
            not have the key.

    Example::

        >>> compare_runs(["runs/photos"]).runs[0].monitor.name
        'top1'
    """

    runs: tuple[RunSummary, ...]
    differences: dict[str, tuple[Any, ...]]

    def table(self) -> Table:
        """Return the results, one row per run."""
        monitors = {run.monitor.name for run in self.runs if run.epochs}
        same = len(monitors) < 2
        name = str(next((run.monitor for run in self.runs if run.epochs), "")) if same else ""
        rows = []
        for run in self.runs:
            best, last = run.best, run.history.epochs[-1] if run.epochs else None
            planned = "" if run.planned in (None, run.epochs) else f"/{run.planned}"
            rows.append((
                run.name, f"{run.epochs}{planned}", _value(run, None if best is None else run.monitor.of(best), same),
                "" if best is None else str(best.epoch), _value(run, run.history.monitored, same),
                "" if last is None else f"{last.loss:.4f}", _time(run.seconds) if run.epochs else "",
                "" if run.images_per_s is None else f"{run.images_per_s:,.0f}",
            ))  # fmt: skip
        heads = "run", "epochs", f"best {name}".strip(), "in epoch", "last", "loss", "time", "images/s"
        return Table(heads, rows, figures=True)

    def recipes(self) -> Table | None:
        """Return what differs between the recipes, one row per run; None if nothing does."""
        keys = [*self.differences]
        if not keys:
            return None
        rows = [[run.name, *(_text(self.differences[key][n]) for key in keys)] for n, run in enumerate(self.runs)]
        table = Table(["run", *keys], rows, figures=True)
        if len(keys) <= KEYS and len(table.text(10**6).split("\n")[0]) <= WIDTH:
            return table
        texts = [(name, ", ".join(map("{}={}".format, keys, own))) for name, *own in rows]
        return Table(("run", "what differs in its recipe"), texts, spaced=True)

    def show(self) -> Any:
        """Return the curves of all runs, which a notebook displays: a matplotlib figure with the monitored metric and
        the training loss, by epoch and by time.

        Raises:
            DataError: if no run has a finished epoch.
            MissingExtra: without matplotlib.
        """
        from .run_curves import figure_of

        return displayed(figure_of(self))

    def save(self, path: str | Path) -> Path:
        """Write the curves.

        Raises:
            DataError: unless `path` ends in `.png`, `.svg` or `.pdf`; if no run has a finished epoch.
            MissingExtra: without matplotlib.
        """
        path = check_picture(path)
        return save_picture(self.show(), path, dpi=120)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        own = [{key: values[n] for key, values in self.differences.items()} for n in range(len(self.runs))]
        return {"runs": [run.to_dict() | {"recipe": each} for run, each in zip(self.runs, own, strict=True)]}

    def _sentences(self) -> list[str]:
        sentences = [f"{run.name}: {run.problem}." for run in self.runs if run.problem]
        if not self.differences and sum(bool(run.recipe) for run in self.runs) > 1:
            sentences.append("The recipes are the same.")
        return sentences

    def __repr__(self) -> str:
        tables = [table.text(WIDTH) for table in (self.table(), self.recipes()) if table is not None]
        return "\n".join([*tables, *self._sentences()])

    def _repr_html_(self) -> str:
        tables = [table.html() for table in (self.table(), self.recipes()) if table is not None]
        return "".join([*tables, *(f"<p>{html.escape(each)}</p>" for each in self._sentences())])


class Result(Protocol):
    """What `compare_runs` reads of a `FitResult`."""

    @property
    def history(self) -> History: ...
    @property
    def spec(self) -> PipelineSpec | None: ...


RunArg = str | Path | History | Result
"""A run: its folder (`fit(out=…)`, `--out`) or address, its result, or its history."""


def compare_runs(runs: Iterable[RunArg]) -> RunComparison:
    """Do what `Pipeline.compare` does, with the runs as a list. Of a history, no recipe is known.

    Raises:
        DataError: as `Pipeline.compare`.

    Example::

        >>> comparison = compare_runs(["runs/photos", result])
        >>> [run.name for run in comparison.runs]
        ['photos', 'result 2']
    """
    given = [*runs] if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    if not given:
        raise DataError("There is no run to compare. Pass the folders of runs (fit(out=…), --out), or results of fit.")
    found = tuple(_read(run, name) for run, name in zip(given, _names(given), strict=True))
    if not any(run.epochs or run.recipe or run.folder is None for run in found):
        raise DataError(
            f"None of these is the folder of a run: {', '.join(map(str, given))}. Pass those of fit(out=…), --out."
        )
    known = [run.recipe for run in found if run.recipe]
    differences = {
        key: tuple(run.recipe.get(key) for run in found)
        for key in dict.fromkeys(key for recipe in known for key in recipe)
        if any(recipe.get(key) != known[0].get(key) for recipe in known)
    }
    return RunComparison(found, differences)


def _read(run: RunArg, name: str) -> RunSummary:
    if isinstance(run, str | Path):
        try:
            return replace(read_run(opened(run, RECIPE, HISTORY), name), folder=run)
        except CheckpointError as error:  # of an address that cannot be reached
            return RunSummary(name, run, History(), {}, f"it cannot be read: {str(error).rstrip('.')}")
    history, spec = run if isinstance(run, History) else getattr(run, "history", None), getattr(run, "spec", None)
    if not isinstance(history, History):
        raise DataError(
            f"{run!r:.80} is not a run. Pass a folder of fit(out=…) or its address, a result of fit, or a history."
        )
    recipe: dict[str, Any] = {}
    with suppress(RecipeError):  # of a custom model
        recipe = {} if spec is None else flattened(to_recipe(spec))
    left = history.unfinished(recipe)
    return RunSummary(name, None, history, recipe, f"it is unfinished, {left}" if left else "")


def read_run(folder: Path, name: str = "") -> RunSummary:
    """Return what a folder says about its run; what is wrong with it is its `problem`."""
    name, history, recipe, problem = name or folder.name, read_history(folder), dict[str, Any](), ""
    try:
        recipe = flattened(read_recipe(folder / RECIPE)[0])
    except RecipeError as error:
        if (folder / RECIPE).exists():
            problem = f"its {RECIPE} is damaged: {str(error).rstrip('.')}"
    if not folder.is_dir():
        problem = "there is no such folder"
    elif history is None and (folder / HISTORY).exists():
        problem = f"its {HISTORY} is damaged"
    elif history is None:
        problem = "it ended before its first epoch did" if recipe else problem or f"it is no run: it has no {HISTORY}"
    elif not problem and (left := history.unfinished(recipe)):
        problem = f"it is unfinished, {left}"
    return RunSummary(name, folder, history or History(), recipe, problem)


def _names(runs: Sequence[RunArg]) -> list[str]:
    """Return short names, each once: folders and addresses without what all of a kind begin with; `result 2`."""
    places = [str(run) if isinstance(run, str | Path) else None for run in runs]
    whole = [
        place and (place.rstrip("/") if is_address(place) else os.path.abspath(place))  # noqa: PTH100 - not `resolve`
        for place in places
    ]
    found = [f"result {number}" for number in range(1, len(runs) + 1)]
    for remote in (False, True):
        own = [n for n, place in enumerate(whole) if place is not None and is_address(place) is remote]
        if own:
            above = os.path.commonpath([os.path.dirname(str(whole[n])) for n in own])  # noqa: PTH120
            for n in own:
                found[n] = os.path.relpath(str(whole[n]), above)
    return [f"{name} ({found[: n + 1].count(name)})" if found.count(name) > 1 else name for n, name in enumerate(found)]


def _value(run: RunSummary, value: float | None, same: bool) -> str:
    if value is None:
        return ""
    text = format_metric(value, run.monitor.unit)
    return text if same else f"{run.monitor} {text}"


def _text(value: Any) -> str:
    if value is None:
        return ABSENT
    return f"{value:g}" if isinstance(value, float) else str(value)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
