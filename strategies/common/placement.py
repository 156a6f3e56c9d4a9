"""What every strategy checks and prepares before it wraps a model: the device, the ranks, and the model's modules."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ...common import machine
from ...common.checks import check_whole, plain
from ...common.errors import StrategyError
from ...common.model_state import BufferCopies, forward_is_replaced, on_meta
from ..base import OptimizerFactory
from ..devices import pick_device, rank_device, refuse_shared_gpu
from ..launching.group import is_rank, join_group
from ..launching.meeting import under_torchrun
from ..options import REGIONS, Options
from .blocks import ModuleFilter, choose, find_blocks
from .sync_batch_norm import sync_batch_norms

RANKS_PER_CORE = 8
"""Maximum number of ranks per CPU core: enough to try out many ranks, and few enough to keep a machine usable."""


class OnRanks(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str | None: ...

    def check(self, devices: int) -> None: ...


def enter(strategy: OnRanks, model: nn.Module) -> torch.device:
    if not dist.is_initialized() and under_torchrun():
        join_group(device=strategy.device)
    strategy.check(dist.get_world_size() if dist.is_initialized() else 1)
    device = rank_device(strategy.device)
    if device.type == "cuda" and dist.is_initialized():
        refuse_shared_gpu(device)
        # It stays the process's current device, which NCCL, and FSDP2 at its first forward, use.
        torch.cuda.set_device(device)
    refuse_sync_batch_norm(strategy.name, model, device)
    parameters_to_train(model)
    return device


def check_ranks(strategy: str, device: str | None, devices: int) -> None:
    check_whole(f"strategy {strategy!r}: devices", plain(devices), StrategyError, 1)
    if not dist.is_available():
        raise StrategyError(f"strategy {strategy!r}: this torch was built without torch.distributed.")
    if device not in (None, "cpu", "cuda"):
        raise StrategyError(
            f"strategy {strategy!r}: device={device!r} cannot be the same for all ranks. Use 'cpu' or 'cuda' (the rank "
            f"determines the index), or the strategy 'single' for one given device."
        )
    # The ranks of one machine see the same GPUs, or one each. Checking the largest index gives the same result on all
    # of them, so that none waits for another that has failed.
    last = machine.local_ranks(1 if is_rank() else devices) - 1
    found = pick_device(device, 0 if is_rank() and torch.cuda.device_count() == 1 else last)
    cores = machine.cores()
    if found.type == "cpu" and devices > RANKS_PER_CORE * cores and not is_rank():
        raise StrategyError(
            f"strategy {strategy!r}: devices={devices} would start {devices} processes on the {cores} CPU core(s) "
            f"here. Use at most {RANKS_PER_CORE * cores}. If ranks run on other machines, start them with torchrun."
        )


def refuse_sync_batch_norm(strategy: str, model: nn.Module, device: torch.device) -> None:
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise StrategyError(
                f"strategy {strategy!r}: {name or 'the model'} is a SyncBatchNorm, which works on CUDA only, but this "
                f"rank trains on the CPU. Use BatchNorm2d instead, with sync_batchnorm=True, which also runs here."
            )


def parameters_to_train(model: nn.Module) -> list[nn.Parameter]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise StrategyError(
            f"prepare: {type(model).__name__} has no parameter that requires a gradient, so nothing would train. Set "
            f"requires_grad on those to train."
        )
    return parameters


def build_optimizer(model: nn.Module, factory: OptimizerFactory) -> torch.optim.Optimizer:
    return factory(parameters_to_train(model))


def compile_model(model: nn.Module, options: Options, device: torch.device) -> None:
    """Compile the model, or its blocks, as `Options.compile` specifies."""
    if options.compile != REGIONS:
        compile_in_place(model, options, device)
        return
    blocks = [block for block in find_blocks(model) if any(block.children())]
    inner = {part for block in blocks for part in block.modules() if part is not block}
    if not blocks:
        raise StrategyError(
            f"compile={REGIONS!r} found no repeated blocks in {type(model).__name__}. Use compile=True."
        )
    for block in blocks:
        if block not in inner:
            compile_in_place(block, options, device)


def compile_in_place(module: nn.Module, options: Options, device: torch.device) -> None:
    """Make `torch.compile` compile the module at its first call; no name changes."""
    if not options.compile:
        return
    mode: Any = options.compile if options.compile not in (True, REGIONS) else None
    graphs = device.type == "cuda" and mode is not None
    graphs = graphs and bool(torch._inductor.list_mode_options(mode).get("triton.cudagraphs"))
    if graphs and options.accumulate > 1:
        raise StrategyError(
            f"compile={mode!r} runs CUDA graphs, each of which overwrites the gradients of the one before, to which "
            f"accumulate={options.accumulate} would add. Use compile=True, or accumulate=1."
        )
    module.compile(mode=mode)
    compiled: Any = module._compiled_call_impl
    if (budget := options.memory_budget) is not None:
        compiled = partial(_within_budget, compiled, budget)
    module._compiled_call_impl = partial(_with_own_outputs, compiled) if graphs else compiled


def _with_own_outputs(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what was compiled to CUDA graphs. The next call writes its outputs into the same memory. In training they
    are used up by then; in evaluation those of several views are averaged, metrics keep some, and an FSDP unit's are
    the next one's inputs."""
    outputs = compiled(*args, **kwargs)
    return outputs if torch.is_grad_enabled() else tree_map_only(torch.Tensor, torch.Tensor.clone, outputs)


