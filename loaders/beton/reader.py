"""A `.beton` file opened for reading: validated first, then read by field and sample."""

from __future__ import annotations

import io
import json
import shutil
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...common.errors import BetonError, suggest
from ...common.exhaustion import exhaustion, is_exhaustion
from ...common.storage.addresses import is_address
from ...common.storage.cache import Remote, local_copy
from ...common.storage.files import LockError, renames_held, wait_for_renames
from ...common.storage.stream import Stream, mirror_at
from ..native import jpegs
from .image_modes import mode_of
from .labels import LabelFacts
from .layout import MODE_RAW, Column, Field, check_numbers, fetch_tables, read_columns, read_header
from .manifest import manifest_path, read_head, read_manifest
from .open_file import ChangedError, OpenFile, ReadError
from .tables import Rows, Tables
from .targets import decode_mask

_ATTEMPTS = 5  # to open a file that conversions may be replacing


@dataclass(frozen=True)
class Beton:
    """A validated `.beton`: one image field, one label and any number of further fields.

    Attributes:
        path: the file.
        file: the open file, from which samples are read.
        image_name: the image's field.
        channels, depth: of the images: their number of channels, and the bits of each value, 8 or 16.
        modes: `(N,)` uint8, 0 for JPEG and 1 for raw pixels.
        widths, heights: `(N,)` in pixels.
        pointers, sizes: `(N,)` position and length in bytes of each image in `data`.
        columns: every field by name, in file order.
        label_name: the label's field: the one named `label`, else the first int, float or ndarray, else the first
            bytes, which are masks.
        page_size: in bytes.
        manifest: the manifest's content, without its checksums and digests; empty if there is none.
        checksums: `(N,)` CRC-32 of each sample when it was converted; None without a manifest.

    Example::

        >>> beton = open_beton("train.beton")
        >>> beton.fields
        {'image': 'rgb_image', 'label': 'int'}
        >>> beton.pixels(0).shape  # of the first image
        (32, 32, 3)
        >>> beton.close()
    """

    path: Path
    file: OpenFile
    image_name: str
    channels: int
    depth: int
    modes: NDArray[np.uint8]
    widths: NDArray[np.uint16]
    heights: NDArray[np.uint16]
    pointers: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    columns: dict[str, Column]
    label_name: str
    page_size: int
    manifest: dict[str, Any]
    checksums: NDArray[np.uint32] | None
    tables: Tables | None = None  # of a large file: the arrays above are read from them when they are indexed

    def __len__(self) -> int:
        return len(self.modes)

    def rows(self, indices: NDArray[np.int64]) -> Rows:
        """Return what the native core has to know of the samples `indices` `(n,)`."""
        if self.tables is not None:
            return self.tables.images(list(self.columns).index(self.image_name), indices)
        return Rows(
            np.full(len(indices), self.file.descriptor, np.int32), self.modes[indices].astype(np.int32),
            self.widths[indices], self.heights[indices], self.pointers[indices], self.sizes[indices],
            files=(self.file,),
        )  # fmt: skip

    @property
    def data(self) -> NDArray[np.uint8]:
        """The full file, memory-mapped, `(bytes,)` uint8, read-only: a map of its own on each call, because one takes a
        descriptor. Reading it kills the process if the file has been truncated since."""
        return self.file.mapped()

    @property
    def fields(self) -> dict[str, str]:
        """Map field name to kind: rgb_image, int, float, bytes, ndarray or json; in file order."""
        return {name: column.field.kind for name, column in self.columns.items()}

    @cached_property
    def targets(self) -> dict[str, str]:
        """Map the fields that move with the image to their kinds: mask, boxes, keypoints; see `beton.targets`."""
        masks = {self.label_name: "mask"} if self.fields[self.label_name] == "bytes" else {}
        return {**masks, **self.manifest.get("targets", {})}

    @property
    def colors(self) -> dict[str, list[str]]:
        """Map masks to the colors that their sources had, `"#rrggbb"` by class index, or ""; empty if they had none."""
        return dict(self.manifest.get("colors", {}))

    @cached_property
    def labels(self) -> NDArray[Any]:
        """`(N,)` int64 class indices or float64 targets; `(N, K)` of the stored type for vectors.

        Raises:
            BetonError: if the labels are masks, or a vector has a non-finite value.
        """
        if self.label_name in self.targets:
            raise BetonError(
                f"{self.path}: its labels are masks, which differ in size. Read some with "
                f"read({self.label_name!r}, indices), or one with mask({self.label_name!r}, index)."
            )
        labels: NDArray[Any] = self.read(self.label_name, np.arange(len(self)))
        if labels.ndim > 1 and labels.dtype.kind in "fc":
            bad = ~np.isfinite(labels).reshape(len(labels), -1).all(axis=1)
            if bad.any():
                raise self.sample_error(int(np.argmax(bad)), "its label is not finite")
        return labels

    def read(self, name: str, indices: NDArray[np.int64]) -> Any:
        """Return the values of one field for the samples `indices` `(n,)`.

        int and float are returned as `(n,)` int64 and float64; ndarrays as `(n, *shape)` of the stored type, in
        the order of bytes of this machine; bytes as a list (an image's: as stored); JSON as a list of values.

        Raises:
            BetonError: if there is no such field, or a JSON value does not parse.
        """
        if name not in self.columns:
            raise BetonError(f"{self.path} has no field {name!r}.{suggest(name, self.columns)}")
        column = self.columns[name]
        field = column.field
        if not field.allocated:
            return column.values[indices]
        if field.kind == "ndarray":
            stored = self.file.read_many(column.pointers[indices], field.nbytes)
            found = stored.view(field.dtype).reshape(-1, *field.shape)
            return found.astype(field.dtype.newbyteorder("="), copy=False)  # torch takes no other order of bytes
        values = ((index, self._stored(column, index)) for index in np.asarray(indices).tolist())
        return [self._json(name, *each) if field.kind == "json" else each[1] for each in values]

    def _stored(self, column: Column, index: int) -> bytes:
        if not column.field.allocated:
            return bytes(column.values[index].tobytes())
        try:
            return self.file.read(int(column.pointers[index]), int(column.sizes[index]))
        except (ChangedError, ReadError) as error:
            raise type(error)(f"Sample {index} cannot be read: {error}") from None

    def _json(self, name: str, index: int, value: bytes) -> Any:
        try:
            return json.loads(value.removesuffix(b"\0").decode())
        except (ValueError, RecursionError) as error:  # the latter of many brackets in each other
            raise self.sample_error(index, f"its field {name!r} is not valid JSON ({error})") from None

    def all_checksums(self, before: int = 0) -> int:
        """Return the CRC-32 of `checksums`, which there are, after bytes whose CRC-32 is `before`."""
        if self.tables is not None:
            return self.tables.all_checksums(before)
        assert self.checksums is not None
        return zlib.crc32(self.checksums.tobytes(), before)

    def checksum(self, index: int) -> int:
        """Return the CRC-32 of the sample's current data: image bytes, then each further field in file order."""
        return self._with_fields(index, zlib.crc32(self.stored(index)))

    def _with_fields(self, index: int, crc: int) -> int:
        """Return the CRC-32 of a sample, of whose image it is `crc`."""
        for column in self.columns.values():
            if column.field.name != self.image_name:
                crc = zlib.crc32(self._stored(column, index), crc)
        return crc

    def is_unchanged(self, index: int) -> bool:
        """Whether the sample matches its checksum; True without a manifest."""
        return self.checksums is None or self.checksum(index) == self.checksums[index]

    def are_unchanged(self, indices: NDArray[np.int64], images: NDArray[np.uint32]) -> bool:
        """Whether the samples match their checksums, if these are the CRC-32s of their images, `(n,)`."""
        if self.checksums is None:
            return True
        found = [self._with_fields(*each) for each in zip(indices.tolist(), images.tolist(), strict=True)]
        return bool(found == self.checksums[indices].tolist())

    def require_unchanged(self, index: int) -> None:
        """Raise `BetonError` unless the sample matches its checksum. One of a remote file is fetched a second time."""
        if self.is_unchanged(index):
            return
        if (mirror := self.file.mirror) is not None:
            for column in self.columns.values():
                if column.field.allocated:
                    mirror.forget(int(column.pointers[index]), int(column.sizes[index]))
            if self.is_unchanged(index):
                return
            raise BetonError(
                f"{self.path}: sample {index}: what {mirror.address} sends has another CRC-32 than the manifest: "
                "one of them was changed. Upload both files of one conversion again, and run the same command again."
            )
        raise self.sample_error(index, "its data changed since the conversion (CRC-32 mismatch)")

    def prefetch(
        self,
        indices: NDArray[np.int64],
        soon: NDArray[np.float32] | None = None,
        later: NDArray[np.float32] | None = None,
        *,
        local: bool,
    ) -> None:
        """Begin to read the images of the samples `indices` `(n,)`, which are wanted soon, without waiting for them.

        With `local` also of a file of this machine: it pays if the file is larger than the memory. Of a stream, each
        is wanted at the time `soon` `(n,)`, and again at the time `later` `(n,)`.
        """
        if soon is not None and later is not None and isinstance(self.file.mirror, Stream):
            self.file.mirror.expect(self.pointers[indices], self.sizes[indices], soon, later)
        elif self.file.mirror is not None:
            self.file.mirror.prefetch(self.pointers[indices], self.sizes[indices])
        elif local:
            self.file.announce(self.pointers[indices], self.sizes[indices])

    @contextmanager
    def prepared(self, indices: NDArray[np.int64]) -> Iterator[None]:
        """Inside the block, the images of the samples `indices` `(n,)` are on this machine.

        Samples of a remote file are compared with their checksums at their first use, those of a stream at each if the
        file may be replaced unnoticed; a mismatch is a `BetonError`.
        """
        if (mirror := self.file.mirror) is None:
            yield
            return
        with mirror.pinned(self.pointers[indices], self.sizes[indices], announced=True):
            for index in indices[self._unseen[indices]].tolist():
                self.require_unchanged(index)
            self._unseen[indices] = isinstance(mirror, Stream) and mirror.may_change
            yield

    @cached_property
    def _unseen(self) -> NDArray[np.bool_]:
        """`(N,)` which samples of a remote file are to be compared when they are used."""
        return np.ones(len(self), dtype=np.bool_)

    def close(self) -> None:
        """End what `prefetch` has begun. The file stays open."""
        if self.file.mirror is not None:
            self.file.mirror.close()

    def stored(self, index: int) -> bytes:
        """Return a sample's image as stored: a JPEG file's bytes, or its pixels row by row."""
        return self._stored(self.columns[self.image_name], index)

    def image(self, index: int) -> Image.Image:
        """Return a sample's image, decoded by Pillow: of mode RGB, L, RGBA or I;16.

        Raises:
            BetonError: if it cannot be decoded, or its size differs from the metadata; or if it has several channels of
                16 bits, for which Pillow has no mode.
        """
        if self.modes[index] == MODE_RAW:
            if mode_of(self.channels, self.depth) in ("RGB;16", "RGBA;16"):
                raise BetonError(
                    f"{self.path}: its images have {self.channels} channels of 16 bits, for which Pillow has no mode. "
                    "Read an array with pixels(index)."
                )
            return Image.fromarray(self.pixels(index))
        stored, size = self.stored(index), (int(self.widths[index]), int(self.heights[index]))
        try:
            image = Image.open(io.BytesIO(jpegs.huffman_coded(stored)), formats=["JPEG"]).convert("RGB")
            image.info = {}  # its EXIF data, too: loaders take pictures as they are stored
        except MemoryError:
            raise
        except Exception as error:  # damaged files make Pillow's readers raise many types
            raise self.sample_error(index, f"its JPEG data cannot be decoded ({error})") from error
        if image.size != size:
            raise self.sample_error(index, f"its JPEG has {image.size} pixels, but the file's metadata has {size}")
        return image

    def pixels(self, index: int) -> NDArray[Any]:
        """Return a sample's image as an array, `(H, W)` or `(H, W, C)`, uint8 or uint16.

        Raises:
            BetonError: as `image`.
        """
        if self.modes[index] != MODE_RAW:
            return np.asarray(self.image(index))
        shape = (self.heights[index], self.widths[index], self.channels)[: 3 if self.channels > 1 else 2]
        return np.frombuffer(self.stored(index), dtype=f"<u{self.depth // 8}").reshape(shape)

    def mask(self, name: str, index: int, rows: int | None = None) -> NDArray[Any]:
        """Return a sample's mask, `(H, W)` uint8 or uint16, read-only: a class index per pixel of its image.

        With `rows`, it may end after so many rows.

        Raises:
            BetonError: if it cannot be decoded, or its size is not the image's.
        """
        if self.fields.get(name) != "bytes":
            known = [field for field, kind in self.fields.items() if kind == "bytes"]
            raise BetonError(f"{self.path} has no mask {name!r}.{suggest(name, known)}")
        stored = self._stored(self.columns[name], index)
        try:
            return decode_mask(stored, int(self.heights[index]), int(self.widths[index]), rows)
        except ValueError as error:
            raise self.sample_error(index, f"its mask {name!r}: {error}") from None

    def sample_error(self, index: int, reason: str) -> BetonError:
        """Return the error for an unusable sample."""
        return BetonError(
            f"{self.path}: sample {index}: {reason}. Exclude it with indices=, which count "
            "through all files of the data, or convert the data again."
        )

    @property
    def classes(self) -> list[str]:
        """Class names in label order; empty without a manifest."""
        return list(self.manifest.get("classes", []))

    @property
    def num_classes(self) -> int:
        """The number of the classes' names; without, see `LabelFacts.outputs`. Of masks without names 0: it is not
        known."""
        masks = self.label_name in self.targets
        return len(self.classes) if masks or self.classes else LabelFacts.of([self.labels]).outputs


