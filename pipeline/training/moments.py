"""What the loop calls at each moment: the methods that sessions of transforms and observers override."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch

from ...common.errors import PlanError
from ...transforms import Session
from ..telemetry.observer import Observer
from ..telemetry.state import TrainState

Microbatch = tuple[torch.Tensor, torch.Tensor]
"""Images `(b, 3, H, W)` and targets: class indices `(b,)` or probabilities `(b, C)`."""
Calls = tuple[Callable[[TrainState], Any], ...]
OBSERVED_FIRST = ("on_epoch_start", "on_step_start", "after_forward", "after_backward")


class Moments:
    """The calls at each moment, in order; see `transforms.common.moments`.

    Sessions are called in the plan's order, and after them the observer; the observer before them where time or a batch
    begins, and after a forward or a backward. So its phases (see `Phase`) contain what they name, and nothing else.

    Args:
        sessions: of the transforms.
        observer: of the run.
    """

    on_epoch_start: Calls
    on_step_start: Calls
    before_forward: Calls
    after_forward: Calls
    before_loss: Calls
    before_backward: Calls
    after_backward: Calls
    should_step: Calls
    after_gradients: Calls
    should_apply: Calls
    before_step: Calls
    on_optimizer_step: Calls
    on_step_end: Calls

    def __init__(self, sessions: Sequence[Session], observer: Observer) -> None:
        for moment in get_type_hints(type(self)):
            calls = [call for session in sessions for call in session.calls(moment)]
            seen = list(observer.calls(moment))
            setattr(self, moment, (*seen, *calls) if moment in OBSERVED_FIRST else (*calls, *seen))

    def batch(self, calls: Calls, state: TrainState, batch: Microbatch) -> Microbatch:
        """Return the batch, or what these calls replace it by.

        Raises:
            PlanError: if that is not a pair of tensors.
        """
        state.batch = batch
        for call in calls:
            call(state)
        now = state.batch
        pair = tuple(now) if isinstance(now, tuple | list) else ()
        if len(pair) == 2 and all(isinstance(tensor, torch.Tensor) for tensor in pair):
            return pair[0], pair[1]
        raise PlanError(
            f"A transform set the batch to {now!r:.80}, which is not a pair of images and targets."
        )

    def loss(self, state: TrainState, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradients are taken, or what the calls replace it by.

        Raises:
            PlanError: if that is not a tensor.
        """
        state.loss = loss
        for call in self.before_backward:
            call(state)
        if not isinstance(state.loss, torch.Tensor):
            raise PlanError(f"A transform set the loss to {state.loss!r:.80}, which is not a tensor.")
        return state.loss if state.loss.dim() == 0 else state.loss.mean()
