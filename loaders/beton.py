"""The `.beton` file (FFCV's format, version 2): its layout, and a reader that validates before it trusts.

Layout, little-endian: header · field descriptors · metadata · zeros up to a page · pages · allocation
table to the end of the file. Source: libffcv/ffcv, `ffcv/types.py` and `ffcv/writer.py` (1.0.2).
FFCV itself checks only the version number; a damaged file then hangs, crashes or gives wrong pixels.
"""

from __future__ import annotations

import io
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import BetonError

VERSION = 2
HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("alloc_table_ptr", "<u8"),
    ]
)
FIELD = np.dtype([("type_id", "u1"), ("name", "u1", (16,)), ("arguments", "u1", (1024,))])
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
MODE_JPEG, MODE_RAW = 0, 1

FLOAT_FIELD, INT_FIELD, IMAGE_FIELD = 0, 1, 2
METADATA_TYPES = {FLOAT_FIELD: np.dtype("<f8"), INT_FIELD: np.dtype("<i8"), IMAGE_FIELD: IMAGE}
MIN_PAGE, MAX_PAGE = 1 << 21, 1 << 31


def metadata_dtype(type_ids: list[int]) -> np.dtype[Any]:
    """One metadata row: a column `f0`, `f1`, … per field, aligned as C would."""
    columns: Any = [("", METADATA_TYPES[type_id]) for type_id in type_ids]
    dtype: np.dtype[Any] = np.dtype(columns, align=True)
    return dtype


@dataclass(frozen=True)
class Beton:
    """A validated `.beton` of one image field and one label field, opened for reading.

    Attributes:
        path: the file.
        data: the whole file, memory-mapped, `(bytes,)` uint8, read-only.
        modes: `(N,)` uint8, 0 for JPEG and 1 for raw pixels.
        widths, heights: `(N,)` in pixels.
        pointers, sizes: `(N,)` position and length in bytes of each image in `data`.
        labels: `(N,)` int64 class indices, or float64 targets.
        page_size: in bytes.
        manifest: what the conversion wrote beside the file; empty where there is none.
    """

    path: Path
    data: NDArray[np.uint8]
    modes: NDArray[np.uint8]
    widths: NDArray[np.uint16]
    heights: NDArray[np.uint16]
    pointers: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    labels: NDArray[Any]
    page_size: int
    manifest: dict[str, Any]

    def __len__(self) -> int:
        return len(self.modes)

    def stored(self, index: int) -> bytes:
        """A sample's image as it is stored: a JPEG file's bytes, or its pixels row by row."""
        start = int(self.pointers[index])
        return self.data[start : start + int(self.sizes[index])].tobytes()

    def image(self, index: int) -> Image.Image:
        """A sample's image, decoded by Pillow.

        Raises:
            BetonError: if it does not decode, or to another size than the metadata says.
        """
        stored, size = self.stored(index), (int(self.widths[index]), int(self.heights[index]))
        if self.modes[index] == MODE_RAW:
            return Image.frombytes("RGB", size, stored)
        try:
            image = Image.open(io.BytesIO(stored)).convert("RGB")
        except Exception as error:  # Pillow's readers raise whatever a damaged file leads them to
            raise self.sample_error(index, f"its JPEG data does not decode ({error})") from error
        if image.size != size:
            raise self.sample_error(
                index, f"its JPEG has {image.size} pixels, the file's metadata says {size}"
            )
        return image

    def sample_error(self, index: int, reason: str) -> BetonError:
        """The error for a sample that cannot be used."""
        return BetonError(
            f"{self.path}: sample {index}: {reason}. Leave it out with indices=, or convert the data again."
        )

    label_name = "label"

    @property
    def fields(self) -> dict[str, str]:
        return {"image": "rgb_image", "label": "int" if self.labels.dtype == np.int64 else "float"}

    def read(
        self,
        name: str,  # noqa: ARG002
        indices: Any,
    ) -> Any:
        return self.labels[indices]

    def checksum(self, index: int) -> int:
        return checksum(self.stored(index), self.labels[index])

    @property
    def checksums(self) -> Any:
        return self.manifest.get("crc32")

    @property
    def classes(self) -> list[str]:
        """Class names in label order; empty if the file came without a manifest."""
        return list(self.manifest.get("classes", []))

    @property
    def num_classes(self) -> int:
        """Number of classes: the names' count, or the largest label plus one."""
        return len(self.classes) or int(self.labels.max()) + 1


def tables_start(fields: int) -> int:
    """Where the metadata begins: after the header and so many field descriptors."""
    return HEADER.itemsize + fields * FIELD.itemsize


