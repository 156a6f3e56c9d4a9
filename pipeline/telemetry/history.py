"""The results of a run after each epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from ...common.errors import DrivetrainError
from ...common.pictures import displayed, save_result
from ...common.storage.json_files import convert
from ...common.table import Table
from ..tasks.metrics import Unit, format_metric

Units = Mapping[str, Unit]
HISTORY = "history.json"
"""The history in the folder of its run."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of a history.

    Attributes:
        epoch: counted from 1.
        loss: mean of the training loss function.
        val_loss: mean of the task's own loss on the validation data; None without, or if the epoch was not evaluated
            (`fit(eval_every=…)`).
        metrics: the task's metrics on the validation data, by name; empty without.
        images_per_s: training throughput over all ranks, without evaluation.
        data_wait_fraction: fraction of the training time spent waiting for data, 0 to 1.
        seconds: duration of the full epoch, including evaluation.
        lr: learning rate at its end.
        skipped: steps skipped because their loss was not finite (`fit(on_nonfinite="skip")`), or because their
            gradients overflowed in fp16: a few until the loss scale is calibrated, and one each time it grows too far.
        replaced: samples that could not be decoded, for which others were trained on (`load(on_error="skip")`).
        units: units of those metrics that are shares, by name; a property of the run, `History.units`.

    Example::

        >>> last = result.history.epochs[-1]
        >>> last.epoch, sorted(last.metrics)
        (1, ['top1'])
    """

    epoch: int
    loss: float
    val_loss: float | None
    metrics: Mapping[str, float]
    images_per_s: float
    data_wait_fraction: float
    seconds: float
    lr: float
    skipped: int = 0
    replaced: int = 0
    units: Units = field(default_factory=dict, compare=False, repr=False)

    @property
    def accuracy(self) -> float | None:
        """Top-1 accuracy (0 to 1) on the validation data; None without, or if the task has no metric `top1`."""
        return self.metrics.get("top1")

    def values(self) -> dict[str, float]:
        """Return all numbers by name, the metrics among them; those that were not measured are missing."""
        found: dict[str, float] = {}
        for name, value in _saved(self).items():
            found |= value if name == "metrics" else {} if value is None else {name: value}
        return found

    def __str__(self) -> str:
        parts = [f"epoch {self.epoch}", f"loss {self.loss:.4f}"]
        if self.val_loss is not None:
            parts += [f"val loss {self.val_loss:.4f}", *shown(self.metrics, self.units)]
        parts += [f"{self.images_per_s:,.0f} images/s", f"waiting {self.data_wait_fraction:.0%}"]
        parts.append(f"{self.seconds:.1f} s")
        if self.skipped:
            parts.append(f"{self.skipped} steps skipped")
        return "  ".join(parts)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation within an epoch (`fit(eval_every_steps=…)`, or because the run was stopped there).

    Attributes:
        epoch: number of the epoch, counted from 1.
        step: completed optimizer steps of the full run.
        val_loss: mean of the task's own loss on the validation data.
        metrics: the task's metrics on the validation data, by name.
        units: see `Epoch`.

    Example::

        >>> result = pipeline.fit(epochs=1, eval_every_steps=1, progress=False)
        >>> [one.step for one in result.history.evaluations]
        [1]
    """

    epoch: int
    step: int
    val_loss: float
    metrics: Mapping[str, float]
    units: Units = field(default_factory=dict, compare=False, repr=False)

    @property
    def accuracy(self) -> float | None:
        """Top-1 accuracy (0 to 1); None if the task has no metric `top1`."""
        return self.metrics.get("top1")

    @property
    def results(self) -> dict[str, float]:
        """`val_loss` and the metrics by name, without the position."""
        return {"val_loss": self.val_loss, **self.metrics}

    def __str__(self) -> str:
        position = f"epoch {self.epoch}, step {self.step:,}"
        return "  ".join([position, f"val loss {self.val_loss:.4f}", *shown(self.metrics, self.units)])


def _saved(one: Epoch | Evaluation) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "units"}


def shown(metrics: Mapping[str, float], units: Units) -> list[str]:
    return [f"{name} {format_metric(value, units.get(name))}" for name, value in metrics.items()]


