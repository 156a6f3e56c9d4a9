"""An algorithm of Composer's in a run: its events, its state in checkpoints, and what it sees of Composer's `State`,
`Logger` and `ComposerModel`. Composer's own classes are taken from the modules that the algorithm's class has imported;
nothing of Composer is imported here."""

import copy
import random
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ...common.errors import PlanError
from ..base import Loop, Session
from ..common.losses import unreduced

EVENTS: dict[str, tuple[str, ...]] = {
    "on_epoch_start": ("fit_start", "iteration_start", "epoch_start"),
    "on_step_start": ("after_dataloader", "batch_start", "before_train_batch"),
    "before_forward": ("before_forward",),
    "before_loss": ("after_forward", "before_loss"),
    "before_backward": ("after_loss", "before_backward"),
    "after_backward": ("after_backward",),
    "before_step": ("after_train_batch",),
    "on_step_end": ("batch_end",),
    "after_epoch": ("epoch_end",),
    "on_fit_end": ("fit_end",),
}
"""The events of training, by the moment of the loop."""
EVALUATION = ("eval_before_all", "eval_start", "eval_end", "eval_after_all")
_TRAINING = [event for events in EVENTS.values() for event in events]
PLACES = ("init", *_TRAINING[:-1], *EVALUATION, _TRAINING[-1])
"""The events that have a place, in the order of a run."""
ELSEWHERE = ("eval_standalone_", "predict_")
"""Events outside of training, which a run never reaches, in Composer neither."""
WITHOUT_PLACE: dict[str, tuple[str, ...]] = {
    "fit_start": ("before_load", "after_load"),
    "after_dataloader": ("before_dataloader",),
    "batch_end": ("batch_checkpoint",),
    "epoch_end": ("epoch_checkpoint", "iteration_end", "iteration_checkpoint"),
    "eval_start": ("eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"),
}
"""The events of training without a place, by the one that Drivetrain reaches next to them."""


@dataclass
class Applied:
    algorithm: Any  # the copy that was applied at `Event.INIT`; runs begin with copies of it
    model: Any  # the `ComposerModel` that it got
    # Of weights before, by those after; new ones are left out, and those that vanished are None.
    names: dict[str, Any]