def _within_budget(compiled: Callable[..., Any], budget: float, *args: Any, **kwargs: Any) -> Any:
    """Call what was compiled. It is compiled at its first call, and again for other shapes: the setting is read then,
    for the backward, too."""
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return compiled(*args, **kwargs)


def change_layers(model: nn.Module, options: Options) -> None:
    if options.sync_batchnorm:
        sync_batch_norms(model)
    if options.memory_budget is None:
        recompute_activations(model, cast(ModuleFilter, options.activation_checkpointing))


def put_on(model: nn.Module, device: torch.device, options: Options) -> nn.Module:
    if on_meta(model):
        raise StrategyError(
            f"prepare: {type(model).__name__} is on the meta device, where only strategies that shard parameters "
            "initialize it. Use 'fsdp', also with one device, or build the model on the CPU."
        )
    model = model.to(device)
    change_layers(model, options)
    compile_model(model, options, device)
    return model


def recompute_activations(model: nn.Module, module_filter: ModuleFilter) -> tuple[str, ...]:
    """Checkpoint the activations of the selected modules (Chen et al. 2016, arXiv:1604.06174); return their names.
    Results do not change: the second forward uses the random numbers and buffers of the first, and buffers (BatchNorm's
    statistics) are updated once; `torch.utils.checkpoint` only does the former."""
    outermost: dict[str, nn.Module] = {}
    for name, module in choose(module_filter, model, "activation_checkpointing").items():
        if not any(name.startswith(f"{outer}.") or outer == "" for outer in outermost):
            outermost[name] = module
    for name, module in outermost.items():
        if forward_is_replaced(module):
            raise StrategyError(
                f"activation_checkpointing: the forward of {name or 'the model'}, a {type(module).__name__}, was "
                f"replaced on the instance, as by torch.compile, so it would not run again in the backward. Define it "
                f"in a class, or select other modules."
            )
    for module in outermost.values():
        if not isinstance(module, _Recomputed):
            module.__class__ = _recomputed(type(module))  # type: ignore[arg-type]
    return tuple(outermost)


class _Recomputed(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes operations, and updates buffers once
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _buffers_as_in_the_first(self, BufferCopies(self))

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@cache  # modules of one class keep a common class
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {"__module__": __name__})


@contextmanager
def _buffers_as_in_the_first(module: nn.Module, first: BufferCopies) -> Iterator[None]:
    now = BufferCopies(module)
    first.restore()
    try:
        yield
    finally:
        now.restore()
