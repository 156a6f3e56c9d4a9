"""Run a sweep: each run in a process of its own, several at a time, and a table of what came out."""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any

from ....common.errors import PlanError
from ....common.frozen import FrozenDict
from ....common.signals import handled, interrupts_held
from ....common.storage.addresses import stamp
from ....common.storage.files import make_folder, write_file
from ....common.table import Table, screen_width
from ....loaders.sample_options import SampleOptions
from ....loaders.sources import files_of
from ...models.weights import weights_of
from ...recipes.flat import PROSE
from ...recipes.presets import DEFAULTS, completed, parse_overrides
from ...runs.analysis.compare import RunSummary, read_run
from ...runs.folder import MODEL, lock_run_dir
from ...tasks.metrics import format_metric
from .space import SEED, Space, Values, name_of

RECORD, OUTPUT = "sweep.json", "output.txt"
PATIENCE = 60.0  # seconds for a run to save after Ctrl-C, before it is killed
_LOOK = 0.05  # seconds between two looks at the processes


@dataclass(frozen=True)
class Outcome:
    """A run of a sweep.

    Attributes:
        name: of its folder.
        values: texts by key that differ between the runs.
        run: what its folder says.
        failure: why it is not finished; "" if it is.
    """

    name: str
    values: Values
    run: RunSummary
    failure: str = ""

    @property
    def value(self) -> float | None:
        """The monitored metric of the last evaluation; None if the run failed, or has no validation data."""
        return None if self.failure else self.run.history.monitored

    def to_dict(self) -> dict[str, Any]:
        seed = self.values.get(SEED) or self.run.recipe.get(SEED)  # all runs may have the same one
        return {
            "run": self.name, "seed": None if seed is None else str(seed), "value": self.value, "failure": self.failure,
            "epochs": self.run.epochs, "seconds": self.run.seconds,
        }  # fmt: skip