def open_beton(path: str | Path, remote: Remote = Remote(), most: int | None = None) -> Beton:  # noqa: B008  frozen
    """Open and validate a `.beton` file; nothing is decoded yet.

    Checks every number that reading relies on: positions are inside the file; allocations exist, belong to the
    sample and cross no page; lengths match the fields. A manifest must have the file's seal. If a conversion replaces
    both files at the same time, the result is the old or the new pair.

    Args:
        path: the file, or its address, such as `s3://bucket/train.beton`: then its tables are fetched here, and samples
            when they are read; see `load(patience=)`.
        remote: the folder of local copies, its limit, and the patience with servers.
        most: a file with more samples is checked sample by sample when they are used, if its manifest has digests by
            block. Default None: all is checked now.

    Raises:
        BetonError: naming the file, what is wrong, and where.
        DataError: if the file at an address cannot be read.

    Example::

        >>> beton = open_beton("train.beton")
        >>> len(beton.sizes), beton.classes
        (32, ['cat', 'dog'])
        >>> beton.close()
    """
    if not is_address(path):
        return _checked(Path(path), remote, most)
    copy = local_copy(str(path), remote)
    try:
        beton = _checked(copy, remote, most)
    except BaseException:
        if remote.stream:
            shutil.rmtree(copy.parent, ignore_errors=True)
        raise
    if remote.stream:  # nobody else uses it
        weakref.finalize(beton.file, shutil.rmtree, copy.parent, ignore_errors=True)
    return beton


