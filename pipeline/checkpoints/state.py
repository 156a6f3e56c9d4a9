"""What a checkpoint holds: the state of a run as tensors and JSON values. Captured here, each rank's share on the CPU,
and restored here, under the same names."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointError, DrivetrainError
from ...strategies import Engine
from ...strategies.common.optimizer_state import Entry, OptimizerState
from ...strategies.engine import copied
from ...transforms.common.tensors import buffers_kept
from ..telemetry.history import Epoch, History
from ..training.build import Built
from ..training.hooks import TrainingHooks
from .format import OWN, Checkpoint, Part, Tensors

AVERAGE = "::"
"""Stands between a method or a parameter and what is kept of it in a tensor's name."""


def capture_state(built: Built) -> tuple[Part, dict[str, Any]]:
    """Return this rank's part of the state of model, optimizer, hooks and random numbers, and the JSON values that
    are the run's as a whole, its position included. Every rank must call it.

    Buffers that each rank keeps for itself (BatchNorm's running statistics, and averages of them) are saved as
    those of all ranks together (`Engine.pool_buffers`), from which any number of ranks resumes, and also as each
    rank's own, with which the same number resumes bit for bit.
    """
    engine, hooks = built.engine, built.hooks
    keep, writers = _division(engine)
    own = (
        _own_buffers(engine) | _randomness(engine) | {"loss": hooks.state.meter.total.detach().cpu().clone()}
    )
    with buffers_kept(engine.plain_model):
        engine.sync_buffers()
        model = engine.export_state(keep)
    optimizer = engine.export_optimizer(keep)
    averages, own_averages, values = _methods(engine, hooks, keep)
    tensors, numbers = _flat(optimizer.entries)
    shared = {"model": model, "optimizer": tensors, "methods": averages}
    part = Part(
        {**(shared if engine.rank < writers else {}), OWN: own | own_averages},
        {"random": _python_randomness(), "numbers": numbers},
        writers,
    )
    whole = {
        "optimizer": {"groups": optimizer.groups, "loss_scale": dict(optimizer.loss_scale)},
        "methods": values,
        "loader": built.train.state_dict(),
        **hooks.state.state_dict(engine),
        "parameters": sorted(name for name, _ in engine.plain_model.named_parameters()),
    }
    return part, whole


def shares(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which rank writes what, so that all write about the same number of bytes; the same on every rank."""
    loads, homes = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        home = loads.index(min(loads))
        loads[home] += sizes[name]
        homes[name] = home
    return homes


def _division(engine: Engine) -> tuple[Any, int]:
    """What this rank is to keep of each export, and how many ranks write: all where parameters are divided."""
    if not engine.sharded:
        return (lambda _: engine.rank == 0), 1
    homes = shares(engine.sizes(), engine.world_size)
    return (lambda name: homes.get(name, 0) == engine.rank), engine.world_size


def _own_buffers(engine: Engine) -> dict[str, torch.Tensor]:
    if engine.world_size == 1:
        return {}
    buffers = engine.plain_model.named_buffers()
    return {f"buffer{AVERAGE}{name}": copied(b) for name, b in buffers if b.is_floating_point()}


def _randomness(engine: Engine) -> dict[str, torch.Tensor]:
    found = {"random.cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(engine.device)
    return found


def _python_randomness() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 — the global one, which models may use
    return {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}


def _methods(
    engine: Engine, hooks: TrainingHooks, keep: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """The averages that this rank writes; those that are its own; and the JSON values, in which
    `{"tensors": prefix}` stands for averages."""
    parameters = {name for name, _ in engine.plain_model.named_parameters()}
    whole: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for method, state in hooks.state_dict(engine).items():
        values[method] = {}
        for key, value in state.items():
            if not isinstance(value, dict) or not value:
                values[method][key] = value
                continue
            prefix = f"{method}.{key}{AVERAGE}"
            values[method][key] = {"tensors": prefix}
            buffers = {name: tensor for name, tensor in value.items() if name not in parameters}
            pooled = engine.pool_buffers(buffers) if engine.world_size > 1 else {}
            own |= {prefix + name: copied(buffers[name]) for name in pooled}
            for name, tensor in value.items():
                gathered = pooled[name] if name in pooled else engine.gather(tensor)
                if keep(name):
                    whole[prefix + name] = copied(gathered)
    return whole, own, values


def _flat(entries: Mapping[str, Entry]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, float]]]:
    """An optimizer's entries as tensors by one name each, and the numbers among them."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, float]] = {}
    for name, entry in entries.items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}{AVERAGE}{key}"] = value
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def all_finite(part: Part, parameters: Iterable[str]) -> bool:
    """Whether the parameters in it are numbers that a training can go on from."""
    model = part.tensors.get("model", {})
    return all(bool(model[name].isfinite().all()) for name in parameters if name in model)


def load_engine(checkpoint: Checkpoint, engine: Engine) -> None:
    """Gives the engine the weights and the optimizer's state.

    Raises:
        CheckpointError: if they are those of another model or optimizer.
    """
    with restoring(checkpoint):
        engine.import_state(checkpoint.tensors("model"))
        numbers = {name: entry for own in checkpoint.state["ranks"] for name, entry in own["numbers"].items()}
        entries = Entries(checkpoint.tensors("optimizer"), numbers)
        plain = checkpoint.state["optimizer"]
        engine.import_optimizer(OptimizerState(plain["groups"], entries, plain["loss_scale"]))