class ComposerSession(Session):
    """An algorithm in a run: `of` names its class, and `on_shards` the events at which shards are safe."""

    def __init__(self, of: str, model: nn.Module, applied: Applied, on_shards: Collection[str]) -> None:
        self._plain, self._model, self._on_shards = model, applied.model, on_shards
        self._name = f"Composer's {type(applied.algorithm).__name__}"
        self._algorithm = self._copy(applied.algorithm)
        self._event = brought("core.event").Event
        self._key = zlib.crc32(of.encode())
        self._loop: Loop | None = None
        # An error is raised before training, rather than at a checkpoint.
        encoded(self._name, self._algorithm.state_dict(), "state", {})

    def calls(self, moment: str) -> Iterator[Callable[[Any], Any]]:
        if moment in EVENTS:
            yield partial(self._at, moment)

    def after_epoch(self, loop: Loop) -> None:
        self._at("after_epoch", loop)

    def on_fit_end(self, loop: Loop) -> None:
        self._at("on_fit_end", loop)

    def _at(self, moment: str, loop: Loop) -> None:
        """Run all algorithms at a moment's events, in the first session: after something, in reverse order."""
        sessions = [session for session in loop.sessions if isinstance(session, ComposerSession)]
        if self is not sessions[0]:
            return
        for event in self._events(moment, loop):
            for session in reversed(sessions) if event.startswith("after_") else sessions:
                session._loop = session._model.steps.loop = loop
                session._run(event, session._algorithm)

    def _events(self, moment: str, loop: Loop) -> Sequence[str]:
        if moment == "on_step_start" and self._loop is None:
            raise PlanError(
                "Algorithms of Composer's follow the moments of train_epoch. Call that, instead of "
                "TrainingHooks.microbatches in a loop of your own."
            )
        if moment != "on_epoch_start":
            return EVENTS[moment]
        loop.microbatch = loop.engine.rank
        first, resumed = self._loop is None, loop.step_in_epoch > 0
        start = ("fit_start",) if loop.step else ("fit_start", "iteration_start")
        return (*(start if first else ()), *(() if resumed else ("epoch_start",)))

    @contextmanager
    def _evaluation(self, algorithm: Any) -> Iterator[None]:
        self._run("eval_before_all", algorithm)
        self._run("eval_start", algorithm)
        try:
            yield
        finally:
            self._run("eval_end", algorithm)
            self._run("eval_after_all", algorithm)

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._loop is None else self._evaluation(self._algorithm)

    def state_dict(self) -> dict[str, Any]:
        tensors: dict[str, Tensor] = {}
        tree = encoded(self._name, self._algorithm.state_dict(), "state", tensors)
        return {"values": [tree], "tensors": tensors, "averages": self._averages()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = next((p.device for p in self._plain.parameters()), torch.device("cpu"))
        self._algorithm.load_state_dict(decoded(state["values"][0], state["tensors"], device))

    @torch.no_grad()
    def _averages(self) -> dict[str, Tensor]:
        if self._loop is None:
            return {}
        state = StateView(self._name, self._model, self._loop, self._algorithm)
        if not self._algorithm.match(self._event("eval_start"), state):
            return {}
        values = {**dict(self._plain.named_parameters()), **dict(self._plain.named_buffers())}
        own = {name: value.detach().clone() for name, value in values.items()}
        with self._evaluation(self._copy(self._algorithm)):
            found = {name: value.detach().clone() for name, value in values.items()}
        for name, value in values.items():
            value.copy_(own[name])
        return {} if all(torch.equal(own[name], found[name]) for name in own) else found

    def _copy(self, algorithm: Any) -> Any:
        return copy.deepcopy(algorithm, {id(self._model): self._model, id(self._plain): self._plain})

    def _run(self, event: str, algorithm: Any) -> None:
        loop = self._loop
        assert loop is not None
        state = StateView(self._name, self._model, loop, algorithm)
        for absent in WITHOUT_PLACE.get(event, ()):
            if algorithm.match(self._event(absent), state):
                raise no_place(self._name, (absent,))
        here = self._event(event)
        if not algorithm.match(here, state):
            return
        if loop.engine.sharded and event not in self._on_shards:
            raise PlanError(
                f"{self._name} runs at Event.{here.name} on shards of the model, which was not known before. Declare "
                "that it is safe there, with from_composer(…, safe_with=(…)), or distribute with 'ddp'."
            )
        position = [loop.seed, loop.step, loop.microbatch, self._key, PLACES.index(event)]
        with seeded(position, loop.engine.device):
            algorithm.apply(here, state, SilentLogger())


def no_place(name: str, events: Sequence[str]) -> PlanError:
    listed = ", ".join(f"Event.{each.upper()}" for each in events)
    return PlanError(
        f"{name} runs at {listed}, which has no place in Drivetrain's loop. It has: "
        f"{', '.join(each.upper() for each in PLACES)}. Leave it out, or let it match one of these."
    )


def encoded(name: str, value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": [path, value.device.type]}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        items = [[key, encoded(name, each, f"{path}/{key}", tensors)] for key, each in value.items()]
        return {"dict": items}
    if type(value) in (list, tuple):
        parts = [encoded(name, each, f"{path}/{number}", tensors) for number, each in enumerate(value)]
        return {type(value).__name__: parts}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise PlanError(
        f"{name}: {path} of its state_dict() is {value!r:.80}, a {type(value).__name__}, which a checkpoint cannot "
        "contain. Return tensors, numbers, texts, None, and dicts and lists of them."
    )


def decoded(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        path, where = content
        return tensors[path].to("cpu" if where == "cpu" else device)
    if kind == "dict":
        return {key: decoded(each, tensors, device) for key, each in content}
    parts = [decoded(each, tensors, device) for each in content]
    return tuple(parts) if kind == "tuple" else parts


class NoPlace(PlanError, AttributeError):
    """Something of Composer's that has no place in Drivetrain's loop. `hasattr` returns False for it."""


class Unknown(Exception):
    """`match` has read what is known only in a run, while its events are determined before one."""


def brought(module: str) -> Any:
    """Return a module of Composer, which the import of an algorithm's class has imported."""
    name = f"composer.{module}"
    if name not in sys.modules:
        raise PlanError(
            f"{name} is not imported, as it is by Composer 0.32. Install that version: pip install mosaicml."
        )
    return sys.modules[name]


class Steps:
    """What the algorithm's model computes with, in a run: the wrapped model and the loss. Never copied."""

    loop: Loop | None = None

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def forward(self, images: Tensor) -> Any:
        if self.loop is None:
            raise NoPlace("state.model cannot compute at Event.INIT: it is not wrapped yet.")
        return self.loop.forward(images)

    def loss(self, outputs: Any, targets: Tensor, *args: Any, **options: Any) -> Any:
        """Return the training loss; with options such as `reduction`, the task's own."""
        if self.loop is None or self.loop.loss_function is None:
            raise NoPlace("state.model.loss is known only in a step of training.")
        function = self.loop.loss_function
        if args or options:
            task, function = getattr(function, "task", None), getattr(function, "base", function)
            outputs = outputs if task is None else task.outputs(outputs)
            if not args and options == {"reduction": "none"} and (each := unreduced(function)) is not None:
                return each(outputs, targets)  # a module does not take it as an argument
        return function(outputs, targets, *args, **options)


def composer_model(model: nn.Module) -> Any:
    """Return a `ComposerModel` whose attribute `module` is the model, as in Composer's `ComposerClassifier`. Its
    `forward` and `loss` work in a step of training only: set `steps.loop`."""
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
    def __init__(self, device: torch.device) -> None:
        self.name = "gpu" if device.type == "cuda" else device.type
        self._device = device

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def batch_to_device(self, batch: Any) -> Any:
        return type(batch)(each.to(self._device) for each in batch)

    def module_to_device(self, module: nn.Module) -> nn.Module:
        return module.to(self._device)


class SilentLogger:
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
    """Composer's `State`, as far as Drivetrain's loop has its parts. `name` is the algorithm's, for messages. `model`
    is None while events are determined, and `loop` then a `Probe`; it is None at `Event.INIT`."""

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
        return brought("utils.batch_helpers").batch_get(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
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
            epoch=loop.epoch, epoch_in_iteration=loop.epoch,
            batch=loop.step, batch_in_epoch=loop.step_in_epoch,
            sample=loop.step * loop.batch_size, sample_in_epoch=loop.step_in_epoch * loop.batch_size,
        )  # fmt: skip

    def get_elapsed_duration(self) -> Any:
        """Return the completed fraction of the run, in finished epochs, as Composer does for a duration in epochs."""
        duration = self.max_duration
        return self.timestamp.get(duration.unit) / duration

    def _at_step(self, name: str) -> Loop | Probe:
        if self._loop is None:
            raise NoPlace(f"{self._name} uses state.{name} at Event.INIT, where Drivetrain does not know it yet.")
        loop: Loop | Probe = self._loop
        return loop

    def _in_run(self, name: str) -> Loop:
        loop = self._at_step(name)
        if isinstance(loop, Probe):
            raise Unknown
        return loop


_AT_STEPS: dict[str, Callable[[Loop | Probe], Any]] = {
    "dataloader_len": lambda at: brought("core.time").Time(at.steps_per_epoch, "ba"),
    "max_duration": lambda at: brought("core.time").Time(max(at.total_steps // at.steps_per_epoch, 1), "ep"),
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
_ALL = (*vars(StateView), *_AT_STEPS, *_IN_RUN, "callbacks", "algorithms")
_PARTS = [name for name in _ALL if not name.startswith("_")]


def _precision(loop: Loop) -> Any:
    amp = "" if loop.precision == "fp32" else "amp_"
    return brought("core.precision").Precision(f"{amp}{loop.precision}")


@contextmanager
def seeded(words: Sequence[int], device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators, from which Composer's algorithms draw, inside the block, and restore their states
    after it: those of NumPy and Python and, with a device, torch's."""
    first, second, third = (int(word) for word in np.random.SeedSequence(words).generate_state(3, np.uint32))
    before = np.random.get_state(), random.getstate()  # noqa: NPY002
    np.random.seed(first)  # noqa: NPY002
    random.seed(second)
    cuda = [device] if device is not None and device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda, enabled=device is not None):
            if device is not None:
                torch.default_generator.manual_seed(third)
            for each in cuda:
                with torch.cuda.device(each):
                    torch.cuda.manual_seed(third)
            yield
    finally:
        np.random.set_state(before[0])  # noqa: NPY002
        random.setstate(before[1])
