"""The result of tuning: the pipeline and every trial with its figure and reason, as table, picture and file."""

from __future__ import annotations

import html
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from ....common import machine
from ....common.errors import LedgerError, PlanError, RecipeError, require
from ....common.pictures import BLUE, INK, ORANGE, PURPLE, RED, literal, save_picture
from ....common.storage.files import write_file
from ....common.storage.json_files import ShapeError, parse
from ....common.table import Table
from ...describe.pipeline_spec import PipelineSpec
from ...ledger.statistics import speed_text
from ...recipes.convert import to_recipe
from ...recipes.core_yaml import dump
from ...runs.facts import check_facts

Outcome = Literal["accepted", "dropped", "trade", "undecided", "failed", "not tried"]
FORMAT = 2
NOISE = 1.1  # training that exceeds a ceiling by more than this shows that the machine was busy
OUTCOMES = {"accepted": BLUE, "trade": ORANGE, "dropped": RED, "undecided": PURPLE}  # their colors


@dataclass(frozen=True)
class Tried:
    name: str  # such as "workers=4"
    bottleneck: str  # that it relieves: data, step or communication
    # "trade" is faster, but not shown to keep the accuracy; "undecided": the tuning ended during its rounds.
    outcome: Outcome
    ratio: float | None = None  # speed with it over that without
    low: float | None = None  # of the ratio's confidence interval; None after a single round
    high: float | None = None
    rounds: int = 0  # in which both were measured
    images_per_s: float | None = None  # with it
    reason: str = ""  # why it failed, or was not tried
    accuracy: float | None = None  # after short trainings, less that of the pipeline as given: a fraction
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    seeds: int = 0  # from which both were trained
    memory: int | None = None  # bytes on a rank: the peak on a GPU, else of weights, gradients and optimizer

    @property
    def figure(self) -> str:
        if self.ratio is None:
            return self.reason
        rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        if self.low is not None and self.high is not None:
            rounds = f"{self.low:.3f} to {self.high:.3f}, {rounds}"
        speed = f"{self.ratio:.3f} ×  ({rounds})"
        if self.accuracy is None or self.accuracy_low is None or self.accuracy_high is None:
            return f"{speed}; {self.reason}" if self.reason else speed
        points = [f"{100 * one:+.2f}" for one in (self.accuracy, self.accuracy_low, self.accuracy_high)]
        return f"{speed}; accuracy {points[0]} points ({points[1]} to {points[2]}, {self.seeds} seeds)"