COLUMNS = {
    "epoch": ("epoch", "d"),
    "loss": ("loss", ".4f"),
    "val_loss": ("val loss", ".4f"),
    "images_per_s": ("images/s", ",.0f"),
    "data_wait_fraction": ("waiting for data", ".0%"),
    "seconds": ("seconds", ".1f"),
    "lr": ("lr at its end", ".3g"),
    "skipped": ("steps skipped", "d"),
    "replaced": ("samples replaced", "d"),
}
"""The fields of an `Epoch` in the order of a log's columns, with heading and format in notebooks."""


@dataclass(frozen=True)
class Monitor:
    """The value that decides which epoch is best: `val_loss`, or a metric of the task."""

    name: str = "top1"
    higher_is_better: bool = True
    unit: Unit | None = None

    def of(self, results: Epoch | Evaluation) -> float | None:
        value = results.val_loss if self.name == "val_loss" else results.metrics.get(self.name)
        return None if value is None or value != value else value

    def score(self, results: Epoch | Evaluation) -> float | None:
        value = self.of(results)
        return None if value is None else value if self.higher_is_better else -value

    def fraction(self, value: float) -> float:
        """Return a value of a metric that is a share, 0 to 1."""
        return value / 100 if self.unit == "percent" else value

    def reaches(self, value: float, target: float) -> bool:
        return value >= target if self.higher_is_better else value <= target

    def __str__(self) -> str:
        return self.name.replace("_", " ")


class StepPoint(NamedTuple):
    """A step of the curves."""

    at: float  # epochs trained until then: 1.5 in the middle of the second
    loss: float  # of this step on rank 0
    lr: float  # of the first parameter group


class _Stop(TypedDict):
    reason: str
    epoch: int
    step: int
    within: NotRequired[int]  # steps of the epoch that it is in; 0 after an epoch


class _Saved(TypedDict):
    """The facts of a saved history that a reader uses."""

    epochs: list[Epoch]
    evaluations: NotRequired[list[Evaluation]]
    steps: NotRequired[list[StepPoint]]
    monitor: NotRequired[Monitor]
    units: NotRequired[dict[str, Unit | None]]
    planned: NotRequired[int]
    stopped: NotRequired[_Stop]
    resumed: NotRequired[list[dict[str, Any]]]
    provenance: NotRequired[dict[str, Any]]


