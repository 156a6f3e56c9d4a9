"""Save and load weights, and translate them to the names that they had before surgery."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ....common.errors import CheckpointError
from ....common.model_state import ModelState
from ....common.storage.files import sha256
from ....common.storage.tensors import open_tensors, read_tensors, save_weights
from ....transforms import Transform


def plain_state(state: ModelState, model: nn.Module, transforms: Sequence[Transform]) -> ModelState:
    """Return the tensors under the names that they had before `transforms`, given in plan order."""
    plain = state.all()
    for transform in reversed(transforms):
        plain = transform.to_plain(plain, model)
    unlisted = set(map(id, state.unlisted.values()))  # by identity: a surgery may have renamed them
    weights = {name: value for name, value in plain.items() if id(value) not in unlisted}
    return ModelState(weights, {name: value for name, value in plain.items() if id(value) in unlisted})


def save_model(
    state: ModelState, path: Path, *, epochs: int | str | None = None, about: Mapping[str, str] | None = None
) -> None:
    """Write the state dict to `path`, with the digest of what it leaves out, which is in `unlisted_path(path)`."""
    other, linked = unlisted_path(path), dict(about or {})
    if state.unlisted:
        save_weights(state.unlisted, other)
        linked["unlisted"] = sha256(other)
    save_weights(state.weights, path, epochs=epochs, about=linked, checksum=True)
    if not state.unlisted:
        other.unlink(missing_ok=True)  # of an earlier file of this name


def open_model(path: Path) -> ModelState:
    return ModelState(read_tensors(path), open_unlisted(path))


def open_unlisted(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that `save_model` wrote beside the state dict at `path`; of any other file, none."""
    other, expected = unlisted_path(path), open_tensors(path).metadata.get("unlisted")
    if expected is None:
        return {}
    if not other.is_file() or sha256(other) != expected:
        wrong = "is of another moment of the run" if other.is_file() else "is missing"
        raise CheckpointError(
            f"{path} belongs together with {other.name}, which has the tensors that the model's state dict leaves out "
            f"(non-persistent buffers), and {wrong}. Keep the two together; or pass the state dict, "
            "safetensors.torch.load_file(path), to begin with the model's own values of those."
        )
    return dict(open_tensors(other))


def load_model(path: Path, *, epochs: int | str) -> ModelState:
    """Return what `save_model` wrote after `epochs` epochs; an empty `ModelState` if there is no such file."""
    try:
        if open_tensors(path).metadata.get("epochs") != str(epochs):
            return ModelState()
        return open_model(path)
    except CheckpointError:  # an incomplete or damaged file is not a result
        return ModelState()


def unlisted_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.unlisted{path.suffix}")
