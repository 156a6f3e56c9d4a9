"""The manifest of a `.beton` file: class names, settings and checksums, as JSON next to it.

A seal proves that the two files belong together: a digest of all samples' checksums and of the tables' checksum.
It is stored in the manifest, and in the `.beton` after the metadata, in padding that FFCV leaves empty and does not
read. So a conversion killed between its two renames, or a file copied without its manifest, can never combine one
data set's class names with another's pixels.

To read large files sample by sample, the manifest has a CRC-32 of each `BLOCK` samples' tables and checksums
(`Blocks`), whose own digest has the seal in it; and the checksums, which come last, in lines of equal length.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BetonError
from ...common.exhaustion import is_exhaustion
from .layout import SEAL_BYTES, Field, tables_end, tables_start
from .open_file import OpenFile
from .targets import check_colors, check_targets

BLOCK = 512  # samples: checking one reads 28 KiB of tables of a file with images and labels
LINE = len("  4294967295,\n")  # bytes of a checksum's line, but for the last one's comma
_CHUNK = 1 << 16
_LIST = b',\n "crc32": [\n'  # what the list of checksums begins with; a JSON string has no line break


def manifest_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def tables_checksum(data: OpenFile | NDArray[np.uint8], samples: int, fields: Sequence[Field], table_ptr: int) -> int:
    """Return the CRC-32 of everything but the samples' data: header, fields, metadata, allocation table."""
    return zlib.crc32(data[table_ptr:].data, zlib.crc32(data[: tables_end(samples, fields)].data))


def seal(tables_crc32: int, checksums: NDArray[np.uint32]) -> bytes:
    """Return the digest that both files of a pair contain: of nothing else, so the same data gives the same file."""
    return hashlib.sha256(tables_crc32.to_bytes(4, "little") + checksums.astype("<u4").tobytes()).digest()


