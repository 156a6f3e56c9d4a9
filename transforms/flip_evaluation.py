"""TestTimeFlip: average predictions over each image and its mirror image, optionally shifted ones too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.errors import DataError, PlanError
from .base import Natural, Transform
from .common.images import keep_format


@dataclass(frozen=True)
class TestTimeFlip(Transform):
    """Predict with the mean of the logits of each image and its horizontal mirror image.

    Evaluation takes twice as long, or six times with `shift`. Compare its accuracies only with others that use it.

    Attributes:
        shift: pixels by which the images are also moved, up-left and down-right, with reflected edges. These two
            and their mirror images count for half of the mean. Integer ≥ 0, less than the images' sides. Default
            0: no shifted images; airbench uses 1.

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012, section 4.1
    (with crops); Jordan, "94% on CIFAR-10 in 3.29 Seconds", 2024, arXiv:2404.00498 (flip alone, and with shifts).

    Example::

        >>> logits = TestTimeFlip().predict(model.eval(), images)
        >>> logits.shape
        torch.Size([8, 2])
    """

    shift: Natural = 0

    # Otherwise pytest would collect the class as a test.
    __test__ = False
    kind = "evaluation"
    source = "Krizhevsky et al. 2012; Jordan 2024, arXiv:2404.00498"
    targets = ("class indices", "labels", "values")

    def predict(self, model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Return logits (B, C), in float32 or better, of images (B, 3, H, W), in the caller's gradient and autocast
        modes. Raises `DataError` for images of another shape, `PlanError` unless the model returns a tensor."""
        if images.dim() != 4 or min(images.shape[-2:]) <= self.shift:
            raise DataError(
                f"{self}: images of shape {tuple(images.shape)}. Pass (B, 3, H, W), with sides larger than shift."
            )
        logits = _both(model, images)
        if not self.shift:
            return logits
        by = self.shift
        padded = F.pad(images, (by, by, by, by), mode="reflect")
        height, width = images.shape[-2:]
        corners = padded[..., 2 * by :, 2 * by :], padded[..., :height, :width]
        moved = [_both(model, keep_format(corner, images)) for corner in corners]
        return (logits + (moved[0] + moved[1]) / 2) / 2


def _both(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    logits: object = model(images)
    if not isinstance(logits, Tensor):
        raise PlanError(
            f"TestTimeFlip takes the mean of one tensor, and the model returns a {type(logits).__name__}. Return the "
            "logits, in a pipeline by the task's outputs(), or leave TestTimeFlip out."
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(wide) + model(keep_format(images.flip(-1), images)).to(wide)) / 2
