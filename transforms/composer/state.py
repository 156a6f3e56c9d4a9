"""What an algorithm of Composer's sees here of its `State`, its `Logger` and its `ComposerModel`.

Composer's own classes (`Event`, `Time`, `Timestamp`, …) are taken from the modules that the algorithm's class has
imported; nothing of Composer is imported here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...common.errors import PlanError
from ..base import Loop


class NoPlace(PlanError, AttributeError):
    """Something of Composer's that has no place in Drivetrain's loop. `hasattr` returns False for it."""


class Unknown(Exception):
    """Raised when `match` reads what is known only in a run, while its events are determined before one."""


def brought(module: str) -> Any:
    """Return a module of Composer, which the import of an algorithm's class has imported.

    Raises:
        PlanError: if it is not there.
    """
    name = f"composer.{module}"
    if name not in sys.modules:
        raise PlanError(
            f"{name} is not imported, as it is by Composer 0.32. Install that version: pip install mosaicml."
        )
    return sys.modules[name]


class Steps:
    """What the algorithm's model computes with, in a run: the wrapped model and the loss. Never copied."""

    loop: Loop | None = None

    def __deepcopy__(self, memo: object) -> Steps:
        return self

    def forward(self, images: torch.Tensor) -> Any:
        """Return the outputs of the wrapped model."""
        if self.loop is None:
            raise NoPlace("state.model cannot compute at Event.INIT: it is not wrapped yet.")
        return self.loop.forward(images)

    def loss(self, outputs: Any, targets: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Return the training loss; with options such as `reduction`, the task's own."""
        if self.loop is None or self.loop.loss_function is None:
            raise NoPlace("state.model.loss is known only in a step of training.")
        function = self.loop.loss_function
        if args or options:
            task, function = getattr(function, "task", None), getattr(function, "base", function)
            outputs = outputs if task is None else task.outputs(outputs)
        return function(outputs, targets, *args, **options)


def composer_model(model: nn.Module) -> Any:
    """Return a `ComposerModel` whose attribute `module` is the model, as in Composer's `ComposerClassifier`.

    Its `forward` takes a batch `(images, targets)`, and its `loss` outputs and a batch. Both work in a step of
    training only: set `steps.loop`.
    """
    base: Any = brought("models").ComposerModel

    class Wrapped(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = model
            self.steps = Steps()

        def forward(self, batch: Any) -> Any:
            return self.steps.forward(batch[0])

        def loss(self, outputs: Any, batch: Any, *args: Any, **options: Any) -> Any:
            return self.steps.loss(outputs, batch[1], *args, **options)

    return Wrapped()


class DeviceView:
    """The device of a run, with the methods of Composer's `Device` that algorithms use."""

    def __init__(self, device: torch.device) -> None:
        self.name = "gpu" if device.type == "cuda" else device.type
        self._device = device

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def batch_to_device(self, batch: Any) -> Any:
        return type(batch)(each.to(self._device) for each in batch)

    def module_to_device(self, module: nn.Module) -> nn.Module:
        return module.to(self._device)


class SilentLogger:
    """Takes what an algorithm logs, and drops it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("log_"):
            return lambda *_, **__: None
        raise NoPlace(f"logger.{name} has no place in Drivetrain's loop, which drops what algorithms log.")


class Probe:
    """A point of a nominal run, for `match` before there is one: 10 epochs of 10 steps."""

    total_steps, steps_per_epoch, batch_size = 100, 10, 10

    def __init__(self, step: int) -> None:
        self.epoch, self.step, self.step_in_epoch = step // 10, step, step % 10


class StateView:
    """Composer's `State`, as far as Drivetrain's loop has its parts. Others raise `NoPlace`, which names them.

    Args:
        name: the algorithm's, for messages.
        model: a `composer_model`; None while events are determined.
        loop: the loop, or a `Probe`; None at `Event.INIT`.
        algorithm: the algorithm.
    """

    profiler = None
    auto_microbatching = False
    precision_config = None
    dataloader_label = "train"

    def __init__(self, name: str, model: Any, loop: Loop | Probe | None, algorithm: Any) -> None:
        vars(self).update(_name=name, _model=model, _loop=loop, callbacks=[], algorithms=[algorithm])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _AT_STEPS:
            return _AT_STEPS[name](self._at_step(name))
        if name in _IN_RUN:
            return _IN_RUN[name](self._in_run(name))
        raise NoPlace(
            f"{self._name} uses state.{name}, which has no place in Drivetrain's loop. It has: "
            f"{', '.join(sorted(_PARTS))}."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("batch", "outputs", "loss"):
            raise NoPlace(
                f"{self._name} replaces state.{name}, which Drivetrain's loop cannot take over. It takes batch, "
                "outputs and loss."
            )
        setattr(self._in_run(name), name, value)

    @property
    def model(self) -> Any:
        if self._model is None:
            raise Unknown
        return self._model

    def batch_get_item(self, key: Any) -> Any:
        """Return an item of the batch, by index or by a function."""
        return brought("utils.batch_helpers").batch_get(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Replace an item of the batch, by index or by a function."""
        loop = self._in_run("batch")
        loop.batch = brought("utils.batch_helpers").batch_set(loop.batch, key, value)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self._loop is None else [self._in_run("optimizers").engine.optimizer]

    @property
    def timestamp(self) -> Any:
        loop = self._loop
        if loop is None:
            return brought("core.time").Timestamp()
        return brought("core.time").Timestamp(
            epoch=loop.epoch,
            batch=loop.step,
            sample=loop.step * loop.batch_size,
            epoch_in_iteration=loop.epoch,
            batch_in_epoch=loop.step_in_epoch,
            sample_in_epoch=loop.step_in_epoch * loop.batch_size,
        )

    def get_elapsed_duration(self) -> Any:
        """Return the completed fraction of the run, in finished epochs, as Composer does for a duration in epochs."""
        duration = self.max_duration
        return self.timestamp.get(duration.unit) / duration

    def _at_step(self, name: str) -> Loop | Probe:
        if self._loop is None:
            raise NoPlace(
                f"{self._name} uses state.{name} at Event.INIT, where Drivetrain does not know it yet."
            )
        loop: Loop | Probe = self._loop
        return loop

    def _in_run(self, name: str) -> Loop:
        loop = self._at_step(name)
        if isinstance(loop, Probe):
            raise Unknown
        return loop


_AT_STEPS: dict[str, Callable[[Loop | Probe], Any]] = {
    "dataloader_len": lambda loop: brought("core.time").Time(loop.steps_per_epoch, "ba"),
    "max_duration": lambda loop: brought("core.time").Time(
        max(loop.total_steps // loop.steps_per_epoch, 1), "ep"
    ),
}
_IN_RUN: dict[str, Callable[[Loop], Any]] = {
    "batch": lambda loop: loop.batch,
    "outputs": lambda loop: loop.outputs,
    "loss": lambda loop: loop.loss,
    "dataloader": lambda loop: loop.loader,
    "train_dataloader": lambda loop: loop.loader,
    "device": lambda loop: DeviceView(loop.engine.device),
    "precision": lambda loop: _precision(loop),
    "_precision": lambda loop: _precision(loop),
    "rank_zero_seed": lambda loop: loop.seed,
    "seed": lambda loop: loop.seed + loop.engine.rank,
    "fsdp_enabled": lambda loop: loop.engine.sharded,
    "fsdp_config_version": lambda loop: 2 * loop.engine.sharded,
}
_PARTS = [
    name
    for name in (*vars(StateView), *_AT_STEPS, *_IN_RUN, "callbacks", "algorithms")
    if not name.startswith("_")
]


def _precision(loop: Loop) -> Any:
    names = {"fp32": "fp32", "bf16": "amp_bf16", "fp16": "amp_fp16"}
    return brought("core.precision").Precision(names[loop.precision])


@contextmanager
def host_seeded(words: Sequence[int]) -> Iterator[int]:
    """Seed the global generators of NumPy and Python inside the block, and restore their states after it. Yield a seed
    for torch's."""
    first, second, third = (int(word) for word in np.random.SeedSequence(words).generate_state(3, np.uint32))
    before = np.random.get_state(), random.getstate()  # noqa: NPY002
    np.random.seed(first)  # noqa: NPY002
    random.seed(second)
    try:
        yield third
    finally:
        np.random.set_state(before[0])  # noqa: NPY002
        random.setstate(before[1])


@contextmanager
def seeded(words: Sequence[int], device: torch.device) -> Iterator[None]:
    """Seed all global generators inside the block, and restore their states after it.

    Composer's algorithms draw from them. Seeded by the position, their numbers do not depend on what else draws.
    """
    cuda = [device] if device.type == "cuda" else []
    with host_seeded(words) as seed, torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


__all__ = [
    "NoPlace",
    "Probe",
    "SilentLogger",
    "StateView",
    "Unknown",
    "brought",
    "composer_model",
    "host_seeded",
    "seeded",
]