@dataclass(frozen=True)
class Blocks:
    """The CRC-32 of what is before the tables, `(1,)`, and of each `BLOCK` samples' rows of the tables and of their
    checksums, `(blocks,)` each."""

    head: NDArray[np.uint32]
    metadata: NDArray[np.uint32]
    allocations: NDArray[np.uint32]
    checksums: NDArray[np.uint32]

    @classmethod
    def of(
        cls, head: bytes, metadata: NDArray[Any], allocations: NDArray[Any], checksums: NDArray[np.uint32]
    ) -> Blocks:
        each = BLOCK * len(allocations) // len(metadata)
        first = np.array([zlib.crc32(head)], np.uint32)
        return cls(first, _crcs(metadata, BLOCK), _crcs(allocations, each), _crcs(checksums.astype("<u4"), BLOCK))

    def to_json(self, seal: bytes) -> dict[str, Any]:
        columns = {name: crcs.astype("<u4").tobytes().hex() for name, crcs in vars(self).items()}
        return {"samples": BLOCK, **columns, "sha256": self._digest(seal)}

    @classmethod
    def from_json(cls, given: dict[str, Any], samples: int, seal: bytes) -> Blocks:
        """Return the blocks; raise ValueError unless they are those of the seal."""
        columns = (given[name] for name in ("head", "metadata", "allocations", "checksums"))
        own = cls(*(np.frombuffer(bytes.fromhex(column), "<u4") for column in columns))
        count = -(-samples // BLOCK)
        if given["samples"] != BLOCK or [len(crcs) for crcs in own.columns()] != [1, count, count, count]:
            raise ValueError("its blocks are not those of its samples")
        if given["sha256"] != own._digest(seal):
            raise ValueError("the digest of its blocks differs")
        return own

    def all_checksums(self, samples: int, before: int) -> int:
        """Return the CRC-32 of the checksums of all `samples`, after bytes whose CRC-32 is `before`, without reading
        them."""
        sizes = [4 * BLOCK] * (len(self.checksums) - 1)
        sizes.append(4 * (samples - BLOCK * len(sizes)))
        return joined(zip(sizes, self.checksums.tolist(), strict=True), before)

    def columns(self) -> list[NDArray[np.uint32]]:
        return [self.head, self.metadata, self.allocations, self.checksums]

    def _digest(self, seal: bytes) -> str:
        return hashlib.sha256(b"".join([seal, *(crcs.astype("<u4").tobytes() for crcs in self.columns())])).hexdigest()


def joined(parts: Iterable[tuple[int, int]], before: int = 0) -> int:
    """Return the CRC-32 of parts, of which each has a size in bytes and a CRC-32, after bytes whose CRC-32 is `before`:
    CRC-32s of neighbors add up, once the first is moved on by zeros of the second's length."""
    zeros, of_zeros = b"", 0
    for size, crc in parts:
        if size != len(zeros):
            zeros = bytes(size)
            of_zeros = zlib.crc32(zeros)
        before = zlib.crc32(zeros, before) ^ of_zeros ^ crc
    return before


def _crcs(rows: NDArray[Any], each: int) -> NDArray[np.uint32]:
    starts = range(0, len(rows), each)
    return np.array([zlib.crc32(rows[at : at + each].view(np.uint8).data) for at in starts], np.uint32)


def write_manifest(file: BinaryIO, about: dict[str, Any], checksums: NDArray[np.uint32]) -> None:
    """Write `about` and, under `"crc32"`, the samples' checksums, without building the full text in memory."""
    text = json.dumps(about, indent=1)
    file.write(text[: -len("\n}")].encode() + _LIST)
    for start in range(0, len(checksums), _CHUNK):
        part = ",\n".join(f"  {value:10}" for value in checksums[start : start + _CHUNK].tolist())
        file.write((",\n" if start else "").encode() + part.encode())
    file.write(b"\n ]\n}\n")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise as BetonError what a manifest that cannot be read, or is none, raises in the block."""
    try:
        yield
    except OSError as error:
        if is_exhaustion(error):  # which says nothing about the file
            raise
        raise BetonError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BetonError(f"{file} is not a manifest ({error!r}). Delete it, or convert again.") from None


def _is_of(manifest: dict[str, Any], samples: int, fields: Sequence[Field]) -> bool:
    """Whether a manifest is of so many samples with these fields; raise if it is none."""
    kinds = {field.name: field.kind for field in fields}
    same: bool = manifest["samples"] == samples and dict(manifest["fields"]) == kinds
    classes = set(map(type, list(manifest["classes"])))
    check_targets(manifest.get("targets", {}), kinds)
    check_colors(dict(manifest.get("colors", {})), kinds)
    shard = manifest.get("shard")  # of files that are one data set
    if isinstance(shard, dict) and (type(shard["number"]), type(shard["follows"])) != (int, str):
        raise ValueError("its shard is not a number and the seal of the file before")
    return same and classes <= {str}


def read_manifest(
    path: Path, data: OpenFile, header: Any, fields: Sequence[Field]
) -> tuple[dict[str, Any], NDArray[np.uint32] | None]:
    """Return a file's manifest and checksums `(N,)`; empty and None without one. One of another file is an error."""
    file, count = manifest_path(path), int(header["num_samples"])
    if not file.exists():
        return {}, None
    with _reading(file):
        manifest = dict(json.loads(file.read_bytes()))
        own = _is_of(manifest, count, fields)
        tables, sealed = int(manifest["tables_crc32"]), bytes.fromhex(manifest["seal"])
        checksums = np.array(manifest.pop("crc32"), dtype=np.uint32)
        manifest.pop("blocks", None)
        expected = seal(tables, checksums)
    current = tables_checksum(data, count, fields, int(header["alloc_table_ptr"]))
    end = tables_end(count, fields)
    stored = data[end : end + SEAL_BYTES].tobytes()
    _require(path, {
        "it has other samples or fields": own and checksums.shape == (count,),
        "its checksum of the tables differs": tables == current,
        "its seal, a digest of all samples' checksums, differs": expected == sealed == stored,
    })  # fmt: skip
    return manifest, checksums


def _require(path: Path, reasons: dict[str, bool]) -> None:
    for reason, right in reasons.items():
        if not right:
            raise BetonError(
                f"{manifest_path(path)} does not belong to {path.name}, or one of them is damaged: {reason}. Convert "
                "the data again; or, if the .beton is known to be good, delete the manifest to read it without class "
                "names and checksums."
            )


def read_head(
    path: Path, data: OpenFile, header: Any, fields: Sequence[Field]
) -> tuple[dict[str, Any], Blocks, int] | None:
    """Return a file's manifest without its checksums, its blocks, and where in it the checksums begin; None without a
    manifest or blocks, which older versions did not write. One of another file is an error."""
    file, count = manifest_path(path), int(header["num_samples"])
    if not file.exists():
        return None
    with _reading(file):
        with file.open("rb") as opened:
            text, at = b"", -1
            while at < 0 and (more := opened.read(_CHUNK)):
                text += more
                at = text.find(_LIST, max(len(text) - len(more) - len(_LIST), 0))
        manifest = dict(json.loads(text[:at] + b"}")) if at >= 0 else {}
        if "blocks" not in manifest:
            return None
        own = _is_of(manifest, count, fields)
        sealed = bytes.fromhex(manifest["seal"])
        blocks = Blocks.from_json(manifest.pop("blocks"), count, sealed)
    end = tables_end(count, fields)
    _require(path, {
        "it has other samples or fields": own,
        "its checksum of the header differs": zlib.crc32(data[: tables_start(len(fields))].data) == blocks.head[0],
        "its seal, a digest of all samples' checksums, differs": sealed == data[end : end + SEAL_BYTES].tobytes(),
    })  # fmt: skip
    return manifest, blocks, at + len(_LIST)
