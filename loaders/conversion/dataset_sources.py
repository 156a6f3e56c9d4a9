"""Data sets in memory as sources: a pair of arrays, or any indexable data set."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ...common.errors import DataError


class ArraySource:
    """A pair of arrays: images `(N, H, W, C)`, `(N, C, H, W)` or `(N, H, W)`, uint8 or uint16, and labels.

    Labels are `(N,)`, `(N, K)`, or masks, `(N, H, W)`.
    """

    kind = "arrays"

    def __init__(self, images: Any, labels: Any) -> None:
        dtype = str(images.dtype).removeprefix("torch.")
        if dtype not in ("uint8", "uint16") or len(images.shape) not in (3, 4):
            raise DataError(
                f"The images are {dtype} of shape {tuple(images.shape)}. Pass uint8, 0 to 255, of shape "
                "(N, H, W, 3), (N, 3, H, W) or (N, H, W); for uint16 and other channels, with image_mode=."
            )
        if len(labels.shape) not in (1, 2, 3) or 0 in labels.shape[1:]:
            raise DataError(
                f"The labels have shape {tuple(labels.shape)}. Pass one number per image, (N,), one vector per "
                "image, (N, K), or one mask per image, (N, H, W)."
            )
        if len(images) != len(labels):
            raise DataError(
                f"There are {len(images)} images and {len(labels)} labels. Pass one label per image."
            )
        self._images, self._labels = images, labels
        self.classes: list[str] = []

    def __len__(self) -> int:
        return len(self._images)

    def get(self, index: int) -> tuple[Any, Any]:
        return self._images[index], self._labels[index]

    def describe(self, index: int) -> str:
        return f"sample {index}"


class DatasetSource:
    """Any indexable data set. Only one thread at a time calls `__getitem__`, which may not be thread-safe."""

    def __init__(self, dataset: Any, fields: Sequence[str] = ()) -> None:
        self.kind = f"dataset {type(dataset).__name__}"
        self.classes = [str(name) for name in getattr(dataset, "classes", None) or _feature_names(dataset)]
        self._dataset, self._fields, self._lock = _with_files(dataset), list(fields), threading.Lock()

    def __len__(self) -> int:
        return len(self._dataset)

    def get(self, index: int) -> tuple[Any, ...]:
        with self._lock:
            sample = self._dataset[index]
        if isinstance(sample, dict):
            return self._from_dict(sample)
        wanted = 2 + len(self._fields)
        if not isinstance(sample, tuple | list) or len(sample) != wanted:
            names = ", ".join(["image", "label", *self._fields])
            has = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            what = f"a pair ({names})" if wanted == 2 else f"a tuple ({names})"
            raise DataError(f"it is a {type(sample).__name__}{has}; expected {what} or a dict")
        return tuple(sample)

    def _from_dict(self, sample: dict[str, Any]) -> tuple[Any, ...]:
        image = sample.get("image", sample.get("img"))
        if image is None or "label" not in sample:
            raise DataError(f"it has the keys {sorted(sample)}; expected 'image' (or 'img') and 'label'")
        missing = [name for name in self._fields if name not in sample]
        if missing:
            raise DataError(f"it has the keys {sorted(sample)}; the fields {missing} are missing")
        return image, sample["label"], *(sample[name] for name in self._fields)

    def describe(self, index: int) -> str:
        return f"sample {index}"


def _feature_names(dataset: Any) -> Sequence[str]:
    """Return the class names of a Hugging Face data set's label; empty for any other data set."""
    features = getattr(dataset, "features", None)
    return getattr(features.get("label"), "names", None) or [] if isinstance(features, dict) else []


def _with_files(dataset: Any) -> Any:
    """Make a Hugging Face data set return each image's stored file, so that JPEGs are copied unchanged."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, dict) or not hasattr(dataset, "cast_column"):
        return dataset
    if getattr(dataset, "format", {}).get("type") is not None:
        return dataset  # the user's own transform or format defines the samples
    for name in ("image", "img"):
        feature = features.get(name)
        if feature is not None and getattr(feature, "decode", False):
            return dataset.cast_column(name, type(feature)(decode=False))
    return dataset