@dataclass(frozen=True)
class Combination:
    """The runs of the same values, which differ in their seed."""

    values: Values
    runs: tuple[Outcome, ...]

    @property
    def results(self) -> list[float]:
        return [run.value for run in self.runs if run.value is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.results) if self.results else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds, with n - 1; None of fewer than two."""
        return statistics.stdev(self.results) if len(self.results) > 1 else None

    @property
    def seconds(self) -> float | None:
        """Mean duration of the finished runs."""
        done = [run.run.seconds for run in self.runs if not run.failure]
        return statistics.fmean(done) if done else None

    @property
    def failures(self) -> list[str]:
        return [run.failure for run in self.runs if run.failure]

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={text}" for key, text in self.values.items()) or "the recipe"

    def to_dict(self) -> dict[str, Any]:
        runs = [run.to_dict() for run in self.runs]
        return {
            "values": self.values, "mean": self.mean, "spread": self.spread, "seconds": self.seconds, "runs": runs,
        }  # fmt: skip


@dataclass(frozen=True)
class Swept:
    """The outcome of a sweep; printed, a table with the best combination first."""

    combinations: list[Combination] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(len(one.failures) for one in self.combinations)

    def to_dict(self) -> dict[str, Any]:
        return {"monitor": self._monitor.name, "combinations": [one.to_dict() for one in self._sorted()]}

    @property
    def _monitor(self) -> Any:
        runs = [run.run for one in self.combinations for run in one.runs]
        return next((run for run in runs if "monitor" in run.history.facts), runs[0]).monitor

    def _sorted(self) -> list[Combination]:
        sign = -1 if self._monitor.higher_is_better else 1
        return sorted(self.combinations, key=lambda one: (one.mean is None, sign * (one.mean or 0.0)))

    def __str__(self) -> str:
        monitor, rows, reasons = self._monitor, [], []
        for one in self._sorted():
            text = "failed" if one.mean is None and one.failures else ""
            text = text if one.mean is None else format_metric(one.mean, monitor.unit)
            spread = "" if one.spread is None else f"± {format_metric(one.spread, monitor.unit)}"
            seconds = "" if one.seconds is None else f"{one.seconds:,.1f} s"
            done = f"{len(one.runs) - len(one.failures)}/{len(one.runs)}"
            rows.append((one.name, text, spread, done, seconds))
            for reason in dict.fromkeys(one.failures):
                times = one.failures.count(reason)
                reasons.append(f"{one.name}: {times} of {len(one.runs)} failed: {reason}")
        heads = "", f"{monitor}, mean", "spread", "runs", "time"
        caption = "Mean and standard deviation over the seeds, of the last evaluation; mean time of a run."
        return "\n".join([Table(heads, rows, caption=caption, figures=True).text(screen_width()), *reasons])


def sweep(
    recipe: str, what: Space, folder: Path, sources: Mapping[str, str] = FrozenDict(), *, jobs: int = 1,
    said: Callable[[str], None] = lambda _: None,
) -> Swept:  # fmt: skip
    """Train every run of a space in `folder/NAME`, `jobs` at a time. Finished runs are taken as they are, interrupted
    ones resumed; a run that fails does not stop the others.

    Args:
        recipe: as `drivetrain train` takes it.
        what: the values.
        folder: of the sweep.
        sources: the data by key, `train` and `val`.
        jobs: processes at a time. They share the visible GPUs: equal parts, or one each if there are more jobs.
        said: gets a line for every run that ends.

    Raises:
        PlanError, RecipeError: before any run, for values that the recipe does not take, or if a run in `folder` had
            other values.
        KeyboardInterrupt: on Ctrl-C, once all processes have ended; each saves a checkpoint first. Its note says how to
            go on.
    """
    runs = {name_of(values): values for values in what.runs()}
    pairs = {name: [f"{key}={text}" for key, text in (what.fixed | values).items()] for name, values in runs.items()}
    wanted = {name: completed(recipe, parse_overrides(each) | dict(sources)).values for name, each in pairs.items()}
    if any(values["epochs"] is None for values in wanted.values()):
        raise PlanError(f"Number of epochs not set by {recipe}. Pass epochs=….")
    with lock_run_dir(make_folder(folder)):  # once all values are checked: a typo leaves no folder
        return _train_all(recipe, runs, pairs, wanted, folder, sources, jobs, said)


def _train_all(
    recipe: str, runs: Mapping[str, Values], pairs: Mapping[str, list[str]], wanted: Mapping[str, dict[str, Any]],
    folder: Path, sources: Mapping[str, str], jobs: int, said: Callable[[str], None],
) -> Swept:  # fmt: skip
    of_file = functools.cache(stamp)  # most runs have the same data
    _record(folder, {
        name: values | {"data": {file: of_file(file) for file in (*_files(values), *_weights(values))}}
        for name, values in wanted.items()
    })  # fmt: skip
    flags = [text for key, source in sources.items() for text in (f"--{key}", source)]
    commands = {}
    for name, overrides in pairs.items():
        if not _is_done(read_run(folder / name)):
            command = [sys.executable, "-m", "drivetrain", "train", recipe, *overrides, *flags]
            if any((folder / name / "checkpoints").glob("*")):
                command.append("--resume")
            commands[name] = [*command, "--out", str(folder / name)]
    if kept := len(runs) - len(commands):
        said(f"{kept} of {len(runs)} runs are finished already.")
    failures = _run_all(folder, commands, jobs, said)
    outcomes = {}
    for name, values in runs.items():
        run = read_run(folder / name)
        failure = failures.get(name, "") or ("" if _is_done(run) else run.problem)
        outcomes[name] = Outcome(name, values, run, failure)
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes.values():
        grouped.setdefault(name_of(_without_seed(outcome.values)), []).append(outcome)
    return Swept([Combination(_without_seed(each[0].values), tuple(each)) for each in grouped.values()])


def _weights(values: Mapping[str, Any]) -> list[str]:
    """Return the files of weights with which a run begins, of a run's folder only this one: reports and pictures may be
    added to it. The names of published weights have no stamp."""
    given = (values["init_from"], *weights_of(values["model_options"]))
    # An address stays as it is: a path would lose one of its slashes.
    return [str(Path(one, MODEL)) if Path(one).is_dir() else one for one in given if isinstance(one, str)]


def _without_seed(values: Values) -> Values:
    return {key: text for key, text in values.items() if key != SEED}


def _files(values: Mapping[str, Any]) -> list[str]:
    """Return the data of a run, and the files that select some of it."""
    data = [name for key in ("train", "val") if values[key] is not None for name in files_of(values[key]).names]
    return [*data, *SampleOptions(indices=values["indices"], balance=values["balance"]).value_files]


def _is_done(run: RunSummary) -> bool:
    stopped = run.history.stopped is not None  # perhaps within its first epoch
    return (run.epochs > 0 or stopped) and not run.problem


def _record(folder: Path, wanted: dict[str, dict[str, Any]]) -> None:
    """Keep the values of each run; refuse to take up a run of other values, or a finished one of other data."""
    try:
        known = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    defaults = json.loads(json.dumps(DEFAULTS))  # of keys that an older version did not have
    for name, values in wanted.items():
        before, now = known.get(name), json.loads(json.dumps(values))
        if not isinstance(before, dict):
            continue
        if _is_done(read_run(folder / name)):  # any other is trained again, or resumed, which compares its data
            values["data"] = _same_data(folder / name, before.get("data"), now["data"])
        # What only describes a recipe changes with versions of Drivetrain, and changes no training.
        there = {key: before.get(key, defaults.get(key)) for key in now if key not in ("data", *PROSE)}
        if keys := [key for key in there if there[key] != now[key]]:
            what = ", ".join(f"{key}={there[key]!r:.60}, not {now[key]!r:.60}" for key in keys[:3])
            raise PlanError(f"{folder / name} is a run of other values: {what}. Pass another folder: --out.")
    write_file(folder / RECORD, json.dumps(known | wanted, indent=1))


def _same_data(run: Path, before: Any, now: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the stamps of a finished run's files; refuse a file that has changed. What cannot be read now, or could
    not be then, has none, as has that of an older version: it is taken as it is."""
    known = before if isinstance(before, dict) else {}
    found = {file: own or known.get(file, []) for file, own in now.items()}
    if changed := [file for file, own in found.items() if known.get(file) and known[file] != own]:
        raise PlanError(f"{run} is a run of other data: {changed[0]} has changed since. Pass another folder: --out.")
    return found


