"""BatchNorm over the global batch: each layer's statistics are summed over the ranks, forward and backward. Only a
layer's class changes, to a subclass within which `torch.nn.functional.batch_norm` computes over all ranks. So its own
forward (momentum, counters, an activation that some libraries append) stays what it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ...common.errors import StrategyError
from ...common.model_state import forward_is_replaced


def sync_batch_norms(model: nn.Module) -> tuple[str, ...]:
    """Make the BatchNorm layers of `model` compute over all ranks, in place; return their names.

    CUDA tensors use the function of `torch.nn.SyncBatchNorm`; CPU tensors, which it does not support, one of our own.
    In evaluation, and while a layer is frozen, nothing is exchanged. Ranks may have different numbers of samples, or
    none; every rank must call every layer equally often. Under `torch.compile`, each layer runs uncompiled.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ()
    norms = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
    layers: dict[str, nn.Module] = {
        name: norm for name, norm in norms.items() if not isinstance(norm, nn.SyncBatchNorm | _Synced)
    }
    for name, layer in layers.items():
        if getattr(layer, "averages_variances", False):
            raise StrategyError(
                f"prepare: sync_batchnorm=True computes statistics over the global batch, but {name or 'the model'} is "
                f"a {type(layer).__name__}, which computes them over small groups of it. Leave one of the two out."
            )
        if forward_is_replaced(layer):
            raise StrategyError(
                f"prepare: sync_batchnorm=True changes the class of BatchNorm layers, but the forward of "
                f"{name or 'the model'} was replaced on the instance. Define it in a class, or leave "
                f"sync_batchnorm out."
            )
    for layer in layers.values():
        layer.__class__ = _synced(type(layer))  # type: ignore[arg-type]
    return tuple(layers)


@contextmanager
def absent(model: nn.Module) -> Iterator[None]:
    """Inside the block, `model` is in evaluation mode, except that its synchronized layers take part in what the other
    ranks exchange in training: for a rank without samples, which calls the model with a placeholder."""
    before = [(module, module.training) for module in model.modules()]
    layers = [module for module, training in before if training and isinstance(module, _Synced)]
    model.eval()
    for layer in layers:
        layer.is_absent = layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_absent = False
        for module, training in before:
            module.training = training


class _Synced(nn.Module):
    sums_over_ranks = True  # all ranks must run it together, so StochasticDepth does not skip it
    is_absent = False  # whether this rank has no samples: it takes part with none; see `absent`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = super().forward
        if not self.training:
            return forward(*args, **kwargs)
        with _OverRanks(self.is_absent) as mode:
            out = forward(*args, **kwargs)
        if not mode.called:
            raise StrategyError(
                f"sync_batchnorm=True: the forward of {type(self).__bases__[1].__name__} does not call "
                f"torch.nn.functional.batch_norm, so its statistics cannot be summed over the ranks. Leave "
                f"sync_batchnorm out, or replace the layer."
            )
        return out


@cache  # layers of one class keep a common class
def _synced(kind: type[nn.Module]) -> type[nn.Module]:
    # Here rather than as a decorator: it imports the compiler, which would take seconds in every rank.
    forward = torch.compiler.disable(_Synced.forward)  # type: ignore[no-untyped-call]
    return type(f"Synced{kind.__name__}", (_Synced, kind), {"__module__": __name__, "forward": forward})


class _OverRanks(TorchFunctionMode):
    def __init__(self, is_absent: bool) -> None:
        super().__init__()
        self.called, self._function = False, _take_part if is_absent else _batch_norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.called = True
        return self._function(*args, **(kwargs or {}))


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if input.is_cuda:
        group = dist.group.WORLD
        # Of an empty input, torch's function sends zeros of its dtype, but those with samples send float32.
        own = input if input.numel() else _wide(input)
        out: torch.Tensor = TorchFunction.apply(
            own, weight, bias, running_mean, running_var, eps, momentum, group, dist.get_world_size()
        )
        return out.to(input.dtype)
    return _BatchNormOverRanks.apply(input, weight, bias, running_mean, running_var, momentum, eps)  # type: ignore[no-any-return]


def _take_part(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Exchange the statistics of no samples, forward and backward, and return the placeholder `input`."""
    return input + _batch_norm(input[:0], *args, **kwargs).sum()


class _BatchNormOverRanks(torch.autograd.Function):
    """Batch normalization of this rank's samples `(B, C, …)` with the statistics of all ranks' samples. Means and
    biased variances are merged by the law of total variance, without differences of large numbers. The gradients of
    weight and bias stay this rank's, for the strategy to average."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        x, weight, bias = _wide(input), _wide(weight), _wide(bias)
        count, mean, variance = _global_statistics(x)
        if running_mean is not None and running_var is not None and count:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        mean, variance = mean.to(x.dtype), variance.to(x.dtype)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        ctx.count, ctx.eps = count, eps
        if not input.numel():
            return torch.empty_like(input)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps).to(input.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        x, dy = _wide(input), _wide(grad)
        if x.numel():  # the sums of dy · (x - mean) · scale, and of dy
            _, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, None, None, mean, scale, True, ctx.eps, [False, True, True]
            )
        else:
            for_weight, for_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        for_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([for_weight, for_bias]).double()
            dist.all_reduce(sums)
            along, constant = (sums / max(ctx.count, 1)).to(x.dtype)
            shape = (1, -1, *[1] * (x.dim() - 2))
            gain = scale if weight is None else scale * weight
            centered = (x - mean.view(shape)) * (scale * along).view(shape)
            for_input = dy.sub(centered).sub_(constant.view(shape)).mul_(gain.view(shape)).to(input.dtype)
        trained = ctx.needs_input_grad[1:3]
        return for_input, for_weight if trained[0] else None, for_bias if trained[1] else None, *[None] * 4


def _wide(tensor: Any) -> Any:
    half = tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if half else tensor


def _global_statistics(x: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return the number of values of a channel on all ranks, their mean and biased variance, `(C,)` in float64."""
    channels = x.shape[1]
    own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if x.numel():
        own[0] = x.numel() // channels
        torch.cat(torch.batch_norm_update_stats(x, None, None, 0.0), out=own[1:])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    table = torch.stack(every)  # a row per rank
    numbers, means, variances = table[:, :1], table[:, 1 : channels + 1], table[:, channels + 1 :]
    count = numbers.sum().item()
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)} on this rank, and "
            "no more on all ranks."
        )
    shares = numbers / max(count, 1)
    mean = (shares * means).sum(0)
    return count, mean, (shares * (variances + (means - mean).square())).sum(0)
