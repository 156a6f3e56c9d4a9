"""The engine of a model that is whole on its rank: all that `Single` needs, and most of what others do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..errors import StrategyError
from .common.memory import Held, tensors_in
from .common.optimizer_state import Entry, Keep, OptimizerState, export_groups, import_groups
from .common.statistics import pool_buffers
from .options import HALF, Options


class LocalEngine:
    """An engine on one device; see `base.Engine` for what each method promises."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.rank = 0
        self.world_size = 1
        self.accumulate = options.accumulate
        self.note = ""
        self.skipped = False
        self._options = options
        self._microbatches = 0  # gradients added since the last step
        self._scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")

    @property
    def plain_model(self) -> nn.Module:
        """The user's module, without the strategy's wrapper."""
        return self.model

    @property
    def divided(self) -> bool:
        """Whether parameters are divided among the ranks: here each has them whole."""
        return False

    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor that `export_state` gives, by name."""
        tensors = self._tensors("sizes")
        return {name: self._shape(value).numel() * value.element_size() for name, value in tensors.items()}

    def forward_context(self) -> AbstractContextManager[Any]:
        """The precision's autocast, or nothing for fp32. For evaluation too."""
        if self._options.precision != "fp32":
            return torch.autocast(self.device.type, dtype=HALF[self._options.precision])
        return nullcontext()

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        """Adds the gradients of `loss / accumulate`.

        Raises:
            StrategyError: if `last_microbatch` contradicts the `accumulate` given to `prepare`: the
                loss is divided by it, so any other number of microbatches would train silently wrong.
        """
        self._count(last_microbatch)
        # To divide by 1 would be two operations of autograd, of which a small model's step has few.
        share = loss if self.accumulate == 1 else loss / self.accumulate
        self._scaler.scale(share).backward()  # type: ignore[no-untyped-call]
        if last_microbatch:  # here, so that whoever looks at the gradients sees true ones
            self._unscale()

    def _count(self, last_microbatch: bool) -> None:
        """Counts a microbatch; raises StrategyError as `backward` does."""
        number = self._microbatches + 1
        if last_microbatch != (number == self.accumulate):
            raise StrategyError(
                f"backward: microbatch {number} of accumulate={self.accumulate} came with "
                f"last_microbatch={last_microbatch}; give exactly {self.accumulate} per step, "
                f"and last_microbatch=True with the last one only."
            )
        self._microbatches = number

    def step(self) -> torch.Tensor | None:
        """Clips, steps and zeroes. Returns the gradients' total norm before clipping if it is on; see `base.Engine`.

        Raises:
            StrategyError: before `accumulate` microbatches have been through `backward`.
        """
        self._check_complete()
        norm: torch.Tensor | None = None
        self.skipped = self._overflowed()
        if not self.skipped:
            if self._options.clip_norm is not None:
                norm = self._clip(self._options.clip_norm)
            # Not GradScaler.step, which would read once more whether they overflowed; they are unscaled already.
            self.optimizer.step()
        self.zero()
        return norm

    def _check_complete(self) -> None:
        """Raises StrategyError as `step` does."""
        if self._microbatches != self.accumulate:
            raise StrategyError(
                f"step: {self._microbatches} of accumulate={self.accumulate} microbatches went through "
                f"backward; call backward for all of them first."
            )

    def zero(self) -> None:
        """Throws away the gradients added since the last step."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._microbatches == self.accumulate:
            self._scaler.update()
        self._microbatches = 0

    def reduce(self, value: torch.Tensor, op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        """`value` reduced over all ranks, the same on each; a new tensor on the device of `value`."""
        if op not in ("mean", "sum"):
            raise StrategyError(f"reduce: op={op!r} is not known; use 'mean' or 'sum'.")
        total = self._sum(value.detach().to(self.device, copy=True)).to(value.device)
        return total / self.world_size if op == "mean" else total

    def sync_buffers(self) -> None:
        """Gives each rank the floating-point buffers (BatchNorm's statistics) of all; see `base.Engine`."""
        if self.world_size == 1:
            return
        buffers = dict(self.plain_model.named_buffers())
        for name, value in self.pool_buffers(buffers).items():
            buffers[name].detach().copy_(value)

    def pool_buffers(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`values` of the model's floating-point buffers over all ranks; here they are those of this rank."""
        return {name: value for name, value in values.items() if value.is_floating_point()}

    @torch.no_grad()
    def export_state(self, keep: Keep | None = None) -> dict[str, torch.Tensor]:
        """The model's state by plain names: whole, contiguous copies on the CPU; see `base.Engine`.

        Raises:
            StrategyError: if a module keeps an extra state that is no tensor.
        """
        state: dict[str, torch.Tensor] = {}
        for name, value in self._tensors("export_state").items():
            whole = self.gather(value)
            if keep is None or keep(name):
                state[name] = copied(whole)
        return state

    @torch.no_grad()
    def import_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrites the model's state, in place; see `base.Engine`.

        Raises:
            StrategyError: if names or shapes are not the model's. Nothing has changed if it is a name; a shape
                is seen when its tensor's turn comes.
        """
        own = self._tensors("import_state")
        if set(own) != set(state):
            odd = sorted(set(own) ^ set(state))
            where = "the saved state" if odd[0] in state else "the model"
            raise StrategyError(
                f"import_state: {odd[0]!r} is in {where} only ({len(odd)} such names in all); build the model "
                f"with the same factory and the same transforms."
            )
        for name, value in own.items():
            saved = state[name]
            shape = self._shape(value)
            if saved.shape != shape:
                raise StrategyError(
                    f"import_state: {name!r} has the shape {tuple(saved.shape)} in the saved state and "
                    f"{tuple(shape)} in the model; build the model with the same factory."
                )
            self._write(value, saved)

    @torch.no_grad()
    def export_optimizer(self, keep: Keep | None = None) -> OptimizerState:
        """The optimizer's state by plain parameter names; see `base.Engine`.

        Raises:
            StrategyError: for state that is neither a tensor nor a number.
        """
        names = self._names()
        groups = export_groups(self.optimizer, names)
        kept: dict[str, Entry] = {}
        entries = self._entries(names)
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            name = names[parameter]
            entry = {
                key: self._exported(parameter, name, key, value)
                for key, value in entries.get(name, {}).items()
                if value is not None  # SGD without momentum
            }
            if entry and (keep is None or keep(name)):
                kept[name] = entry
        return OptimizerState(groups, kept, self._scaler.state_dict())

    @torch.no_grad()
    def import_optimizer(self, state: OptimizerState) -> None:
        """Gives the optimizer the state that another engine's `export_optimizer` gave; see `base.Engine`.

        Raises:
            StrategyError: if it is that of other parameters.
        """
        names = self._names()
        import_groups(self.optimizer, names, state.groups)
        if self._scaler.is_enabled() and state.loss_scale:
            self._scaler.load_state_dict(dict(state.loss_scale))
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                saved = state.entries.get(names[parameter]) if self._owns(parameter) else None
                if saved is not None:
                    self.optimizer.state[parameter] = {
                        key: self._imported(key, value, parameter, group) for key, value in saved.items()
                    }

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """`value` whole: itself, unless ranks hold parts of it, which all of them must then gather."""
        return value

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        # A read of a reduced number: unlike `dist.barrier` it needs no device of its own under NCCL.
        self._sum(torch.zeros((), device=self.device)).item()

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """`value` summed over all ranks, possibly in place."""
        return value

    def _unscale(self) -> None:
        """Divides the gradients by the loss scale of fp16, and notes whether one is not finite."""
        self._scaler.unscale_(self.optimizer)

    def _overflowed(self) -> bool:
        """Whether fp16's gradients are not finite, on any rank: then no rank steps, and the loss scale falls.

        Waits for the device, in fp16 only: the host decides whether the optimizer is called.
        """
        if not self._scaler.is_enabled():
            return False
        seen = self._scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        return any(bool(found.item()) for found in seen.values())

    def _clip(self, clip_norm: float) -> torch.Tensor:
        """Scales the gradients to a total norm of at most `clip_norm`; returns the norm they had, `()`."""
        return nn.utils.clip_grad_norm_(self.plain_model.parameters(), clip_norm)

    def _shape(self, value: torch.Tensor) -> torch.Size:
        """The shape that `gather` gives a tensor of the model."""
        return value.shape

    def _write(self, value: torch.Tensor, whole: torch.Tensor) -> None:
        """Overwrites a tensor of the model, in place, by one that every rank has whole."""
        value.copy_(self._part(whole, value))

    def held(self) -> Held:
        """The tensors this rank holds for training; see `memory.held_bytes`."""
        parameters = list(self.plain_model.parameters())
        return Held(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            list(tensors_in(self.optimizer)),
            sum(parameter.numel() for parameter in parameters),
        )

    def _part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """What this rank holds of `whole`, a CPU tensor that every rank has, where it holds `like`."""
        return whole

    def _tensors(self, caller: str) -> dict[str, torch.Tensor]:
        """The tensors of the model's state dict, not copied."""
        state = self.plain_model.state_dict()
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise StrategyError(
                    f"{caller}: {name!r} is a {type(value).__name__}; only tensors can be exported, make it a "
                    f"buffer."
                )
        return {name: value.detach() for name, value in state.items()}

    def _names(self) -> dict[nn.Parameter, str]:
        """The plain name of each parameter; a tied one has that of its first place."""
        return {parameter: name for name, parameter in self.plain_model.named_parameters()}

    def _entries(self, names: Mapping[nn.Parameter, str]) -> Mapping[str, Entry]:
        """The optimizer's state by names, of all ranks; what is elsewhere as something that `_exported` gathers."""
        state: Mapping[Any, Entry] = self.optimizer.state
        return {names[parameter]: entry for parameter, entry in state.items()}

    def _owns(self, parameter: nn.Parameter) -> bool:  # noqa: ARG002
        """Whether this rank keeps the optimizer's state of `parameter`, or a part of it."""
        return True

    def _exported(
        self,
        parameter: nn.Parameter,  # noqa: ARG002
        name: str,
        key: str,
        value: object,
    ) -> torch.Tensor | float:
        if isinstance(value, torch.Tensor):
            return copied(self.gather(value.detach()))
        if isinstance(value, int | float):
            return value
        raise StrategyError(
            f"export_optimizer: {name}: {key} is a {type(value).__name__}; only tensors and numbers can be saved."
        )

    def _imported(
        self, key: str, value: torch.Tensor | float, parameter: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor | float:
        if not isinstance(value, torch.Tensor):
            return value
        if key == "step" and value.dim() == 0:  # on the CPU, as torch keeps it, unless a kernel reads it
            on_device = group.get("capturable") or group.get("fused")
            return value.to(parameter.device if on_device else "cpu", copy=True)
        return self._part(value, parameter).to(parameter.device, copy=True)


class RanksEngine(LocalEngine):
    """An engine that is one of the ranks of the process group."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> None:
        super().__init__(model, optimizer, device, options)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def pool_buffers(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`values` of the model's floating-point buffers over all ranks; see `base.Engine`."""
        return pool_buffers(values, self.plain_model, self.reduce)

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value

    def _unscale(self) -> None:
        super()._unscale()
        if not self._scaler.is_enabled():
            return
        # A rank sees the gradients it holds, perhaps none; if one rank leaves the step out, all must.
        seen = self._scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        here = torch.zeros((), device=self.device)
        for found in seen.values():
            here += found.full_tensor() if hasattr(found, "full_tensor") else found  # of a DTensor
        seen.clear()
        seen[self.device] = self._sum(here)


def copied(value: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    # Contiguous, because safetensors takes nothing else and channels_last weights are not.
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
