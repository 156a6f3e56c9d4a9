"""LayerFreezing: progressively stop training the first layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..common.errors import PlanError
from ..common.model_state import keep_frozen_statistics
from .base import Fraction, FractionBelowOne, Report, Session, Transform
from .common.moments import session_at


@dataclass(frozen=True)
class LayerFreezing(Transform):
    """Freeze a fraction of the layers that rises from 0 at `freeze_start` to `freeze_level` at the end.

    A layer is a module with its own parameters, in registration order; the last one is never frozen. For models whose
    parameters are all in leaf modules, layers and schedule match Composer's `freeze_layers`, which never freezes
    parameters of modules with children, such as a ViT's class token.

    The frozen layers follow from the progress alone, so `freeze` has no state, and a resumed run just calls it again.
    It sets requires_grad to False and the gradient to None, and every PyTorch optimizer skips a parameter without a
    gradient, momentum and weight decay included, so the optimizer does not change. The running statistics of a frozen
    BatchNorm stay, too: `freeze` sets it to evaluation mode, and so does Drivetrain's loop. In a custom loop, call
    `freeze` after `model.train()`, which ends it. In Composer the statistics drift away from the weights.

    DDP waits for the gradients of frozen parameters unless find_unused_parameters is set. FSDP2 reads requires_grad in
    every forward, and FairScale's ShardedDDP does not wait for gradients. DeepSpeed would keep updating frozen
    parameters, by momentum and weight decay, in its flat buffers. A compiled model is recompiled after each change,
    until torch has compiled 8 versions of it: it runs further ones uncompiled.

    Attributes:
        freeze_start: fraction of training until a layer freezes. Number in [0, 1). Default 0.5, as in Composer.
        freeze_level: fraction of the layers frozen at the end. Number in [0, 1]. Default 1.0, as in Composer.

    Raises:
        PlanError: from a run of so few epochs that no layer would freeze: they do so at the start of an epoch.

    Source: Brock et al., "FreezeOut", 2017, arXiv:1706.04983; the schedule is Composer's.

    Example::

        >>> LayerFreezing(freeze_start=0.5).level(0.75)  # after three quarters of the training
        0.5
    """

    freeze_start: FractionBelowOne = 0.5
    freeze_level: Fraction = 1.0

    kind = "schedule"
    source = "Brock et al. 2017, arXiv:1706.04983"
    unsafe_with = ("deepspeed",)
    unused_parameters = True
    tried_by_tune = "surgery"

    @property
    def depends_on_length(self) -> bool:
        return self.freeze_level > 0

    @property
    def turning_points(self) -> tuple[float, ...]:
        return (self.freeze_start,)

    def check_epochs(self, epochs: int, image_size: int | tuple[int, int]) -> None:  # noqa: ARG002
        if self.freeze_level and not self.level(1 - 1 / epochs):
            raise PlanError(
                f"{self} freezes layers at the start of epochs, and with epochs={epochs} none would freeze. Train for "
                "more epochs, lower freeze_start, or leave it out."
            )

    def session(self, model: nn.Module) -> Session:
        return session_at(before_epoch=lambda loop: self.freeze(model, loop.progress_at(loop.epoch_start)))

    def level(self, progress: float) -> float:
        if not 0 <= progress <= 1:
            raise PlanError(
                f"LayerFreezing: progress={progress!r}. Pass the fraction of training completed, in [0, 1]."
            )
        return self.freeze_level * max(0.0, progress - self.freeze_start) / (1 - self.freeze_start)

    def freeze(self, model: nn.Module, progress: float) -> Report:
        """Freeze the layers due at `progress`, 0 to 1; nothing is unfrozen. Call it between two steps, as Composer does
        after every epoch. `model` is the one in training; under DDP, `ddp.module`.

        Return the names of the newly frozen layers; a note has the total number of frozen layers.
        """
        layers = [(n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
        depth = int(self.level(progress) * max(0, len(layers) - 1))
        kept = {p for _, last in layers[-1:] for p in last.parameters(recurse=False)}  # others may share them
        changed = []
        for name, layer in layers[:depth]:
            learning = [p for p in layer.parameters(recurse=False) if p.requires_grad and p not in kept]
            for parameter in learning:
                parameter.requires_grad_(False)
                parameter.grad = None
            if learning:
                changed.append(name)
        keep_frozen_statistics(model)
        note = f"{depth} of {len(layers)} layers are frozen at progress {progress:g}."
        return Report("LayerFreezing", tuple(changed), (), (note,))
