"""An algorithm of Composer's in a run: its events, and its state in checkpoints."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.errors import PlanError
from ..base import Loop, Session
from .state import SilentLogger, StateView, brought, seeded

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
    """An algorithm after `Event.INIT`.

    Attributes:
        algorithm: the copy that was applied; runs begin with copies of it.
        model: the `ComposerModel` that it got.
        names: the names before, by the names after; a name that has no one before is left out, and None is before for a
            weight that vanished.
    """

    algorithm: Any
    model: Any
    names: dict[str, Any]


class ComposerSession(Session):
    """An algorithm in a run.

    Args:
        of: the name of its class.
        model: the model.
        applied: the algorithm after `Event.INIT`.
        on_shards: the events at which it may run if the model is sharded.
    """

    def __init__(self, of: str, model: nn.Module, applied: Applied, on_shards: Collection[str]) -> None:
        self._plain, self._model, self._on_shards = model, applied.model, on_shards
        self._name = f"Composer's {type(applied.algorithm).__name__}"
        self._algorithm = self._copy(applied.algorithm)
        self._event = brought("core.event").Event
        self._key = zlib.crc32(of.encode())
        self._loop: Loop | None = None
        encoded(
            self._name, self._algorithm.state_dict(), "state", {}
        )  # before training, rather than at a checkpoint

    def calls(self, moment: str) -> Iterator[Callable[[Any], Any]]:
        if moment in EVENTS:
            yield partial(self._at, moment)

    def after_epoch(self, loop: Loop) -> None:
        self._at("after_epoch", loop)

    def on_fit_end(self, loop: Loop) -> None:
        self._at("on_fit_end", loop)

    def _at(self, moment: str, loop: Loop) -> None:
        """Run all algorithms of the run at the events of a moment: the first of their sessions does, because at an
        event after something they run in reverse order."""
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

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context between the algorithm's events of evaluation."""
        if self._loop is None:  # the run has not begun
            yield
            return
        with self._evaluation(self._algorithm):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state, and the weights that it evaluates if they are not those in training."""
        tensors: dict[str, torch.Tensor] = {}
        tree = encoded(self._name, self._algorithm.state_dict(), "state", tensors)
        return {"values": [tree], "tensors": tensors, "averages": self._averages()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the algorithm's state."""
        device = next((p.device for p in self._plain.parameters()), torch.device("cpu"))
        self._algorithm.load_state_dict(decoded(state["values"][0], state["tensors"], device))

    @torch.no_grad()
    def _averages(self) -> dict[str, torch.Tensor]:
        """Return the weights by name that the algorithm puts into the model for evaluations."""
        loop, event = self._loop, self._event("eval_start")
        if loop is None or not self._algorithm.match(
            event, StateView(self._name, self._model, loop, self._algorithm)
        ):
            return {}
        values = {**dict(self._plain.named_parameters()), **dict(self._plain.named_buffers())}
        own = {name: value.detach().clone() for name, value in values.items()}
        with self._evaluation(self._copy(self._algorithm)):
            found = {name: value.detach().clone() for name, value in values.items()}
        for name, value in values.items():
            value.copy_(own[name])
        return {} if all(torch.equal(own[name], found[name]) for name in own) else found

    def _copy(self, algorithm: Any) -> Any:
        """Return a copy that refers to the same model."""
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
        with seeded(
            [loop.seed, loop.step, loop.microbatch, self._key, PLACES.index(event)], loop.engine.device
        ):
            algorithm.apply(here, state, SilentLogger())


def no_place(name: str, events: Sequence[str]) -> PlanError:
    """Return the error for events without a place."""
    listed = ", ".join(f"Event.{each.upper()}" for each in events)
    return PlanError(
        f"{name} runs at {listed}, which has no place in Drivetrain's loop. It has: "
        f"{', '.join(each.upper() for each in PLACES)}. Leave it out, or let it match one of these."
    )


def encoded(name: str, value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a state as JSON values, with its tensors in `tensors`."""
    if isinstance(value, torch.Tensor):
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


def decoded(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
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


__all__ = ["ELSEWHERE", "PLACES", "Applied", "ComposerSession", "no_place"]
