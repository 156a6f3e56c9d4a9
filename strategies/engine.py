"""The engine of a model that is whole on its rank: all that `Single` needs, and most of what others do."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from ..errors import StrategyError
from .base import OptimizerFactory, Precision


@dataclass(frozen=True)
class StepOptions:
    """What one optimizer step does, as given to `Strategy.prepare`; checked here for every strategy."""

    precision: Precision
    clip_norm: float | None
    accumulate: int

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise StrategyError(
                f"prepare: precision={self.precision!r} is not known; use one of {get_args(Precision)}."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise StrategyError(
                f"prepare: clip_norm={self.clip_norm!r} must be above 0; use None to leave gradients alone."
            )
        if self.accumulate < 1:
            raise StrategyError(f"prepare: accumulate={self.accumulate!r} must be 1 or more microbatches.")


def pick_device(device: str | None, local_rank: int = 0) -> torch.device:
    """The device to train on: the named one, else CUDA where there is any, else the CPU.

    A CUDA device without an index gets `local_rank` as its index.

    Raises:
        StrategyError: if the name means nothing, or CUDA is asked for and is not here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise StrategyError(f"device={device!r} is no device of torch; use 'cpu' or 'cuda'.") from error
    if found.type not in ("cpu", "cuda"):
        raise StrategyError(f"device={device!r} is not supported; use 'cpu' or 'cuda'.")
    if found.type == "cpu":
        return torch.device("cpu")
    index = local_rank if found.index is None else found.index
    here = torch.cuda.device_count()
    if index >= here:
        raise StrategyError(
            f"device={device!r} means CUDA device {index}, and this process sees {here}; "
            f"use fewer devices, or device='cpu'."
        )
    return torch.device("cuda", index)


def check_ranks(strategy: str, device: str | None, devices: int) -> None:
    """Checks the surroundings of a strategy that runs on several ranks; `device` is its option.

    Raises:
        StrategyError: if `devices` ranks cannot train here.
    """
    if devices < 1:
        raise StrategyError(f"strategy {strategy!r}: devices={devices} must be 1 or more.")
    if not dist.is_available():
        raise StrategyError(f"strategy {strategy!r}: this torch is built without torch.distributed.")
    if device not in (None, "cpu", "cuda"):
        raise StrategyError(
            f"strategy {strategy!r}: device={device!r} is not one for all ranks; use 'cpu' or 'cuda' "
            f"(the index is the rank's), or 'single' for one given device."
        )
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    pick_device(device, on_this_machine - 1)


def refuse_sync_batch_norm(strategy: str, model: nn.Module, device: torch.device) -> None:
    """Raises StrategyError for a SyncBatchNorm on the CPU, naming it."""
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise StrategyError(
                f"strategy {strategy!r}: {name or 'the model'} is a SyncBatchNorm, which works on CUDA only, "
                f"and this rank trains on the CPU; use BatchNorm2d there."
            )


