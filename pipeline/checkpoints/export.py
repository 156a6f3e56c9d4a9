"""Export a plain state dict from a checkpoint, for use without Drivetrain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...errors import CheckpointError, require_suffix
from ..models.factories import model_factory
from ..training.build import rebuild_model
from .directory import CheckpointDir, best_of, find
from .fingerprint import rebuild_spec
from .format import Checkpoint, Tensors
from .state import restoring, with_averages
from .weights import plain_state, save_weights

Names = Literal["plain", "trained"]


def export(
    place: str | Path,
    out: str | Path,
    *,
    names: Names = "plain",
    best: bool = False,
    model: str | Callable[..., nn.Module] | nn.Module | None = None,
) -> Checkpoint:
    """Write the evaluated weights as one safetensors file: averages (EMA, SWA) if there are any.

    Args:
        place: a checkpoint, or the folder of a run, which stands for its newest complete checkpoint.
        out: the `.safetensors` file to write; an existing file is replaced.
        names: `"plain"`: the parameter names of the model before surgery, which can load the file with
            `load_state_dict`. Tensors that a surgery adds and the plain model does not have keep their names, see
            `Transform.to_plain`. `"trained"`: the names of the model after surgery.
        best: for the folder of a run, take the checkpoint with the best monitored metric instead.
        model: for plain names, the model before surgery, as `Pipeline` takes it: `"module:factory"`, a factory, called
            with the options that it was trained with, or a module. None: the model that the checkpoint names, which
            must be one of torchvision's or Drivetrain's, because opening a checkpoint runs no code.

    Returns:
        The exported checkpoint.

    Raises:
        CheckpointError: if there is no checkpoint, if it is damaged, if its model is unknown, if `model` is not the
            trained one, or if `out` has another suffix.
        RecipeError: if `model` cannot be imported.
    """
    require_suffix(Path(out), ".safetensors", CheckpointError)
    if model is not None and names != "plain":
        raise CheckpointError(f"names={names!r} (--names) takes no model. Remove model= (--model).")
    checkpoint = _best(Path(place)) if best else find(Path(place))
    state = evaluated_state(checkpoint)
    if names == "plain":
        state = _plain(checkpoint, state, model)
    save_weights({name: value.contiguous() for name, value in state.items()}, Path(out))
    return checkpoint


def evaluated_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the weights that the training evaluated at this point, under the names of the model after surgery."""
    with restoring(checkpoint):
        state = dict(checkpoint.tensors("model"))
        for kept in with_averages(checkpoint).values():
            for averages in kept.values():
                if isinstance(averages, Tensors):  # a custom method may also keep JSON values
                    # Averages of half-precision weights are kept in float32.
                    for name in averages:  # one at a time, so that memory holds one copy of the weights
                        if name in state:
                            state[name] = averages[name].to(state[name].dtype)
        return state


def _plain(
    checkpoint: Checkpoint,
    state: dict[str, torch.Tensor],
    given: str | Callable[..., nn.Module] | nn.Module | None,
) -> dict[str, torch.Tensor]:
    saved = checkpoint.content.description
    if saved is None:
        raise CheckpointError(
            f"{checkpoint.path} does not know how to build its model: its options, or a custom surgery, cannot be "
            f"written as JSON. Use names='trained' (--names trained), or FitResult.plain_state()."
        )
    if isinstance(given, str):
        given = model_factory(given)
    with restoring(checkpoint):
        spec, transforms = rebuild_spec(saved, given)
    if given is None:
        with restoring(checkpoint):
            model, _ = rebuild_model(spec, transforms)
    else:
        model, _ = rebuild_model(spec, transforms)
        _check_fits(model, state, spec.model_name, checkpoint.path)
    with restoring(checkpoint):
        return plain_state(state, model, transforms)


def _check_fits(model: nn.Module, state: dict[str, torch.Tensor], name: str, where: Path) -> None:
    """Raise CheckpointError unless the model, after surgery, has the names and shapes of the trained weights."""
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


def _best(place: Path) -> Checkpoint:
    store = CheckpointDir(place / "checkpoints")
    # Checkpoints of an earlier run may be there until the first of this run is complete.
    best = best_of(list(store.of_run(store.run)))
    if best is None:
        raise CheckpointError(
            f"{store.folder} has no checkpoint of its run with a monitored metric. Remove best=True (--best), or pass "
            f"the path of a checkpoint."
        )
    best.verify()
    return best
