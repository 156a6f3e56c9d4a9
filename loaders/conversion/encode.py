"""Encode one image, in whatever form, as the bytes stored in a `.beton`."""

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...common.checks import check_flag, check_whole, is_number, is_whole, make_plain
from ...common.errors import DataError, suggest
from ..beton.image_modes import MODES
from ..beton.layout import MODE_JPEG, MODE_RAW, Field
from ..decode.pictures import (
    JPEG_FORMATS,
    LONGEST,
    LONGEST_JPEG,
    decoded,
    pixels_of,
    reading,
    to_rgb,
    turn_of,
)
from ..native import jpegs
from .folders import without_waiting

_RAW_LIMIT = 64 * 64 * 3  # bytes up to which mode auto stores pixels: lossless, and faster to read
_CHOICES = {"write_mode": ("auto", "jpg", "raw", "smart", "proportion"), "check": ("decode", "structure")}
_END_OF_IMAGE = b"\xff\xd9"

_OPTIMIZED_MEMORY = 1 << 28
"""Bytes of coefficients up to which Huffman tables are optimized: 44 megapixels without chroma subsampling. Each worker
has one image, and decoding a baseline JPEG for its check takes far less."""


@dataclass(frozen=True)
class Encoding:
    """How images are stored; see `convert` for each value's meaning."""

    max_resolution: int | None = None
    min_resolution: int | None = None
    quality: int = 90
    write_mode: str = "auto"
    smart_threshold: int | None = None
    compress_probability: float = 0.5
    check: str = "decode"
    optimize: bool = False
    keep_bytes: bool = False
    image_mode: str | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        for name in ("max_resolution", "min_resolution"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1):
                raise DataError(f"{name}={value!r} must be at least 1 pixel, or None for no limit.")
        if self.max_resolution is not None and self.min_resolution is not None:
            raise DataError("max_resolution and min_resolution both set the scale. Pass only one of them.")
        check_whole("quality", self.quality, DataError, 1, 100)
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise DataError(f"{name}={value!r} is unknown.{suggest(str(value), choices)}")
        check_flag("optimize", self.optimize, DataError)
        check_flag("keep_bytes", self.keep_bytes, DataError)
        if self.optimize and self.keep_bytes:
            raise DataError("optimize=True changes a JPEG's bytes, which keep_bytes=True keeps. Pass only one of them.")
        if self.smart_threshold is not None and not is_whole(self.smart_threshold, 0):
            raise DataError(f"smart_threshold={self.smart_threshold!r} must be a number of bytes, or None.")
        if not is_number(self.compress_probability, "[0, 1]"):
            raise DataError(f"compress_probability={self.compress_probability!r} must be in [0, 1].")
        self._check_write_mode()
        self._check_mode()

    def _check_write_mode(self) -> None:
        for name, mode in (("smart_threshold", "smart"), ("compress_probability", "proportion")):
            if (value := getattr(self, name)) != getattr(Encoding, name) and self.write_mode != mode:
                raise DataError(
                    f"{name}={value!r} is of write_mode={mode!r}, but write_mode={self.write_mode!r} does not use it. "
                    f"Leave it out, or use write_mode={mode!r}."
                )
        for name in ("optimize", "keep_bytes"):
            if getattr(self, name) and self.write_mode == "raw":
                wrong = f"{name}=True is for JPEGs, but write_mode='raw' stores pixels"
                raise DataError(f"{wrong}. Leave one of the two out.")

    def _check_mode(self) -> None:
        if self.image_mode is not None and self.image_mode not in MODES:
            raise DataError(f"image_mode={self.image_mode!r} is unknown. Use one of {', '.join(map(repr, MODES))}.")
        if self.array_mode is None:
            return
        resize, leave = "Resize the images first", "Leave it out: such images are stored raw"
        for name, wrong, remedy in (
            ("write_mode", self.write_mode not in ("auto", "raw"), leave),
            ("max_resolution", self.max_resolution is not None, resize),
            ("min_resolution", self.min_resolution is not None, resize),
            ("optimize", self.optimize, leave),
            ("keep_bytes", self.keep_bytes, leave),
        ):
            if wrong:
                raise DataError(
                    f"{name}={getattr(self, name)!r} does not go with image_mode={self.image_mode!r}. {remedy}."
                )

    @property
    def array_mode(self) -> str | None:
        """The mode of images that are stored as arrays; None for RGB with 8 bits."""
        return None if self.image_mode == "RGB" else self.image_mode

    def target_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (width, height) to store for an image of this size: never larger."""
        if self.max_resolution is not None:
            ratio = self.max_resolution / max(size)
        elif self.min_resolution is not None:
            ratio = self.min_resolution / min(size)
        else:
            return size
        return size if ratio >= 1 else (max(round(size[0] * ratio), 1), max(round(size[1] * ratio), 1))

    def as_jpeg(self, number: int, size: tuple[int, int], is_jpeg: bool) -> bool:
        """Whether to store sample `number` as a JPEG at `size`: by FFCV's rules, and our own for auto."""
        pixels = size[0] * size[1] * 3
        if self.write_mode == "auto":
            return max(size) <= LONGEST_JPEG and (is_jpeg or pixels > _RAW_LIMIT)
        if self.write_mode == "smart":
            return self.smart_threshold is not None and pixels > self.smart_threshold
        if self.write_mode == "proportion":  # depends only on the index, not on the number of workers
            return random.Random(number).random() < self.compress_probability
        return self.write_mode == "jpg"


@dataclass(frozen=True)
class Encoded:
    mode: int  # MODE_JPEG or MODE_RAW
    width: int
    height: int
    payload: bytes
    treatment: str  # what was done to it
    upright: tuple[int, int]  # (width, height) upright, before it was scaled


