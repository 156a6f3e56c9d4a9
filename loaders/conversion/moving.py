"""Masks, boxes and keypoints of a sample: taken in any form, scaled as its image is, and stored."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ...common.errors import DataError
from ..beton.targets import check_classes, check_size, coordinates, decode_mask, encode_mask, nearest_places
from .encode import Encoded

_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B")
"""Modes of Pillow's images with one integer per pixel."""

Size = tuple[int, int]
"""Width and height."""


def is_mask(label: Any) -> bool:
    """Whether a label is meant as a mask: a picture, a PNG file's bytes, or an array of two or more dimensions."""
    return isinstance(label, Image.Image | bytes) or (
        isinstance(label, np.ndarray | torch.Tensor) and label.ndim >= 2
    )


def store_target(name: str, kind: str, value: Any, encoded: Encoded, classes: int) -> bytes:
    """Return a target as stored in the file.

    Args:
        name, kind: of the field.
        value: of the upright image, before it was scaled.
        encoded: the image as stored.
        classes: number of classes that a mask's indices may have, besides 255; 0: any.

    Raises:
        DataError: if it is not a target of this kind, or not one of this image.
    """
    stored = encoded.width, encoded.height
    try:
        if kind != "mask":
            text = _scaled_coordinates(kind, value, encoded.upright, stored)
            return text.encode() + b"\0"  # as FFCV's JSONField
        indices = _indices(value, encoded.upright)
        if classes:
            check_classes(indices, classes)
        return encode_mask(indices if stored == encoded.upright else _nearest(indices, stored))
    except ValueError as error:
        raise DataError(f"its {kind} {name!r}: {error}") from None


def _indices(value: Any, size: Size) -> NDArray[Any]:
    """Return a mask's class indices, `(H, W)`. The size is checked before pixels are decoded."""
    if isinstance(value, bytes):
        return decode_mask(value, size[1], size[0])
    if isinstance(value, Image.Image):
        if value.mode not in _MODES:
            raise ValueError(
                f"it is an image of mode {value.mode}; expected one class index per pixel: mode P, L, 1 or I;16"
            )
        check_size(value.size, size)
        try:
            return np.asarray(value)
        except MemoryError:
            raise
        except Exception as error:  # opened lazily, so it may still be damaged
            raise ValueError(f"it cannot be decoded ({error})") from None
    indices = _numbers(value)
    if indices.ndim == 3 and len(indices) == 1:
        indices = indices[0]
    if indices.ndim != 2 or indices.dtype.kind not in "biu":
        raise ValueError(
            f"it is {indices.dtype} of shape {indices.shape}; expected one class index per pixel: integers of shape "
            "(H, W)"
        )
    check_size(indices.shape[::-1], size)
    return indices


def _numbers(value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        numbers: NDArray[Any] = (
            (value.double() if value.is_floating_point() else value).detach().cpu().numpy()
        )
        return numbers
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.array(None)


def _nearest(indices: NDArray[Any], size: Size) -> NDArray[Any]:
    """Return a mask scaled to another size: for each pixel the one at its top left corner, as in PyTorch."""
    rows, columns = (
        nearest_places(before, after) for before, after in zip(indices.shape, size[::-1], strict=True)
    )
    return indices[rows[:, None], columns]


def _scaled_coordinates(kind: str, value: Any, upright: Size, stored: Size) -> str:
    form = getattr(value, "format", None)
    if isinstance(value, torch.Tensor) and form is not None and getattr(form, "name", form) != "XYXY":
        raise ValueError(
            f"their format is {getattr(form, 'name', form)}; convert them to XYXY with torchvision's "
            "ConvertBoundingBoxFormat"
        )
    canvas = getattr(value, "canvas_size", None)
    if isinstance(value, torch.Tensor) and canvas is not None and tuple(canvas) != upright[::-1]:
        raise ValueError(
            f"their canvas is {tuple(canvas)} (height, width), but their image is {upright[::-1]}, upright"
        )
    array = coordinates(kind, _numbers(value))
    if stored != upright:
        scale = np.array(stored) / np.array(upright)
        array = array * np.tile(scale, array.shape[1] // 2)
    return json.dumps(array.tolist())
