"""ALiBi: a linear distance penalty on attention logits replaces position embeddings. Shapes: B batch, N tokens (prefix
tokens, then H · W patches, row by row), D features, K heads."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.errors import DataError
from .base import Report, State, Transform
from .common.surgery import Verdict, full_name, operate, patched

EMBEDDINGS = ("pos_embedding", "pos_embed")
"""The parameters in which torchvision's and timm's ViT keep their position embeddings."""

TIMM = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")


def slopes(heads: int, device: torch.device) -> Tensor:
    """Return each head's slope, (K,): a geometric series starting at 2^(-8/K), as in the paper. If K is not a power of
    two: the series of the next lower power, then every other slope of the next higher one."""
    below = 2 ** int(math.log2(heads))
    exponents = torch.arange(1, below + 1, device=device) * (8 / below)
    between = torch.arange(1, 2 * below + 1, 2, device=device)[: heads - below] * (4 / below)
    return torch.exp2(-torch.cat([exponents, between]))


def distance_bias(heads: int, grid: tuple[int, int], prefix: int, like: Tensor) -> Tensor:
    """Return -slope · distance between patch centers, 0 from and to `prefix` tokens: (1, K, N, N), to be added to the
    attention logits. `grid` is (H, W) in patches; `like` determines dtype and device."""
    height, width = grid
    rows = torch.arange(height, device=like.device).repeat_interleave(width)
    columns = torch.arange(width, device=like.device).repeat(height)
    square = (rows[:, None] - rows).square() + (columns[:, None] - columns).square()
    distance = F.pad(square.sqrt(), (prefix, 0, prefix, 0))
    return (-slopes(heads, like.device)[:, None, None] * distance)[None].to(like.dtype)


@dataclass(frozen=True)
class Layout:
    """How tokens map to the image: `grid` is (H, W) in patches, for the image size the model was built for, and
    `prefix` the number of tokens before the patches, e.g. the class token."""

    grid: tuple[int, int]
    prefix: int

    def read(self, patches: int) -> tuple[int, int] | None:
        """Return the grid that so many patches are taken for, the model's or a square one; None if they are neither."""
        if patches == self.grid[0] * self.grid[1]:
            return self.grid
        side = math.isqrt(max(0, patches))
        return (side, side) if side**2 == patches else None

    def bias(self, heads: int, tokens: Tensor) -> Tensor:
        """Return the bias (1, K, N, N) for tokens (B, N, D). Images of another size must be square."""
        grid = self.read(tokens.shape[1] - self.prefix)
        if grid is None:
            raise DataError(
                f"ALiBi: {tokens.shape[1]} tokens are not {self.prefix} plus a {self.grid} or square grid of "
                "patches, so their distances are unknown. Pass square images, or images of the model's size."
            )
        return distance_bias(heads, grid, self.prefix, tokens)


class AlibiMultiheadAttention(nn.MultiheadAttention):
    """Self-attention of (B, N, D) with a distance bias, for torchvision's ViT."""

    layout: Layout

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """As `nn.MultiheadAttention` with need_weights=False. Only the query is read: FSDP2 passes three copies."""
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
    """Forward pre-hook for timm's `Attention`, which accepts a mask: adds the distance bias as the mask."""

    layout: Layout

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens, *rest = args
        mask = rest[0] if rest else kwargs.get("attn_mask")
        if mask is not None:
            raise DataError("ALiBi: this attention was called with an attn_mask, which is not supported. Pass no mask.")
        bias = self.layout.bias(module.num_heads, tokens)  # type: ignore[arg-type]
        if torch.is_autocast_enabled(tokens.device.type):  # attention wants the mask in the queries' dtype
            bias = bias.to(torch.get_autocast_dtype(tokens.device.type))
        return (tokens,), {**kwargs, "attn_mask": bias}


@dataclass(frozen=True)
class CheckGrid:
    """Forward pre-hook for timm's embedding of patches in images of any size (`dynamic_img_size`): attention sees only
    the number of patches, which grids of several shapes have."""

    layout: Layout

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        height, width = args[0].shape[-2:]
        grid = tuple(module.dynamic_feat_size((height, width)))
        taken = self.layout.read(grid[0] * grid[1])
        if taken is not None and taken != grid:
            raise DataError(
                f"ALiBi: images of {height}×{width} pixels have as many patches as a grid of {taken}, for which it "
                f"would take their grid of {grid}. Pass images of the model's size, or square ones with another "
                "number of patches."
            )


