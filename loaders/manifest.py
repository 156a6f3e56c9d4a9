"""The manifest beside a `.beton` file: class names, settings and checksums, as JSON."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import BetonError
from .layout import Field, metadata_dtype, tables_start

_CHUNK = 1 << 16


def manifest_path(path: Path) -> Path:
    """Where the manifest of a `.beton` file stands."""
    return path.with_name(path.name + ".json")


def tables_checksum(data: NDArray[np.uint8], samples: int, fields: Sequence[Field], table_ptr: int) -> int:
    """CRC-32 of everything in the file but the samples' data: header, fields, metadata, allocation table."""
    end = tables_start(len(fields)) + samples * metadata_dtype(fields).itemsize
    return zlib.crc32(data[table_ptr:].data, zlib.crc32(data[:end].data))


def write_manifest(file: BinaryIO, about: dict[str, Any], checksums: NDArray[np.uint32]) -> None:
    """Writes `about` and, under `"crc32"`, the samples' checksums, without all of the text in memory."""
    text = json.dumps(about, indent=1)
    file.write(text[: -len("\n}")].encode() + b',\n "crc32": [\n')
    for start in range(0, len(checksums), _CHUNK):
        part = ",\n".join(f"  {value}" for value in checksums[start : start + _CHUNK].tolist())
        file.write((",\n" if start else "").encode() + part.encode())
    file.write(b"\n ]\n}\n")


def read_manifest(
    path: Path, data: NDArray[np.uint8], header: Any, fields: Sequence[Field]
) -> tuple[dict[str, Any], NDArray[np.uint32] | None]:
    """The manifest of the file `path`, and its checksums `(N,)`; nothing where there is none.

    Raises:
        BetonError: if it is no manifest, or not that of this file as it is now.
    """
    beside = manifest_path(path)
    if not beside.exists():
        return {}, None
    kinds = {field.name: field.kind for field in fields}
    try:
        manifest = dict(json.loads(beside.read_text()))
        own = manifest["samples"] == header["num_samples"] and dict(manifest["fields"]) == kinds
        classes, expected = list(manifest["classes"]), int(manifest["tables_crc32"])
        checksums = np.array(manifest["crc32"], dtype=np.uint32)
        whole = checksums.shape == (manifest["samples"],) and all(isinstance(name, str) for name in classes)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise BetonError(f"{beside} is not a manifest ({error!r}). Delete it, or convert again.") from None
    found = tables_checksum(data, int(header["num_samples"]), fields, int(header["alloc_table_ptr"]))
    if not own or not whole or found != expected:
        raise BetonError(
            f"{beside} does not belong to {path.name}, or one of them is damaged: its samples, fields or "
            "checksum of the tables differ. Convert the data again; or, if the .beton is known to be good, delete it."
        )
    return manifest, checksums
