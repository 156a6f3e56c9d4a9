"""Training in one process on several GPUs: torch's DataParallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack, cast

import torch
import torch.distributed as dist
from torch import nn

from ..errors import StrategyError
from .base import OptimizerFactory
from .common.placement import build_optimizer, put_on
from .devices import pick_device
from .engine import LocalEngine
from .options import Options, PrepareOptions


class DPEngine(LocalEngine):
    """A model wrapped by DataParallel; see `base.Engine` for what each method promises."""

    @property
    def plain_model(self) -> nn.Module:
        """The user's module, inside the wrapper, on the first device."""
        return cast(nn.Module, self.model.module)


@dataclass(frozen=True)
class DP:
    """One process that copies the model to all GPUs for each batch, and divides the batch among them.

    There for what cannot start processes; `ddp` is faster on the same GPUs. BatchNorm's statistics are those of
    the first GPU's images. Evaluation, which uses the plain model, is on the first GPU. On the CPU it is one
    device, and there is nothing to divide.

    Args:
        device: `"cpu"` or `"cuda"`; None takes CUDA if there is any, else the CPU.
        device_ids: indices of the GPUs; the first holds the model and the gradients. Default: all that this
            process sees.
    """

    device: str | None = None
    device_ids: tuple[int, ...] | None = None

    name = "dp"
    summary = "one process that divides each batch among its GPUs (DataParallel)"

    def check(self, devices: int) -> None:
        """Raises StrategyError unless `devices` is 1 and the GPUs are here."""
        if devices != 1:
            raise StrategyError(
                f"strategy 'dp' is one process, so devices={devices} must be 1; it takes every GPU that it sees, "
                f"or those of device_ids. Use 'ddp' for {devices} processes."
            )
        self._devices()

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Moves `model` to the first device, builds the optimizer, wraps; see `base.Strategy.prepare`.

        Raises:
            StrategyError: for an argument that means nothing, `compile` on GPUs, a device that is not here, or
                inside a process group of several ranks, where each would train a model of its own.
        """
        options = Options.of(given)
        if dist.is_available() and dist.is_initialized():
            self.check(dist.get_world_size())
        devices = self._devices()
        if options.compile and devices[0].type == "cuda":
            raise StrategyError(
                f"strategy 'dp': compile={options.compile!r} would run the first GPU's compiled module for every copy "
                f"of it; leave it out, or use 'ddp'."
            )
        model = put_on(model, devices[0], options)
        optimizer = build_optimizer(model, optimizer_factory)
        if devices[0].type == "cpu":
            return LocalEngine(model, optimizer, devices[0], options)
        return DPEngine(nn.DataParallel(model, devices), optimizer, devices[0], options)

    def _devices(self) -> list[torch.device]:
        if self.device not in (None, "cpu", "cuda"):
            raise StrategyError(
                f"strategy 'dp': device={self.device!r} is not one for all; use 'cpu' or 'cuda', and device_ids."
            )
        if pick_device(self.device).type == "cpu":
            if self.device_ids is not None:
                raise StrategyError(
                    f"strategy 'dp': device_ids={self.device_ids} are GPUs, and it would train on the CPU; leave "
                    f"them out."
                )
            return [torch.device("cpu")]
        ids = range(torch.cuda.device_count()) if self.device_ids is None else self.device_ids
        if not ids:
            raise StrategyError("strategy 'dp': device_ids=() names no GPU; leave it out to take all.")
        return [pick_device(f"cuda:{index}") for index in ids]
