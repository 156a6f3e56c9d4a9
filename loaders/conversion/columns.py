"""Metadata of the samples written so far: compact columns, without an object per sample."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..beton.layout import ALLOCATION, Field, metadata_dtype
from .encode import Encoded
from .values import Stored


@dataclass(frozen=True)
class Sample:
    """An image as it will be stored, and the values of the further fields, label first."""

    encoded: Encoded
    values: tuple[Stored, ...]

    @property
    def size(self) -> int:
        """Bytes it takes on a page; an empty value takes one, so that positions stay unique."""
        return len(self.encoded.payload) + sum(
            max(len(value), 1) for value in self.values if isinstance(value, bytes)
        )


class Columns:
    """Metadata, allocations and checksums of the samples so far, in order: about 70 bytes each.

    Args:
        fields: of every sample, the image first and the label second. An "int" label field becomes "float" with the
            first float.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = list(fields)
        self._modes, self._widths, self._heights = array("B"), array("H"), array("H")
        self._values: list[Any] = [array("d" if field.kind == "float" else "q") for field in fields[1:]]
        self._pointers, self._sizes = array("Q"), array("Q")  # of all allocations, sample by sample
        self._crc_int, self._crc_float = array("I"), array("I")  # with the label as either number

    def __len__(self) -> int:
        return len(self._modes)

    def add(self, sample: Sample, start: int) -> list[tuple[int, bytes]]:
        """Add a sample whose data begins at `start`; return the `(position, bytes)` to write."""
        image, at, writes = sample.encoded, start, []
        self._modes.append(image.mode)
        self._widths.append(image.width)
        self._heights.append(image.height)
        for data in (image.payload, *(value for value in sample.values if isinstance(value, bytes))):
            self._pointers.append(at)
            self._sizes.append(len(data))
            writes.append((at, data))
            at += max(len(data), 1)
        if self.fields[1].kind == "int" and isinstance(sample.values[0], float):
            self._label_is_float()
        for column, value in zip(self._values, sample.values, strict=True):
            if not isinstance(value, bytes):
                column.append(value)
        self._add_checksums(sample)
        return writes

    def _label_is_float(self) -> None:
        label = self.fields[1]
        self.fields[1] = Field(label.name, "float")
        self._values[0] = array("d", self._values[0])

    def _add_checksums(self, sample: Sample) -> None:
        """Add both checksums: whether labels are ints or floats is known only after the last sample."""
        image = zlib.crc32(sample.encoded.payload)
        if self.fields[1].kind == "int":
            self._crc_int.append(self._checksum(image, sample, "int"))
        if self.fields[1].kind in ("int", "float"):
            self._crc_float.append(self._checksum(image, sample, "float"))
        else:
            self._crc_int.append(self._checksum(image, sample, self.fields[1].kind))

    def _checksum(self, crc: int, sample: Sample, label: str) -> int:
        kinds = [label, *(field.kind for field in self.fields[2:])]
        for kind, value in zip(kinds, sample.values, strict=True):
            data = value if isinstance(value, bytes) else _NUMBER[kind](value).tobytes()
            crc = zlib.crc32(data, crc)
        return crc

    @property
    def checksums(self) -> NDArray[np.uint32]:
        """Return each sample's checksum, `(N,)`, as defined by `Beton.checksum`."""
        return np.array(self._crc_float if self.fields[1].kind == "float" else self._crc_int, dtype=np.uint32)

    @property
    def labels(self) -> NDArray[Any] | None:
        """Return the labels, `(N,)` int64 or float64; None for vectors and masks."""
        return None if self.fields[1].allocated else np.array(self._values[0])

    def metadata(self) -> NDArray[Any]:
        """Return the metadata, `(N,)` of `metadata_dtype(fields)`."""
        rows = np.zeros(len(self), dtype=metadata_dtype(self.fields))
        allocated = [field for field in self.fields if field.allocated]
        pointers = np.frombuffer(self._pointers, dtype=np.uint64).reshape(len(self), len(allocated))
        sizes = np.frombuffer(self._sizes, dtype=np.uint64).reshape(pointers.shape)
        for number, field in enumerate(self.fields):
            column = rows[f"f{number}"]
            if field.kind == "rgb_image":
                column["mode"], column["width"] = self._modes, self._widths
                column["height"], column["data_ptr"] = self._heights, pointers[:, 0]
            elif not field.allocated:
                column[:] = self._values[number - 1]
            elif field.kind == "ndarray":
                column[:] = pointers[:, allocated.index(field)]
            else:
                place = allocated.index(field)
                column["ptr"], column["size"] = pointers[:, place], sizes[:, place]
        return rows

    def allocations(self) -> NDArray[Any]:
        """Return the allocations, `(N · allocated fields,)` of `ALLOCATION`."""
        table = np.zeros(len(self._pointers), dtype=ALLOCATION)
        table["sample_id"] = np.repeat(np.arange(len(self)), len(table) // max(len(self), 1))
        table["ptr"], table["size"] = self._pointers, self._sizes
        return table


_NUMBER: dict[str, Any] = {"int": np.int64, "float": np.float64}
