"""The plan's row about what each rank of a sharded training holds."""

from typing import Any

import torch
from torch import nn

from ...strategies.common.memory import rank_bytes, shards_parameters
from ..describe.plan import Step
from ..describe.resolve import ResolvedPlan
from ..optim.config import OptimizerConfig
from ..optim.optimizers import is_schedule_free
from .build import build_on_meta

_PROBE = 8  # rows and columns of the matrix with which an optimizer is tried


def memory_steps(plan: ResolvedPlan) -> tuple[Step, ...]:
    """Return a row for a strategy that shards parameters, of the model on the meta device; none for a model that cannot
    be built there."""
    how = plan.distribution
    strategy: Any = plan.strategy
    if how.ranks == 1 or not shards_parameters(strategy.name):  # "deepspeed" does not name the stage
        return ()
    try:
        model, stays = build_on_meta(plan.spec, plan.transforms)
        of_state = state_bytes(plan.optimization)
    except Exception:  # of the user's code: the row is information
        return ()
    whole = 4 * sum(one.numel() for one in model.parameters())
    trained = 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    ranks = strategy.shards(how.ranks) if hasattr(strategy, "shards") else how.ranks
    state = round(trained / 4 * of_state)
    own = list(rank_bytes(strategy.name, ranks, whole, trained, state))
    gathered = 0
    if hasattr(strategy, "gathered_bytes"):
        gathered = strategy.gathered_bytes(model, how.step_options["precision"])
        if how.accumulate > 1:  # FSDP2 reduces gradients with the last microbatch; until then, a rank's own are full
            own[1] = trained
    parts, saved = "weights, gradients and optimizer state", whole + state
    if any(transform.averages_weights for transform in plan.transforms):
        own.append(whole / ranks)
        parts, saved = "weights, gradients, optimizer state and averages", saved + whole
    elif is_schedule_free(plan.optimization.optimizer):  # its averages are in checkpoints only
        saved += whole
    beside = f", and up to {_gb(gathered)} gathered for a while" if gathered else ""
    return (
        Step(
            f"memory of a rank: {_gb(sum(own) + gathered)} and activations", "Drivetrain",
            f"{', '.join(map(_gb, own))} of {parts}{beside}. Checkpoints take {_gb(saved)} on the disk, of which each "
            f"rank copies {_gb(saved / ranks)} to the host's memory and writes it. {_begins(stays, whole)}",
        ),
    )  # fmt: skip


def _begins(on_meta: bool, whole: float) -> str:
    if on_meta:
        return (
            "The model is on the meta device: no rank holds all of it, and each module's reset_parameters(), a "
            "checkpoint or init_from= gives the values"
        )
    return f"Each rank first builds the model on the CPU, in {_gb(whole)}; of one on the meta device, only its shard"


def state_bytes(optimization: OptimizerConfig) -> float:
    """Return the bytes of optimizer state by parameter, which one step of a small matrix shows."""
    weight = nn.Parameter(torch.zeros(_PROBE, _PROBE))
    weight.grad = torch.zeros_like(weight)
    optimizer = optimization.factory([weight])
    optimizer.step()
    state = optimizer.state[weight].values()
    held = sum(one.nbytes for one in state if isinstance(one, torch.Tensor) and one.shape == weight.shape)
    return held / weight.numel()


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3g} GB" if size >= 1e8 else f"{size / 1e6:,.3g} MB"
