"""ALiBi: in place of position embeddings, attention that falls off with the distance between patches.

Shapes: B batch, N tokens (some prefix tokens, then H · W patches, row by row), D features, K heads.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import DataError
from .base import Kind, Report, State, Transform
from .common.surgery import Verdict, full_name, operate, patched

EMBEDDINGS = ("pos_embedding", "pos_embed")
"""The parameters in which torchvision's and timm's ViT keep their position embeddings."""

TIMM = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")


def slopes(heads: int, device: torch.device) -> torch.Tensor:
    """How fast each head's attention falls off: (K,), a geometric series from 2^(-8/K), as in the source.

    For K that is no power of two: the series of the power below, then every other one of the power above.
    """
    below = 2 ** int(math.log2(heads))
    exponents = torch.arange(1, below + 1, device=device) * (8 / below)
    between = torch.arange(1, 2 * below + 1, 2, device=device)[: heads - below] * (4 / below)
    return torch.exp2(-torch.cat([exponents, between]))


def distance_bias(heads: int, grid: tuple[int, int], prefix: int, like: torch.Tensor) -> torch.Tensor:
    """-slope · distance between the centres of patches; 0 from and to prefix tokens.

    Args:
        heads: K.
        grid: (H, W) in patches.
        prefix: tokens before the patches, e.g. the class token.
        like: gives dtype and device.

    Returns:
        (1, K, N, N), to be added to the logits of attention.
    """
    height, width = grid
    rows = torch.arange(height, device=like.device).repeat_interleave(width)
    columns = torch.arange(width, device=like.device).repeat(height)
    square = (rows[:, None] - rows).square() + (columns[:, None] - columns).square()
    distance = F.pad(square.sqrt(), (prefix, 0, prefix, 0))
    return (-slopes(heads, like.device)[:, None, None] * distance)[None].to(like.dtype)


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a model stand.

    Attributes:
        grid: (H, W) in patches, of the image size that the model was built for.
        prefix: tokens before the patches.
    """

    grid: tuple[int, int]
    prefix: int

    def bias(self, heads: int, tokens: torch.Tensor) -> torch.Tensor:
        """(1, K, N, N) for tokens (B, N, D). Images of another size must be square.

        Raises:
            DataError: if N is neither the model's own nor that of a square.
        """
        count, grid = tokens.shape[1] - self.prefix, self.grid
        if count != grid[0] * grid[1]:
            grid = (math.isqrt(max(0, count)),) * 2
        if count != grid[0] * grid[1]:
            raise DataError(
                f"ALiBi: {tokens.shape[1]} tokens are not {self.prefix} and a grid of {self.grid} or a square "
                "of patches, so their distances are unknown. Give square images, or ones of the model's size."
            )
        return distance_bias(heads, grid, self.prefix, tokens)


