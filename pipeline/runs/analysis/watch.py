"""What a run that another process trains has reached, read from its folder or address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ....common.errors import DataError
from ....common.table import Table
from ...recipes.files import RECIPE
from ...tasks.metrics import format_metric
from ...telemetry.history import HISTORY
from ...telemetry.loggers import METRICS, PROMETHEUS, RANK_GAUGES
from ...telemetry.rank_times import RankTimes
from ..checkpoints.remote import opened, run_name
from .compare import RunSummary, read_run

QUIET = 120.0  # seconds without a change after which the line reports it
ROWS = 8  # ranks that are shown, the slowest first


@dataclass(frozen=True)
class RunState:
    """A moment of a run; it prints as one line.

    Attributes:
        summary: of its finished epochs and its recipe.
        newest: the newest metrics by name, if the run has `logger="prometheus"`: `step`, `step_loss` and so on.
        changed: when its files changed, by the clock of the run's machine or of its file system, which may differ from
            this machine's; None if unknown, as of an address without these metrics.
        quiet: seconds during which its watcher has seen no change, by the watcher's clock.
        ranks: what the steps of each rank take, from the same metrics; empty of a single rank.
    """

    summary: RunSummary
    newest: Mapping[str, float] = field(default_factory=dict)
    changed: datetime | None = None
    quiet: float = 0.0
    ranks: Sequence[RankTimes] = ()

    @property
    def slowest(self) -> list[int]:
        """The ranks, the one that the others wait for first."""
        return sorted(range(len(self.ranks)), key=lambda rank: -self.ranks[rank].own)

    def table(self) -> Table:
        rows = [(f"{rank}", *_cells(self.ranks[rank])) for rank in self.slowest[:ROWS]]
        heads = ("rank", "s per step", "without waiting for ranks", "waiting for data", "memory")
        return Table(heads, rows, figures=True)

    @property
    def ended(self) -> bool:
        """Whether no epoch is to come: the last planned one ended, or a callback stopped the run."""
        planned = self.summary.planned
        done = planned is not None and self.summary.epochs >= planned
        return done or self.summary.history.stopped is not None

    def _slowest(self) -> str:
        if not self.ranks:
            return ""
        first = self.slowest[0]
        _, own, data, _ = _cells(self.ranks[first])
        return f"slowest rank {first} of {len(self.ranks)}: {own} s per step, {data} s of data"

    def __str__(self) -> str:
        run, history, newest = self.summary, self.summary.history, self.newest
        planned = "" if run.planned is None else f" of {run.planned}"
        parts = [f"{run.name}: {run.epochs}{planned} epochs"]
        if "step" in newest:
            parts.append(f"step {newest['step']:,.0f}")
        if "step_loss" in newest:
            parts.append(f"loss {newest['step_loss']:.4f}")
        elif history.epochs:
            parts.append(f"loss {history.epochs[-1].loss:.4f}")
        speed = newest.get("step_images_per_s", history.epochs[-1].images_per_s if history.epochs else None)
        if speed is not None:
            parts.append(f"{speed:,.0f} images/s")
        if "step_data_wait_fraction" in newest:
            parts.append(f"waiting {newest['step_data_wait_fraction']:.0%}")
        parts += filter(None, [self._slowest(), history.latest])
        if run.best is not None:
            value = format_metric(run.monitor.of(run.best) or 0.0, run.monitor.unit)
            parts.append(f"best {value}, epoch {run.best.epoch}")
        if self.ended:
            parts.append("stopped: " + history.stopped if history.stopped is not None else "finished")
            return ", ".join(parts)
        if self.quiet >= QUIET:
            parts.append(f"no news for {self.quiet / 60:.0f} min")
        if self.changed is not None:
            parts.append(f"last change {self.changed:%Y-%m-%d %H:%M:%S} UTC")
        return ", ".join(parts)


def look(run: str | Path) -> RunState:
    """Return what the run in a folder or at an address has reached now. No weights are read, and no code of its recipe
    is run. Raise DataError if it is not a run, CheckpointError if an address cannot be reached."""
    folder = opened(run, RECIPE, HISTORY, PROMETHEUS)
    summary = read_run(folder, run_name(run))
    gauges = _gauges(folder / PROMETHEUS)
    newest = {name.removeprefix("drivetrain_"): value for (name, rank), value in gauges.items() if not rank}
    # A run that begins has these metrics before its other files.
    if not (summary.epochs or summary.recipe or newest or (folder / HISTORY).exists()):
        raise DataError(f"{run} is not a run: {summary.problem}. Pass a folder of fit(out=…), --out.")
    changed = newest.get("updated_seconds", 0.0)
    if not changed and folder == Path(run):
        changed = max(map(_changed, (folder / HISTORY, folder / METRICS, folder / RECIPE, folder / "checkpoints")))
    return RunState(summary, newest, _moment(changed), ranks=_ranks(gauges))


def _moment(seconds: float) -> datetime | None:
    with suppress(ValueError, OverflowError, OSError):  # of a damaged file
        return datetime.fromtimestamp(seconds, UTC) if seconds else None
    return None


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _ranks(gauges: Mapping[tuple[str, str], float]) -> Sequence[RankTimes]:
    ranks = list[RankTimes]()
    with suppress(KeyError):
        while True:
            ranks.append(RankTimes(*(gauges[name, f"{len(ranks)}"] for name in RANK_GAUGES)))
    return ranks


def _gauges(path: Path) -> dict[tuple[str, str], float]:
    """Return the values of `metrics.prom` by name and label `rank`, which is "" without one; none of another file."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    found = {}
    for line in lines:
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition(" ")
        rank = labels.rpartition('rank="')[2].removesuffix('"}') if name in RANK_GAUGES else ""
        with suppress(ValueError):
            found[name, rank] = float(value)
    return found


def _cells(times: RankTimes) -> tuple[str, str, str, str]:
    seconds = [f"{each:.3f}" for each in (times.step, times.own, times.data_wait)]
    return seconds[0], seconds[1], seconds[2], f"{times.memory / 2**30:.2f} GiB"
