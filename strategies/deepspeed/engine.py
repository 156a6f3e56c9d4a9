"""The engine of a model that DeepSpeed's ZeRO shards across the ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...common.errors import StrategyError
from ...common.model_state import unlisted_tensors
from ...common.rows import FlatShard, chunk, local_part
from ...common.storage.tensors import elements_of, shape_of
from ..base import Held
from ..common import sharding
from ..common.memory import tensors_in
from ..common.optimizer_state import Entry, Keep, OptimizerState, as_held, import_groups
from ..engine import RanksEngine, scalar_device
from ..options import Options

Groups = list[list[nn.Parameter]]
"""The parameters of an optimizer's groups, before DeepSpeed replaces them by flat ones."""


class DeepSpeedEngine(RanksEngine):
    """A model inside DeepSpeed's engine, the `wrapper`, which concatenates the parameters of an optimizer's group into
    one flat tensor, of which each rank steps a partition. The weights it exports are the fp32 ones that are trained."""

    def __init__(
        self, wrapper: Any, deepspeed: Any, groups: Groups, device: torch.device, options: Options, stage: int
    ) -> None:
        self._zero = wrapper.optimizer
        super().__init__(wrapper, self._zero.optimizer, device, options)
        self._deepspeed, self._wrapper = deepspeed, wrapper
        self._groups, self._stage = groups, stage
        if self.sharded and self.world_size > 1 and all(map(_is_plain, self.plain_model.parameters())):
            self.shards = self.world_size

    @property
    def plain_model(self) -> nn.Module:
        return cast(nn.Module, self._wrapper.module)

    @property
    def sharded(self) -> bool:
        return self._stage == 3

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        self._count(last_microbatch)
        self._wrapper.set_gradient_accumulation_boundary(last_microbatch)
        self._wrapper.backward(loss)  # which divides it

    def step(self) -> torch.Tensor | None:
        """Raise `StrategyError` also for non-finite gradients, for which DeepSpeed would silently skip the step."""
        self._check_complete()
        self._wrapper.step()
        self._microbatches = 0
        if self._zero.overflow:
            raise StrategyError(
                "step: the gradients are not finite, and DeepSpeed has skipped the step. Lower the learning rate, add "
                "a warm-up, or set clip_norm."
            )
        if self._options.clip_norm is None:
            return None
        return torch.as_tensor(self._zero._global_grad_norm).reshape(())

    def zero_grad(self) -> None:
        self._wait_for_reduction()
        self._zero.zero_grad()
        if self._stage < 3:
            # As DeepSpeed's step does on overflow; its `zero_grad` does not reset the partitions.
            self._zero._release_preflattened_grad_buffers()
            for kept in (self._zero.averaged_gradients, self._zero.all_grad_tensors):
                kept.update(dict.fromkeys(kept))
            self._zero.micro_step_id = -1
        self._microbatches = 0

    def gradients(self) -> dict[str, torch.Tensor]:
        named = [(name, p) for name, p in self.plain_model.named_parameters() if p.requires_grad]
        whole = {name: self._deepspeed.utils.safe_get_full_grad(p) for name, p in named}
        return {name: value.detach().clone() for name, value in whole.items() if value is not None}

    def group_names(self) -> list[list[str]]:
        with self._plain_groups():
            return super().group_names()

    def _wait_for_reduction(self) -> None:
        """Make this device's next work wait for DeepSpeed's reduction of the gradients, without blocking the host. The
        reduction runs on a separate stream: memory freed before it is done would be in use twice."""
        if self.device.type != "cuda":
            return
        for name in ("reduction_stream", "reduce_and_partition_stream"):  # of stages 1 and 2, and of stage 3
            stream = getattr(self._zero, name, None)
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)

    @torch.no_grad()
    def import_state(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        if self.shards:  # what is gathered now would keep the old values
            self._zero.empty_partition_cache()
        super().import_state(state, strict=strict)
        self._zero.refresh_fp32_params()

    def export_optimizer(self, keep: Keep | None = None) -> OptimizerState:
        self._link_states()
        with self._plain_groups():
            return super().export_optimizer(keep)

    @torch.no_grad()
    def import_optimizer(self, state: OptimizerState) -> None:
        """Raise `StrategyError` also if the state differs between parameters of one group here."""
        names = self._names()
        with self._plain_groups():
            import_groups(self.optimizer, names, state.groups)
        self.optimizer.state.clear()
        members: dict[torch.Tensor, list[nn.Parameter]] = {}
        groups: dict[torch.Tensor, dict[str, Any]] = {}
        for own, group in zip(self._groups, self.optimizer.param_groups, strict=True):
            for parameter in own:
                members.setdefault(self._flat(parameter), []).append(parameter)
                groups[self._flat(parameter)] = group
        for flat, parameters in members.items():
            entries = {names[p]: state.entries[names[p]] for p in parameters if names[p] in state.entries}
            if entries:
                _refuse_uneven(entries, [names[p] for p in parameters])
                self.optimizer.state[flat] = _blank(flat, next(iter(entries.values())), groups[flat])
        self._link_states()
        for parameter in (p for group in self._groups for p in group):
            entry = state.entries.get(names[parameter], {})
            for key in entry:
                if shape_of(entry, key):
                    self._set_state(parameter, key, entry)

    def _link_states(self) -> None:
        """Give each parameter its part of the flat state: DeepSpeed does so once, before other groups have state."""
        if self._stage < 3 and self.optimizer.state:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def gather(self, value: torch.Tensor, home: int | None = None) -> torch.Tensor:
        tensor: Any = value
        if isinstance(tensor, FlatShard):
            flat = sharding.gathered_rows(local_part(value).to(self.device), value.shape.numel(), home, None)
            return flat.view(value.shape) if home in (None, self.rank) else flat
        if not hasattr(value, "ds_id"):
            return value
        with self._deepspeed.zero.GatheredParameters([value]):
            return value.detach().clone()

    def held(self) -> Held:
        """DeepSpeed's copy of the weights counts as optimizer; with stages 1 and 2 a parameter that spans two
        partitions has its full gradient in both. Its buffers for communication and offload are not included."""
        parameters = list(self.plain_model.parameters())
        flats = list(dict.fromkeys(self._flat(p) for group in self._groups for p in group))
        gradients = [p.grad for p in (*parameters, *flats) if p.grad is not None]
        for kept in (self._zero.averaged_gradients, getattr(self._zero, "all_grad_tensors", {})):
            gradients += [gradient for group in kept.values() for gradient in group or []]
        divided = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
        count = sum(self._shape(parameter).numel() for parameter in parameters)
        return Held([*parameters, *divided], gradients, [*flats, *tensors_in(self.optimizer)], count)

    def _tensors(self, caller: str) -> dict[str, torch.Tensor]:
        if self._stage < 3:
            return super()._tensors(caller)
        super()._tensors(caller)
        # The parameters themselves, which know their partitions.
        return {**self.plain_model.state_dict(keep_vars=True), **unlisted_tensors(self.plain_model)}

    def _shape(self, value: torch.Tensor) -> torch.Size:
        return cast(torch.Size, getattr(value, "ds_shape", value.shape))

    def _write(self, value: Any, source: Mapping[str, Any], name: str) -> None:
        if not hasattr(value, "ds_id"):
            value.detach().copy_(source[name])
        elif self.shards:
            own = elements_of(source, name, *self._range(value))
            value.ds_tensor[: len(own)].copy_(own)
        else:
            with self._deepspeed.zero.GatheredParameters([value], modifier_rank=0):
                value.data.copy_(source[name])

    def _gathered(self, value: Any, keep: Keep | None) -> torch.Tensor:
        if keep is as_held and self.shards and hasattr(value, "ds_id"):
            return self._shard(value, lambda: value.ds_tensor)
        return super()._gathered(value, keep)

    def _shard(self, parameter: Any, partition: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the elements of a parameter, or of its state, of which this rank has the `partition`."""
        start, stop = self._range(parameter)
        shard = FlatShard(lambda: partition()[: stop - start], parameter.ds_shape, self.shards, self.rank)
        return cast(torch.Tensor, shard)

    def _range(self, parameter: Any) -> tuple[int, int]:
        """Return the first element of this rank's partition, and the one after its last, which padding may follow."""
        return chunk(parameter.ds_numel, self.world_size, self.rank)

    def _entries(self, names: Mapping[nn.Parameter, str]) -> Mapping[str, Entry]:
        parameters = (parameter for group in self._groups for parameter in group)
        return {names[p]: self.optimizer.state.get(self._flat(p), {}) for p in parameters}

    def _exported(
        self, parameter: nn.Parameter, name: str, key: str, value: object, keep: Keep | None
    ) -> torch.Tensor | float:
        if isinstance(value, torch.Tensor) and value.shape == self._flat(parameter).shape:  # one per element
            utils = self._deepspeed.utils
            if keep is as_held and self.shards:
                return self._shard(parameter, partial(utils.safe_get_local_optimizer_state, parameter, key))
            value = utils.safe_get_full_optimizer_state(parameter, key)
        return super()._exported(parameter, name, key, value, keep)

    def _set_state(self, parameter: Any, key: str, entry: Entry) -> None:
        if self._stage < 3:
            whole = cast(torch.Tensor, entry[key])
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, whole.contiguous(), key)
            return
        own = elements_of(entry, key, *self._range(parameter))
        part = own.new_zeros(parameter.ds_tensor.numel())
        part[: len(own)] = own
        self._deepspeed.utils.safe_set_local_optimizer_state(parameter, part, key)

    def _flat(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the tensor that this rank steps in place of `parameter` and its neighbours."""
        if self._stage < 3:
            number = next(i for i, group in enumerate(self._groups) if any(p is parameter for p in group))
            return cast(torch.Tensor, self._zero.single_partition_of_fp32_groups[number])
        number = self._zero.grad_position[self._zero.get_param_id(parameter)][0]
        return cast(torch.Tensor, self._zero.fp32_partitioned_groups_flat[number])

    @contextmanager
    def _plain_groups(self) -> Iterator[None]:
        """Return a context in which the optimizer's groups have the model's parameters instead of the flat ones."""
        flat = [group["params"] for group in self.optimizer.param_groups]
        for group, parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        try:
            yield
        finally:
            for group, parameters in zip(self.optimizer.param_groups, flat, strict=True):
                group["params"] = parameters


def _blank(flat: torch.Tensor, entry: Entry, group: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key in entry:
        if shape_of(entry, key):
            state[key] = torch.zeros_like(flat, requires_grad=False)
            continue
        value = state[key] = entry[key]
        if isinstance(value, torch.Tensor):
            state[key] = value.to(scalar_device(key, group, flat), copy=True)
    return state


def _is_plain(parameter: Any) -> bool:
    """Return whether a parameter's partition is in memory as it is: not on NVMe, and not quantized."""
    partition = parameter.ds_tensor
    return partition.final_location != "nvme" and not hasattr(partition, "ds_quant_scale")


def _refuse_uneven(entries: Mapping[str, Entry], names: list[str]) -> None:
    missing = [name for name in names if name not in entries]
    if missing:
        raise StrategyError(
            f"import_optimizer: the saved optimizer has no state for {missing[0]!r} but has some for others, and "
            f"DeepSpeed steps the parameters of a group together. Put the two into separate groups."
        )
    first, *others = entries
    for key in entries[first]:
        if shape_of(entries[first], key):
            continue
        value = entries[first][key]
        for other in others:
            if entries[other].get(key) != value:
                raise StrategyError(
                    f"import_optimizer: {key!r} is {value} for {first!r} and {entries[other].get(key)} for {other!r}; "
                    f"DeepSpeed steps the parameters of a group together. Put the two into separate groups."
                )