def tables_checksum(data: NDArray[np.uint8], samples: int, type_ids: list[int], table_ptr: int) -> int:
    """CRC-32 of everything in the file but the images: header, fields, metadata, allocation table."""
    end = tables_start(len(type_ids)) + samples * metadata_dtype(type_ids).itemsize
    return zlib.crc32(data[table_ptr:].data, zlib.crc32(data[:end].data))


def checksum(stored: bytes, label: Any) -> int:
    """CRC-32 of a sample: its image's bytes as stored, then its label's eight bytes (little-endian)."""
    kind = "<f8" if isinstance(label, float | np.floating) else "<i8"
    return zlib.crc32(np.array(label, dtype=kind).tobytes(), zlib.crc32(stored))


def manifest_path(path: Path) -> Path:
    """Where the manifest of a `.beton` file stands."""
    return path.with_name(path.name + ".json")


def open_beton(path: str | Path) -> Beton:
    """Opens and validates a `.beton` file; nothing is decoded yet.

    Every number that reading will rely on is checked here: positions inside the file, allocations
    that exist and cross no page, raw images whose length fits their size.

    Raises:
        BetonError: naming the file, what is wrong, and where.
    """
    path = Path(path)
    header = _read_header(path)
    fields, names = _read_fields(path, header)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    rows = _read_metadata(path, data, header, fields)
    first = tables_start(len(fields)) + rows.nbytes
    table = _read_allocations(path, data, header, first, len(rows))
    image = rows[f"f{fields.index(IMAGE_FIELD)}"]
    label = rows[f"f{next(i for i, kind in enumerate(fields) if kind != IMAGE_FIELD)}"]
    sizes = _match_allocations(path, image, table)
    manifest = _read_manifest(path, data, header, fields, names)
    _check_labels(path, label, len(manifest.get("classes", [])))
    return Beton(
        path=path,
        data=np.asarray(data),
        modes=image["mode"].copy(),  # a copy is contiguous and writeable, as the compiled loader wants it
        widths=image["width"].copy(),
        heights=image["height"].copy(),
        pointers=image["data_ptr"].copy(),
        sizes=sizes,
        labels=label.copy(),
        page_size=int(header["page_size"]),
        manifest=manifest,
    )


def _read_header(path: Path) -> Any:
    if not path.exists():
        raise BetonError(f"{path} does not exist. Make it with: drivetrain convert SOURCE {path}")
    if not path.is_file():
        raise BetonError(f"{path} is not a file. Convert a folder with: drivetrain convert {path} OUT.beton")
    size = path.stat().st_size
    if size < HEADER.itemsize:
        raise BetonError(f"{path} has {size} bytes, too few for a .beton header. Convert the data again.")
    header = np.fromfile(path, dtype=HEADER, count=1)[0]
    if header["version"] != VERSION:
        raise BetonError(
            f"{path} is not a .beton file of version {VERSION} (its first two bytes say {header['version']})."
        )
    if header["alloc_table_ptr"] == 0:
        raise BetonError(f"{path} is unfinished: its conversion was interrupted. Convert the data again.")
    page = int(header["page_size"])
    if page < MIN_PAGE or page > MAX_PAGE or page & (page - 1):
        raise BetonError(f"{path}: page size {page} at byte 4 is not a power of two from 2 MiB to 2 GiB.")
    if header["num_samples"] == 0:
        raise BetonError(f"{path} holds no samples.")
    return header


def _read_fields(path: Path, header: Any) -> tuple[list[int], list[str]]:
    count = int(header["num_fields"])
    descriptors = np.fromfile(path, dtype=FIELD, count=count, offset=HEADER.itemsize)
    if len(descriptors) < count:
        raise BetonError(
            f"{path} is truncated: it ends within its {count} field descriptors. Convert the data again."
        )
    kinds = [int(kind) for kind in descriptors["type_id"]]
    try:
        names = [bytes(name).split(b"\0")[0].decode("ascii") for name in descriptors["name"]]
    except UnicodeDecodeError:
        raise BetonError(f"{path}: a field name after byte {HEADER.itemsize} is not ASCII.") from None
    if (
        count != 2
        or len(kinds) != 2
        or kinds.count(IMAGE_FIELD) != 1
        or not set(kinds) <= set(METADATA_TYPES)
    ):
        raise BetonError(
            f"{path} has fields {dict(zip(names, kinds, strict=True))} of {count}; Drivetrain reads one "
            f"image field (type {IMAGE_FIELD}) and one int or float label (type {INT_FIELD} or {FLOAT_FIELD})."
        )
    return kinds, names


def _read_metadata(path: Path, data: NDArray[np.uint8], header: Any, fields: list[int]) -> Any:
    start = tables_start(len(fields))
    dtype = metadata_dtype(fields)
    end = start + int(header["num_samples"]) * dtype.itemsize
    if end > len(data):
        raise BetonError(
            f"{path} is truncated: {header['num_samples']} samples need {end} bytes of metadata, "
            f"the file has {len(data)}."
        )
    return data[start:end].view(dtype)


