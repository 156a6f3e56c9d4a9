"""LayerFreezing: the first layers stop learning, more and more of them as training goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..errors import PlanError
from .base import Kind, Report, Transform
from .common.checks import check_fraction


@dataclass(frozen=True)
class LayerFreezing(Transform):
    """Freezes a share of the layers that rises from 0 at `freeze_start` to `freeze_level` at the end.

    A layer is a module with parameters of its own, in the order of registration; the last one is never
    frozen. For models whose parameters are all in leaf modules, the layers and the schedule are those of
    Composer's `freeze_layers`; that one never freezes parameters that stand beside children, such as a
    ViT's class token.

    `freeze` keeps no state: what is frozen follows from the progress alone, so a resumed run calls it and
    goes on. It sets requires_grad to False and the gradient to None, and every PyTorch optimizer leaves a
    parameter without a gradient as it is, momentum and weight decay included; no optimizer needs to be
    changed. Running statistics of batch normalisations still move, as in Composer.

    Frozen parameters get no gradient, for which DDP waits unless find_unused_parameters is set. FSDP2 reads
    requires_grad at every forward, and FairScale's ShardedDDP waits for no gradient. DeepSpeed keeps stepping
    what is frozen, by momentum and weight decay, in the flat buffers that it laid out at the start. A compiled
    model compiles again after each change.

    Attributes:
        freeze_start: share of training before the first layer freezes. Number in [0, 1). Default 0.5, as
            in Composer.
        freeze_level: share of the layers that are frozen at the end. Number in [0, 1]. Default 1.0, as in
            Composer.

    Raises:
        PlanError: at construction, if a value is out of range.

    Source: Brock et al., "FreezeOut", 2017, arXiv:1706.04983; the schedule is Composer's.
    """

    freeze_start: float = 0.5
    freeze_level: float = 1.0

    kind: ClassVar[Kind] = "schedule"
    source: ClassVar[str] = "Brock et al. 2017, arXiv:1706.04983"
    unsafe_with: ClassVar[tuple[str, ...]] = ("deepspeed",)
    unused_parameters: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fraction(self, "freeze_start")
        check_fraction(self, "freeze_level", one=True)

    @property
    def depends_on_length(self) -> bool:
        """Unless no layer is ever frozen."""
        return self.freeze_level > 0

    def level(self, progress: float) -> float:
        """The share of the layers that are frozen, in [0, 1], when a share `progress` of training is done.

        Raises:
            PlanError: if `progress` is not in [0, 1].
        """
        if not 0 <= progress <= 1:
            raise PlanError(
                f"LayerFreezing: progress={progress!r} is the share of training done, from 0 to 1."
            )
        return self.freeze_level * max(0.0, progress - self.freeze_start) / (1 - self.freeze_start)

    def freeze(self, model: nn.Module, progress: float) -> Report:
        """Freezes what is to be frozen when a share `progress` of training is done. Thaws nothing.

        Call it between two steps, as Composer does after every epoch.

        Args:
            model: the model in training; under DDP, `ddp.module`.
            progress: share of all training done, from 0 to 1.

        Returns:
            Names of the layers that were frozen now; a note says how many are frozen in all.

        Raises:
            PlanError: if `progress` is not in [0, 1].
        """
        layers = [(n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
        depth = int(self.level(progress) * max(0, len(layers) - 1))
        changed = []
        for name, layer in layers[:depth]:
            learning = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            for parameter in learning:
                parameter.requires_grad_(False)
                parameter.grad = None
            if learning:
                changed.append(name)
        note = f"{depth} of {len(layers)} layers are frozen at progress {progress:g}."
        return Report("LayerFreezing", tuple(changed), (), (note,))


__all__ = ["LayerFreezing"]
