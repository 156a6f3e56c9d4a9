"""What a checkpoint holds: the state of a run as tensors and JSON values, each rank's share of it on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ...strategies import Engine
from ...strategies.common.optimizer_state import Entry
from ...strategies.engine import copied
from ...transforms.common.tensors import buffers_kept
from ..training.build import Built
from ..training.hooks import TrainingHooks
from .format import OWN, Part

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
    if not engine.divided:
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
