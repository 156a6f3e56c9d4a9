"""Run the trials of variants: kept in this process, on ranks started for each round, or in a process of their own."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import groupby
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray

from ...common.budget import OutOfTime
from ...common.checks import is_number
from ...common.errors import DrivetrainError, PlanError, StrategyError
from ...common.signals import interrupts_held
from ...loaders.epochs import EpochLoader
from ...loaders.image_size import ImageSize
from ...loaders.order.batches import Samples, taken
from ...loaders.sources import Files, Part, files_of
from ...strategies import launch, registry
from ...strategies.launching.group import is_rank
from ..describe.cuda_settings import cuda_settings
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import ResolvedPlan, resolve
from ..ledger.variant import Costs, Trial, VariantId
from ..training.build import build, fork_rng, make_loader
from .trials import BuiltVariant, Labels, MemoryScale, digest, phases, run_trial

T = TypeVar("T")

MIN_BATCHES = 4  # per trial; with fewer, filling the loader's queue would dominate
REASON_LENGTH = 300  # characters; CUDA's out-of-memory message has twice as many

Results = tuple[dict[VariantId, Trial], dict[VariantId, str]]  # trials, and the reasons of those that failed


def check_measurable(seconds: float) -> None:
    if not is_number(seconds, "(0, inf)"):
        given = f"{seconds:g}" if is_number(seconds) else repr(seconds)
        raise PlanError(f"seconds={given} (--seconds, --ledger-seconds, --tune) must be positive and finite.")
    if is_rank():
        raise PlanError(
            "A ledger, a tuning or a race starts its own ranks, between other trials. Start it without torchrun, and "
            "outside a process group."
        )


@dataclass(frozen=True)
class Variant:
    id: VariantId
    spec: PipelineSpec

    @cached_property
    def plan(self) -> ResolvedPlan:
        return resolve(self.spec)


def groups(variants: Iterable[Variant]) -> list[list[Variant]]:
    """Group consecutive variants of the same pipeline, which is then built once."""
    return [list(group) for _, group in groupby(variants, key=lambda variant: id(variant.spec))]


class Loaders:
    """The training loaders of one process: variants with equal settings share one, with its workers."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._known: list[tuple[Any, EpochLoader]] = []
        self._own: dict[int, tuple[Samples, bool]] = {}  # what is trained on, by the loader's id; whether of a mix

    def get(self, plan: ResolvedPlan, image_size: ImageSize, device: torch.device) -> EpochLoader:
        data = dataclasses.replace(plan.data, image_size=image_size)
        key = (data, plan.train_settings, plan.seed, device)
        for known, loader in self._known:
            if known == key:
                return loader
        files = files_of(data.train)
        # Without the weights of a mix: of each of its data sets, a trial would need its share.
        source = data.train if files.weights is None else Files((Part(str(files), files.names),))
        loader = self._stack.enter_context(
            make_loader(dataclasses.replace(plan, data=data), source, train=True, device=device)
        )
        self._known.append((key, loader))
        chosen = range(loader.samples) if loader.selected is None else loader.selected.train
        self._own[id(loader)] = chosen, files.weights is not None
        return loader

    def samples(self, loader: EpochLoader, most: int) -> NDArray[np.int64]:
        """Return up to so many of the samples that the pipeline trains on: the first; of a mix, some from all over."""
        own, is_mix = self._own[id(loader)]
        count = min(most, len(own))
        last = len(own) - 1 if is_mix else count - 1
        return taken(own, np.linspace(0, last, count).astype(np.int64))


class VariantRunner:
    """Runs the variants of one pipeline, training first; ranks are started for each round. At the deadline (in
    `perf_counter` time), it raises OutOfTime, and what was built is closed, as after any error."""

    def __init__(
        self, group: Sequence[Variant], loaders: Loaders, batches: int = MIN_BATCHES,
        deadline: float = math.inf,
    ) -> None:  # fmt: skip
        start = perf_counter()
        self._plan, self._warm_up = group[0].plan, batches
        self.variants = [variant.id for variant in group]  # those that have not failed
        self.on_ranks = self._plan.needs_ranks
        self.opening = 0.0  # seconds of building and warm-up; 0 with ranks, which do both in each trial
        self.seconds = 0.0  # of the last trials, including starting ranks
        self.costs = Costs()
        self._built: BuiltVariant | None = None
        self._stack = ExitStack()
        if not self.on_ranks:
            with ExitStack() as stack:
                self._built, self.costs = build_variant(self._plan, loaders, stack, batches, deadline)
                self._stack = stack.pop_all()
            self.opening = perf_counter() - start

    def close(self) -> None:
        self._built, self.variants = None, []
        self._stack.close()

    def run(self, epoch: int, batches: int, variants: Sequence[VariantId], deadline: float = math.inf) -> Results:
        """Run these trials. If training failed, its model may be in any state, so the full group fails."""
        start = perf_counter()
        if self._built is None:
            trials, failed = self._run_on_ranks(variants, epoch, batches, deadline)
        else:
            trials, failed = _run_here(self._built, variants, epoch, batches, deadline)
        self.seconds = perf_counter() - start
        why = next((reason for one, reason in failed.items() if one.workload == "train"), None)
        if why is not None:
            return {}, {one: failed.get(one, why) for one in self.variants}
        return trials, failed

    def _run_on_ranks(self, variants: Sequence[VariantId], epoch: int, batches: int, deadline: float) -> Results:
        left = deadline - perf_counter()
        if left <= 0:
            raise OutOfTime
        try:
            answers = on_ranks(
                self._plan, None if left == math.inf else left, _trials_on_rank,
                self._plan, list(variants), epoch, batches, self._warm_up,
            )  # fmt: skip
        except Exception as error:  # a rank raised, died or timed out
            if perf_counter() >= deadline:
                raise OutOfTime from None
            return {}, dict.fromkeys(variants, describe_error(error))
        self.costs = largest([costs for _, costs in answers])
        return {one: _merged([trials[one] for trials, _ in answers]) for one in variants}, {}


