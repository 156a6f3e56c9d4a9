"""Weights of a file for a new model, with another last layer where the number of outputs differs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ...common.errors import DataError

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")  # any but the first are torch's own format
_INSIDE = ("state_dict", "model_state_dict", "model")  # where torchvision's and timm's scripts keep it
_omitted: ContextVar[bool] = ContextVar("omitted", default=False)


@contextmanager
def weights_omitted() -> Iterator[None]:
    """Build models with random weights inside the block: for a model whose weights are all replaced next. The files
    that it began with need not exist any more."""
    token = _omitted.set(True)
    try:
        yield
    finally:
        _omitted.reset(token)


def omitted() -> bool:
    return _omitted.get()


def is_file_name(weights: str | Path) -> bool:
    """Not the name of published weights: by its suffix, or because it exists."""
    return isinstance(weights, Path) or Path(weights).suffix in SUFFIXES or Path(weights).exists()


def read_weights(path: Path, model: str) -> dict[str, torch.Tensor]:
    """Return the state dict of a file (safetensors, or of `torch.save`), on the CPU, without DistributedDataParallel's
    `module.`. Only tensors and plain values are unpickled (`weights_only=True`), so no code runs."""
    if not path.is_file():
        raise DataError(f"The weights {path} of {model} are not a file.")
    try:
        if path.suffix == ".safetensors":
            state: Any = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch's reader raise many types
        raise unusable(path, model, _first_line(error)) from error
    if isinstance(state, Mapping):
        state = next((state[key] for key in _INSIDE if isinstance(state.get(key), Mapping)), state)
    if not isinstance(state, Mapping) or not state:
        raise unusable(path, model, "it has no state dict")
    odd = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise unusable(path, model, f"its entry {odd[0]!r} is not a tensor, so it is not a state dict")
    if all(str(name).startswith("module.") for name in state):
        return {name.removeprefix("module."): value for name, value in state.items()}
    return dict(state)


def load_weights(model: nn.Module, path: Path, name: str, heads: Sequence[str]) -> None:
    """Load a file, except weights of another shape of `heads`, the layers that return the outputs; if any other weight
    differs in name or shape, nothing is loaded."""
    state, own = read_weights(path, name), model.state_dict()
    prefixes = tuple(f"{head}." for head in heads)
    left = {
        key
        for key, value in state.items()
        if key.startswith(prefixes) and key in own and own[key].shape != value.shape
    }
    for key in {**own, **state}:
        if key in left:
            continue
        if key not in state:
            raise unusable(path, name, f"{key!r} is missing")
        if key not in own:
            raise unusable(path, name, f"{key!r} is not a weight of it")
        if own[key].shape != state[key].shape:
            there, here = tuple(state[key].shape), tuple(own[key].shape)
            raise unusable(path, name, f"{key!r} is {there} there and {here} in it")
    model.load_state_dict({key: own[key] if key in left else value for key, value in state.items()})


def unusable(source: object, model: str, reason: str) -> DataError:
    return DataError(
        f"The weights {source} cannot be loaded into {model}: {reason}. Pass a complete file with weights of this "
        "model (.safetensors, or a state dict saved by torch.save), or none."
    )


def _first_line(error: Exception) -> str:
    """Return one short line: messages of torch's reader fill a page."""
    if "weights_only" in str(error):
        return (
            "it has more than tensors, and unpickling that could run code, or it is damaged. Save the state dict "
            "alone: safetensors.torch.save_file(model.state_dict(), path)"
        )
    text = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {text[:200]}"
