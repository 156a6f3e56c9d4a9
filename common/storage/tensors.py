"""Tensors by name in safetensors files: read one by one or by rows, written as a whole or not at all."""

import json
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, DrivetrainError
from .files import atomic_file


class Tensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each read from its file on access; `shape_of`, `rows_of` and `elements_of` read less."""

    def __init__(self, readers: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
        self.readers, self.metadata = readers, metadata or {}

    def __getitem__(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self.readers[name]()
        return value

    def __contains__(self, name: object) -> bool:
        return name in self.readers

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


_CRC, _UNKNOWN = '"drivetrain.crc32":"{}"', "00000000"
_AT_ONCE = 1 << 20  # bytes


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a file. Raise CheckpointError if it has a checksum (`save_weights`) and other content."""
    opened = open_tensors(path)
    if (expected := opened.metadata.get("drivetrain.crc32")) is not None:
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            crc = zlib.crc32(header.replace(_CRC.format(expected).encode(), _CRC.format(_UNKNOWN).encode(), 1))
            for part in iter(partial(file.read, _AT_ONCE), b""):
                crc = zlib.crc32(part, crc)
        if f"{crc:08x}" != expected:
            raise CheckpointError(f"{path} is damaged: it is not what was written. Copy or create it again.")
    return dict(opened)


def open_tensors(path: Path) -> Tensors:
    with _safetensors_errors(path):
        file: Any = safe_open(path, framework="pt")
        metadata = file.metadata() or {}
        wide = json.loads(metadata.get("complex", "{}"))
        keys = file.keys()
        return Tensors({key: Stored(path, file, key, wide.get(key)) for key in keys}, metadata)


@dataclass(frozen=True)
class Stored:
    """A tensor in an open file: calling it reads it, a slice of it reads these rows only."""

    path: Path
    file: Any
    key: str
    wide: str | None = None  # the name of a dtype of `_COMPLEX`

    @property
    def shape(self) -> tuple[int, ...]:
        with _safetensors_errors(self.path):
            shape = tuple(self.file.get_slice(self.key).get_shape())
        return shape if self.wide is None else shape[:-1]

    @property
    def dtype(self) -> torch.dtype:
        if self.wide is not None:
            return _COMPLEX[self.wide]
        with _safetensors_errors(self.path):
            return _DTYPES[self.file.get_slice(self.key).get_dtype()]

    def __call__(self) -> torch.Tensor:
        with _safetensors_errors(self.path):
            return self._complex(self.file.get_tensor(self.key))

    def __getitem__(self, rows: slice) -> torch.Tensor:
        with _safetensors_errors(self.path):
            return self._complex(self.file.get_slice(self.key)[rows])

    def _complex(self, value: torch.Tensor) -> torch.Tensor:
        return value if self.wide is None else torch.view_as_complex(value).to(_COMPLEX[self.wide])


def shape_of(source: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the shape of a tensor of `source`, which is not read if it is in a file; () for a number."""
    return tuple(getattr(_unread(source, name), "shape", ()))


def part_of(source: Mapping[str, torch.Tensor], names: Collection[str]) -> Mapping[str, torch.Tensor]:
    """Return the tensors of these names. Those in a file are not read."""
    if isinstance(source, Tensors):
        return Tensors({name: each for name, each in source.readers.items() if name in names}, source.metadata)
    return {name: each for name, each in source.items() if name in names}


def rows_of(source: Mapping[str, Any], name: str, start: int, stop: int) -> torch.Tensor:
    """Return these rows of a tensor of `source`; of one in a file, only they are read."""
    rows: torch.Tensor = _unread(source, name)[start:stop]
    return rows


def elements_of(source: Mapping[str, Any], name: str, start: int, stop: int) -> torch.Tensor:
    """Return these elements of a tensor of `source`, flattened; of one in a file, only the rows that have them are
    read, or only they, if its elements are sharded."""
    flat = getattr(_unread(source, name), "elements", None)
    if flat is not None:
        elements: torch.Tensor = flat[start:stop]
        return elements
    width = max(1, math.prod(shape_of(source, name)[1:]))
    first = start // width
    rows = rows_of(source, name, first, -(-stop // width))
    return rows.flatten()[start - first * width : stop - first * width]


def _unread(source: Mapping[str, Any], name: str) -> Any:
    return source.readers[name] if isinstance(source, Tensors) else source[name]


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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# Not in safetensors: real and imaginary parts are in another dimension, name and dtype in the metadata `complex`.
_COMPLEX = {"complex128": torch.complex128}


def save_weights(
    state: Mapping[str, torch.Tensor],
    path: str | Path,
    *,
    epochs: int | str | None = None,
    about: Mapping[str, str] | None = None,
    checksum: bool = False,
) -> None:
    """Write CPU tensors as safetensors, atomically, with `about` as metadata. Of `Tensors`, each is read when it is
    written, in their `file_order`, so that one is held at a time. `epochs` is the epoch of the history that they belong
    to (within one, a text): a process killed between the two files leaves newer weights. `checksum`: with the CRC-32 of
    the header, with eight zeros in its place, and of the tensors in the metadata."""
    metadata = {**(about or {}), **({} if epochs is None else {"epochs": str(epochs)})}
    if checksum:
        metadata["drivetrain.crc32"] = _UNKNOWN
    kinds = {kind: name for name, kind in _COMPLEX.items()}
    order = file_order(state)
    dtypes = {name: _unread(state, name).dtype for name in order}
    wide = {name: kinds[dtype] for name, dtype in dtypes.items() if dtype in kinds}
    if wide:
        metadata["complex"] = json.dumps(wide, sort_keys=True)
    # Sorted, so that equal tensors with equal metadata are equal files.
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = dtypes[name], list(shape_of(state, name))
        if name in wide:
            dtype, shape = dtype.to_real(), [*shape, 2]
        if dtype not in _NAMES:
            raise DrivetrainError(f"{path} cannot hold {name!r}: safetensors has no {dtype}.")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # One by one: safetensors' `save` copies all in memory, and its `save_file` replaces the file that is open here.
    with atomic_file(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        crc = zlib.crc32(text)
        for name in order:
            value = torch.view_as_real(state[name]) if name in wide else state[name]
            if value.numel():
                data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
                file.write(data)
                crc = zlib.crc32(data, crc) if checksum else crc
        if checksum:
            known = _CRC.format(_UNKNOWN).encode()
            file.seek(8 + text.index(known))
            file.write(known.replace(_UNKNOWN.encode(), f"{crc:08x}".encode()))


def file_order(state: Mapping[str, Any]) -> list[str]:
    """Return the names in the order in which `save_weights` reads and writes them: larger elements first, so that each
    tensor is aligned."""
    dtypes = {name: _unread(state, name).dtype for name in state}
    sizes = {name: (d.to_real() if d in _COMPLEX.values() else d).itemsize for name, d in dtypes.items()}
    return sorted(state, key=lambda name: (-sizes[name], name))
