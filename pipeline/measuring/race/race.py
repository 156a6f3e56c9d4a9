"""Race pipelines to an accuracy: full runs from the same seeds in turns, each evaluation timed without evaluations.

For each seed, all variants train one after the other; every second seed in reverse order, so that none always follows
the same one. A run goes to its last epoch, whether it has reached the target or not, because its schedule does;
hopeless ones are stopped by the rule of `RaceResult.rule`. With a file, the unfinished run has a folder of its own next
to it, from whose checkpoint the next call continues.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from ....common.budget import OutOfTime, alarm
from ....common.checks import check_number, check_whole
from ....common.errors import CheckpointError, DataError, PlanError
from ....common.storage.addresses import local_path
from ....common.storage.files import exclusive_lock, make_folder
from ....common.terminal import progress_bar
from ...callbacks.callback import Callback, RunView
from ...describe.pipeline_spec import PipelineSpec
from ...describe.resolve import ResolvedPlan, resolve
from ...ledger.variant import PLAIN
from ...runs.checkpoints.directory import CheckpointDir, Checkpoints
from ...runs.checkpoints.remote import CHECKPOINTS
from ...runs.facts import facts_here, fit_options, measured_config, options_of
from ...runs.fit import fit
from ...tasks.scales import check_comparable, scales
from ...telemetry.history import Monitor
from ...telemetry.provenance import provenance
from ...training.build import fork_rng, plain_torch, resolve_data
from ...training.model_identity import digest
from ..runner import check_measurable, describe_error
from ..variants import plain
from .result import Point, RaceInterrupted, RaceResult, RaceRun, read_runs

Against = Mapping[str, PipelineSpec] | Sequence[PipelineSpec]


@plain_torch()
def race(
    spec: PipelineSpec, *, target: float, seeds: int, against: Against | None, epochs: int | None,
    give_up: float | None, seconds: float | None, out: str | Path | None, progress: bool, paired: bool = False,
) -> RaceResult:  # fmt: skip
    """See `Pipeline.race`. If `paired`, only the first variant's time on the same seed limits the others' runs."""
    begin = perf_counter()
    check_number("target", target, PlanError, "(0, 1]", also=": an accuracy")
    check_whole("seeds", seeds, PlanError, 1)
    if give_up is not None:
        check_number("give_up", give_up, PlanError, "[1, inf)", also=", or None to stop no run")
    check_measurable(1.0 if seconds is None else seconds)
    file = None if out is None else local_path(out, "out", PlanError).absolute()
    if file is not None and file.suffix != ".json":
        raise PlanError(f"out={str(out)!r} must end in .json: it keeps the runs, from which the next call continues.")
    given = _variants(spec, against)
    if epochs is not None:
        given = {name: one.replace(epochs=epochs) for name, one in given.items()}
    plans = {name: _checked(name, one, progress) for name, one in given.items()}
    monitor = _monitor(plans)
    facts = _facts(plans, {"target": target, "give_up": give_up, "first seed": spec.seed})
    with nullcontext() if file is None else _lock_race(file):
        runs = [] if file is None else read_runs(file, facts)
        result = RaceResult(target, tuple(given), runs, monitor, give_up, facts, provenance=provenance())
        racing = _Race(result, runs, given, range(spec.seed, spec.seed + seeds), file, progress, paired)
        deadline = None if seconds is None else begin + seconds
        interrupted, why = False, ""
        try:
            with fork_rng(spec.seed), nullcontext() if deadline is None else alarm(deadline):
                if racing.run(deadline):
                    why = (
                        f"Stopped before the next run, which was not expected to end within the {seconds:g} s budget: "
                    )
        except OutOfTime:
            why = f"Stopped at the {seconds:g} s budget, within a run, which {racing.left}: "
        except KeyboardInterrupt:
            interrupted, why = True, "Interrupted: "
        result = dataclasses.replace(result, stopped=f"{why}{racing.count}")
        if file is not None:
            result.save(file)
    if interrupted:
        raise RaceInterrupted(result)
    return result


@contextmanager
def _lock_race(file: Path) -> Iterator[None]:
    """Let one race at a time use a file: a second one would replace its results, and remove its unfinished run."""
    lock = make_folder(file.parent) / f".{file.name}.race"
    with exclusive_lock(lock, f"Another race uses {file}. Wait until it ends, or pass another file: out=… (--out)."):
        folder = make_folder(_unfinished(file))
        try:
            yield
        finally:
            with suppress(OSError):  # it has an unfinished run
                folder.rmdir()


def _unfinished(file: Path) -> Path:
    return file.with_name(f"{file.stem}-unfinished")


def _variants(spec: PipelineSpec, against: Against | None) -> dict[str, PipelineSpec]:
    """Return all variants by name, the pipeline first; without others, plain PyTorch is the second."""
    found = {spec.recipe or "the pipeline": spec}
    if against is None:
        return found | {str(PLAIN): plain(resolve(spec))}
    entries: list[tuple[Any, Any]]
    if isinstance(against, Mapping):
        entries = [*against.items()]
    else:
        entries = [(None, one) for one in ([against] if isinstance(against, PipelineSpec) else against)]
    for number, (name, one) in enumerate(entries, 2):
        if not isinstance(one, PipelineSpec):
            raise PlanError(f"against: {one!r:.80} is not a pipeline. Pass pipelines, as a dict by name or as a list.")
        if not (name is None or isinstance(name, str)):  # a file of it could not be read again
            raise PlanError(f"against: {name!r:.80} is not a text. Give each pipeline a text as its name.")
        if name in found:
            raise PlanError(f"against: {name!r} is the name of the pipeline itself. Give it another name.")
        own = one.recipe if one.recipe not in found else None
        found[name or own or f"pipeline {number}"] = one
    return found


def _checked(name: str, spec: PipelineSpec, progress: bool) -> ResolvedPlan:
    plan = resolve_data(resolve(spec), progress)
    if plan.spec.epochs is None:
        raise PlanError(
            f"Number of epochs of {name!r} not set. Pass race(epochs=…), or set epochs=… in the recipe or the command."
        )
    if plan.data.val is None:
        raise PlanError(
            f"A race measures the accuracy, which needs validation data; {name!r} has none. Pass a second file to "
            "load() (--val)."
        )
    check_comparable(plan.task, "A race")
    return plan


def _monitor(plans: Mapping[str, ResolvedPlan]) -> Monitor:
    """Return what is raced for: the metric that the tasks monitor."""
    found = {}
    for name, plan in plans.items():
        scale = scales(plan.task)[plan.task.monitor]
        found[name] = Monitor(plan.task.monitor, scale.higher_is_better is not False, scale.unit)
    first, *others = found
    for name in others:
        if found[name] != found[first]:
            raise PlanError(
                f"{first!r} monitors {found[first].name!r}, and {name!r} {found[name].name!r}: a race has one target. "
                "Give their tasks the same monitor."
            )
    return found[first]


def _facts(plans: Mapping[str, ResolvedPlan], rules: Mapping[str, Any]) -> dict[str, Any]:
    facts = {**rules, "variants": [*plans]}
    for name, plan in plans.items():
        options = options_of(plan) | {"epochs": plan.spec.epochs}
        facts |= {f"{name}: {key}": value for key, value in options.items() if key != "seed"}
    return facts | facts_here()


class RaceClock(Callback):
    """Keep `(seconds, images, accuracy)` of each evaluation. Once the training has taken more than `limit` seconds
    without reaching the target, it ends at the next evaluation or end of an epoch. There is no `on_step_end`, which
    could slow the steps that are timed."""

    def __init__(self, monitor: Monitor, target: float, limit: float | None) -> None:
        self.monitor, self.target, self.limit = monitor, target, limit
        self.points: list[list[float]] = []
        self.undefined = False  # whether the last evaluation had no value
        self._start, self._before = perf_counter(), 0.0

    @property
    def wall(self) -> float:
        """Seconds since it was created, and those of the run before it was interrupted."""
        return self._before + perf_counter() - self._start

    @property
    def reason(self) -> str:
        """Why it stops a run."""
        return f"race: {self.target:g} not reached within {self.limit:.4g} s" if self.limit is not None else ""

    def on_fit_start(self, view: RunView) -> None:  # noqa: ARG002
        self.points, self.undefined = [], False

    def on_evaluation_end(self, view: RunView) -> None:
        value = view.metrics.get(self.monitor.name)
        self.undefined = value is None or value != value  # e.g. over no sample
        if value is not None and not self.undefined:
            self.points.append([view.seconds, view.images, self.monitor.fraction(value)])
        self._look(view)

    def on_epoch_end(self, view: RunView) -> None:
        self._look(view)

    def _look(self, view: RunView) -> None:
        reached = any(self.monitor.reaches(accuracy, self.target) for _, _, accuracy in self.points)
        if self.limit is not None and view.seconds > self.limit and not reached:
            view.stop(self.reason)

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points, "wall": self.wall, "undefined": self.undefined}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.points, self._before, self._start = state["points"], state["wall"], perf_counter()
        self.undefined = bool(state.get("undefined"))  # which older ones lack


class _Race:
    """The runs, in their order. Those that end are added to `runs`, which are the result's."""

    _own: Path | None = None  # folder of the last run that began

    def __init__(
        self, result: RaceResult, runs: list[RaceRun], variants: Mapping[str, PipelineSpec], seeds: range,
        file: Path | None, progress: bool, paired: bool,
    ) -> None:  # fmt: skip
        self._result, self._runs, self._variants, self._seeds = result, runs, variants, seeds
        self._file, self._paired = file, paired
        self._bar = progress_bar(len(seeds) * len(variants), progress, unit="run")

    @property
    def count(self) -> str:
        known = [run for run in self._runs if run.seed in self._seeds]
        return f"{len(known)} of {len(self._seeds) * len(self._variants)} runs have ended."

    @property
    def left(self) -> str:
        """What becomes of a run that the end of the budget interrupts."""
        if self._file is None or self._paired:
            return "does not count"
        if self._own is not None and CheckpointDir(self._own / CHECKPOINTS).checkpoints():
            return "the next call continues after its last epoch"
        return "has not ended an epoch, so the next call begins it again (pass more seconds)"

    def run(self, deadline: float | None) -> bool:
        """Run what has not ended yet; return whether the time was too short for a run, with which it leaves off."""
        with self._bar as bar:
            for number, seed in enumerate(self._seeds):
                for name in [*self._variants][:: -1 if number % 2 else 1]:
                    if all((run.variant, run.seed) != (name, seed) for run in self._runs):
                        if deadline is not None and perf_counter() + self._expected(name) > deadline:
                            return True
                        bar.set_description(f"race: {name}, seed {seed}")
                        self._runs.append(self._one(name, seed))
                        if self._file is not None:
                            self._result.save(self._file)
                            shutil.rmtree(self._folder(name, seed), ignore_errors=True)
                    bar.update()
        return False

    def _expected(self, name: str) -> float:
        """Return the seconds of the variant's longest run so far; 0 before the first, which a budget may interrupt."""
        return max((run.wall for run in self._runs if run.variant == name), default=0.0)

    def _limit(self, name: str, seed: int) -> float | None:
        result, first = self._result, self._result.variants[0]
        if not self._paired:
            return result.limit(seed)
        if name == first:
            return None
        return dataclasses.replace(result, runs=[run for run in result.of(first) if run.seed == seed]).limit(seed)

    def _one(self, name: str, seed: int) -> RaceRun:
        spec, limit = self._variants[name], self._limit(name, seed)
        clock = RaceClock(self._result.monitor, self._result.target, limit)
        options: dict[str, Any] = {"callbacks": [*fit_options(spec).get("callbacks", ()), clock]}
        if self._file is not None and not self._paired:  # else nothing continues it
            # Not in the background: that would take time from the steps that follow.
            kept = Checkpoints(keep=1, keep_best=False, background=False)
            self._own = self._folder(name, seed)
            options |= {"out": self._own, "resume": "auto", "checkpoints": kept}
        try:
            history = fit(spec.replace(seed=seed), measured_config(spec, **options)).history
        except (PlanError, DataError, CheckpointError):  # no run of this variant can work, or none can be kept
            raise
        except Exception as error:  # it diverged, or ran out of memory: the others go on
            return RaceRun(name, seed, wall=clock.wall, failed=describe_error(error))
        points = tuple(Point(at, int(images), accuracy) for at, images, accuracy in clock.points)
        stopped, resumed = history.stopped or "", len(history.facts.get("resumed", ()))
        given_up = stopped == clock.reason
        return RaceRun(
            name, seed, points, clock.wall, limit if given_up else None, stopped, resumed=resumed,
            undefined=clock.undefined,
        )  # fmt: skip

    def _folder(self, name: str, seed: int) -> Path:
        """Return the folder of a run, with what an interrupt has left of it. What is left of other races and of
        ended runs is removed; not of a run that is still to end, before which one that has failed is repeated."""
        assert self._file is not None
        facts = json.dumps(dict(self._result.facts), sort_keys=True, default=str)
        place = _unfinished(self._file)
        folders = {one: place / digest(f"{facts} {one[0]} {one[1]}") for one in product(self._variants, self._seeds)}
        ended = {(run.variant, run.seed) for run in self._runs}
        for other in {*place.glob("*")} - {folder for one, folder in folders.items() if one not in ended}:
            shutil.rmtree(other, ignore_errors=True)
        return folders[name, seed]