def _run_here(built: BuiltVariant, variants: Sequence[VariantId], epoch: int, batches: int, deadline: float) -> Results:
    trials, failed = {}, {}
    for one in variants:
        try:
            trials[one] = _merged([run_trial(built, one.workload, epoch, batches, deadline)])
        except OutOfTime:
            raise
        except Exception as error:  # of the model, a transform, memory: continue with the others
            failed[one] = describe_error(error)
    return trials, failed


def on_ranks(plan: ResolvedPlan, timeout: float | None, job: Callable[..., T], *arguments: Any) -> list[T]:
    """Return what `job` returns on each rank; once one has failed, or after `timeout` seconds, raise StrategyError."""
    how = plan.distribution
    return launch(
        job, *arguments, devices=how.ranks, device=how.device, collective_timeout=how.timeout, timeout=timeout,
        patience=0.0,
    )  # fmt: skip


def describe_error(error: BaseException) -> str:
    """Return an error as the reason of a row: its type and first line; for a rank's error, with the rank."""
    if isinstance(error, StrategyError) and isinstance(error.__cause__, DrivetrainError):
        error = error.__cause__  # the rank's own error
    text, kind = str(error).strip().partition("\n")[0], type(error).__name__
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        kind = f"out of memory ({kind})"
    return textwrap.shorten(f"{kind}: {text}" if text else kind, REASON_LENGTH, placeholder=" …")


def _trials_on_rank(
    plan: ResolvedPlan, variants: Sequence[VariantId], epoch: int, batches: int, warm_up: int
) -> tuple[dict[VariantId, tuple[Trial, Labels]], Costs]:
    with fork_rng(plan.seed), ExitStack() as stack:
        # The ranks are new and need warm-up, too.
        variant, costs = build_variant(plan, Loaders(stack), stack, warm_up)
        return {one: run_trial(variant, one.workload, epoch, batches) for one in variants}, costs


def _merged(ranks: Sequence[tuple[Trial, Labels]]) -> Trial:
    slowest = max((trial for trial, _ in ranks), key=lambda trial: trial.seconds)
    return dataclasses.replace(slowest, samples=digest([labels for _, labels in ranks]))


def build_variant(
    plan: ResolvedPlan, loaders: Loaders, stack: ExitStack, batches: int = MIN_BATCHES,
    deadline: float = math.inf,
) -> tuple[BuiltVariant, Costs]:  # fmt: skip
    before = _allocated()
    with fork_rng(plan.seed):
        built = stack.enter_context(build(plan))
    engine = built.engine
    variant = BuiltVariant(
        built,
        phases(plan.transforms, plan.data.image_size),
        lambda size: loaders.get(plan, size, engine.device),
        loaders.samples,
        partial(cuda_settings, plan.distribution, plan.transforms),
    )
    if plan.distribution.compile:
        # Start the loader's workers now, not in the first trial.
        run_trial(variant, "loader", 0, batches, deadline)
    scale = MemoryScale(engine)
    start = perf_counter()
    run_trial(variant, "train", 0, batches, deadline, scale)
    first = perf_counter() - start  # of all phases: each may compile, whatever its share of a run
    if scale.steps < 2:  # before the first step there is no optimizer state
        run_trial(variant, "train", 0, batches, deadline, scale)
    compiling = None
    if plan.distribution.compile:
        start = perf_counter()
        run_trial(variant, "train", 0, batches, deadline)
        compiling = max(first - (perf_counter() - start), 0.0)
    held = None if scale.held is None else asdict(scale.held)
    return variant, Costs(held, _peak(engine.device, before), compiling)