def _checked(path: Path, remote: Remote, most: int | None) -> Beton:
    """Return the opened file. What a copy has of a remote one may be what its source sent once, by mistake, and is
    fetched a second time."""
    try:
        return _opened(path, remote, most)
    except BetonError:
        if (mirror := mirror_at(path, remote.patience)) is None:
            raise
    mirror.renew(path)
    try:
        return _opened(path, remote, most)
    except BetonError as error:
        raise type(error)(str(error).replace(str(path), mirror.address)) from error.__cause__


def _opened(path: Path, remote: Remote, most: int | None) -> Beton:
    if not path.name:  # "." or "/", from which no name of a manifest follows
        read_header(path)  # raises
    for _ in range(_ATTEMPTS - 1):
        before = stamps(path)
        try:
            return _open(path, remote.patience, most)
        except BetonError:
            wait_for_renames(path)
            if stamps(path) == before:
                raise  # nobody replaced the files in the meantime
    with renames_held(path):  # writers that replace the files faster than they are read wait for this one
        return _open(path, remote.patience, most)


def stamps(path: Path) -> list[tuple[int, ...] | None]:
    """Return what distinguishes a file and its manifest from files that replace them, or that they become."""
    found: list[tuple[int, ...] | None] = []
    for one in (path, manifest_path(path)):
        try:
            status = one.stat()
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except OSError:
            found.append(None)
    return found