def _read_allocations(path: Path, data: NDArray[np.uint8], header: Any, first: int, samples: int) -> Any:
    """The allocation table; images may lie from byte `first` up to the table itself."""
    start = int(header["alloc_table_ptr"])
    if start > len(data) or (len(data) - start) % ALLOCATION.itemsize:
        raise BetonError(
            f"{path} is truncated: its allocation table should start at byte {start} and fill the file in "
            f"rows of {ALLOCATION.itemsize}, but the file has {len(data)} bytes."
        )
    table = np.frombuffer(data[start:].tobytes(), dtype=ALLOCATION)
    page, limit = np.uint64(header["page_size"]), np.uint64(start)
    ends = table["ptr"] + table["size"]
    bad = (table["sample_id"] >= samples) | (ends > limit) | (ends < table["ptr"]) | (table["size"] == 0)
    bad |= table["ptr"] < np.uint64(first)
    bad |= table["ptr"] // page != (ends - np.uint64(1)) // page
    if bad.any():
        row = int(np.argmax(bad))
        raise BetonError(
            f"{path}: row {row} of the allocation table ({table[row]}) points outside the data or crosses a "
            f"page of {page} bytes."
        )
    return table


def _match_allocations(path: Path, image: Any, table: Any) -> NDArray[np.uint64]:
    """The length in bytes of each sample's image, looked up by its pointer."""
    order = np.argsort(table["ptr"], kind="stable")
    pointers, sizes = table["ptr"][order], table["size"][order]
    if len(table) > 1 and (pointers[:-1] + sizes[:-1] > pointers[1:]).any():
        raise BetonError(f"{path}: allocations overlap.")
    wanted = np.asarray(image["data_ptr"])
    at = np.minimum(np.searchsorted(pointers, wanted), max(len(pointers) - 1, 0))
    missing = pointers[at] != wanted if len(pointers) else np.ones(len(wanted), bool)
    if not missing.any():
        missing = table["sample_id"][order][at] != np.arange(len(wanted))
    if missing.any():
        raise BetonError(f"{path}: sample {int(np.argmax(missing))} points to data that was never written.")
    found: NDArray[np.uint64] = sizes[at]
    pixels = image["width"].astype(np.uint64) * image["height"].astype(np.uint64) * np.uint64(3)
    wrong = (pixels == 0) | (image["mode"] > MODE_RAW) | ((image["mode"] == MODE_RAW) & (found != pixels))
    if wrong.any():
        sample = int(np.argmax(wrong))
        raise BetonError(
            f"{path}: sample {sample} says mode {image['mode'][sample]}, {image['width'][sample]} × "
            f"{image['height'][sample]} pixels in {found[sample]} bytes, which cannot be."
        )
    return found


def _check_labels(path: Path, labels: Any, classes: int) -> None:
    """Refuses labels that no data set has, such as ints read as floats because one bit of a type flipped."""
    if labels.dtype == np.int64:
        bad = (labels < -(1 << 31)) | (labels >= (1 << 31))
        if classes:
            bad |= (labels < 0) | (labels >= classes)
        allowed = f"a class from 0 to {classes - 1}" if classes else "a 32-bit class index"
    else:
        tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max
        bad = (labels != 0) & ~((np.abs(labels) >= tiny) & (np.abs(labels) <= largest))
        allowed = "a number that float32 holds"
    if bad.any():
        sample = int(np.argmax(bad))
        raise BetonError(
            f"{path}: sample {sample} has the label {labels[sample]}, which is not {allowed}. Convert the data again."
        )


def _read_manifest(
    path: Path, data: NDArray[np.uint8], header: Any, fields: list[int], names: list[str]
) -> dict[str, Any]:
    beside = manifest_path(path)
    if not beside.exists():
        return {}
    try:
        manifest = dict(json.loads(beside.read_text()))
        own = manifest["samples"] == header["num_samples"] and list(manifest["fields"]) == names
        classes, checksum = list(manifest["classes"]), int(manifest["tables_crc32"])
        whole = len(manifest["crc32"]) == manifest["samples"] and all(isinstance(c, str) for c in classes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BetonError(f"{beside} is not a manifest ({error!r}). Delete it, or convert again.") from None
    found = tables_checksum(data, int(header["num_samples"]), fields, int(header["alloc_table_ptr"]))
    if not own or not whole or found != checksum:
        raise BetonError(
            f"{beside} does not belong to {path.name}, or one of them is damaged: its samples, fields or "
            "checksum of the tables differ. Convert the data again; or, if the .beton is known to be good, delete it."
        )
    return manifest
