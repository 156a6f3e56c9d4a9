"""What can be converted: folders of images, tar shards, indexable data sets and arrays, behind one interface."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ...common.errors import DataError
from .folders import FolderSource, MaskFolder
from .labelled_folder import LabelledFolder
from .tar_source import TarSource, is_shards


class SampleSource(Protocol):
    """Samples by index. Several threads may call `get`."""

    kind: str
    classes: list[str]

    def __len__(self) -> int: ...

    def get(self, index: int) -> tuple[Any, ...]:
        """Return the image in any form that `encode_image` accepts, the label, and each further field's value."""
        ...

    def describe(self, index: int) -> str:
        """Return the sample's name for an error message: a path, or its index."""
        ...


def open_source(
    source: Any, fields: Sequence[str] = (), labels: str | Path | None = None, classes: Sequence[str] = ()
) -> SampleSource:
    """Open a source of any supported type.

    Args:
        source: a folder laid out as `CLASS/image.jpg` (see `FolderSource`); WebDataset shards: a path that ends in
            `.tar`, a pattern such as `train-{000..003}.tar` or `train-*.tar`, or a list of them; a pair
            `(images, labels)` of arrays or tensors; or any object with `len` and `[index]` that returns
            `(image, label, …)` or a dict with `image`/`img` and `label`.
        fields: names of the further fields that each sample must have.
        labels: for a folder, the CSV file that labels its images (see `LabelledFolder`), or the folder of their masks
            (see `MaskFolder`).
        classes: class names in label order, for the names in `labels`.

    Raises:
        DataError: if it is missing, empty, or none of these, or cannot provide such fields.
    """
    if labels is not None:
        if not isinstance(source, str | Path) or is_shards(source):
            raise DataError(
                f"labels={str(labels)!r} are for a folder of images. Leave them out for other sources."
            )
        _refuse_fields(fields, "folder")
        if Path(labels).is_dir():
            return MaskFolder(Path(source), Path(labels))
        return LabelledFolder(Path(source), Path(labels), classes)
    if is_shards(source):
        return TarSource(source, fields)
    if isinstance(source, str | Path):
        _refuse_fields(fields, "folder")
        return FolderSource(Path(source))
    if isinstance(source, tuple) and len(source) == 2 and all(hasattr(part, "shape") for part in source):
        _refuse_fields(fields, "pair of arrays")
        return ArraySource(*source)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return DatasetSource(source, fields)
    raise DataError(
        f"A {type(source).__name__} cannot be converted. Pass a folder with one folder per class, .tar shards, a "
        "pair of arrays (images, labels), or a data set with len() and [index] that returns (image, label)."
    )


def _refuse_fields(fields: Sequence[str], kind: str) -> None:
    if fields:
        raise DataError(
            f"A {kind} has only image and label, no fields {list(fields)}. Pass a data set or .tar shards."
        )


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
        self._dataset, self._fields, self._lock = _undecoded(dataset), list(fields), threading.Lock()

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


def _undecoded(dataset: Any) -> Any:
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
