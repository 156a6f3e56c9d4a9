"""What a checkpoint holds: the state of a run as tensors and JSON values. Captured here, each rank's share on the CPU,
and restored here, under the same names."""

from __future__ import annotations

import random
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import CheckpointError, DrivetrainError
from ...strategies import Engine
from ...strategies.common.optimizer_state import OptimizerState
from ...strategies.engine import copied
from ...transforms.common.tensors import buffers_kept
from ..telemetry.state import EpochMeter
from ..training.build import Built
from ..training.hooks import TrainingHooks
from .content import TENSORS, CheckpointContent, OptimizerContent, RankContent
from .format import OWN, Checkpoint, Part, Tensors, grouped, key_of


def capture_state(built: Built, **about: Any) -> tuple[Part, CheckpointContent]:
    """Return this rank's part of a checkpoint, and the content that all ranks share. Every rank must call it.

    Buffers that each rank keeps for itself (BatchNorm's running statistics, and averages of them) are saved as
    those of all ranks together (`Engine.pool_buffers`), from which any number of ranks resumes, and also as each
    rank's own, with which the same number resumes bit for bit.

    Args:
        built: what trains.
        about: the fields of the content that `built` does not know.
    """
    engine, hooks, position = built.engine, built.hooks, built.hooks.state
    keep, writers = _division(engine)
    own = _own_buffers(engine) | _randomness(engine) | {"loss": position.meter.total.detach().cpu().clone()}
    with buffers_kept(engine.plain_model):
        engine.sync_buffers()
        model = engine.export_state(keep)
    optimizer = engine.export_optimizer(keep)
    averages, own_averages, values = _methods(engine, hooks, keep)
    moments: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, float]] = {}
    for name, entry in optimizer.entries.items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                moments[key_of(name, key)] = value
            else:
                numbers.setdefault(name, {})[key] = value
    shared = {"model": model, "optimizer": moments, "methods": averages}
    part = Part(
        {**(shared if engine.rank < writers else {}), OWN: own | own_averages},
        RankContent(_python_randomness(), numbers),
        writers,
    )
    return part, CheckpointContent(
        epoch=position.epoch,
        step=position.step,
        step_in_epoch=position.meter.steps,
        meter=position.meter.state_dict(engine),
        optimizer=OptimizerContent(optimizer.groups, dict(optimizer.loss_scale)),
        methods=values,
        loader=built.train.state_dict(),
        **about,
    )


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
    return {key_of("buffer", name): copied(b) for name, b in buffers if b.is_floating_point()}


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
    """Return the averages that this rank writes, those of its own, and the JSON values with `TENSORS` for averages."""
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
            what = f"{method}.{key}"
            values[method][key] = TENSORS
            buffers = {name: tensor for name, tensor in value.items() if name not in parameters}
            pooled = engine.pool_buffers(buffers) if engine.world_size > 1 else {}
            own |= {key_of(what, name): copied(buffers[name]) for name in pooled}
            for name, tensor in value.items():
                gathered = pooled[name] if name in pooled else engine.gather(tensor)
                if keep(name):
                    whole[key_of(what, name)] = copied(gathered)
    return whole, own, values


def all_finite(part: Part, model: nn.Module) -> bool:
    """Return whether the model's parameters in the part are all finite."""
    saved = part.tensors.get("model", {})
    return all(bool(saved[name].isfinite().all()) for name, _ in model.named_parameters() if name in saved)


def load_engine(checkpoint: Checkpoint, engine: Engine) -> None:
    """Gives the engine the weights and the optimizer's state.

    Raises:
        CheckpointError: if they are those of another model or optimizer.
    """
    with restoring(checkpoint):
        engine.import_state(checkpoint.tensors("model"))
        entries: dict[str, Any] = dict(grouped(checkpoint.tensors("optimizer")))
        for rank in checkpoint.content.ranks:
            for name, numbers in rank.numbers.items():
                entries[name] = ChainMap(numbers, entries.get(name, {}))
        plain = checkpoint.content.optimizer
        engine.import_optimizer(OptimizerState(plain.groups, entries, plain.loss_scale))


def load_hooks(checkpoint: Checkpoint, built: Built) -> None:
    """Restore the position, the states of the methods, and this rank's own buffers, after `TrainingHooks.begin`.

    Raises:
        CheckpointError: if the checkpoint does not hold them.
    """
    engine, content, state = built.engine, checkpoint.content, built.hooks.state
    with restoring(checkpoint):
        own = own_tensors(checkpoint, engine)
        built.hooks.load_state_dict(engine, with_averages(checkpoint, own))
        buffers: Mapping[str, torch.Tensor] = {} if own is None else grouped(own).get("buffer", {})
        with torch.no_grad():
            for name, buffer in engine.plain_model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        total = torch.tensor(float(content.meter["total"])) if own is None else own["loss"]
        state.epoch, state.step = content.epoch, content.step
        state.meter = EpochMeter(**{**content.meter, "total": total.to(engine.device)})


def load_randomness(checkpoint: Checkpoint, engine: Engine, seed: int) -> None:
    """Sets the global random states of torch, numpy and Python: this rank's own; with another number of ranks,
    those that follow from (seed, step, rank)."""
    with restoring(checkpoint):
        own = own_tensors(checkpoint, engine)
        if own is None:
            key = np.random.SeedSequence([seed, checkpoint.content.step, engine.rank])
            first, second, third = (int(word) for word in key.generate_state(3, np.uint32))
            torch.manual_seed(first)
            np.random.seed(second)  # noqa: NPY002 — the global one, which models may use
            random.seed(third)
            return
        torch.set_rng_state(own["random.cpu"])
        if engine.device.type == "cuda" and "random.cuda" in own:
            torch.cuda.set_rng_state(own["random.cuda"], engine.device)
        saved = checkpoint.content.ranks[engine.rank].random
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = saved["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def own_tensors(checkpoint: Checkpoint, engine: Engine) -> Tensors | None:
    """What this rank has saved of its own; None if the checkpoint is of another number of ranks."""
    if len(checkpoint.content.ranks) != engine.world_size:
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


def with_averages(checkpoint: Checkpoint, own: Tensors | None = None) -> dict[str, dict[str, Any]]:
    """Return the states of the methods with their averages in place of `TENSORS`; those in `own` go first."""
    averages = grouped(checkpoint.tensors("methods"), *([] if own is None else [own]))
    return {
        method: {
            key: averages[f"{method}.{key}"] if value == TENSORS else value for key, value in state.items()
        }
        for method, state in checkpoint.content.methods.items()
    }
