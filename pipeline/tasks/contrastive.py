"""Contrastive learning: views of one image are alike, and unlike those of other images; no labels are used."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...common.checks import check_number
from ...common.errors import PlanError
from .task import Kind, Targets, Task, shape_of


class Contrastive(Task):
    """Learn features without labels: views of one image are to be alike, and unlike those of all others (SimCLR).

    The model returns an embedding per view, `(B, D)`; the loader makes the views: `load(…, views=2)`. The loss is the
    cross entropy of picking a view's partner among all other views of the global batch, by cosine similarity over
    `temperature`. Embeddings of all ranks are compared, so the loss of a step does not depend on the number of ranks.
    With more than two views, it is the mean over all partners. There is no evaluation: judge the features by training
    on labels, with `fit(init_from=…)`.

    Args:
        temperature: of the softmax. Default 0.5, SimCLR's for CIFAR-10; 0.1 for ImageNet.

    Raises:
        PlanError: for a temperature that is not above 0.

    Source: Chen et al., "A simple framework for contrastive learning of visual representations", 2020,
    arXiv:2002.05709, section 2.1 (NT-Xent).

    Example::

        >>> pipeline = Pipeline("resnet18").load("train.beton", batch_size=16, image_size=32, views=2)
        >>> pipeline = pipeline.task(Contrastive(temperature=0.5))
    """

    kind: ClassVar[Kind] = "views"

    def __init__(self, temperature: float = 0.5) -> None:
        check_number("Contrastive: temperature", temperature, PlanError, "(0, inf)")
        self.temperature = float(temperature)

    @property
    def loss_name(self) -> str:
        return "contrastive loss"

    @property
    def about(self) -> str:
        return "targets: none; the other views of each image"

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 — there are none
        """Return the mean loss over this rank's views, a scalar, for embeddings `(B, V, D)`."""
        own = F.normalize(outputs.float(), dim=-1).flatten(0, 1)  # (B · V, D), sample by sample
        views = outputs.shape[1]
        everyone, first = _gathered(own)
        similarity = own @ everyone.T / self.temperature
        rows = torch.arange(len(own), device=own.device)
        similarity[rows, first + rows] = -torch.inf  # of a view with itself
        chosen = F.log_softmax(similarity, dim=1)
        samples = torch.arange(len(everyone), device=own.device) // views
        partners = samples[first + rows, None] == samples[None]
        partners[rows, first + rows] = False
        # Not chosen[partners].mean(): how many there are would have to be read from the device.
        mean: torch.Tensor = -chosen.masked_fill(~partners, 0.0).sum() / (len(own) * (views - 1))
        return mean

    def denominator(self, targets: torch.Tensor) -> int:
        """Return the number of images; the ranks have equally many."""
        return len(targets)

    def row(self, prediction: Any, classes: Any) -> dict[str, Any]:  # noqa: ARG002
        """Return the `embedding`, a list of D numbers."""
        return {"embedding": prediction.tolist()}

    def check(self, train: Targets, val: Targets | None) -> None:  # noqa: ARG002
        if val is not None:
            raise PlanError(
                f"Contrastive learning has no labels to evaluate on, but load() has {val.source}. Leave it out; judge "
                "the features by training on labels from them: fit(init_from=…)."
            )

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:  # noqa: ARG002
        if isinstance(outputs, torch.Tensor) and outputs.dim() in (2, 3) and outputs.shape[0] == 2:
            return ""
        found = shape_of(outputs)
        return f"The model returns {found} for 2 images, but Contrastive needs one embedding per image, (2, D)."


def _gathered(own: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the rows of all ranks, in their order, and the place of this rank's first one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return own, 0
    everyone: torch.Tensor = _Gather.apply(own)
    return everyone, dist.get_rank() * len(own)


class _Gather(torch.autograd.Function):
    """All ranks have equally many rows. The gradient is the sum over ranks: the strategy takes the mean."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]
