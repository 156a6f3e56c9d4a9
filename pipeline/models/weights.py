"""Weights of files: the one place that reads them, and a new model that begins with them."""

import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.errors import CheckpointError, DataError
from ...common.storage.tensors import read_tensors

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar")  # any but the first are torch's own format
SOURCES = "a file of weights (.safetensors, .pth, .pt, .bin)"
_INSIDE = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")
# Of torch.compile and DistributedDataParallel, in any order.
_WRAPPERS = ("_orig_mod.", "module.", "_orig_mod.")
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


def weights_of(options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what the options of a model of Drivetrain's name as its weights: files, published ones, or None."""
    return options.get("weights"), options.get("pretrained")


def is_file_name(weights: str | Path) -> bool:
    """Not the name of published weights: by its suffix, or because it exists."""
    return isinstance(weights, Path) or Path(weights).suffix in SUFFIXES or Path(weights).exists()


def read_weights(path: Path, model: str, own: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return the state dict in a file, on the CPU: of safetensors by its suffix, else of `torch.save`. Raise DataError
    if it is damaged, has other objects, or no state dict. `model`, which shall take the weights, is for messages.

    Nothing is unpickled but tensors and plain values (`weights_only=True`), and an `argparse.Namespace`, in which
    scripts keep their options: no code runs. As in timm, of a training script's checkpoint the first of
    `state_dict_ema`, `model_ema`, `state_dict`, `model_state_dict` and `model` is taken, so that averages go first; and
    `module.` and `_orig_mod.`, the prefixes of DistributedDataParallel and `torch.compile`, are removed from names,
    unless these are among the model's `own`, which may begin so, too.
    """
    if not path.is_file():
        raise DataError(f"The weights {path} of {model} are not a file.")
    try:
        if path.suffix == ".safetensors":
            state: Any = read_tensors(path)
        else:
            with torch.serialization.safe_globals([Namespace]):
                state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError as error:
        raise unusable(path, model, str(error).rstrip(".")) from error
    except Exception as error:  # a damaged file makes torch's reader raise many types
        raise unusable(path, model, _reason(error)) from error
    if isinstance(state, Mapping):
        state = next((state[key] for key in _INSIDE if isinstance(state.get(key), Mapping)), state)
    if not isinstance(state, Mapping) or not state:
        raise unusable(path, model, "it has no state dict")
    odd = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise unusable(path, model, f"its entry {odd[0]!r} is not a tensor, so it is not a state dict")
    return _unwrapped(dict(state), set(own))


def _unwrapped(state: dict[str, torch.Tensor], own: set[str]) -> dict[str, torch.Tensor]:
    for wrapper in _WRAPPERS:
        # Without the counter of torch's AveragedModel.
        plain = {name: value for name, value in state.items() if name != "n_averaged"}
        if plain and own.isdisjoint(plain) and all(str(name).startswith(wrapper) for name in plain):
            state = {name.removeprefix(wrapper): value for name, value in plain.items()}
    return state


def load_weights(model: nn.Module, path: Path, name: str, heads: Sequence[str], removed: Sequence[str] = ()) -> None:
    """Load a file, except weights of `removed` layers, and those of another shape of `heads`, the layers that return
    the outputs; if any other weight differs in name or shape, nothing is loaded."""
    without, prefixes = (tuple(f"{layer}." for layer in layers) for layers in (removed, heads))
    state = {key: value for key, value in read_weights(path, name).items() if not key.startswith(without)}
    own = model.state_dict()
    left = {
        key for key, value in state.items() if key.startswith(prefixes) and key in own and own[key].shape != value.shape
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


def _reason(error: Exception) -> str:
    """Return one short line: messages of torch's reader fill a page."""
    if "weights_only" in str(error):
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it has more than tensors, an object of {found[1]}," if found else "it has more than tensors,"
        return (
            f"{what} and unpickling that could run code, or it is damaged. Save the state dict alone, where you trust "
            "it: safetensors.torch.save_file(model.state_dict(), path), or torch.save(model.state_dict(), path)"
        )
    text = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {text[:200]}"