def _run_all(folder: Path, commands: dict[str, list[str]], jobs: int, said: Callable[[str], None]) -> dict[str, str]:
    """Run the commands; return why runs failed. However this ends, no process is left."""
    failures: dict[str, str] = {}
    gpus, free, slots = visible_gpus() if jobs > 1 else [], [*range(jobs)], dict[str, int]()
    waiting, running, ended = [*commands], dict[str, subprocess.Popen[bytes]](), 0
    with _ended_with(running), _terminating():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    name = waiting.pop(0)
                    slots[name] = free.pop(0)
                    with interrupts_held():  # else one that has just started could be forgotten
                        running[name] = _start(folder / name, commands[name], job_environment(gpus, slots[name], jobs))
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    ended += 1
                    free.append(slots[name])
                    reason = _reason(folder / name, running.pop(name).returncode)
                    if reason:
                        failures[name] = reason
                    shown = shorten(reason, 110, placeholder=" …") or _shown(read_run(folder / name))
                    said(f"{ended}/{len(commands)}  {name}: {shown}")
                time.sleep(_LOOK)
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"{ended} of {len(commands)} runs have ended; the same command continues the others.")
            raise
    return failures


def visible_gpus() -> list[str]:
    """Return the GPUs of this process as `CUDA_VISIBLE_DEVICES` names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = torch.cuda.device_count()
    return named[:count] if named[0] else [str(number) for number in range(count)]


def job_environment(gpus: Sequence[str], slot: int, jobs: int) -> dict[str, str]:
    """Return the variables of the process in `slot`, 0 to `jobs` - 1: equal parts of the GPUs, so that runs can be
    compared, or one GPU each if there are more jobs than GPUs."""
    if jobs == 1 or len(gpus) < 2:
        return {}
    share = max(len(gpus) // jobs, 1)
    first = slot * share % len(gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + share])}


def _start(folder: Path, command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process group of its own: Ctrl-C in a terminal reaches only the sweep, which passes it on, once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0,
            env=os.environ | variables,
        )  # fmt: skip


@contextmanager
def _ended_with(running: dict[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """After the block, end the processes that still run: by Ctrl-C, at which they save, or else by force. Where a shell
    script has started the sweep with `&`, all ignore SIGINT; they save at SIGTERM, too."""
    try:
        yield
    finally:
        number = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
        with ExitStack() as stack:
            for process in running.values():
                stack.callback(_kill, process)
            for process in running.values():
                with suppress(ProcessLookupError):
                    process.send_signal(number)
            deadline = time.monotonic() + PATIENCE
            while any(process.poll() is None for process in running.values()) and time.monotonic() < deadline:
                time.sleep(_LOOK)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with its ranks and loaders, if some are left
    process.wait()


@contextmanager
def _terminating() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the sweep as Ctrl-C does. nohup ignores SIGHUP: then it continues."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    ends = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    with handled(ends, interrupt):
        yield


def _reason(folder: Path, status: int) -> str:
    if status == 0:
        return ""
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    lines = (folder / OUTPUT).read_text(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last or f"it ended with the exit status {status}"


def _shown(run: RunSummary) -> str:
    return ", ".join(filter(None, [run.history.latest, f"{run.seconds:,.1f} s"]))
