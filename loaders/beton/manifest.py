"""The manifest beside a `.beton` file: class names, settings and checksums, as JSON.

The two files prove that they belong together by a seal, a digest of all samples' checksums and of the tables'.
It is in the manifest, and in the `.beton` after the metadata, in the padding that FFCV leaves empty and does not
read. A conversion that was killed between the two renames, or a file that was copied without the other, thus
cannot give one data set's class names to another's pixels.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...errors import BetonError
from .layout import Field, metadata_dtype, tables_start

SEAL_BYTES = 32
"""Of a SHA-256."""

_CHUNK = 1 << 16


def manifest_path(path: Path) -> Path:
    """Where the manifest of a `.beton` file stands."""
    return path.with_name(path.name + ".json")


def tables_checksum(data: NDArray[np.uint8], samples: int, fields: Sequence[Field], table_ptr: int) -> int:
    """CRC-32 of everything in the file but the samples' data: header, fields, metadata, allocation table."""
    end = tables_start(len(fields)) + samples * metadata_dtype(fields).itemsize
    return zlib.crc32(data[table_ptr:].data, zlib.crc32(data[:end].data))


def seal(tables_crc32: int, checksums: NDArray[np.uint32]) -> bytes:
    """The digest of a file's content that both files of a pair hold.

    It depends on nothing else, so that the same data gives the same file, wherever it came from.
    """
    return hashlib.sha256(tables_crc32.to_bytes(4, "little") + checksums.astype("<u4").tobytes()).digest()


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
        classes, tables = list(manifest["classes"]), int(manifest["tables_crc32"])
        checksums = np.array(manifest["crc32"], dtype=np.uint32)
        whole = checksums.shape == (manifest["samples"],) and all(isinstance(name, str) for name in classes)
        sealed = bytes.fromhex(manifest.get("seal", ""))
        expected = seal(tables, checksums)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise BetonError(f"{beside} is not a manifest ({error!r}). Delete it, or convert again.") from None
    if not sealed:
        raise BetonError(
            f"{beside} was written by an earlier version of Drivetrain, and does not prove that it belongs to "
            f"{path.name}. Convert the data again; or delete it to read the file without class names and checksums."
        )
    count = int(header["num_samples"])
    reasons = {
        "it has other samples or fields": own and whole,
        "its checksum of the tables differs": tables
        == tables_checksum(data, count, fields, int(header["alloc_table_ptr"])),
        "its seal, a digest of all samples' checksums, differs": expected
        == sealed
        == _stored_seal(data, count, fields),
    }
    for reason, right in reasons.items():
        if not right:
            raise BetonError(
                f"{beside} does not belong to {path.name}, or one of them is damaged: {reason}. Convert the data "
                "again; or, if the .beton is known to be good, delete the manifest to read it without class names "
                "and checksums."
            )
    return manifest, checksums


def _stored_seal(data: NDArray[np.uint8], samples: int, fields: Sequence[Field]) -> bytes:
    """What the file holds where its seal is, if it has one."""
    end = tables_start(len(fields)) + samples * metadata_dtype(fields).itemsize
    return data[end : end + SEAL_BYTES].tobytes()
