"""The moments of the training loop, for the sessions of transforms that follow it (`transforms.from_composer`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...common.errors import PlanError
from ...loaders.epochs import EpochLoader
from ...strategies import Engine
from ...transforms import Session
from ...transforms.common.moments import LoopView, Moment
from ..tasks.means import LossFunction
from ..tasks.nests import to_float
from ..telemetry.state import TrainState


def loop_view(engine: Engine, total: int, loader: EpochLoader | None, seed: int, precision: str) -> LoopView:
    """Return the view of a run of `total` steps."""

    def forward(images: torch.Tensor) -> Any:
        with engine.forward_context():
            return to_float(engine.model(images))

    return LoopView(
        engine.plain_model, forward, engine.optimizer, engine.device, engine.rank, engine.world_size, engine.sharded,
        precision, seed, total, total if loader is None else max(len(loader), 1),
        0 if loader is None else loader.settings.batch_size, loader,
    )  # fmt: skip


class LoopEvents:
    """Calls sessions at the moments of a run; without sessions, it returns what it is given.

    Args:
        sessions: in the plan's order; at moments after something (`after_loss`), they are called in reverse.
        view: what they see and change.
        state: the position of the run.
        accumulate: microbatches per step.
    """

    def __init__(
        self,
        sessions: Sequence[Session] = (),
        view: LoopView | None = None,
        state: TrainState | None = None,
        accumulate: int = 1,
    ) -> None:
        self._sessions, self._accumulate = tuple(sessions), accumulate
        self._started = False
        self._whole: Any = None
        if sessions:
            assert view is not None
            assert state is not None
            self._view, self._state = view, state

    def at(self, moment: Moment) -> None:
        """Call the sessions."""
        if not self._sessions:
            return
        view, state = self._view, self._state
        view.epoch, view.step, view.step_in_epoch = state.epoch, state.step, state.meter.steps
        for session in reversed(self._sessions) if moment.startswith("after_") else self._sessions:
            session.at(moment, view)

    def begin_epoch(self) -> None:
        """Begin an epoch, or resume within one; the first one of this process begins the run."""
        if not self._sessions:
            return
        self._view.microbatch = self._view.rank
        if not self._started:
            self._started = True
            self.at("fit_start")
            if not self._state.step:
                self.at("iteration_start")
        if not self._state.meter.steps:
            self.at("epoch_start")

    def begin_step(
        self, images: torch.Tensor, targets: torch.Tensor, loss: LossFunction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of this rank.

        Raises:
            PlanError: in a loop of one's own, which would pass over the other moments.
        """
        if not self._sessions:
            return images, targets
        if not self._started:
            raise PlanError(
                "Algorithms of Composer's follow the moments of train_epoch. Call that, instead of "
                "TrainingHooks.microbatches in a loop of your own."
            )
        view = self._view
        view.batch, view.loss_function, view.microbatch = (images, targets), loss, view.rank
        for moment in ("after_dataloader", "batch_start", "before_train_batch"):
            self.at(moment)
        self._whole = view.batch
        images, targets = self._batch()
        if len(images) % self._accumulate:
            raise PlanError(
                f"A transform changed the batch to {len(images)} images, which cannot be split into "
                f"accumulate={self._accumulate} equal microbatches. Set accumulate=1, or leave it out."
            )
        return images, targets

    def before_forward(
        self, images: torch.Tensor, targets: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the microbatch; `number` counts those of this rank from 1."""
        if not self._sessions:
            return images, targets
        view = self._view
        view.batch, view.microbatch = (images, targets), view.rank * self._accumulate + number - 1
        self.at("before_forward")
        return self._batch()

    def before_loss(self, outputs: Any, targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return the outputs and the targets for the loss."""
        if not self._sessions:
            return outputs, targets
        self._view.outputs = outputs
        self.at("after_forward")
        self.at("before_loss")
        return self._view.outputs, self._batch()[1]

    def before_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradients are taken."""
        if not self._sessions:
            return loss
        self._view.loss = loss
        self.at("after_loss")
        self.at("before_backward")
        loss = self._view.loss
        if not isinstance(loss, torch.Tensor):
            raise PlanError(f"A transform set the loss to {loss!r:.80}, which is not a tensor.")
        return loss if loss.dim() == 0 else loss.mean()

    def end_microbatches(self) -> None:
        """End the microbatches: the batch is this rank's again."""
        if self._sessions:
            self._view.batch, self._view.microbatch = self._whole, self._view.rank

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self._view.batch
        if (
            isinstance(batch, tuple | list)
            and len(batch) == 2
            and all(isinstance(t, torch.Tensor) for t in batch)
        ):
            return batch[0], batch[1]
        raise PlanError(
            f"A transform set the batch to {batch!r:.80}, which is not a pair of images and targets."
        )