@dataclass(repr=False)
class History:
    """The finished epochs, facts about the run that produced them, its evaluations within epochs, and the loss and
    learning rate of up to a thousand steps, evenly spaced, for the curves.

    Example::

        >>> result.history.save("history.json")
        >>> [epoch.epoch for epoch in result.history.epochs]
        [1]
    """

    epochs: list[Epoch] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    steps: list[StepPoint] = field(default_factory=list, compare=False)  # those of rank 0, which only it has

    def to_dict(self) -> dict[str, Any]:
        """Return the history as plain JSON types."""
        within = {"evaluations": [*map(_saved, self.evaluations)]} if self.evaluations else {}
        steps = {"steps": [[*step] for step in self.steps]} if self.steps else {}
        return {"epochs": [*map(_saved, self.epochs)], **within, **steps, **self.facts}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> History:
        """Return the history that `to_dict` gave as plain JSON types. ShapeError names the first field that is missing
        or of another type."""
        typed = convert(saved, _Saved)
        facts = {key: value for key, value in saved.items() if key not in ("epochs", "evaluations", "steps")}
        units = facts.get("units", {})
        within = [replace(each, units=units) for each in typed.get("evaluations", [])]
        return cls([replace(epoch, units=units) for epoch in typed["epochs"]], facts, within, typed.get("steps", []))

    def save(self, path: str | Path) -> None:
        """Write the history as `.json`, or its curves as `.png`, `.svg` or `.pdf`; atomically.

        Raises:
            DrivetrainError: for another suffix, or curves without a finished epoch.
            MissingExtra: for curves, without matplotlib.
        """
        save_result(self, path, dpi=120)

    def show(self) -> Any:
        """Return the curves, which a notebook displays: a matplotlib figure, as in the run's `curves.png`.

        Raises:
            DrivetrainError: without a finished epoch.
            MissingExtra: without matplotlib.
        """
        from .curves import figure_of

        if not self.epochs:
            raise DrivetrainError("No epoch has finished, so there are no curves. Train for one epoch at least.")
        return displayed(figure_of(self))

    @property
    def best(self) -> Epoch | None:
        """The first epoch with the best monitored value; None if none was evaluated."""
        rated = [(score, epoch) for epoch in self.epochs if (score := self.monitor.score(epoch)) is not None]
        return max(rated, key=lambda pair: pair[0])[1] if rated else None

    @property
    def last(self) -> Epoch | Evaluation | None:
        """The last epoch or moment within one that was evaluated; None if none was."""
        known: list[tuple[int, int, int, Epoch | Evaluation]] = [
            (epoch.epoch, 1, 0, epoch) for epoch in self.epochs if epoch.val_loss is not None
        ]
        known += [(each.epoch, 0, each.step, each) for each in self.evaluations]  # before the one at the epoch's end
        return max(known, key=lambda entry: entry[:3])[3] if known else None

    @property
    def accuracy(self) -> float | None:
        """Top-1 accuracy (0 to 1) of the last evaluation; None without validation data."""
        return None if self.last is None else self.last.accuracy

    @property
    def units(self) -> Units:
        """The units of those metrics that are shares, by name."""
        units: Units = self.facts.get("units", {})
        return units

    @property
    def monitor(self) -> Monitor:
        """What decides which epoch is best."""
        return Monitor(**self.facts.get("monitor", {}))

    @property
    def monitored(self) -> float | None:
        """The monitored value of the last evaluation; None if it is unknown."""
        return None if self.last is None else self.monitor.of(self.last)

    @property
    def latest(self) -> str:
        """The monitored value of the last evaluation as text, with its name; "" if it is unknown."""
        value, monitor = self.monitored, self.monitor
        return "" if value is None else f"{monitor} {format_metric(value, monitor.unit)}"

    @property
    def stopped(self) -> str | None:
        """Why a callback stopped the run before its last epoch ended; None if none did, or the run continues."""
        stopped: dict[str, Any] | None = self.facts.get("stopped")
        return None if stopped is None or self.facts.get("continued") else str(stopped["reason"])

    @property
    def moment(self) -> str:
        """When the run's weights are from, in epochs: `"1"`, or `"1 and 2 steps"` if it was stopped there."""
        within = self.facts.get("stopped", {}).get("within")
        return f"{len(self.epochs)} and {within} steps" if within else f"{len(self.epochs)}"

    def planned(self, recipe: Mapping[str, Any]) -> int | None:
        """Return how many epochs the run was to train, by its recipe, which is written sooner, or if it has none, by
        the history; None of one of version 0.2.0 without a recipe."""
        planned = recipe.get("epochs", self.facts.get("planned"))
        return planned if isinstance(planned, int) else None

    def unfinished(self, recipe: Mapping[str, Any]) -> str:
        """Return `"1 of 3 epochs"` if the run left off before its last epoch without having been stopped by a callback;
        "" otherwise, or if the plan is unknown."""
        done, planned = len(self.epochs), self.planned(recipe)
        ended = self.stopped is not None or planned is None or done >= planned
        return "" if ended else f"{done} of {planned} epochs"

    def __repr__(self) -> str:
        return "\n".join(map(str, self.epochs)) or "no finished epoch"

    def _repr_html_(self) -> str:
        if not self.epochs:
            return "<i>no finished epoch</i>"
        units = self.units
        values = [epoch.values() for epoch in self.epochs]
        names = [*COLUMNS]
        at = names.index("val_loss") + 1
        names[at:at] = dict.fromkeys(name for epoch in self.epochs for name in epoch.metrics)
        measured = [name for name in names if any(name in row for row in values)]
        rows = [[_cell(name, row.get(name), units.get(name)) for name in measured] for row in values]
        return Table([COLUMNS.get(name, (name,))[0] for name in measured], rows, figures=True).html()


def read_history(folder: Path) -> History | None:
    """Return the history of the run in a folder; None if it has none, or a damaged one."""
    try:
        return History.from_dict(json.loads((folder / HISTORY).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def _cell(name: str, value: float | None, unit: Unit | None) -> str:
    if value is None:
        return ""
    return format(value, COLUMNS[name][1]) if name in COLUMNS else format_metric(value, unit)
