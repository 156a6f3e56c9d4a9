"""Train in one process: on one device, the baseline of every other strategy, or on several GPUs with DataParallel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn

from ..common.errors import StrategyError
from .base import OptimizerFactory
from .common.placement import build_optimizer, put_on
from .devices import pick_device
from .engine import LocalEngine
from .launching.group import in_group
from .options import Options, PrepareOptions


@dataclass(frozen=True)
class Single:
    """One device, no process group.

    Args:
        device: `"cpu"`, `"cuda"` or `"cuda:1"`. Default None: CUDA if available, else the CPU.

    Example::

        >>> engine = Single("cpu").prepare(model, lambda params: torch.optim.SGD(params, lr=0.1), accumulate=2)
    """

    device: str | None = None

    name = "single"
    summary = "one device, CUDA if available, else the CPU"

    def check(self, devices: int) -> None:
        """Raise `StrategyError` unless `devices` is 1 and the device is available."""
        if devices != 1:
            raise StrategyError(f"strategy 'single' trains on 1 device, not {devices}. Use 'ddp' for more.")
        pick_device(self.device)

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Move `model` to the device and build the optimizer; see `base.Strategy.prepare`.

        Raises `StrategyError` inside a process group of several ranks, where each would train a separate model.
        """
        options = Options.of(given)
        if in_group() and dist.get_world_size() > 1:
            raise StrategyError(
                f"strategy 'single' was prepared on {dist.get_world_size()} ranks, and each would train a separate "
                f"model. Use 'ddp', or devices=1."
            )
        device = pick_device(self.device)
        model = put_on(model, device, options)
        return LocalEngine(model, build_optimizer(model, optimizer_factory), device, options)


class Copies(nn.DataParallel[Any]):
    """Its threads, one for each GPU, take over that autocast is on, but not its dtype: they would compute in fp16."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

        def within(replica: nn.Module, *args: Any, **named: Any) -> Any:
            with torch.autocast("cuda", dtype=dtype, enabled=enabled):
                return replica(*args, **named)

        return super().parallel_apply([partial(within, each) for each in replicas], inputs, kwargs)


class DPEngine(LocalEngine):
    @property
    def plain_model(self) -> nn.Module:
        return cast(nn.Module, self.model.module)


@dataclass(frozen=True)
class DP:
    """One process that copies the model to all GPUs for each batch, and splits the batch among them.

    For environments that cannot start processes; `ddp` is faster on the same GPUs. BatchNorm's statistics are those of
    the first GPU's images. Evaluation, which uses the plain model, runs on the first GPU. On the CPU nothing is split.

    Args:
        device: `"cpu"` or `"cuda"`. Default None: CUDA if available, else the CPU.
        device_ids: indices of the GPUs; the first holds the model and the gradients. Default None: all.

    Example::

        >>> pipeline = pipeline.distribute("dp", device_ids=(0, 1))
    """

    device: str | None = None
    device_ids: tuple[int, ...] | None = None

    name = "dp"
    summary = "one process that splits each batch among its GPUs (DataParallel)"

    def check(self, devices: int) -> None:
        """Raise `StrategyError` unless `devices` is 1 and the GPUs are available."""
        if devices != 1:
            raise StrategyError(
                f"strategy 'dp' is one process, so devices={devices} must be 1; it uses every visible GPU, or those of "
                f"device_ids. Use 'ddp' for {devices} processes."
            )
        self._devices()

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Move `model` to the first device, build the optimizer, and wrap; see `base.Strategy.prepare`.

        Raises `StrategyError` for `compile` on GPUs, and in a process group of several ranks.
        """
        options = Options.of(given)
        if in_group():
            self.check(dist.get_world_size())
        devices = self._devices()
        if options.compile and devices[0].type == "cuda":
            raise StrategyError(
                f"strategy 'dp': compile={options.compile!r} would run the first GPU's compiled module for every copy "
                f"of it. Remove it, or use 'ddp'."
            )
        if options.sync_batchnorm and len(devices) > 1:
            raise StrategyError(
                "strategy 'dp': sync_batchnorm=True needs one process per GPU. Use 'ddp', or leave it out."
            )
        model = put_on(model, devices[0], options)
        optimizer = build_optimizer(model, optimizer_factory)
        if devices[0].type == "cpu":
            return LocalEngine(model, optimizer, devices[0], options)
        return DPEngine(Copies(model, devices), optimizer, devices[0], options)

    def _devices(self) -> list[torch.device]:
        if self.device not in (None, "cpu", "cuda"):
            raise StrategyError(
                f"strategy 'dp': device={self.device!r} names a single device. Use 'cpu' or 'cuda', and device_ids."
            )
        if pick_device(self.device).type == "cpu":
            if self.device_ids is not None:
                raise StrategyError(
                    f"strategy 'dp': device_ids={self.device_ids} are GPUs, but it would train on the CPU. Remove them."
                )
            return [torch.device("cpu")]
        ids = range(torch.cuda.device_count()) if self.device_ids is None else self.device_ids
        if not ids:
            raise StrategyError("strategy 'dp': device_ids=() names no GPU. Leave it out to use all.")
        return [pick_device(f"cuda:{index}") for index in ids]
