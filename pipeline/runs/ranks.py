"""Run a function in this process, or on the ranks that the strategy requires, and build what a rank needs."""

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ... import strategies
from ...common.errors import DrivetrainError, StrategyError
from ...strategies.launching.group import is_rank, refuse_lone_task
from ...strategies.launching.meeting import LostRankError, under_torchrun
from ..describe.cuda_settings import cuda_settings
from ..describe.resolve import ResolvedPlan
from ..training.build import Built, Initial, build, draw_apart, fork_rng
from ..training.checks import TrainedOn
from .checkpoints.state import global_randomness_kept

Result = TypeVar("Result")


def on_ranks(
    plan: ResolvedPlan, function: Callable[..., Result], *args: Any, forward: Collection[str] = (),
    patience: float | None = None, saves: bool = False, stacks: Path | None = None,
) -> Result:  # fmt: skip
    """Return what `function(plan, *args)` returns on rank 0; raise a rank's Drivetrain errors as if they occurred here.
    Signals of `forward` reach launched ranks instead; `patience`, `saves` and `stacks` are as in `launch`."""
    refuse_lone_task()
    if is_alone(plan):
        return function(plan, *args)
    try:
        how, waits = plan.distribution, {} if patience is None else {"patience": patience}
        signals = [signal.Signals[name] for name in forward]
        return strategies.launch(
            function, plan, *args, devices=how.ranks, device=how.device, collective_timeout=how.timeout,
            forward=signals, saves=saves, stacks=stacks, **waits,
        )[0]  # fmt: skip
    except LostRankError:  # what it is raised from is a consequence, such as a checkpoint that could not be loaded
        raise
    except StrategyError as error:
        if isinstance(error.__cause__, DrivetrainError | SystemExit):
            raise error.__cause__ from None
        raise


@contextmanager
def built_here(
    plan: ResolvedPlan, initial: Initial | None = None, *, resumes: bool = False, trained: TrainedOn | None = None
) -> Iterator[Built]:
    """Build what this rank trains or evaluates with; afterwards restore the random states and CUDA's settings."""
    with (
        fork_rng(plan.seed),
        global_randomness_kept(),
        cuda_settings(plan.distribution, plan.transforms),
        build(plan, initial, resumes, trained) as built,
    ):
        draw_apart(plan.seed, built.engine.rank)
        yield built


def is_alone(plan: ResolvedPlan) -> bool:
    return not plan.needs_ranks and not under_torchrun()


def trains_here(plan: ResolvedPlan) -> bool:
    return is_alone(plan) or is_rank()