def encode_image(image: Any, encoding: Encoding, number: int = 0) -> Encoded:
    """Encode the bytes of an image file, a dict with its `bytes` or `path` (Hugging Face's undecoded images), a PIL
    image, or a uint8 array or tensor, changing pixels only if necessary; see `_to_array` and `image_pixels`."""
    if isinstance(image, dict) and set(image) == {"bytes", "path"}:
        image = image["bytes"] if image["bytes"] is not None else _read(image["path"])
    if encoding.array_mode is not None:
        pixels, treatment = pixels_of(image, encoding.array_mode)
        height, width = pixels.shape[:2]
        _check_sides((width, height))
        return Encoded(MODE_RAW, width, height, pixels.tobytes(), treatment, (width, height))
    if isinstance(image, bytes):
        return _encode_file(image, encoding, number)
    if isinstance(image, Image.Image):
        with reading():  # it may have been opened without being decoded
            image.load()
        return _store(*to_rgb(image), encoding, number)
    return _store(Image.fromarray(_to_array(image)), "stored", encoding, number)


def image_field(encoding: Encoding, image: Any) -> Field:
    if encoding.array_mode is None:
        return Field("image", "rgb_image")
    (channels, depth), encoded = MODES[encoding.array_mode], encode_image(image, encoding)
    shape = (encoded.height, encoded.width, channels)[: 3 if channels > 1 else 2]
    return Field("image", "ndarray", np.dtype(f"<u{depth // 8}"), shape)


def _check_sides(size: tuple[int, int]) -> None:
    if max(size) > LONGEST:
        raise DataError(f"its longest side is {max(size)} pixels; the format's limit is {LONGEST}")


def _read(path: Any) -> bytes:
    try:
        with open(Path(path), "rb", opener=without_waiting) as file:
            return file.read()
    except (OSError, TypeError) as error:
        raise DataError(f"its file {path} cannot be read: {getattr(error, 'strerror', error)}") from None


def _encode_file(data: bytes, encoding: Encoding, number: int) -> Encoded:
    whole = False
    with reading(), Image.open(io.BytesIO(data)) as image:
        is_jpeg = image.format in JPEG_FORMATS
        if is_jpeg and image.mode == "RGB" and jpegs.frame_type(data) in jpegs.DECODED_FRAMES:
            whole = turn_of(image) is None and encoding.target_size(image.size) == image.size
            whole = whole and encoding.as_jpeg(number, image.size, is_jpeg)
            if whole and (encoded := _keep(data, image.size, encoding)) is not None:
                return encoded
    with decoded(data) as (image, _):
        rgb, treatment = to_rgb(image)
    if whole:
        treatment = "re-encoded: its JPEG decoded with a warning"
    with reading():
        return _store(rgb, treatment, encoding, number, is_jpeg)


def _keep(jpeg: bytes, size: tuple[int, int], encoding: Encoding) -> Encoded | None:
    """Encode an RGB JPEG of this size without a change of its pixels; None if it is damaged. Progressive and arithmetic
    ones become baseline; with `optimize`, others get Huffman tables of their own if that is smaller."""
    sequential = jpegs.frame_type(jpeg) in jpegs.SEQUENTIAL_FRAMES
    sound = encoding.check == "structure" and jpeg.endswith(_END_OF_IMAGE)
    if encoding.optimize if sequential else not encoding.keep_bytes:
        limits = (len(jpeg) - 1, _OPTIMIZED_MEMORY) if sequential else ()
        try:
            payload = jpegs.recoded(jpeg, *limits)
            if payload is not None:
                treatment = "Huffman tables optimized" if sequential else "recoded losslessly as baseline"
                return Encoded(MODE_JPEG, *size, payload, treatment, size)
            sound = True  # its codes were read to the end
        except ValueError:  # damaged, large, or of a kind that cannot be recoded
            sound = False
    if sound or jpegs.decodes(jpeg, *size):
        return Encoded(MODE_JPEG, *size, jpeg, "copied unchanged", size)
    return None


def _to_array(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    array = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if array.dtype != np.uint8:
        remedy = ", or image_mode='I;16', 'RGB;16' or 'RGBA;16'" if array.dtype == np.uint16 else ""
        raise DataError(f"its pixels are {array.dtype}; expected uint8, 0 to 255{remedy}")
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        raise DataError(f"its shape is {array.shape}; expected (H, W, 3), (3, H, W), or (H, W), (H, W, 1) or (1, H, W)")
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array)


def _store(image: Image.Image, treatment: str, encoding: Encoding, number: int, is_jpeg: bool = False) -> Encoded:
    upright, size = image.size, encoding.target_size(image.size)
    if size != upright:
        image, treatment = image.resize(size, Image.Resampling.BOX), "scaled down"
    _check_sides(size)
    if not encoding.as_jpeg(number, size, is_jpeg):
        treatment = "decoded to raw pixels" if is_jpeg and treatment == "stored" else treatment
        return Encoded(MODE_RAW, *size, image.tobytes(), treatment, upright)
    if max(size) > LONGEST_JPEG:
        raise DataError(
            f"its longest side is {max(size)} pixels; a JPEG has at most {LONGEST_JPEG}. Pass write_mode='raw'"
        )
    buffer = io.BytesIO()
    # Without the comment of the file, which may be too long for a JPEG.
    image.save(buffer, "JPEG", quality=encoding.quality, comment=b"")
    treatment = "compressed as JPEG" if treatment == "stored" else treatment
    return Encoded(MODE_JPEG, *size, buffer.getvalue(), treatment, upright)
