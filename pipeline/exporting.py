"""A plain state dict from a checkpoint, for use without Drivetrain."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import torch

from ..errors import CheckpointError, require_suffix
from ..transforms import NothingChanged
from .build import build_model
from .checkpoint import Checkpoint
from .facts import described
from .result import plain_state, save_weights
from .resume import restoring, with_averages
from .retention import Store, best_of, find

Names = Literal["plain", "trained"]


def export(place: str | Path, out: str | Path, *, names: Names = "plain", best: bool = False) -> Checkpoint:
    """Writes the weights that were evaluated as one safetensors file: averages (EMA, SWA) where there are some.

    Args:
        place: a checkpoint, or the folder of a run: its newest complete checkpoint.
        out: the `.safetensors` file to write; replaced if it is there.
        names: `"plain"`: those of the model before surgery, which loads them with `load_state_dict`; the
            checkpoint must know how to build the model (a model of torchvision, or of a recipe). What a
            surgery adds and the plain model cannot express keeps its name, see `Transform.to_plain`.
            `"trained"`: those of the model after surgery.
        best: of a run, the checkpoint with the highest accuracy instead.

    Returns:
        The checkpoint that was taken.

    Raises:
        CheckpointError: if there is none, it is damaged, or its model is not known; for an `out` of another suffix.
    """
    require_suffix(Path(out), ".safetensors", CheckpointError)
    checkpoint = _best(Path(place)) if best else find(Path(place))
    state = evaluated_state(checkpoint)
    if names == "plain":
        state = _plain(checkpoint, state)
    save_weights({name: value.contiguous() for name, value in state.items()}, Path(out))
    return checkpoint


def evaluated_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The weights that the training evaluated at this point, by the names of the model that was trained."""
    with restoring(checkpoint):
        state = dict(checkpoint.tensors("model"))
        methods = with_averages(checkpoint.state["methods"], checkpoint.tensors("methods"), {})
        for kept in methods.values():
            for averages in kept.values():
                if not isinstance(averages, dict | int | bool):
                    # Averages of half precision are kept in float32.
                    state |= {
                        name: averages[name].to(state[name].dtype) for name in averages if name in state
                    }
        return state


def _plain(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = checkpoint.state.get("description")
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{checkpoint.path} does not know how to build its model, which came as an object or from a function "
            f"of your own, and so not its names before surgery. Use names='trained' (--names trained), or "
            f"FitResult.plain_state()."
        )
    with restoring(checkpoint), warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingChanged)  # the training has warned
        pipeline, transforms = described(found)
        model, _ = build_model(pipeline)
        return plain_state(state, model, transforms)


def _best(place: Path) -> Checkpoint:
    store = Store(place / "checkpoints")
    # Those of an earlier run may be there until the first of this one is complete.
    found = best_of(list(store.of_run(store.run)))
    if found is None:
        raise CheckpointError(
            f"{store.folder} has no checkpoint of its run with an accuracy; leave best out, or give the path of one."
        )
    found.verify()
    return found
