"""torchvision's residual blocks with a branch that can be dropped. Imports torchvision, which takes seconds."""

from typing import Any, ClassVar

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.vision_transformer import EncoderBlock


class DropBranch(torchvision.ops.StochasticDepth):  # type: ignore[misc]
    """torchvision's, under a name that marks it as set by the surgery."""


class Shortcut(torch.autograd.Function):
    """A copy of the shortcut, for a branch that was not computed: its parameters get gradients of 0. With None, an
    optimizer would skip them, weight decay included, DDP wait for them, and FSDP2's ranks disagree."""

    @staticmethod
    def forward(shortcut: Tensor, *parameters: Tensor) -> Tensor:  # noqa: ARG004
        return shortcut.clone()  # a view could not be modified in place, which ReLU does

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *map(torch.zeros_like, ctx.saved_tensors))


class _DropsBranch(nn.Module):
    """The sum of shortcut and branch in torchvision's ResNet blocks. A dropped branch updates no statistics."""

    CONVOLUTIONS: ClassVar[int]  # each with its norm; they make the branch
    relu: nn.Module
    downsample: nn.Module | None
    drop_branch: nn.Module

    def _layers(self) -> list[tuple[nn.Module, nn.Module]]:
        numbers = range(1, self.CONVOLUTIONS + 1)
        return [(getattr(self, f"conv{n}"), getattr(self, f"bn{n}")) for n in numbers]

    def _branch(self, x: Tensor, scale: float = 1.0) -> Tensor:
        *inner, (last, last_norm) = self._layers()
        for conv, norm in inner:
            x = self.relu(norm(conv(x)))
        return _scaled(last_norm, last(x), scale)

    def forward(self, x: Tensor) -> Tensor:
        shortcut: Tensor = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(self._sum(shortcut, x))
        return out

    def _sum(self, shortcut: Tensor, x: Tensor) -> Tensor:
        drop: Any = self.drop_branch
        if drop.mode == "row" or not drop.training:
            out: Tensor = drop(self._branch(x))
            return out.add_(shortcut)
        parts = [module for pair in self._layers() for layer in pair for module in layer.modules()]
        if not _may_skip(parts, x):
            return self._masked(parts, x).add_(shortcut)
        # On the CPU, because Python reads the result: a draw on the GPU would synchronize.
        scale = drop(torch.ones(())).item()
        if scale:
            return self._branch(x, scale).add_(shortcut)
        parameters = [p for part in parts for p in part.parameters(recurse=False) if p.requires_grad]
        skipped: Tensor = Shortcut.apply(shortcut, *parameters)
        return skipped

    def _masked(self, parts: list[nn.Module], x: Tensor) -> Tensor:
        """Compute the branch in any case and multiply it by 0 if it is dropped: the same result as `_sum`."""
        scale: Tensor = self.drop_branch(torch.ones((), device=x.device))
        buffers = [buffer for part in parts for buffer in part.buffers(recurse=False)]
        before = [buffer.clone() for buffer in buffers]
        branch = self._branch(x)
        with torch.no_grad():
            for buffer, old in zip(buffers, before, strict=True):
                # .data: autograd holds BatchNorm's statistics, though its backward in training reads none.
                buffer.data.copy_(torch.where(scale > 0, buffer, old))
        return branch * scale


def _scaled(norm: nn.Module, x: Tensor, scale: float) -> Tensor:
    """Return norm(x) * scale. BatchNorm's weight and bias absorb the factor, saving a pass over the activations; those
    of a copy that DataParallel has made are not parameters any more."""
    weights: dict[str, Tensor] = {}
    if scale != 1 and isinstance(norm, nn.BatchNorm2d):
        weights = {name: value * scale for name, value in norm.named_parameters()}
    if weights:
        scaled: Tensor = torch.func.functional_call(norm, weights, x)
        return scaled
    out: Tensor = norm(x)
    return out if scale == 1 else out * scale


def _may_skip(parts: list[nn.Module], x: Tensor) -> bool:
    """Whether a dropped branch may be skipped. A graph would bake in one random draw. Hooks gather shards (FSDP, ZeRO
    3), and synchronized BatchNorm sums over ranks: all must take part, but may draw differently. Hooks on parameters
    (ZeRO 1 and 2) send gradients as they arrive; a skipped branch changes their order. A copy that DataParallel has
    made has no parameters that could get gradients of 0, and its thread draws in any order."""
    if any(getattr(part, "_is_replica", False) for part in parts):
        return False
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    if hasattr(x, "fake_mode"):  # only shapes pass, as through a model on the meta device: no draw can be read
        return False
    if any(p._post_accumulate_grad_hooks for part in parts for p in part.parameters(recurse=False)):
        return False
    # The attribute is that of layers that `distribute(sync_batchnorm=True)` has changed.
    sums = any(isinstance(p, nn.SyncBatchNorm) or getattr(p, "sums_over_ranks", False) for p in parts)
    return not sums and not any(part._forward_pre_hooks or part._forward_hooks for part in parts)


class StochasticBasicBlock(_DropsBranch, BasicBlock):  # type: ignore[misc]
    CONVOLUTIONS = 2


class StochasticBottleneck(_DropsBranch, Bottleneck):  # type: ignore[misc]
    CONVOLUTIONS = 3


class StochasticEncoderBlock(EncoderBlock):  # type: ignore[misc]
    def forward(self, input: Tensor) -> Tensor:
        branch = self.ln_1(input)
        branch, _ = self.self_attention(branch, branch, branch, need_weights=False)
        x = self.drop_branch(self.dropout(branch)) + input
        return self.drop_branch(self.mlp(self.ln_2(x))) + x  # type: ignore[no-any-return]
