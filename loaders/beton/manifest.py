"""The manifest of a `.beton` file: class names, settings and checksums, as JSON next to it.

A seal proves that the two files belong together: a digest of all samples' checksums and of the tables' checksum.
It is stored in the manifest, and in the `.beton` after the metadata, in padding that FFCV leaves empty and does not
read. So a conversion killed between its two renames, or a file copied without its manifest, can never combine one
data set's class names with another's pixels.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BetonError
from ...common.exhaustion import is_exhaustion
from .layout import SEAL_BYTES, Field, tables_end
from .open_file import OpenFile
from .targets import check_colors, check_targets

_CHUNK = 1 << 16


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def tables_checksum(
    data: OpenFile | NDArray[np.uint8], samples: int, fields: Sequence[Field], table_ptr: int
) -> int:
    """Return the CRC-32 of everything but the samples' data: header, fields, metadata, allocation table."""
    return zlib.crc32(data[table_ptr:].data, zlib.crc32(data[: tables_end(samples, fields)].data))


def seal(tables_crc32: int, checksums: NDArray[np.uint32]) -> bytes:
    """Return the digest that both files of a pair contain: of nothing else, so the same data gives the same file."""
    return hashlib.sha256(tables_crc32.to_bytes(4, "little") + checksums.astype("<u4").tobytes()).digest()


def write_manifest(file: BinaryIO, about: dict[str, Any], checksums: NDArray[np.uint32]) -> None:
    """Write `about` and, under `"crc32"`, the samples' checksums, without building the full text in memory."""
    text = json.dumps(about, indent=1)
    file.write(text[: -len("\n}")].encode() + b',\n "crc32": [\n')
    for start in range(0, len(checksums), _CHUNK):
        part = ",\n".join(f"  {value}" for value in checksums[start : start + _CHUNK].tolist())
        file.write((",\n" if start else "").encode() + part.encode())
    file.write(b"\n ]\n}\n")


def read_manifest(
    path: Path, data: OpenFile, header: Any, fields: Sequence[Field]
) -> tuple[dict[str, Any], NDArray[np.uint32] | None]:
    """Return a file's manifest and checksums `(N,)`; empty and None without one. One of another file is an error."""
    file = manifest_path(path)
    if not file.exists():
        return {}, None
    kinds = {field.name: field.kind for field in fields}
    try:
        text = file.read_bytes()
    except OSError as error:
        if is_exhaustion(error):  # which says nothing about the file
            raise
        raise BetonError(f"{file} cannot be read: {error.strerror or error}.") from error
    try:
        manifest = dict(json.loads(text))
        own = manifest["samples"] == header["num_samples"] and dict(manifest["fields"]) == kinds
        classes, tables = list(manifest["classes"]), int(manifest["tables_crc32"])
        checksums = np.array(manifest["crc32"], dtype=np.uint32)
        whole = checksums.shape == (manifest["samples"],) and all(isinstance(name, str) for name in classes)
        sealed = bytes.fromhex(manifest.get("seal", ""))
        expected = seal(tables, checksums)
        check_targets(manifest.get("targets", {}), kinds)
        check_colors(dict(manifest.get("colors", {})), kinds)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BetonError(f"{file} is not a manifest ({error!r}). Delete it, or convert again.") from None
    if not sealed:
        raise BetonError(
            f"{file} was written by an earlier version of Drivetrain and has no seal that ties it to {path.name}. "
            "Convert the data again; or delete it to read the file without class names and checksums."
        )
    count = int(header["num_samples"])
    current = tables_checksum(data, count, fields, int(header["alloc_table_ptr"]))
    end = tables_end(count, fields)
    stored = data[end : end + SEAL_BYTES].tobytes()
    reasons = {
        "it has other samples or fields": own and whole,
        "its checksum of the tables differs": tables == current,
        "its seal, a digest of all samples' checksums, differs": expected == sealed == stored,
    }
    for reason, right in reasons.items():
        if not right:
            raise BetonError(
                f"{file} does not belong to {path.name}, or one of them is damaged: {reason}. Convert the data "
                "again; or, if the .beton is known to be good, delete the manifest to read it without class names "
                "and checksums."
            )
    return manifest, checksums
