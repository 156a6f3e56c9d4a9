"""A plain state dict from a checkpoint, for use without Drivetrain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...errors import CheckpointError, require_suffix
from ...transforms import NothingChanged, Transform
from ..models.factories import model_factory
from ..spec.pipeline_spec import PipelineSpec
from ..training.build import build_model
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
    """Writes the weights that were evaluated as one safetensors file: averages (EMA, SWA) where there are some.

    Args:
        place: a checkpoint, or the folder of a run: its newest complete checkpoint.
        out: the `.safetensors` file to write; replaced if it is there.
        names: `"plain"`: those of the model before surgery, which loads them with `load_state_dict`. What a
            surgery adds and the plain model cannot express keeps its name, see `Transform.to_plain`.
            `"trained"`: those of the model after surgery.
        best: of a run, the checkpoint with the highest accuracy instead.
        model: for plain names: the model before surgery, as `Pipeline` takes it: `"module:factory"`, a factory, called
            with the options that it was trained with, or a module. None: the one that the checkpoint names, which must
            be one of torchvision's or Drivetrain's, because a checkpoint alone runs no code.

    Returns:
        The checkpoint that was taken.

    Raises:
        CheckpointError: if there is none, it is damaged, its model is not known, or `model` is not the one that was
            trained; for an `out` of another suffix.
        RecipeError: if `model` cannot be imported.
    """
    require_suffix(Path(out), ".safetensors", CheckpointError)
    if model is not None and names != "plain":
        raise CheckpointError(f"names={names!r} (--names) needs no model. Leave model= (--model) out.")
    checkpoint = _best(Path(place)) if best else find(Path(place))
    state = evaluated_state(checkpoint)
    if names == "plain":
        state = _plain(checkpoint, state, model)
    save_weights({name: value.contiguous() for name, value in state.items()}, Path(out))
    return checkpoint


def evaluated_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The weights that the training evaluated at this point, by the names of the model that was trained."""
    with restoring(checkpoint):
        state = dict(checkpoint.tensors("model"))
        for kept in with_averages(checkpoint).values():
            for averages in kept.values():
                if isinstance(averages, Tensors):  # a custom method may keep any JSON values beside them
                    # Averages of half precision are kept in float32.
                    for name in averages:  # one at a time: there is one copy of the weights
                        if name in state:
                            state[name] = averages[name].to(state[name].dtype)
        return state


def _plain(
    checkpoint: Checkpoint,
    state: dict[str, torch.Tensor],
    given: str | Callable[..., nn.Module] | nn.Module | None,
) -> dict[str, torch.Tensor]:
    found = checkpoint.content.description
    if found is None:
        raise CheckpointError(
            f"{checkpoint.path} does not know how to build its model: its options, or a custom surgery, cannot be "
            f"written as JSON. Use names='trained' (--names trained), or FitResult.plain_state()."
        )
    if isinstance(given, str):
        given = model_factory(given)
    with restoring(checkpoint):
        spec, transforms = rebuild_spec(found, given)
    if given is None:
        with restoring(checkpoint):
            model = _built(spec, transforms)
    else:
        model = _built(spec, transforms)
        _check_fits(model, state, spec.model_name, checkpoint.path)
    with restoring(checkpoint):
        return plain_state(state, model, transforms)


def _built(spec: PipelineSpec, transforms: Sequence[Transform]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingChanged)  # the training has warned
        return build_model(spec, transforms)[0]


def _check_fits(model: nn.Module, state: dict[str, torch.Tensor], name: str, where: Path) -> None:
    """Refuses a model, after surgery, that does not have the weights that were trained."""
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
                f"{where} {theirs}. Give the model that the training had, before surgery."
            )


def _best(place: Path) -> Checkpoint:
    store = CheckpointDir(place / "checkpoints")
    # Those of an earlier run may be there until the first of this one is complete.
    found = best_of(list(store.of_run(store.run)))
    if found is None:
        raise CheckpointError(
            f"{store.folder} has no checkpoint of its run with an accuracy; leave best out, or give the path of one."
        )
    found.verify()
    return found