def parameters_to_train(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that require gradients.

    Raises:
        StrategyError: if there are none.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise StrategyError(
            f"prepare: {type(model).__name__} has no parameter that requires a gradient, so nothing would "
            f"train; set requires_grad on those that should."
        )
    return parameters


def build_optimizer(model: nn.Module, factory: OptimizerFactory) -> torch.optim.Optimizer:
    """The factory's optimizer over the parameters of `model` that require gradients.

    Raises:
        StrategyError: if there are none.
    """
    return factory(parameters_to_train(model))


class LocalEngine:
    """An engine on one device; see `base.Engine` for what each method promises."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: StepOptions
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.rank = 0
        self.world_size = 1
        self.accumulate = options.accumulate
        self._options = options
        self._microbatches = 0  # gradients added since the last step

    @property
    def plain_model(self) -> nn.Module:
        """The user's module, without the strategy's wrapper."""
        return self.model

    def forward_context(self) -> AbstractContextManager[Any]:
        """The precision's autocast, or nothing for fp32. For evaluation too."""
        if self._options.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        """Adds the gradients of `loss / accumulate`.

        Raises:
            StrategyError: if `last_microbatch` contradicts the `accumulate` given to `prepare`: the
                loss is divided by it, so any other number of microbatches would train silently wrong.
        """
        number = self._microbatches + 1
        if last_microbatch != (number == self.accumulate):
            raise StrategyError(
                f"backward: microbatch {number} of accumulate={self.accumulate} came with "
                f"last_microbatch={last_microbatch}; give exactly {self.accumulate} per step, "
                f"and last_microbatch=True with the last one only."
            )
        self._microbatches = number
        (loss / self.accumulate).backward()  # type: ignore[no-untyped-call]

    def step(self) -> float | None:
        """Clips, steps and zeroes. Returns the gradients' total norm before clipping if it is on.

        Raises:
            StrategyError: before `accumulate` microbatches have been through `backward`.
        """
        if self._microbatches != self.accumulate:
            raise StrategyError(
                f"step: {self._microbatches} of accumulate={self.accumulate} microbatches went through "
                f"backward; call backward for all of them first."
            )
        norm: float | None = None
        if self._options.clip_norm is not None:
            norm = self._clip(self._options.clip_norm)
        self.optimizer.step()
        self.zero()
        return norm

    def zero(self) -> None:
        """Throws away the gradients added since the last step."""
        self.optimizer.zero_grad(set_to_none=True)
        self._microbatches = 0

    def reduce(self, value: torch.Tensor, op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        """`value` reduced over all ranks, the same on each; a new tensor on the device of `value`."""
        if op not in ("mean", "sum"):
            raise StrategyError(f"reduce: op={op!r} is not known; use 'mean' or 'sum'.")
        total = self._sum(value.detach().to(self.device, copy=True)).to(value.device)
        return total / self.world_size if op == "mean" else total

    def sync_buffers(self) -> None:
        """Makes floating-point buffers (BatchNorm's statistics) their mean over all ranks."""

    def export_state(self) -> dict[str, torch.Tensor]:
        """The model's state by plain parameter names: whole, contiguous copies on the CPU.

        Raises:
            StrategyError: if a module keeps an extra state that is no tensor.
        """
        state: dict[str, torch.Tensor] = {}
        for name, value in self.plain_model.state_dict().items():
            if not isinstance(value, torch.Tensor):
                raise StrategyError(
                    f"export_state: {name!r} is a {type(value).__name__}; only tensors can be exported, "
                    f"make it a buffer."
                )
            # Contiguous, because safetensors takes nothing else and channels_last weights are not.
            whole = self._whole(value.detach())
            state[name] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return state

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        # A read of a reduced number: unlike `dist.barrier` it needs no device of its own under NCCL.
        self._sum(torch.zeros((), device=self.device)).item()

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """`value` summed over all ranks, possibly in place."""
        return value

    def _clip(self, clip_norm: float) -> float:
        """Scales the gradients to a total norm of at most `clip_norm`; returns the norm they had."""
        return nn.utils.clip_grad_norm_(self.plain_model.parameters(), clip_norm).item()

    def _whole(self, value: torch.Tensor) -> torch.Tensor:
        """`value` of the state dict, gathered if ranks hold parts of it."""
        return value


class RanksEngine(LocalEngine):
    """An engine that is one of the ranks of the process group."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: StepOptions
    ) -> None:
        super().__init__(model, optimizer, device, options)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def sync_buffers(self) -> None:
        """Makes floating-point buffers (BatchNorm's statistics) their mean over all ranks.

        Integer buffers (`num_batches_tracked`) count the same steps on each rank and stay.
        """
        buffers = [b for b in self.plain_model.buffers() if b.is_floating_point()]
        for dtype in dict.fromkeys(b.dtype for b in buffers):
            same = [b for b in buffers if b.dtype == dtype]
            # One message instead of two for each BatchNorm layer.
            mean = self.reduce(torch.cat([b.detach().flatten() for b in same]))
            for buffer, values in zip(same, torch.split(mean, [b.numel() for b in same]), strict=True):
                buffer.detach().copy_(values.view_as(buffer))

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value
