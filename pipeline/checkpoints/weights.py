"""Save and load weights, and translate them to the names that they had before surgery."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...common.errors import CheckpointError, DrivetrainError
from ...common.model_state import ModelState
from ...common.storage.files import atomic_file, sha256
from ...transforms import Transform


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
    save_weights(state.weights, path, epochs=epochs, about=linked)
    if not state.unlisted:
        other.unlink(missing_ok=True)  # of an earlier file of this name


def open_model(path: Path) -> ModelState:
    weights, other = open_tensors(path), unlisted_path(path)
    expected = weights.metadata.get("unlisted")
    if expected is None:
        return ModelState(dict(weights))
    if not other.is_file() or sha256(other) != expected:
        wrong = "is of another moment of the run" if other.is_file() else "is missing"
        raise CheckpointError(
            f"{path} belongs together with {other.name}, which has the tensors that the model's state dict leaves out "
            f"(non-persistent buffers), and {wrong}. Keep the two together; or pass the state dict, "
            "safetensors.torch.load_file(path), to begin with the model's own values of those."
        )
    return ModelState(dict(weights), dict(open_tensors(other)))


def load_model(path: Path, *, epochs: int) -> ModelState:
    """Return what `save_model` wrote after `epochs` epochs; an empty `ModelState` if there is no such file."""
    try:
        if open_tensors(path).metadata.get("epochs") != str(epochs):
            return ModelState()
        return open_model(path)
    except CheckpointError:  # an incomplete file is not a result
        return ModelState()


def unlisted_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.unlisted{path.suffix}")


class Tensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each read from its file on access."""

    def __init__(
        self, readers: Mapping[str, Callable[[], torch.Tensor]], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.readers, self.metadata = readers, metadata or {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.readers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self.readers

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


def open_tensors(path: Path) -> Tensors:
    with _safetensors_errors(path):
        file: Any = safe_open(path, framework="pt")
        metadata = file.metadata() or {}
        wide = json.loads(metadata.get("complex", "{}"))
        keys = file.keys()
        return Tensors({key: partial(_tensor, path, file, key, wide.get(key)) for key in keys}, metadata)


def _tensor(path: Path, file: Any, key: str, wide: str | None) -> torch.Tensor:
    with _safetensors_errors(path):
        value: torch.Tensor = file.get_tensor(key)
        return value if wide is None else torch.view_as_complex(value).to(_COMPLEX[wide])


@contextmanager
def _safetensors_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}.") from error


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.complex64: "C64",
}  # fmt: skip
# Not in safetensors: real and imaginary parts are in another dimension, name and dtype in the metadata `complex`.
_COMPLEX = {"complex128": torch.complex128}


def save_weights(
    state: Mapping[str, torch.Tensor],
    path: str | Path,
    *,
    epochs: int | str | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write CPU tensors as safetensors, atomically, with `about` as metadata. `epochs` is the epoch of the history that
    they belong to (within one, a text): a process killed between the two files leaves newer weights."""
    metadata = {**(about or {}), **({} if epochs is None else {"epochs": str(epochs)})}
    kinds = {kind: name for name, kind in _COMPLEX.items()}
    wide = {name: kinds[value.dtype] for name, value in state.items() if value.dtype in kinds}
    if wide:
        metadata["complex"] = json.dumps(wide, sort_keys=True)
    # Sorted, so that equal tensors with equal metadata are equal files.
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    plain = {name: torch.view_as_real(value) if name in wide else value for name, value in state.items()}
    # Larger elements first, so that each tensor is aligned.
    ordered = sorted(plain.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, value in ordered:
        if value.dtype not in _NAMES:
            raise DrivetrainError(f"{path} cannot hold {name!r}: safetensors has no {value.dtype}.")
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {
            "dtype": _NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # One by one: safetensors' `save` copies all in memory, and its `save_file` replaces the file that is open here.
    with atomic_file(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in ordered:
            if value.numel():
                file.write(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
