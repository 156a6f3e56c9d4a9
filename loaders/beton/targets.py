"""Targets that move with the image: masks (one class index per pixel), boxes and keypoints, as stored in a file.

A mask is a PNG file in a bytes field; boxes and keypoints are lists of numbers in a JSON field. So FFCV reads the
fields, and every image viewer shows a mask. Which fields are targets is in the manifest.
"""

import io
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

STORED_AS = {"mask": "bytes", "boxes": "json", "keypoints": "json"}
"""Maps the kinds of targets, which are cropped, flipped and resized with the image, to those of their fields."""

MOVING = tuple(STORED_AS)

NOT_COUNTED = 255  # class index of pixels that count neither in the loss nor in metrics, as in PASCAL VOC

_COLUMNS = {"boxes": 4, "keypoints": 2}
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = struct.Struct(">8xIIBB2xB")
"""The first chunk: length and name, then width, height, bits per value, color type, and whether it is interlaced."""
_GRAY, _PALETTE = 0, 3
_COLORS = {0: "gray", 2: "RGB", 3: "palette", 4: "gray with transparency", 6: "RGB with transparency"}
_INDICES = ((1, _GRAY), (8, _GRAY), (16, _GRAY), (1, _PALETTE), (2, _PALETTE), (4, _PALETTE), (8, _PALETTE))
"""Bits per sample and color type of PNGs whose values Pillow returns unscaled."""


def check_targets(targets: Mapping[Any, Any], kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the targets of a file, name to kind; raise ValueError for one that no field of its kind stores."""
    for name, kind in targets.items():
        if kind not in MOVING or name not in kinds or kinds[name] != STORED_AS[kind]:
            stored = f"the field is {kinds[name]}" if name in kinds else "there is no such field"
            raise ValueError(f"the target {name!r} is {kind!r}, but {stored}")
    return dict(targets)


def palette(colors: Sequence[str] = ()) -> NDArray[np.uint8]:
    """Return a color for each class index, `(256, 3)`: of `colors`, `"#rrggbb"`, or PASCAL VOC's where it is "" or
    ends."""
    indices, usual = np.arange(256)[:, None], np.zeros((256, 3), dtype=np.int64)
    for bit in range(8):  # the index's lowest three give the next lower ones of red, green and blue
        usual |= ((indices >> (3 * bit) >> np.arange(3)) & 1) << (7 - bit)
    for index, color in enumerate(colors[:256]):
        if color:
            usual[index] = [*bytes.fromhex(color[1:])]
    return usual.astype(np.uint8)


_PALETTE_BYTES = palette().tobytes()


def encode_mask(indices: NDArray[Any]) -> bytes:
    """Return class indices `(H, W)`, integers from 0 to 65535, as a PNG: with a palette that has a color per class, or
    with 16 bits per pixel if an index is above 255."""
    if indices.ndim != 2 or not indices.size or indices.dtype.kind not in "biu":
        raise ValueError(f"it is {indices.dtype} of shape {indices.shape}; expected integers of shape (H, W)")
    smallest, largest = int(indices.min()), int(indices.max())
    if smallest < 0 or largest > 0xFFFF:
        raise ValueError(f"it has the class index {smallest if smallest < 0 else largest}; expected 0 to 65535")
    buffer, options = io.BytesIO(), {}
    if largest <= 255:
        image = Image.fromarray(np.ascontiguousarray(indices, dtype=np.uint8))
        image.putpalette(_PALETTE_BYTES)
        options["bits"] = 8
    else:
        image = Image.fromarray(np.ascontiguousarray(indices, dtype=np.uint16))
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def decode_mask(data: bytes, height: int, width: int, rows: int | None = None) -> NDArray[Any]:
    """Return the class indices of a mask's PNG file, gray or palette, `(height, width)` uint8 or uint16, read-only.
    With `rows`, the later ones may be missing: what a crop does not need takes time, too."""
    size, bits, color, lines, _ = _header(data)
    if (bits, color) not in _INDICES:
        what = f"{_COLORS.get(color, f'of color type {color}')} with {bits} bits"
        raise ValueError(f"it is a PNG that is {what}; expected class indices: 8 bits gray, or with a palette")
    check_size(size, (width, height))
    fast = bits == 8 and lines
    if fast and (indices := _unfiltered(lines, height if rows is None else rows, width)) is not None:
        return indices
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            indices = np.asarray(image)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow's readers raise many types
        raise ValueError(f"its PNG cannot be decoded ({error})") from None
    return indices.astype(np.uint16 if bits == 16 else np.uint8, copy=False)


def _unfiltered(lines: list[memoryview], rows: int, width: int) -> NDArray[np.uint8] | None:
    """Return the first rows of an image whose lines have no filter, as `encode_mask` writes them; None for others.
    Takes half of Pillow's time, most of which is not spent on decoding."""
    size = rows * (1 + width)  # a line begins with its filter
    decoder = zlib.decompressobj()
    try:
        found = decoder.decompress(lines[0] if len(lines) == 1 else b"".join(lines), size)
    except zlib.error:
        return None
    if decoder.eof and len(found) < size:  # Pillow would take zeros for the rest
        raise ValueError(f"its PNG ends after {len(found) // (1 + width)} of {rows} rows")
    if len(found) < size:
        return None
    image = np.frombuffer(found, dtype=np.uint8).reshape(rows, 1 + width)
    return None if image[:, 0].any() else image[:, 1:]


def nearest_places(before: int, after: int) -> NDArray[np.int64]:
    """Return each output's index in the input, `(after,)`, of `before` pixels resized to the nearest, with PyTorch's
    rounding: the product with the scale is in float32, and truncated."""
    places = np.arange(after, dtype=np.float32) * (np.float32(before) / np.float32(after))
    return np.minimum(places.astype(np.int64), before - 1)


def check_size(size: tuple[int, int], image: tuple[int, int]) -> None:
    """Require that a mask has the size of its image; both are (width, height)."""
    if size != image:
        turned = "; it is the mask of the upright picture that counts" if size == image[::-1] else ""
        raise ValueError(
            f"it has {size[0]} × {size[1]} pixels (width × height), but its image has {image[0]} × {image[1]}{turned}"
        )


def check_classes(indices: NDArray[Any], classes: int) -> None:
    """Reject a mask with an index that has no class, other than `NOT_COUNTED`."""
    wrong = (indices >= classes) & (indices != NOT_COUNTED)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"it has the class index {indices[row, column]} at row {row}, column {column}, but there are {classes} "
            f"classes; {NOT_COUNTED} is for pixels that do not count"
        )


