"""Losses that are no finite numbers: noticed at their step, by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch

from ...errors import NonFiniteError, PlanError, suggest
from ...strategies import Engine
from ...transforms.common.tensors import locals_of
from ..telemetry.host_copy import HostCopy
from ..telemetry.observer import Observer
from ..telemetry.state import TrainState

OnNonFinite = Literal["raise", "skip"]

OVERFLOWS = 50
"""Steps that fp16 may skip one after the other. Each halves the loss scale, and fp16's numbers reach from 2^-24 to
2^16: after 50 halvings no finite gradient overflows."""


def check_choice(how: str) -> None:
    """Refuses what is no `OnNonFinite`.

    Raises:
        PlanError: naming it.
    """
    if how not in get_args(OnNonFinite):
        raise PlanError(f"on_nonfinite={how!r} is not known.{suggest(str(how), get_args(OnNonFinite))}")


class NonFiniteGuard(Observer):
    """Stop a training, or skip the step, when a rank's loss is not finite.

    With `"raise"` the loss is looked at before the optimizer steps where that costs nothing, on the CPU; on
    CUDA one step later, when the next one is queued, so that the device never waits. With `"skip"` every step
    waits for its loss, and buffers (BatchNorm's statistics, which a bad batch would spoil) are copied before it.
    The norm of the gradients is looked at likewise: on the CPU at once, on CUDA one step later.

    Gradients that are not finite although the loss is show in their norm, with `clip_norm`; the step has been
    taken by then, so that is an error also with `"skip"`. Without a norm they show in the next loss. A skipped
    step whose weights are spoiled already is an error too: no step would ever be taken again.

    A step that fp16's loss scale skips is part of its search, and no error, unless `OVERFLOWS` follow each other.

    Args:
        engine: to agree with the other ranks: one number each, a step.
        how: `"raise"` or `"skip"`.
        advice: completes an error: the last good checkpoint, what to change.
    """

    def __init__(self, engine: Engine, how: OnNonFinite, advice: Callable[[], str]) -> None:
        self._engine, self._skip = engine, how == "skip"
        self._advice = advice
        self._at_once = self._skip or engine.device.type != "cuda"
        self._late: tuple[int, HostCopy] | None = None
        self._late_norm: tuple[int, HostCopy] | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._overflows = 0

    def on_step_start(self, state: TrainState) -> None:  # noqa: ARG002
        """Copy the buffers, if the step may be skipped."""
        if self._skip:
            self._buffers = [(buffer, buffer.clone()) for buffer in self._engine.plain_model.buffers()]

    @torch.no_grad()
    def should_step(self, state: TrainState, loss: torch.Tensor) -> bool:
        """Return whether the loss is finite on every rank; every rank must ask.

        Raises:
            NonFiniteError: naming step and rank; for the step before, on CUDA.
        """
        losses = self._of_all_ranks(loss)
        if self._at_once:
            self._look_at_norm()
            return self._judged(state.step + 1, losses.tolist())
        late, self._late = self._late, (state.step + 1, HostCopy(losses))
        self._look(late)
        self._look_at_norm()
        return True

    def _of_all_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Each rank's loss in its place `(ranks,)`; one rank asks nobody."""
        if self._engine.world_size == 1:
            return loss.reshape(1)
        losses = torch.zeros(self._engine.world_size, device=self._engine.device)
        losses[self._engine.rank] = loss
        return self._engine.reduce(losses, "sum")

    def on_optimizer_step(self, state: TrainState, norm: torch.Tensor | None, skipped: bool) -> None:
        """Check the norm, and count overflows that follow each other.

        Raises:
            NonFiniteError: naming the step; for the norm of the step before, on CUDA.
        """
        self._overflows = self._overflows + 1 if skipped else 0
        step = state.step + 1
        if self._overflows == OVERFLOWS:
            raise NonFiniteError(
                f"At step {step} the gradients overflowed in fp16 for the {OVERFLOWS}th step in a row, at "
                f"every loss scale: they are not finite, with a finite loss. {self._advice()}"
            )
        if norm is not None and norm.device.type == "cuda":
            self._late_norm = step, HostCopy(norm)
        elif norm is not None:
            self._check_norm(step, norm.item())

    def flush(self) -> None:
        """Check what is still on its way from the device.

        Raises:
            NonFiniteError: naming step and rank.
        """
        late, self._late = self._late, None
        self._look(late)
        self._look_at_norm()

    def _look(self, late: tuple[int, HostCopy] | None) -> None:
        if late is not None:
            step, losses = late
            self._judged(step, losses.values())

    def _look_at_norm(self) -> None:
        late, self._late_norm = self._late_norm, None
        if late is not None:
            step, norm = late
            self._check_norm(step, norm.values())

    def _check_norm(self, step: int, value: float) -> None:
        if math.isfinite(value):
            return
        if self._late is not None and self._late[0] == step:
            self.flush()  # a loss that is not finite is the cause, and has the better message
        raise NonFiniteError(
            f"At step {step} the norm of the gradients is {value}, with a finite loss; the weights are spoiled. "
            f"{self._advice()}"
        )

    def _judged(self, step: int, losses: list[float]) -> bool:
        bad = {rank: value for rank, value in enumerate(losses) if not math.isfinite(value)}
        if not bad:
            return True
        where = ", ".join(f"{value} on rank {rank}" for rank, value in list(bad.items())[:8])
        if self._skip and not self._spoiled():
            for buffer, value in self._buffers:
                buffer.copy_(value)
            return False
        spoiled = " The weights themselves are not finite any more: skipping would not help." * self._skip
        raise NonFiniteError(f"At step {step} the loss is {where}.{spoiled} {self._advice()}")

    def _spoiled(self) -> bool:
        parameters = [p.detach() for p in self._engine.plain_model.parameters()]
        mine = any(not bool(part.isfinite().all()) for part in locals_of(parameters))
        return bool(self._engine.reduce(torch.tensor(float(mine)), "sum").item())
