"""Where changes compete: trials of two pipelines in turns, on the same samples, under a time budget."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from ....common.budget import OutOfTime
from ....common.errors import DrivetrainError, StrategyError
from ....strategies.devices import rank_device
from ....strategies.launching.group import all_reduce_speed
from ...describe.cuda_settings import uses_gpu
from ...describe.pipeline_spec import PipelineSpec
from ...describe.resolve import ResolvedPlan
from ...ledger.variant import LOADER, MODEL, Trial, VariantId, in_turn, same_samples
from ...runs.facts import measured_config
from ...runs.fit import fit
from ...training.build import build_model
from ..runner import (
    MIN_BATCHES,
    Failed,
    Loaders,
    ProcessRunner,
    Variant,
    VariantRunner,
    describe_error,
    on_ranks,
)

LIMIT_ROUNDS = 3
FEWEST = 2  # batches of a trial, where a step takes seconds


@dataclass
class Contender:
    id: VariantId
    plan: ResolvedPlan
    runner: VariantRunner | ProcessRunner
    loaders: ExitStack
    deadline: float

    @property
    def batch_size(self) -> int:
        return self.plan.data.batch_size

    @property
    def memory(self) -> int | None:
        """Bytes on one rank: the peak on a GPU, else held; None before a trial, and in a process of its own."""
        costs = self.runner.costs
        held = None if costs.held_bytes is None else sum(costs.held_bytes.values())
        return held if costs.peak_bytes is None else costs.peak_bytes

    def trials(self, number: int, batches: int, *others: VariantId) -> dict[VariantId, Trial]:
        """Return a trial of training, and of these other variants. Raise Failed, or OutOfTime."""
        if isinstance(self.runner, ProcessRunner):
            return {self.id: self.runner.trial(number, batches)}
        trials, failed = self.runner.run(number, batches, [self.id, *others], self.deadline)
        if failed:
            raise Failed(next(iter(failed.values())))
        return trials

    def close(self) -> None:
        self.runner.close()
        self.loaders.close()


class Arena:
    """Builds pipelines, and measures them in turns, with trials of `seconds`. With `probe`, the first is tried in a
    process of its own if the system could kill this one for lack of memory: on a CPU, without ranks. One with a larger
    batch than all before is tried in one in any case."""

    def __init__(self, deadline: float, seconds: float, *, probe: bool = False, epochs: int = 1) -> None:
        self._deadline, self._seconds, self._probe, self._epochs = deadline, seconds, probe, epochs
        self._batches = 0  # of a trial; the first pipeline's speed decides
        self._batch_size = 0  # for which they are counted
        self._largest = 0  # batch that fits

    def open(self, name: str, spec: PipelineSpec, variables: Mapping[str, str] | None = None) -> Contender:
        """Build and warm up a pipeline, with `variables` in a process of its own. Raise Failed, or OutOfTime."""
        one = Variant(in_turn(name), spec)
        plan, loaders = one.plan, ExitStack()
        batches = self._count(plan.data.batch_size)
        if variables is not None:
            runner = ProcessRunner(one, variables, batches, self._deadline)
            return Contender(one.id, plan, runner, loaders, self._deadline)
        probe = (self._probe or self._largest) and plan.data.batch_size > self._largest
        if probe and not plan.needs_ranks and not uses_gpu(plan.distribution):
            ProcessRunner(one, {}, FEWEST, self._deadline).close()
        with ExitStack() as failing:
            failing.enter_context(loaders)
            try:
                group = [one, Variant(LOADER, spec), Variant(MODEL, spec)]
                built = VariantRunner(group, Loaders(loaders), batches, self._deadline)
            except (OutOfTime, DrivetrainError):
                raise
            except Exception as error:  # of the model, a transform, memory
                raise Failed(describe_error(error)) from error
            failing.callback(built.close)
            made = Contender(one.id, plan, built, loaders, self._deadline)
            if not self._batches:
                start = perf_counter()
                made.trials(0, FEWEST)
                each = (perf_counter() - start) / FEWEST
                self._batches = max(math.ceil(self._seconds / each), FEWEST)
                self._batch_size = made.batch_size
            self._largest = max(self._largest, made.batch_size)
            failing.pop_all()
        return made

    def _count(self, batch_size: int, largest: int = 0) -> int:
        """Return the batches of a trial: as many images as in any other, or, next to one of a `largest` batch, as many
        as hide there that the loader's queue is filled."""
        largest = max(batch_size, largest)
        fewest = MIN_BATCHES * largest if largest > self._batch_size else FEWEST * batch_size
        return max(self._batches * self._batch_size, fewest) // batch_size

    def round(self, number: int, contenders: Sequence[Contender]) -> list[float]:
        """Return the images/s of one trial of each, in the given order; every second round runs in reverse order."""
        trials: dict[VariantId, Trial] = {}
        largest = max(one.batch_size for one in contenders)
        for one in contenders[:: -1 if number % 2 else 1]:
            trials |= one.trials(number, self._count(one.batch_size, largest))
        if len({(one.batch_size, one.plan.data.order) for one in contenders}) == 1:  # else other batches of them
            same_samples(trials)
        return [trials[one.id].speed for one in contenders]

    def limits(self, contender: Contender) -> dict[str, float]:
        """Return images/s of training, of loader and model alone, and on several ranks of communication alone."""
        names = {contender.id: "training", LOADER: "loader", MODEL: "model"}
        batches = self._count(contender.batch_size)
        rounds = [contender.trials(number, batches, LOADER, MODEL) for number in range(LIMIT_ROUNDS)]
        found = {name: median(trials[one].speed for trials in rounds) for one, name in names.items()}
        if contender.plan.needs_ranks:
            found["communication"] = contender.batch_size / collective_seconds(contender.plan, self._deadline)
        return found

    def accuracy(self, spec: PipelineSpec, seed: int) -> float:
        """Train briefly from this seed, and return the monitored share, 0 to 1, negated if lower is better. Raise
        Failed, or OutOfTime: only in the main thread, the budget's end interrupts a training."""
        if perf_counter() >= self._deadline:
            raise OutOfTime
        try:
            history = fit(spec.replace(seed=seed), measured_config(spec, epochs=self._epochs)).history
        except Exception as error:
            raise Failed(describe_error(error)) from error
        if history.monitored is None:
            raise Failed("its training has no accuracy")
        found = history.monitor.fraction(history.monitored)
        return found if history.monitor.higher_is_better else -found


def is_out_of_memory(reason: str) -> bool:
    """Whether a pipeline failed for lack of memory; a rank that the system killed most often did."""
    return any(text in reason.lower() for text in ("out of memory", "allocate memory", "sigkill"))


def collective_seconds(plan: ResolvedPlan, deadline: float) -> float:
    """Return the median seconds of an all-reduce of all gradients: the least that a step communicates."""
    model, _ = build_model(plan.spec, plan.transforms)
    size = 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    del model
    left = max(deadline - perf_counter(), 0.0)
    try:
        return max(on_ranks(plan, left, _median, size, plan.distribution.device))
    except StrategyError:
        if perf_counter() >= deadline:
            raise OutOfTime from None
        raise


def _median(size: int, device: str) -> float:
    return all_reduce_speed(size, rank_device(device)).median
