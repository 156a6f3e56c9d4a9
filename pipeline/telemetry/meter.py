"""What is added up over an epoch, and can be taken up again in the middle of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...strategies import Engine


@dataclass
class Sums:
    """Of one epoch so far.

    Attributes:
        total: of the losses of this rank's steps, on the device.
        counted: the steps in it.
        overflowed: those of them that were skipped because fp16's gradients overflowed; their losses count.
        skipped: further steps, whose loss was not finite.
        images: over all ranks.
        seconds, waited: of training, and of waiting for data.
        elapsed: seconds of the epoch so far, also in processes before this one.
    """

    total: torch.Tensor
    counted: int = 0
    skipped: int = 0
    overflowed: int = 0
    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    elapsed: float = 0.0

    @property
    def steps(self) -> int:
        """Batches of the epoch that are done."""
        return self.counted + self.skipped

    def state_dict(self, engine: Engine) -> dict[str, Any]:
        """As JSON values; every rank must call it. `total` is the mean over the ranks."""
        mean = engine.reduce(self.total).item()
        names = ("counted", "skipped", "overflowed", "images", "seconds", "waited", "elapsed")
        return {"total": mean, **{name: getattr(self, name) for name in names}}

    @classmethod
    def of(cls, state: dict[str, Any], device: torch.device) -> Sums:
        """Those of a `state_dict`, on this rank."""
        return cls(**{**state, "total": torch.tensor(float(state["total"]), device=device)})
