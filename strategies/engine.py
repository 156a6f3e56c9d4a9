"""The engine of an unsharded model: everything that `Single` needs, and most of what others do. Buffers pooled over all
ranks: means, and for BatchNorm the variance of all ranks' samples together."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..common.errors import StrategyError
from ..common.model_state import has_mean, set_buffer, unlisted_tensors, vacant_buffers
from ..common.storage.tensors import shape_of
from .base import Engine, Held
from .common.memory import tensors_in
from .common.optimizer_state import (
    Entry,
    Keep,
    OptimizerState,
    as_held,
    export_groups,
    import_groups,
    name_of,
)
from .options import Options, half_dtype


class LossScale(torch.amp.GradScaler):
    """Gradients may be on the CPU (`fsdp_cpu_offload`), and the scale on a GPU. torch copies it, and the mark of an
    overflow, to them without waiting for the copies: they may arrive after the CPU has read and written them."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        device = next((gradient.device for gradient in gradients), inv_scale.device)
        return super()._unscale_grads_(optimizer, inv_scale.to(device), found_inf.to(device), allow_fp16)


class LocalEngine(Engine):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.rank, self.world_size, self.shards = 0, 1, 0
        self.accumulate, self._options = options.accumulate, options
        self.note, self.skipped = "", False
        self._microbatches = 0  # accumulated since the last step
        self._scaler = LossScale(device.type, enabled=options.precision == "fp16")
        self._known, self._left_out = -1, list[nn.Parameter]()

    @property
    def plain_model(self) -> nn.Module:
        return self.model

    @property
    def sharded(self) -> bool:
        return False

    def forward_context(self) -> AbstractContextManager[Any]:
        if self._options.precision != "fp32":
            return torch.autocast(self.device.type, dtype=half_dtype(self._options.precision))
        return nullcontext()

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        self._count(last_microbatch)
        # Not divided by 1: that would be two autograd operations, which matters for the step of a small model.
        share = loss if self.accumulate == 1 else loss / self.accumulate
        self._scaler.scale(share).backward()  # type: ignore[no-untyped-call]
        if last_microbatch:  # here, so that code that inspects the gradients sees unscaled ones
            self._drop_left_out()
            self._unscale()

    def _drop_left_out(self) -> None:
        """Drop the gradients of parameters that the optimizer does not have, and thus does not zero: they would add up,
        also in norms. It may get them later, as in gradual unfreezing."""
        groups = self.optimizer.param_groups
        known = sum(len(group["params"]) for group in groups)
        if known != self._known:
            own = {parameter for group in groups for parameter in group["params"]}
            others = [parameter for parameter in self.model.parameters() if parameter not in own]
            # DeepSpeed's groups have other tensors than the model.
            self._known, self._left_out = known, others if not own.isdisjoint(self.model.parameters()) else []
        for parameter in self._left_out:
            parameter.grad = None

    def _count(self, last_microbatch: bool) -> None:
        number = self._microbatches + 1
        if last_microbatch != (number == self.accumulate):
            raise StrategyError(
                f"backward: microbatch {number} of accumulate={self.accumulate} came with "
                f"last_microbatch={last_microbatch}. Call it exactly {self.accumulate} times per step, with "
                f"last_microbatch=True only the last time."
            )
        self._microbatches = number

    def step(self) -> torch.Tensor | None:
        self._check_complete()
        norm: torch.Tensor | None = None
        self.skipped = self._overflowed()
        if not self.skipped:
            if self._options.clip_norm is not None:
                norm = self._clip(self._options.clip_norm)
            # Not GradScaler.step, which would check the already unscaled gradients for overflow again.
            self.optimizer.step()
        self._scaler.update()
        self.zero_grad()
        return norm

    def _check_complete(self) -> None:
        if self._microbatches != self.accumulate:
            raise StrategyError(
                f"step: only {self._microbatches} of accumulate={self.accumulate} microbatches went through backward. "
                f"Call backward for all of them first."
            )

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self._scaler.is_enabled():
            self._scaler._per_optimizer_states.clear()  # as its update does; the scale changes once a step
        self._microbatches = 0

    @torch.no_grad()
    def gradients(self) -> dict[str, torch.Tensor]:
        named = self.plain_model.named_parameters()
        return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}

    def group_names(self) -> list[list[str]]:
        names = self._names()
        return [[name_of(p, names) for p in group["params"]] for group in self.optimizer.param_groups]

    def reshard(self) -> None:
        pass  # there are no gathered copies

    def reduce(self, value: torch.Tensor, op: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        if op not in ("mean", "sum"):
            raise StrategyError(f"reduce: op={op!r} is unknown. Use 'mean' or 'sum'.")
        total = self._sum(value.detach().to(self.device, copy=True)).to(value.device)
        return total / self.world_size if op == "mean" else total

    def sync_buffers(self) -> None:
        if self.world_size == 1:
            return
        buffers = dict(self.plain_model.named_buffers())
        for name, value in self.pool_buffers(buffers).items():
            buffers[name].detach().copy_(value)

    def pool_buffers(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in values.items() if has_mean(value)}

    @torch.no_grad()
    def export_state(self, keep: Keep | None = None) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for name, value in self._tensors("export_state").items():
            whole = self._gathered(value, keep)
            if keep is None or keep(name):
                state[name] = whole if keep is as_held else copied(whole)
        return state

    @torch.no_grad()
    def import_state(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        own, unlisted = self._tensors("import_state"), unlisted_tensors(self.plain_model)
        vacant = vacant_buffers(self.plain_model) & state.keys()
        missing = set(own) - set(state) - set(unlisted) if strict else set()
        odd = sorted((set(state) - set(own) - vacant) | missing)
        if odd:
            where = "the saved state" if odd[0] in state else "the model"
            raise StrategyError(
                f"import_state: {odd[0]!r} is only in {where} ({len(odd)} such names in all). Build the model with the "
                f"same factory and the same transforms."
            )
        for name in vacant | (unlisted.keys() & state.keys()):
            set_buffer(self.plain_model, name, state[name].to(self.device))
        for name, value in own.items():
            if name in unlisted or name not in state:
                continue
            saved, shape = shape_of(state, name), tuple(self._shape(value))
            if saved != shape:
                raise StrategyError(
                    f"import_state: {name!r} has shape {saved} in the saved state but {shape} in the model. Build the "
                    f"model with the same factory."
                )
            self._write(value, state, name)

    @torch.no_grad()
    def export_optimizer(self, keep: Keep | None = None) -> OptimizerState:
        names = self._names()
        groups = export_groups(self.optimizer, names)
        kept: dict[str, Entry] = {}
        entries = self._entries(names)
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            name = names[parameter]
            entry = {
                key: self._exported(parameter, name, key, value, keep)
                for key, value in entries.get(name, {}).items()
                if value is not None  # SGD without momentum
            }
            if entry and keep is as_held:
                kept[name] = entry
            elif entry and (keep is None or keep(name)):
                kept[name] = {k: copied(v) if isinstance(v, torch.Tensor) else v for k, v in entry.items()}
        return OptimizerState(groups, kept, self._scaler.state_dict())

    @torch.no_grad()
    def import_optimizer(self, state: OptimizerState) -> None:
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
                        key: self._imported(saved, key, parameter, group) for key in saved
                    }

    def gather(self, value: torch.Tensor, home: int | None = None) -> torch.Tensor:  # noqa: ARG002
        return value

    def _gathered(self, value: torch.Tensor, keep: Keep | None) -> torch.Tensor:
        return value if keep is as_held else self.gather(value)

    def barrier(self) -> None:
        # Reads a reduced number: unlike `dist.barrier` this needs no device of its own under NCCL.
        self._sum(torch.zeros((), device=self.device)).item()

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def _unscale(self) -> None:
        self._scaler.unscale_(self.optimizer)

    def _overflowed(self) -> bool:
        # Synchronizes with the device, in fp16 only: the host decides whether the optimizer is called.
        if not self._scaler.is_enabled():
            return False
        seen = self._scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        return any(bool(overflow.item()) for overflow in seen.values())

    def _clip(self, clip_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.plain_model.parameters(), clip_norm)

    def _shape(self, value: torch.Tensor) -> torch.Size:
        return value.shape

    def _write(self, value: torch.Tensor, source: Mapping[str, Any], name: str) -> None:
        value.copy_(self._read(source, name, value))

    def held(self) -> Held:
        parameters = list(self.plain_model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        count = sum(parameter.numel() for parameter in parameters)
        return Held(parameters, gradients, list(tensors_in(self.optimizer)), count)

    def _read(self, source: Mapping[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return a tensor of `source`, which every rank has in full on the CPU; this rank's shard if `like` is one."""
        value: torch.Tensor = source[name]
        return value

    def _tensors(self, caller: str) -> dict[str, torch.Tensor]:
        state = {**self.plain_model.state_dict(), **unlisted_tensors(self.plain_model)}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise StrategyError(
                    f"{caller}: {name!r} is a {type(value).__name__}, but only tensors can be exported. Register it as "
                    f"a buffer."
                )
        return {name: value.detach() for name, value in state.items()}

    def _names(self) -> dict[nn.Parameter, str]:
        # A tied parameter has the name of its first occurrence.
        return {parameter: name for name, parameter in self.plain_model.named_parameters()}

    def _entries(self, names: Mapping[nn.Parameter, str]) -> Mapping[str, Entry]:
        """Return the optimizer's state of all ranks by name; remote state as an object that `_exported` gathers."""
        state: Mapping[Any, Entry] = self.optimizer.state
        return {names[parameter]: entry for parameter, entry in state.items()}

    def _owns(self, parameter: nn.Parameter) -> bool:  # noqa: ARG002
        return True

    def _exported(
        self, parameter: nn.Parameter, name: str, key: str, value: object, keep: Keep | None  # noqa: ARG002
    ) -> torch.Tensor | float:  # fmt: skip
        if isinstance(value, torch.Tensor):
            return self._gathered(value.detach(), keep)
        if isinstance(value, int | float):
            return value
        raise StrategyError(
            f"export_optimizer: {name}: {key} is a {type(value).__name__}, but only tensors and numbers can be saved."
        )

    def _imported(self, saved: Entry, key: str, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor | float:
        if shape_of(saved, key):
            return self._read(saved, key, parameter).to(parameter.device, copy=True)
        value = saved[key]
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(scalar_device(key, group, parameter), copy=True)


class RanksEngine(LocalEngine):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> None:
        super().__init__(model, optimizer, device, options)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def pool_buffers(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return pool_buffers(values, self.plain_model, self.reduce)

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value

    def _unscale(self) -> None:
        super()._unscale()
        if not self._scaler.is_enabled():
            return
        # A rank sees the gradients it holds, perhaps none; if one rank skips the step, all must.
        seen = self._scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        here = torch.zeros((), device=self.device)
        for overflow in seen.values():
            here += overflow.full_tensor() if hasattr(overflow, "full_tensor") else overflow  # of a DTensor
        seen.clear()
        seen[self.device] = self._sum(here)


def scalar_device(key: str, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.device:
    """Where a number of the optimizer's state belongs: a count of steps and NAdam's product on the CPU, as torch keeps
    them, unless a kernel reads them: each step would read those of all parameters from a GPU, and wait."""
    on_cpu = key in ("step", "mu_product") and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_cpu else parameter.device


def copied(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU: contiguous, because safetensors requires it and channels_last weights are not."""
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


Mean = Callable[[torch.Tensor], torch.Tensor]
"""Returns the mean of a tensor over the ranks; all of them must call it."""


def pool_buffers(values: Mapping[str, torch.Tensor], model: nn.Module, mean: Mean) -> dict[str, torch.Tensor]:
    """Return the floating-point and complex buffers in `values` pooled over all ranks: their means, and BatchNorm's
    `running_var` as one variance. For N shards of equal size the full batch has (law of total variance)::

        mean = mean_r(mean_r)
        var  = mean_r(var_r) + var_r(mean_r)     # var_r over the N ranks as the population

    The result equals that of one process on the full batches, with two exceptions, because only the running statistics
    are exchanged, once. First, a rank's variance is unbiased for its n values of a channel, where the full batch would
    use N · n: a relative difference below 1 / n. Second, the *running* means contain differences between ranks that
    last longer than 1 / momentum steps, as when ranks see different data, but little of the independent differences of
    each shuffled batch: a relative difference of about 1 / n_independent of one batch's values.

    Layers whose running variance is a mean of variances keep the mean: InstanceNorm, and `averages_variances`
    (GhostBatchNorm). `mean` is called once, with float64: mean² - mean² in float32 would lose small variances.
    """
    chosen = {name: value.detach() for name, value in values.items() if has_mean(value)}
    if not chosen:
        return {}
    partners = {var: m for var, m in _batch_norms(model) if var in chosen and m in chosen}
    reals = {name: torch.view_as_real(v) if v.is_complex() else v for name, v in chosen.items()}
    wide = {name: value.flatten().double() for name, value in reals.items()}
    parts = [*wide.values(), *(wide[m].square() for m in partners.values())]
    whole = torch.split(mean(torch.cat(parts)), [part.numel() for part in parts])
    pooled = dict(zip(chosen, whole, strict=False))
    for (var, m), squares in zip(partners.items(), whole[len(chosen) :], strict=True):
        pooled[var] = pooled[var] + (squares - pooled[m].square()).clamp_min(0.0)
    return {name: _like(pooled[name], value) for name, value in chosen.items()}


def _like(flat: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return torch.view_as_complex(flat.view(*value.shape, 2)).to(value.dtype)
    return flat.to(value.dtype).view(value.shape)


def _batch_norms(model: nn.Module) -> list[tuple[str, str]]:
    return [
        (f"{name}.running_var".lstrip("."), f"{name}.running_mean".lstrip("."))
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not getattr(module, "averages_variances", False)
    ]