def load_methods(checkpoint: Checkpoint, built: Built) -> None:
    """Gives the methods what they have kept, and this rank the buffers of its own, after `TrainingHooks.begin`.

    Raises:
        CheckpointError: if the checkpoint does not hold them.
    """
    engine = built.engine
    with restoring(checkpoint):
        own: Mapping[str, torch.Tensor] = own_tensors(checkpoint, engine) or {}
        values = with_averages(checkpoint.state["methods"], checkpoint.tensors("methods"), own)
        built.hooks.load_state_dict(engine, values)
        with torch.no_grad():
            for name, buffer in engine.plain_model.named_buffers():
                if f"buffer{AVERAGE}{name}" in own:
                    buffer.copy_(own[f"buffer{AVERAGE}{name}"])


def load_position(checkpoint: Checkpoint, built: Built) -> None:
    """Continue at the checkpoint's position, after `TrainingHooks.begin`."""
    engine = built.engine
    with restoring(checkpoint):
        own = own_tensors(checkpoint, engine)
        total = torch.tensor(float(checkpoint.state["meter"]["total"])) if own is None else own["loss"]
        built.hooks.state.load_state_dict(checkpoint.state, total.to(engine.device))


def load_history(checkpoint: Checkpoint) -> History:
    """The epochs that are finished, and the facts about the processes that trained them."""
    with restoring(checkpoint):
        saved = dict(checkpoint.state["history"])
        return History([Epoch(**epoch) for epoch in saved.pop("epochs")], saved)


def load_randomness(checkpoint: Checkpoint, engine: Engine, seed: int) -> None:
    """Sets the global random states of torch, numpy and Python: this rank's own; with another number of ranks,
    those that follow from (seed, step, rank)."""
    with restoring(checkpoint):
        own = own_tensors(checkpoint, engine)
        if own is None:
            key = np.random.SeedSequence([seed, checkpoint.state["step"], engine.rank])
            first, second, third = (int(word) for word in key.generate_state(3, np.uint32))
            torch.manual_seed(first)
            np.random.seed(second)  # noqa: NPY002 — the global one, which models may use
            random.seed(third)
            return
        torch.set_rng_state(own["random.cpu"])
        if engine.device.type == "cuda" and "random.cuda" in own:
            torch.cuda.set_rng_state(own["random.cuda"], engine.device)
        saved = checkpoint.state["ranks"][engine.rank]["random"]
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = saved["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def own_tensors(checkpoint: Checkpoint, engine: Engine) -> Tensors | None:
    """What this rank has saved of its own; None if the checkpoint is of another number of ranks."""
    if len(checkpoint.state["ranks"]) != engine.world_size:
        return None
    return checkpoint.tensors(OWN, engine.rank)


@contextmanager
def restoring(checkpoint: Checkpoint) -> Iterator[None]:
    """Whatever does not fit, or is not there, as a CheckpointError that names the checkpoint.

    A JSON value or a tensor that is missing shows as one of Python's own errors.
    """
    try:
        yield
    except CheckpointError:
        raise
    except DrivetrainError as error:
        raise CheckpointError(f"The checkpoint {checkpoint.path} is of another run: {error}") from error
    except (
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
        AttributeError,
        MemoryError,
    ) as error:
        raise CheckpointError(
            f"The checkpoint {checkpoint.path} does not hold what it must ({type(error).__name__}: {error}). Use "
            f"another, or start from scratch with resume=None."
        ) from error


@contextmanager
def global_randomness_kept() -> Iterator[None]:
    """The random states of numpy and Python are, after the block, as before."""
    before = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before[0])  # noqa: NPY002
        random.setstate(before[1])


class Entries(Mapping[str, Entry]):
    """An optimizer's entries by parameter; tensors are read when one is asked for."""

    def __init__(self, tensors: Tensors, numbers: Mapping[str, Mapping[str, float]]) -> None:
        self._tensors, self._numbers = tensors, numbers
        self._names: dict[str, list[str]] = {name: [] for name in numbers}
        for full in tensors:
            self._names.setdefault(full.rpartition(AVERAGE)[0], []).append(full)

    def __getitem__(self, name: str) -> Entry:
        found = {full.rpartition(AVERAGE)[2]: self._tensors[full] for full in self._names[name]}
        return {**found, **self._numbers.get(name, {})}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Averages(Mapping[str, torch.Tensor]):
    """What a method has kept, by parameter; read when it is asked for. What is this rank's own goes first."""

    def __init__(self, prefix: str, shared: Tensors, own: Mapping[str, torch.Tensor]) -> None:
        self._prefix, self._shared, self._own = prefix, shared, own
        self._names = [name.removeprefix(prefix) for name in shared if name.startswith(prefix)]

    def __getitem__(self, name: str) -> torch.Tensor:
        full = self._prefix + name
        return self._own[full] if full in self._own else self._shared[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def with_averages(
    values: Mapping[str, Any], shared: Tensors, own: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """The state of the methods, with averages where `{"tensors": prefix}` stands for them."""
    return {
        method: {
            key: Averages(value["tensors"], shared, own)
            if isinstance(value, dict) and "tensors" in value
            else value
            for key, value in state.items()
        }
        for method, state in values.items()
    }