@dataclass(frozen=True)
class ALiBi(Transform):
    """Attention with linear biases, for vision transformers: logits minus slope · distance in patches.

    Supports torchvision's ViT and timm's (`VisionTransformer` with plain `Attention`). As in Composer, whose surgery
    supports Hugging Face's BERT, RoBERTa and GPT-2, the position embeddings are set to 0 and frozen, and each head uses
    the paper's slope. Composer's distance is `|i - j|` along a text; here it is the Euclidean distance between patch
    centers (as in Fuller et al., "CROMA", 2023, arXiv:2311.00566). The class token and registers are at distance 0.

    Use it when training from scratch or for long fine-tuning: a pretrained ViT loses its positional information. In
    return, the model accepts images of another size without interpolating embeddings. Both libraries check the image
    size; timm's `dynamic_img_size=True` disables the check. Images of another size must then be square.

    Names and shapes in the state dict do not change. `from_plain` sets the position embeddings to 0. A plain model
    loads the result of `to_plain`, but cannot express the bias: it computes a different function.

    Source: Press et al., "Train Short, Test Long", 2022, arXiv:2108.12409.

    Example::

        >>> report = ALiBi().apply(vit)  # a vision transformer with two blocks
        >>> len(report.changed)
        2
    """

    kind = "surgery"
    source = "Press et al. 2022, arXiv:2108.12409"

    def apply(self, model: nn.Module) -> Report:
        layouts = _layouts(model)

        def change(module: nn.Module) -> None:
            layout = layouts[id(module)]
            if isinstance(module, nn.MultiheadAttention):
                module.__class__ = AlibiMultiheadAttention
                module.layout = layout  # type: ignore[assignment]
            else:
                module.register_forward_pre_hook(AddBias(layout), with_kwargs=True)

        report = operate(
            "ALiBi", model, lambda module: _judge(module, id(module) in layouts), change,
            "the attention of torchvision's and timm's ViT",
        )  # fmt: skip
        if not report.changed:
            return report
        for vit in model.modules():
            embed: Any = getattr(vit, "patch_embed", None)
            flexible = id(embed) in layouts and getattr(embed, "strict_img_size", True) is False
            if flexible and any(map(has_bias, vit.modules())):
                embed.register_forward_pre_hook(CheckGrid(layouts[id(embed)]))
        notes = list(report.notes)
        for name, parameter in model.named_parameters():
            if _is_position(name):
                parameter.requires_grad_(False).zero_()
                notes.append(f"{name} is set to 0 and frozen.")
        return replace(report, notes=tuple(notes))

    def from_plain(self, state: State, model: nn.Module) -> State:  # noqa: ARG002
        return {name: torch.zeros_like(v) if _is_position(name) else v for name, v in state.items()}


def _is_position(name: str) -> bool:
    return name.split(".")[-1] in EMBEDDINGS


def _layouts(model: nn.Module) -> dict[int, Layout]:
    layouts: dict[int, Layout] = {}
    for vit in model.modules():
        layout = None
        if full_name(vit) == "torchvision.models.vision_transformer.VisionTransformer":
            side = int(vit.image_size) // int(vit.patch_size)  # type: ignore[arg-type]
            layout = Layout((side, side), prefix=1)
        elif isinstance(grid := getattr(getattr(vit, "patch_embed", None), "grid_size", None), tuple):
            layout = Layout((grid[0], grid[1]), prefix=int(getattr(vit, "num_prefix_tokens", 0)))
        # With timm's or our PatchDropout, the attention cannot know where the remaining patches were.
        if layout and not any(type(module).__name__.startswith("PatchDrop") for module in vit.modules()):
            layouts |= {id(module): layout for module in vit.modules()}
    return layouts


def has_bias(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, AlibiMultiheadAttention) or any(isinstance(hook, AddBias) for hook in hooks)


def _judge(module: nn.Module, placed: bool) -> Verdict | str:
    if has_bias(module):
        return Verdict.DONE
    if type(module) is not nn.MultiheadAttention and full_name(module) not in TIMM:
        return Verdict.IGNORE
    if not placed:
        return "it is not inside a ViT with a known, complete grid of patches"
    if full_name(module) in TIMM and "attn_mask" not in inspect.signature(module.forward).parameters:
        return "the attention of this version of timm takes no mask; upgrade timm"
    return patched(module) or Verdict.CHANGE
