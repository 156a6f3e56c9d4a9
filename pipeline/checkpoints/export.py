"""What a checkpoint exports: its evaluated weights, under the names before surgery too, and its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...common.errors import CheckpointError
from ...common.model_state import ModelState
from ...transforms import Transform
from ..models.factories import model_factory
from ..models.weights import weights_omitted
from ..training.build import rebuild_model
from .directory import CheckpointDir, best_of, find
from .fingerprint import rebuild_spec
from .format import UNLISTED, Checkpoint
from .state import restoring, with_averages
from .weights import Tensors, plain_state

ModelArg = str | Callable[..., nn.Module] | nn.Module | None


def chosen(place: Path, *, best: bool) -> Checkpoint:
    """Return the verified checkpoint at `place`; for the folder of a run, its newest complete one, or with `best` that
    of the best monitored metric."""
    if not best:
        return find(place)
    store = CheckpointDir(place / "checkpoints")
    # Checkpoints of an earlier run may be there until the first of this run is complete.
    checkpoint = best_of(list(store.of_run(store.run)))
    if checkpoint is None:
        raise CheckpointError(
            f"{store.folder} has no checkpoint of its run with a monitored metric. Remove best=True (--best), or pass "
            f"the path of a checkpoint."
        )
    checkpoint.verify()
    return checkpoint


def evaluated_state(checkpoint: Checkpoint) -> ModelState:
    """Return the tensors that the training evaluated at this point, under the names of the model after surgery."""
    with restoring(checkpoint):
        state = ModelState(dict(checkpoint.tensors("model")), dict(checkpoint.tensors(UNLISTED)))
        for kept in with_averages(checkpoint).values():
            for averages in kept.values():
                if isinstance(averages, Tensors):  # a custom method may also keep JSON values
                    _replace(state.weights, averages)
                    _replace(state.unlisted, averages)
        return state


def _replace(state: dict[str, torch.Tensor], averages: Tensors) -> None:
    """Replace tensors by their averages, in their own dtype: of half precision, averages are float32. One at a time, so
    that memory holds one copy of the weights."""
    for name in state.keys() & set(averages):
        state[name] = averages[name].to(state[name].dtype)


def plain_names(checkpoint: Checkpoint, model: ModelArg = None) -> ModelState:
    """Return the evaluated tensors by the names that they had before surgery of `model`; see `rebuild`."""
    state = evaluated_state(checkpoint)
    otherwise = "use names='trained' (--names trained), or FitResult.plain_state()"
    built, transforms = rebuild(checkpoint, state.weights, model, otherwise)
    with restoring(checkpoint):
        return plain_state(state, built, transforms)


def rebuild(
    checkpoint: Checkpoint, state: Mapping[str, torch.Tensor], model: ModelArg, otherwise: str
) -> tuple[nn.Module, tuple[Transform, ...]]:
    """Return the model of a checkpoint after surgery, with new weights, and its transforms in the plan's order. `model`
    is the one before surgery, which must fit the evaluated weights, `state`: a name, a factory, which is called with
    the options of the training, or a module; None: the one that the checkpoint names, for which nothing is imported.
    `otherwise`, for the message: what the caller can do if the model is unknown."""
    saved = checkpoint.content.description
    if saved is None:
        raise CheckpointError(
            f"{checkpoint.place} does not know how to build its model: its options, or a custom surgery, cannot be "
            f"written as JSON. {otherwise[:1].upper()}{otherwise[1:]}."
        )
    if isinstance(model, str):
        model = model_factory(model)
    with restoring(checkpoint):
        spec, transforms = rebuild_spec(saved, model, otherwise)
    if model is None:
        with restoring(checkpoint), weights_omitted():
            return rebuild_model(spec, transforms)[0], transforms
    with weights_omitted():
        built, _ = rebuild_model(spec, transforms)
    _check_fits(built, state, spec.model_name, checkpoint.path)
    return built, transforms


def _check_fits(model: nn.Module, state: Mapping[str, torch.Tensor], name: str, where: Path) -> None:
    own = {key: tuple(value.shape) for key, value in model.state_dict().items() if not is_lazy(value)}
    there = {
        key: tuple(value.shape) for key, value in state.items() if key in own or key not in model.state_dict()
    }
    for key in {**there, **own}:
        if own.get(key) != there.get(key):
            ours, theirs = (
                f"has it as {of[key]}" if key in of else "does not have it" for of in (own, there)
            )
            raise CheckpointError(
                f"{name} is not the model that was trained: of the weight {key!r}, {name} {ours}, and "
                f"{where} {theirs}. Pass the model of the training, before surgery."
            )