class AlibiMultiheadAttention(nn.MultiheadAttention):
    """Self-attention of (B, N, D) with a distance bias, for torchvision's ViT."""

    layout: Layout

    def forward(  # type: ignore[override]
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, need_weights: bool = False
    ) -> tuple[torch.Tensor, None]:
        """As `nn.MultiheadAttention` with need_weights=False, of one tensor with itself.

        Args:
            query: (B, N, D).
            key: the same; not read, for FSDP2 hands over three copies.
            value: the same; not read.
            need_weights: false.
        """
        assert not need_weights
        assert key.shape == value.shape == query.shape
        batch, count, _ = query.shape
        packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        q, k, v = packed.view(batch, count, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        bias = self.layout.bias(self.num_heads, query).to(q.dtype)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


@dataclass(frozen=True)
class AddBias:
    """A forward pre-hook of timm's `Attention`, which takes a mask: adds the distance bias to it."""

    layout: Layout

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens, *rest = args
        mask = rest[0] if rest else kwargs.get("attn_mask")
        if mask is not None:
            raise DataError(
                "ALiBi: this attention was called with a mask of its own, which is not supported."
            )
        heads = module.num_heads
        assert isinstance(heads, int)
        bias = self.layout.bias(heads, tokens)
        if torch.is_autocast_enabled(tokens.device.type):  # attention wants the mask in the queries' dtype
            bias = bias.to(torch.get_autocast_dtype(tokens.device.type))
        return (tokens,), {**kwargs, "attn_mask": bias}


@dataclass(frozen=True)
class ALiBi(Transform):
    """Attention with linear biases, for vision transformers: logits minus slope · distance in patches.

    For the ViT of torchvision and those of timm (`VisionTransformer` with plain `Attention`). As in
    Composer, whose surgery is for Hugging Face's BERT, RoBERTa and GPT-2 and needs `transformers`, the
    position embeddings become 0 and are frozen, and each head has the slope of the source. Composer's
    distance is |i - j| in a text; here it is the Euclidean one between the centres of two patches (as in
    Fuller et al., "CROMA", 2023, arXiv:2311.00566), and the class token and registers are at distance 0
    from all.

    It is a method for training from the start, or for long fine-tuning: a pretrained ViT loses its
    positions. What it gives is a model that takes images of another size without interpolating
    embeddings. Both libraries check the image size; timm's `dynamic_img_size=True` allows others.

    Names and shapes in the state dict stay. `from_plain` sets the position embeddings to 0. A plain model
    cannot express the bias: what `to_plain` gives loads, and computes something else.

    Source: Press et al., "Train Short, Test Long", 2022, arXiv:2108.12409.
    """

    kind: ClassVar[Kind] = "surgery"
    source: ClassVar[str] = "Press et al. 2022, arXiv:2108.12409"

    def apply(self, model: nn.Module) -> Report:
        """Changes `model` in place. Attention that was changed before stays, with a note."""
        layouts = _layouts(model)

        def change(module: nn.Module) -> None:
            layout = layouts[id(module)]
            if isinstance(module, nn.MultiheadAttention):
                module.__class__ = AlibiMultiheadAttention
                module.layout = layout  # type: ignore[assignment]
            else:
                module.register_forward_pre_hook(AddBias(layout), with_kwargs=True)

        def judge(module: nn.Module) -> Verdict | str:
            return _judge(module, id(module) in layouts)

        report = operate("ALiBi", model, judge, change, "the attention of torchvision's and timm's ViT")
        if not report.changed:
            return report
        notes = []
        for name, parameter in model.named_parameters():
            if name.split(".")[-1] in EMBEDDINGS:
                parameter.requires_grad_(False).zero_()
                notes.append(f"{name} is 0 and frozen.")
        return Report(report.transform, report.changed, report.skipped, (*report.notes, *notes))

    def from_plain(self, state: State, model: nn.Module) -> State:  # noqa: ARG002
        """The plain weights with position embeddings of 0."""
        return {
            name: torch.zeros_like(value) if name.split(".")[-1] in EMBEDDINGS else value
            for name, value in state.items()
        }


def _layouts(model: nn.Module) -> dict[int, Layout]:
    """The layout of the tokens for each module inside a ViT, by id."""
    found: dict[int, Layout] = {}
    for vit in model.modules():
        layout = None
        if full_name(vit) == "torchvision.models.vision_transformer.VisionTransformer":
            side = int(vit.image_size) // int(vit.patch_size)  # type: ignore[arg-type]
            layout = Layout((side, side), prefix=1)
        elif isinstance(grid := getattr(getattr(vit, "patch_embed", None), "grid_size", None), tuple):
            layout = Layout((grid[0], grid[1]), prefix=int(getattr(vit, "num_prefix_tokens", 0)))
        # timm can drop patches in training; the places of the others are then unknown to the attention.
        if layout and isinstance(getattr(vit, "patch_drop", nn.Identity()), nn.Identity):
            found |= {id(module): layout for module in vit.modules()}
    return found


def _judge(module: nn.Module, placed: bool) -> Verdict | str:
    if isinstance(module, AlibiMultiheadAttention) or any(
        isinstance(hook, AddBias) for hook in module._forward_pre_hooks.values()
    ):
        return Verdict.DONE
    known = type(module) is nn.MultiheadAttention or full_name(module) in TIMM
    if not known:
        return Verdict.IGNORE
    if not placed:
        return "it is not part of a ViT whose grid of patches is known and complete"
    if full_name(module) in TIMM and "attn_mask" not in inspect.signature(module.forward).parameters:
        return "this version of timm has no mask in its attention; a newer one has"
    return patched(module) or Verdict.CHANGE


__all__ = ["ALiBi", "AlibiMultiheadAttention"]