@dataclass(frozen=True)
class Tuned:
    """The result of `Pipeline.tune`.

    Attributes:
        pipeline: the tuned pipeline: the same training, run faster.
        variables: environment variables that make it faster still, to be set before Python starts.
        target: the accuracy to which the ratios of the trials are those of times; None: they are of speeds.
        trials: every change, in the order in which they were tried.
        limits: images/s of the tuned pipeline, and of its loader and its model alone, by the names `"training"`,
            `"loader"` and `"model"`; on several ranks also what exchanging the gradients would allow,
            `"communication"`; empty if the time did not suffice.
        before: images/s of the pipeline as given.
        facts: recipe, machine and versions.
        stopped: why it ended.
    """

    pipeline: PipelineSpec
    trials: Sequence[Tried]
    limits: Mapping[str, float] = field(default_factory=dict)
    before: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    target: float | None = None

    @property
    def accepted(self) -> tuple[Tried, ...]:
        """The changes that `pipeline` has, in order."""
        return tuple(one for one in self.trials if one.outcome == "accepted")

    @property
    def trades(self) -> tuple[Tried, ...]:
        """The changes that are faster, but not shown to keep the accuracy; `pipeline` does not have them."""
        return tuple(one for one in self.trials if one.outcome == "trade")

    @property
    def gain(self) -> float:
        """The product of the accepted ratios: how many times as fast the tuned pipeline is."""
        return math.prod(one.ratio or 1.0 for one in self.accepted)

    @property
    def bound(self) -> str:
        """One sentence on what limits the tuned pipeline now."""
        if self.target is not None:
            return "Speed is that to the target: the time of training to it without the change, over that with it."
        if not self.limits:
            return "The bottleneck is not known: there was no time to measure it."
        train, loader, model = (self.limits[name] for name in ("training", "loader", "model"))
        if train > NOISE * min(loader, model):
            return (
                f"The bottleneck is not known: training reaches {speed_text(train)} images/s, more than the loader "
                f"({speed_text(loader)}) or the model ({speed_text(model)}) alone. The machine was busy."
            )
        text = (
            f"The {'loader' if loader < model else 'model'} is the bottleneck: the loader alone delivers "
            f"{speed_text(loader)} images/s, the model alone {speed_text(model)}. Training reaches "
            f"{speed_text(train)}, {train / min(loader, model):.0%} of that limit."
        )
        if self.variables:
            text += " This is without the environment variables."
        if "communication" in self.limits:
            share = model / self.limits["communication"]
            text += f" Exchanging gradients takes {share:.0%} of a step's time."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the result in plain JSON types, with the tuned pipeline's recipe if it has one."""
        try:
            recipe: Any = to_recipe(self.pipeline)
        except (PlanError, RecipeError) as error:  # of a model or a loss without a name
            recipe = {"none": str(error)}
        return {
            "format": FORMAT, "facts": dict(self.facts), "recipe": recipe, "gain": self.gain, "before": self.before,
            "limits": dict(self.limits), "stopped": self.stopped, "target": self.target,
            "variables": dict(self.variables), "trials": [asdict(one) for one in self.trials],
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the tuned recipe (`.yaml`), all trials (`.json`), or the picture (`.png`, `.svg`, `.pdf`).

        Raises:
            PlanError: for another suffix, or a pipeline that is no recipe.
            MissingExtra: for a picture without the extra `plot`.
        """
        path = Path(path)
        if path.suffix not in (".yaml", ".json", ".png", ".svg", ".pdf"):
            raise PlanError(f"{path} must end in .yaml, .json, .png, .svg or .pdf.")
        if path.suffix == ".json":
            write_file(path, json.dumps(self.to_dict(), indent=1))
        elif path.suffix == ".yaml":
            lines = self._exports().splitlines() if self.variables else []
            comment = "".join(f"# {line}\n" for line in lines)
            write_file(path, comment + dump(to_recipe(self.pipeline)))
        else:
            save_picture(self.picture(), path, dpi=150, bbox_inches="tight")

    def picture(self) -> Any:
        """Return all changes as a matplotlib figure, a forest plot: speed with each over that without it, and its
        interval. What failed or was not tried has its reason. Raise MissingExtra without matplotlib."""
        figure_class = require("matplotlib.figure", "plot", "draw the tuning").Figure
        figure = figure_class(figsize=(8.5, 1.6 + 0.32 * max(len(self.trials), 1)), layout="constrained")
        axes = figure.subplots()
        measured = [(place, one) for place, one in enumerate(self.trials) if one.ratio is not None]
        for outcome, color in OUTCOMES.items():
            chosen = [(place, one) for place, one in measured if one.outcome == outcome]
            for place, one in chosen:
                if one.low is not None and one.high is not None:
                    axes.plot([one.low, one.high], [place, place], color=color, linewidth=1.6)
            places, ratios = [place for place, _ in chosen], [one.ratio for _, one in chosen]
            axes.plot(ratios, places, "o", color=color, markersize=5, label=outcome if chosen else None)
        for place, one in enumerate(self.trials):
            if one.ratio is None:
                text = textwrap.shorten(f"{one.outcome}: {one.reason}", 70, placeholder=" …")
                axes.text(1, place, f"  {literal(text)}", va="center", fontsize=8, color=INK, style="italic")
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(self.trials)), [literal(one.name) for one in self.trials])
        axes.set_ylim(len(self.trials) - 0.5, -0.5)
        if not measured:
            axes.set_xlim(0.9, 1.5)
        axes.set_xlabel("speed with it, over that without it (with its interval)")
        axes.spines[["top", "right"]].set_visible(False)
        if measured:
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.set_title(f"{self._title}\n{self._limits}".rstrip(), loc="left", fontsize=11, color=INK)
        return figure

    @property
    def _limits(self) -> str:
        """Return the speeds before and after, and the ceilings, in one line."""
        names = {"training": "now", **{name: f"{name} alone" for name in self.limits if name != "training"}}
        speeds = {"before": self.before} | {names[name]: self.limits[name] for name in names if name in self.limits}
        known = [f"{name} {speed_text(speed)}" for name, speed in speeds.items() if speed]
        return f"images/s: {', '.join(known)}" if known else ""

    def _table(self) -> Table:
        rows = [(one.name, one.bottleneck, one.outcome, one.figure) for one in self.trials]
        notes = [self.bound, self.stopped]
        if self.trades:
            names = " and ".join(one.name for one in self.trades)
            notes.append(f"Faster, but not shown to keep the accuracy, and so not accepted: {names}.")
        columns = ("change", "bottleneck", "outcome", "speed with it")
        return Table(columns, rows, self._title, " ".join(notes))

    def __str__(self) -> str:
        table = str(self._table())
        return f"{table}\n{self._exports()}" if self.variables else table

    def _repr_html_(self) -> str:
        exports = f"<pre>{html.escape(self._exports())}</pre>" if self.variables else ""
        return self._table().html() + exports

    @property
    def _title(self) -> str:
        goal = "" if self.target is None else f" to {self.target:.2%}"
        gain = f": {self.gain:.2f} × as fast{goal}" if self.accepted else ""
        return f"{len(self.accepted)} of {len(self.trials)} changes accepted{gain}"

    def _exports(self) -> str:
        """Return the line for a shell that sets the environment variables, not wrapped, so that it can be copied."""
        return f"Before Python starts, run:\n{machine.export_line(self.variables)}"


class TuneInterrupted(KeyboardInterrupt):
    """Ctrl-C during `Pipeline.tune`. `tuned` has the results so far."""

    def __init__(self, tuned: Tuned) -> None:
        tried = sum(one.outcome != "not tried" for one in tuned.trials)
        super().__init__(f"the tuning was interrupted after {tried} trial(s), which its `tuned` contains")
        self.tuned = tuned

    def __reduce__(self) -> Any:
        return type(self), (self.tuned,)


class _File(Struct):
    format: int
    facts: dict[str, Any]
    trials: list[Tried]


def read_trials(path: Path, facts: Mapping[str, Any]) -> list[Tried]:
    """Return the saved trials that need not be repeated; LedgerError if they have others of these facts, such as those
    of another pipeline or machine."""
    if not path.exists():
        return []
    try:
        content = parse(path.read_bytes(), _File)
    except (OSError, ShapeError) as error:
        raise LedgerError(f"{path} is not the file of a tuning: {error}. Pass another name, or delete it.") from None
    known = {name: content.facts.get(name) for name in facts}
    check_facts(path, known, facts, same=content.format == FORMAT)
    return verdicts(content.trials)


def verdicts(trials: Sequence[Tried]) -> list[Tried]:
    """Return the trials that need not be repeated."""
    # A trade with a reason has no verdict on its accuracy.
    return [
        one for one in trials if one.outcome in ("accepted", "dropped") or (one.outcome == "trade" and not one.reason)
    ]