def _allocated() -> list[int]:
    """Return the bytes allocated on each GPU, and reset the peak statistics."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    for number in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(number)
    return [torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count())]


def _peak(device: torch.device, before: list[int]) -> int | None:
    """Return the peak bytes allocated on this GPU since `_allocated`, beyond what was allocated `before`."""
    if device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.max_memory_allocated(number) - (before[number] if before else 0)


def largest(ranks: Sequence[Costs]) -> Costs:
    held = [one.held_bytes for one in ranks if one.held_bytes is not None]
    peaks = [one.peak_bytes for one in ranks if one.peak_bytes is not None]
    compiling = [one.compile_seconds for one in ranks if one.compile_seconds is not None]
    most = {name: max(one[name] for one in held) for name in held[0]} if held else None
    return Costs(most, max(peaks, default=None), max(compiling, default=None))


def peak_bytes(plan: ResolvedPlan, batches: int, seconds: float) -> int | None:
    """Return a rank's peak memory, training twice on each batch: of the process, with mapped pages of the data file,
    without the loader's processes; None if unknown. StrategyError after `seconds`, or if a rank dies."""
    peaks = on_ranks(plan, seconds, _peak_of_rank, plan, batches)
    return max((peak for peak in peaks if peak is not None), default=None)


def _peak_of_rank(plan: ResolvedPlan, batches: int) -> int | None:
    with ExitStack() as stack:
        build_variant(plan, Loaders(stack), stack, batches)
        return resident_peak()


def resident_peak() -> int | None:
    """Return bytes, if /proc reports them. In getrusage, on Linux, a process inherits its parent's peak."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


BOOT = """
import sys
sys.path[:] = {path!r}
from drivetrain.pipeline.measuring.runner import serve
serve({line})
"""
PATIENCE = 5.0  # seconds in which a process may end by itself
# The most that Linux adds to a process's score, by which it chooses whom to kill for lack of memory.
FIRST_TO_KILL = "1000"


class Failed(Exception):
    """A pipeline could not be built, or its training failed; the message has the reason."""


class ProcessRunner:
    """Runs a variant in a process of its own: environment variables are read when Python starts, and what the system
    kills for lack of memory must not be the user's own. Raises Failed, OutOfTime, and errors as `Pipeline.fit`."""

    def __init__(self, variant: Variant, variables: Mapping[str, str], batches: int, deadline: float) -> None:
        self._deadline, self.costs = deadline, Costs()
        job = _pickled(variant, batches)
        self._line, theirs = Pipe()
        boot = _boot(theirs.fileno())
        with ExitStack() as failing:
            failing.callback(self._line.close)
            with theirs, interrupts_held():  # Popen would forget a process that has just started
                self._process = subprocess.Popen(
                    [sys.executable, "-c", boot], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                    env={**os.environ, **variables}, start_new_session=True,
                )  # fmt: skip
                failing.callback(self.close)
            with suppress(BrokenPipeError):  # it died at once: the answer says so
                self._line.send_bytes(job)
            self._received()
            failing.pop_all()

    def trial(self, epoch: int, batches: int) -> Trial:
        with suppress(BrokenPipeError):
            self._line.send((epoch, batches))
        trial = self._received()
        assert isinstance(trial, Trial)
        return trial

    def close(self) -> None:
        self._line.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE if perf_counter() < self._deadline else 0)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _received(self) -> Any:
        if not self._line.poll(max(self._deadline - perf_counter(), 0)):
            raise OutOfTime
        try:
            answer = self._line.recv()
        except (EOFError, ConnectionResetError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)
            if self._process.returncode == -signal.SIGKILL:
                why = "out of memory: the system killed its process (SIGKILL)"
            else:
                why = f"its process ended with status {self._process.returncode}"
            raise Failed(f"{why} before it answered") from None
        if isinstance(answer, DrivetrainError):
            raise answer
        if isinstance(answer, str):
            raise Failed(answer)
        return answer


def _boot(line: int) -> str:
    """Return the program of a process that answers at a descriptor. Among the texts of the path, some notebooks have a
    `Path`, which Python ignores."""
    return BOOT.format(path=[str(entry) for entry in sys.path], line=line)


def _pickled(variant: Variant, batches: int) -> bytes:
    job: Any = partial(_answer, variant, batches)
    if registry.REGISTERED:
        job = partial(registry.call_with, registry.REGISTERED, job)
    try:
        return cloudpickle.dumps(job)  # type: ignore[no-any-return]
    except Exception as error:  # the object's own code may raise anything
        raise PlanError(
            f"The pipeline cannot be sent to a process of its own, in which it is tried: {describe_error(error)}. "
            "Create what cannot be pickled within the model's factory."
        ) from error


def serve(line: int) -> None:
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_KILL)
    with Connection(line) as connection, suppress(EOFError, BrokenPipeError):
        cloudpickle.loads(connection.recv_bytes())(connection)


def _answer(variant: Variant, batches: int, line: Connection) -> None:
    """Build, and train as asked: an epoch and a number of batches. Only the other side looks at the time."""
    with ExitStack() as stack:
        stack.enter_context(fork_rng(variant.spec.seed))
        try:
            runner = VariantRunner([variant], Loaders(stack), batches)
        except Exception as error:
            line.send(error if isinstance(error, DrivetrainError) else describe_error(error))
            return
        stack.callback(runner.close)
        line.send(None)
        while True:
            epoch, count = line.recv()
            trials, failed = runner.run(epoch, count, [variant.id])
            line.send(failed[variant.id] if failed else trials[variant.id])