def _open(path: Path, patience: float, most: int | None) -> Beton:
    tables: Tables | None = None
    try:
        header, fields, field, label = fetch_tables(path, patience, most)
        file = OpenFile(path, patience)
        large = most is not None and int(header["num_samples"]) > most
        if large and (head := read_head(path, file, header, fields)) is not None:
            manifest, blocks, lines = head
            tables = Tables(path, file, header, fields, label, len(manifest["classes"]), blocks, lines)
            columns, checksums = tables.columns(), tables.checksums()
        else:
            columns = read_columns(path, file, header, fields)
            manifest, checksums = read_manifest(path, file, header, fields)
    except LockError:
        raise
    except OSError as error:
        if is_exhaustion(error):
            wanted = f"one file descriptor for {path}, and for each other file of the data"
            raise exhaustion(error, wanted) from error
        raise BetonError(f"{path} cannot be read: {error.strerror or error}.") from error
    image = columns[field.name]
    if tables is not None:
        modes, widths, heights = tables.image_columns(fields.index(field))
    else:
        if not label.allocated:
            check_numbers(path, label.kind, columns[label.name].values, len(manifest.get("classes", [])))
        modes, widths, heights = _image_columns(field, image)
    return Beton(
        path=path, file=file, image_name=field.name,
        channels=3 if field.kind == "rgb_image" else (*field.shape, 1)[2], depth=8 * field.dtype.itemsize,
        modes=modes, widths=widths, heights=heights, pointers=image.pointers, sizes=image.sizes,
        columns=columns, label_name=label.name, page_size=int(header["page_size"]),
        manifest=manifest, checksums=checksums, tables=tables,
    )  # fmt: skip


def _image_columns(field: Field, image: Column) -> list[Any]:
    """Return modes, widths and heights, contiguous, as the compiled loader requires."""
    if field.kind == "rgb_image":
        return [image.values[name].copy() for name in ("mode", "width", "height")]
    height, width = (np.full(len(image.values), side, dtype=np.uint16) for side in field.shape[:2])
    return [np.full(len(image.values), MODE_RAW, dtype=np.uint8), width, height]
