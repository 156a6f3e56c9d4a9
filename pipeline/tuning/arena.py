"""Where changes compete: trials of two pipelines in turns, on the same samples, under a time budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol, TypeVar

from ...errors import DrivetrainError
from ..ledger import data as identity
from ..ledger.budget import OutOfTime
from ..ledger.data import LOADER, MODEL, VariantId
from ..ledger.record import same_samples
from ..ledger.runner import Loaders, VariantRunner, described
from ..ledger.variants import Variant
from ..spec.pipeline_spec import PipelineSpec

LIMIT_ROUNDS = 3
FEWEST = 2
"""Batches of a trial, where a step takes seconds."""


class Failed(Exception):
    """A pipeline could not be built, or its training failed; the message has the reason."""


class Contender(Protocol):
    """A pipeline that was built."""

    @property
    def name(self) -> str:
        """The change that it has."""

    def close(self) -> None:
        """Release its model and its loaders."""


C = TypeVar("C", bound=Contender)


class Arena(Protocol[C]):
    """Builds pipelines, and measures them in turns."""

    def open(self, name: str, spec: PipelineSpec) -> C:
        """Build and warm up a pipeline. Raise Failed, or OutOfTime."""

    def round(self, number: int, contenders: Sequence[C]) -> list[float]:
        """Return the images/s of one trial of each, in the given order. Raise Failed, or OutOfTime."""

    def limits(self, contender: C) -> dict[str, float]:
        """Return images/s of `"training"`, and of `"loader"` and `"model"` alone."""


@dataclass
class Built:
    """A pipeline in an arena: training and its parts."""

    name: str
    id: VariantId
    runner: VariantRunner
    stack: ExitStack

    def close(self) -> None:
        """See `Contender`."""
        self.runner.close()
        self.stack.close()


class Trials:
    """The arena of a machine: the ledger's trials.

    Args:
        deadline: in `perf_counter` time.
        seconds: that a trial may take.
    """

    def __init__(self, deadline: float, seconds: float) -> None:
        self._deadline, self._seconds = deadline, seconds
        self._batches = 0  # of a trial; the first pipeline's speed decides

    def open(self, name: str, spec: PipelineSpec) -> Built:
        """See `Arena`."""
        one, stack = identity.in_turn(name), ExitStack()
        with ExitStack() as failing:
            failing.enter_context(stack)
            try:
                group = [Variant(one, spec), Variant(LOADER, spec), Variant(MODEL, spec)]
                runner = VariantRunner(group, Loaders(stack), self._batches or FEWEST, self._deadline)
            except (OutOfTime, DrivetrainError):
                raise
            except Exception as error:  # of the model, a transform, memory
                raise Failed(described(error)) from error
            made = Built(name, one, runner, stack)
            if not self._batches:
                failing.callback(runner.close)
                self._batches = FEWEST
                start = perf_counter()
                self._run(made, 0, [one])
                each = (perf_counter() - start) / FEWEST
                self._batches = max(math.ceil(self._seconds / each), FEWEST)
            failing.pop_all()
        return made

    def round(self, number: int, contenders: Sequence[Built]) -> list[float]:
        """See `Arena`. Every second round runs in reverse order."""
        trials: dict[VariantId, identity.Trial] = {}
        for contender in contenders[:: -1 if number % 2 else 1]:
            trials |= self._run(contender, number, [contender.id])
        same_samples(trials)
        return [trials[contender.id].speed for contender in contenders]

    def limits(self, contender: Built) -> dict[str, float]:
        """See `Arena`."""
        names = {contender.id: "training", LOADER: "loader", MODEL: "model"}
        rounds = [self._run(contender, number, list(names)) for number in range(LIMIT_ROUNDS)]
        return {name: median(trials[one].speed for trials in rounds) for one, name in names.items()}

    def _run(
        self, contender: Built, number: int, variants: list[VariantId]
    ) -> dict[VariantId, identity.Trial]:
        trials, failed = contender.runner.run(number, self._batches, variants, self._deadline)
        if failed:
            raise Failed(next(iter(failed.values())))
        return trials


def is_out_of_memory(reason: str) -> bool:
    """Whether a pipeline failed for lack of memory."""
    return "out of memory" in reason.lower()
