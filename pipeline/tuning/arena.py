"""Where changes compete: trials of two pipelines in turns, on the same samples, under a time budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol, TypeVar

from ...common.errors import DrivetrainError
from ..describe.cuda_settings import uses_gpu
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import ResolvedPlan, resolve
from ..ledger import data as identity
from ..ledger.data import LOADER, MODEL, VariantId
from ..ledger.record import same_samples
from ..ledger.runner import Loaders, VariantRunner, described
from ..ledger.variants import Variant
from ..measuring.budget import OutOfTime
from ..runs.config import FitConfig
from ..runs.fit import fit
from .communication import collective_seconds
from .separate import Failed, Separate

LIMIT_ROUNDS = 3
FEWEST = 2
"""Batches of a trial, where a step takes seconds."""


class Contender(Protocol):
    """A pipeline that was built."""

    @property
    def name(self) -> str:
        """The change that it has."""

    @property
    def memory(self) -> int | None:
        """Measured bytes on one rank: the peak on a GPU, else of parameters, gradients and optimizer; None before a
        trial."""

    def close(self) -> None:
        """Release its model and its loaders."""


C = TypeVar("C", bound=Contender)


class Arena(Protocol[C]):
    """Builds pipelines, and measures them in turns."""

    def open(self, name: str, spec: PipelineSpec, variables: Mapping[str, str] | None = None) -> C:
        """Build and warm up a pipeline; given environment variables, in a process of its own that has them.

        Raise Failed, or OutOfTime.
        """

    def round(self, number: int, contenders: Sequence[C]) -> list[float]:
        """Return the images/s of one trial of each, in the given order. Raise Failed, or OutOfTime."""

    def limits(self, contender: C) -> dict[str, float]:
        """Return images/s of `"training"`, of `"loader"` and `"model"` alone, and on several ranks of
        `"communication"` alone."""

    def accuracy(self, spec: PipelineSpec, seed: int) -> float:
        """Train briefly from this seed, and return the monitored share, 0 to 1, negated if lower is better. Raise
        Failed, or OutOfTime."""


@dataclass
class Built:
    """A pipeline in an arena: training and its parts."""

    name: str
    id: VariantId
    plan: ResolvedPlan
    runner: VariantRunner
    stack: ExitStack
    deadline: float

    @property
    def batch_size(self) -> int:
        """Images of a batch, over all ranks."""
        return self.plan.data.batch_size

    @property
    def memory(self) -> int | None:
        """See `Contender`."""
        costs = self.runner.costs
        held = None if costs.held_bytes is None else sum(costs.held_bytes.values())
        return held if costs.peak_bytes is None else costs.peak_bytes

    def trial(self, number: int, batches: int) -> identity.Trial:
        """Train on these batches."""
        return self.trials(number, batches, [self.id])[self.id]

    def trials(self, number: int, batches: int, variants: list[VariantId]) -> dict[VariantId, identity.Trial]:
        """Return a trial of each of these variants. Raise Failed, or OutOfTime."""
        trials, failed = self.runner.run(number, batches, variants, self.deadline)
        if failed:
            raise Failed(next(iter(failed.values())))
        return trials

    def close(self) -> None:
        """See `Contender`."""
        self.runner.close()
        self.stack.close()


class Trials:
    """The arena of a machine: the ledger's trials.

    Args:
        deadline: in `perf_counter` time.
        seconds: that a trial may take.
        probe: try the first pipeline in a process of its own, if the system could kill this one for lack of memory:
            on a CPU, in this process. On a GPU, lack of memory is an error; ranks are other processes.
        epochs: of a short training.
    """

    def __init__(self, deadline: float, seconds: float, *, probe: bool = False, epochs: int = 1) -> None:
        self._deadline, self._seconds, self._probe, self._epochs = deadline, seconds, probe, epochs
        self._batches = 0  # of a trial; the first pipeline's speed decides
        self._batch_size = 0  # for which they are counted

    def open(
        self, name: str, spec: PipelineSpec, variables: Mapping[str, str] | None = None
    ) -> Built | Separate:
        """See `Arena`."""
        if variables is not None:
            return Separate(name, spec, variables, self._batches or FEWEST, self._deadline)
        one, stack, plan = identity.in_turn(name), ExitStack(), resolve(spec)
        if self._probe and not self._batches and not plan.needs_ranks and not uses_gpu(plan.distribution):
            Separate(name, spec, {}, FEWEST, self._deadline).close()
        with ExitStack() as failing:
            failing.enter_context(stack)
            try:
                group = [Variant(one, spec), Variant(LOADER, spec), Variant(MODEL, spec)]
                runner = VariantRunner(group, Loaders(stack), self._batches or FEWEST, self._deadline)
            except (OutOfTime, DrivetrainError):
                raise
            except Exception as error:  # of the model, a transform, memory
                raise Failed(described(error)) from error
            failing.callback(runner.close)
            made = Built(name, one, plan, runner, stack, self._deadline)
            if not self._batches:
                start = perf_counter()
                made.trial(0, FEWEST)
                each = (perf_counter() - start) / FEWEST
                self._batches = max(math.ceil(self._seconds / each), FEWEST)
                self._batch_size = made.batch_size
            failing.pop_all()
        return made

    def round(self, number: int, contenders: Sequence[Built | Separate]) -> list[float]:
        """See `Arena`. Every second round runs in reverse order."""
        trials: dict[VariantId, identity.Trial] = {}
        for one in contenders[:: -1 if number % 2 else 1]:
            batches = max(self._batches * self._batch_size // one.batch_size, 1)
            trials[identity.in_turn(one.name)] = one.trial(number, batches)
        if len({one.batch_size for one in contenders}) == 1:
            same_samples(trials)
        return [trials[identity.in_turn(one.name)].speed for one in contenders]

    def limits(self, contender: Built | Separate) -> dict[str, float]:
        """See `Arena`."""
        assert isinstance(contender, Built)
        names = {contender.id: "training", LOADER: "loader", MODEL: "model"}
        rounds = [contender.trials(number, self._batches, list(names)) for number in range(LIMIT_ROUNDS)]
        found = {name: median(trials[one].speed for trials in rounds) for one, name in names.items()}
        if contender.plan.needs_ranks:
            found["communication"] = contender.batch_size / collective_seconds(contender.plan, self._deadline)
        return found

    def accuracy(self, spec: PipelineSpec, seed: int) -> float:
        """See `Arena`."""
        config = FitConfig(epochs=self._epochs, progress=False, checkpoints=None)
        try:
            history = fit(spec.replace(seed=seed), config).history
        except Exception as error:
            raise Failed(described(error)) from error
        if history.monitored is None:
            raise Failed("its training has no accuracy")
        found = history.monitor.fraction(history.monitored)
        return found if history.monitor.higher_is_better else -found


def is_out_of_memory(reason: str) -> bool:
    """Whether a pipeline failed for lack of memory; a rank that the system killed most often did."""
    return any(text in reason.lower() for text in ("out of memory", "allocate memory", "sigkill"))