def palette_of(data: bytes) -> bytes:
    """Return the palette of a mask's PNG file: red, green and blue of each value in turn; empty without one."""
    return _header(data)[4]


def check_colors(colors: Mapping[Any, Any], kinds: Mapping[str, str]) -> None:
    """Raise ValueError unless they are lists of `"#rrggbb"` or "", by the name of a mask's field."""
    for name, own in colors.items():
        if kinds.get(name) != STORED_AS["mask"] or not all(re.fullmatch(r"(#[0-9a-f]{6})?", each) for each in own):
            raise ValueError(f"the colors of {name!r} are not those of masks")


def _header(data: bytes) -> tuple[tuple[int, int], int, int, list[memoryview], bytes]:
    """Return (width, height), bits, color type, compressed lines and palette of a PNG whose chunks are intact; no lines
    if they are interlaced."""
    if not data.startswith(_SIGNATURE):
        raise ValueError("it is not a PNG file")
    view, at, kind, colors = memoryview(data), len(_SIGNATURE), b"", b""
    lines: list[memoryview] = []
    while kind != b"IEND":
        if at + 12 > len(data):
            raise ValueError("its PNG is truncated")
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > len(data):
            raise ValueError("its PNG is truncated")
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + 4]):
            raise ValueError(f"its PNG is damaged: the CRC-32 of the chunk {kind!r} differs")
        if (at == len(_SIGNATURE)) != (kind == b"IHDR"):
            raise ValueError("its PNG does not begin with its only header")
        if kind == b"IDAT":
            lines.append(view[at + 8 : end])
        elif kind == b"PLTE":
            colors = bytes(view[at + 8 : end])
        at = end + 4
    width, height, bits, color, interlaced = _HEADER.unpack_from(data, len(_SIGNATURE))
    return (width, height), bits, color, [] if interlaced else lines, colors


def coordinates(kind: str, values: Any) -> NDArray[Any]:
    """Return boxes as `(n, 4)`, left, top, right, bottom; keypoints as `(n, 2)`, x, y; from lists, too; `n` may be 0.
    Raise ValueError unless they are finite, and each box ends after it begins."""
    columns = _COLUMNS[kind]
    names = "left, top, right, bottom" if kind == "boxes" else "x, y"
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths
        array = np.empty(0, dtype=object)
    if not array.size and array.dtype.kind in "fiu" and array.shape in ((0,), (0, columns)):
        return np.zeros((0, columns))
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] != columns:
        raise ValueError(f"expected any number of {kind}, each a list of {columns} numbers: {names}")
    if not np.isfinite(array).all():
        row = int(np.argmin(np.isfinite(array).all(axis=1)))
        raise ValueError(f"number {row} of its {kind} is {array[row].tolist()}, which is not finite")
    if kind == "boxes":
        wrong = (array[:, 2:] < array[:, :2]).any(axis=1)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(f"box {row} is {array[row].tolist()}, which ends before it begins; expected {names}")
    return array
