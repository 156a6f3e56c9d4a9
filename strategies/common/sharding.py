"""What `fully_shard` requires of a model, and how a model is adapted to it."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ...common.errors import StrategyError
from ..options import Precision, half_dtype
from .blocks import ModuleFilter, choose, find_blocks, without_cut_ties


def refuse_unshardable(strategy: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            raise StrategyError(
                f"strategy {strategy!r}: {name or 'the model'} is already wrapped in {type(module).__name__}. Pass the "
                f"plain model."
            )
    for name, parameter in model.named_parameters():
        place = f"strategy {strategy!r}: the parameter {name!r}"
        if parameter.is_complex():
            raise StrategyError(f"{place} is complex, and only real ones can be sharded. Use 'ddp'.")
        if isinstance(parameter, DTensor):
            raise StrategyError(f"{place} is already sharded (DTensor). Pass the plain model.")
        if is_lazy(parameter):
            raise StrategyError(
                f"{place} has no shape before the first forward. Run the model once, or pass its sizes."
            )
        if parameter.dim() == 0:
            raise StrategyError(f"{place} has no dimension to shard (shape ()). Give it the shape (1,), or use 'ddp'.")


def units(strategy: str, model: nn.Module, wrap: ModuleFilter) -> list[nn.Module]:
    """Return the modules below `model` that are gathered separately, inner ones before those that contain them."""
    if isinstance(wrap, bool):
        return find_blocks(model) if wrap else []
    chosen = choose(wrap, model, f"strategy {strategy!r}: wrap")
    lists = [name for name, module in chosen.items() if isinstance(module, nn.ModuleList | nn.ModuleDict)]
    if lists:
        raise StrategyError(
            f"strategy {strategy!r}: wrap selects {lists[0]}, a {type(chosen[lists[0]]).__name__}, which has no "
            f"forward before which to gather its parameters. Select the modules in it."
        )
    inner_first = (chosen[name] for name in sorted(chosen, key=lambda name: -name.count(".")))
    own = [module for module in inner_first if module is not model and any(True for _ in module.parameters())]
    own_units = without_cut_ties(model, own)
    if not own_units:
        names = ", ".join(filter(None, chosen)) or "the model"
        raise StrategyError(
            f"strategy {strategy!r}: wrap selects {names}, none of which has parameters that only it holds. Select "
            f"other modules below the model, or set wrap=False for a single unit."
        )
    return own_units


def make_contiguous(model: nn.Module) -> bool:
    """Make every parameter contiguous, in place; return whether any was channels-last."""
    channels_last = False
    for parameter in model.parameters():
        if parameter.is_contiguous():
            continue
        if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
            channels_last = True
        parameter.data = parameter.data.contiguous()
    return channels_last


def give_channels_last_inputs(model: nn.Module) -> None:
    """Make `model` convert its positional 4-D tensor inputs to channels-last before its forward. A convolution returns
    channels-last if its input or its weight is, so everything that follows is channels-last too."""

    def convert(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG001
        return tuple(
            each.to(memory_format=torch.channels_last) if isinstance(each, torch.Tensor) and each.dim() == 4 else each
            for each in inputs
        )

    model.register_forward_pre_hook(convert)


@torch.no_grad()
def begin_like_rank_0(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Overwrite the modules' own parameters and buffers with rank 0's, one at a time through `device`, where the model
    need not fit. `fully_shard` takes a shard of what each rank has, which could be a mixture of different weights."""
    own = (t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
    for tensor in dict.fromkeys(own):
        staged = tensor.detach().to(device).contiguous()
        dist.broadcast(staged, src=0)
        tensor.copy_(staged)


def mixed_precision(strategy: str, model: nn.Module, precision: Precision) -> MixedPrecisionPolicy:
    """Return a policy that computes and gathers in half precision and reduces in fp32, except BatchNorm's parameters:
    BatchNorm fails with half-precision parameters and fp32 statistics."""
    norms = (module for module in model.modules() if isinstance(module, _NormBase))
    kept = {parameter for norm in norms for parameter in norm.parameters(recurse=False)}
    options: dict[str, Any] = {"param_dtype": half_dtype(precision), "reduce_dtype": torch.float32}
    if kept:
        if "param_dtype_override_fn" not in inspect.signature(MixedPrecisionPolicy).parameters:
            raise StrategyError(
                f"strategy {strategy!r}: precision={precision!r} with BatchNorm needs a newer torch than "
                f"{torch.__version__}. Use precision='fp32', or 'ddp'."
            )
        options["param_dtype_override_fn"] = lambda p: p.dtype if p in kept else None
    return MixedPrecisionPolicy(**options)


def gathered_rows(own: torch.Tensor, rows: int, home: int | None, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return a tensor of so many rows, sharded as by `torch.chunk`, on rank `home` of the world, whose ranks are the
    group's, and an empty one elsewhere; None: on every rank. Every rank must call it, with its `own` rows."""
    ranks = dist.get_world_size(group)
    each = -(-rows // ranks)
    if len(own) == each:
        sent = own.contiguous()
    else:
        sent = own.new_zeros(each, *own.shape[1:])
        sent[: len(own)] = own
    if home not in (None, dist.get_rank()):
        dist.gather(sent, dst=home, group=group)
        return own.new_empty(0)
    whole = own.new_empty(ranks * each, *own.shape[1:])
    parts = [whole[start : start + each] for start in range(0, ranks * each, each)]
    if home is None:
        dist.all_gather(parts, sent, group=group)
    else:
        dist.gather(sent, parts, dst=home, group=group)
    return whole[:rows]
