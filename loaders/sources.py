"""What can be converted: a folder of images, an indexed data set, a pair of arrays, all as one thing."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""torchvision's `IMG_EXTENSIONS`."""

SMALLEST_TARGET, LARGEST_TARGET = (
    float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)
"""Float labels are loaded as float32; what is smaller counts as zero."""


class Source(Protocol):
    """Samples by number. `get` may be called from several threads."""

    kind: str
    classes: list[str]

    def __len__(self) -> int: ...

    def get(self, index: int) -> tuple[Any, int | float]:
        """The image in any form that `encode_image` takes, and the label."""
        ...

    def describe(self, index: int) -> str:
        """The sample's name for an error message: a path, or its number."""
        ...


def open_source(source: Any) -> Source:
    """Recognises a source.

    Args:
        source: a folder laid out as `CLASS/image.jpg` (torchvision's ImageFolder), a pair
            `(images, labels)` of arrays or tensors, or any object with `len` and `[index]` that gives
            `(image, label)` or a dict with `image`/`img` and `label`.

    Raises:
        DataError: if it is missing, empty, or none of these.
    """
    if isinstance(source, str | Path):
        return FolderSource(Path(source))
    if isinstance(source, tuple) and len(source) == 2 and all(hasattr(part, "shape") for part in source):
        return ArraySource(*source)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return DatasetSource(source)
    raise DataError(
        f"A {type(source).__name__} cannot be converted. Give a folder CLASS/image.jpg, a pair of arrays "
        "(images, labels), or a data set with len() and [index]."
    )


class FolderSource:
    """A folder with one folder per class; classes are numbered by sorted name, as ImageFolder does."""

    kind = "folder"

    def __init__(self, root: Path) -> None:
        if not root.exists():
            raise DataError(
                f"{root} does not exist. Give a folder that holds one folder of images per class."
            )
        if not root.is_dir():
            raise DataError(f"{root} is a file. Give a folder that holds one folder of images per class.")
        folders = sorted(child for child in root.iterdir() if child.is_dir())
        if not folders:
            raise DataError(f"{root} holds no folders. Put each class's images in a folder of its own there.")
        self.root, self.classes = root, [folder.name for folder in folders]
        self._files: list[tuple[Path, int]] = []
        for label, folder in enumerate(folders):
            files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
            if not files:
                raise DataError(
                    f"{folder} holds no images ({', '.join(EXTENSIONS)}). Fill it, or remove it: each folder "
                    "in the root is a class."
                )
            self._files += [(path, label) for path in files]

    def __len__(self) -> int:
        return len(self._files)

    def get(self, index: int) -> tuple[bytes, int]:
        path, label = self._files[index]
        try:
            return path.read_bytes(), label
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from None

    def describe(self, index: int) -> str:
        return str(self._files[index][0])


class ArraySource:
    """A pair of arrays: images `(N, H, W, 3)`, `(N, 3, H, W)` or `(N, H, W)` uint8, and labels `(N,)`."""

    kind = "arrays"

    def __init__(self, images: Any, labels: Any) -> None:
        dtype = str(images.dtype).removeprefix("torch.")
        if dtype != "uint8" or len(images.shape) not in (3, 4):
            raise DataError(
                f"The images are {dtype} of shape {tuple(images.shape)}; give uint8, 0 to 255, of shape "
                "(N, H, W, 3), (N, 3, H, W) or (N, H, W)."
            )
        if len(labels.shape) != 1:
            raise DataError(
                f"The labels have the shape {tuple(labels.shape)}; give one number per image, (N,)."
            )
        if len(images) != len(labels):
            raise DataError(f"There are {len(images)} images and {len(labels)} labels; give as many of each.")
        self._images, self._labels = images, labels
        self.classes: list[str] = []

    def __len__(self) -> int:
        return len(self._images)

    def get(self, index: int) -> tuple[Any, int | float]:
        return self._images[index], plain_label(self._labels[index])

    def describe(self, index: int) -> str:
        return f"sample {index}"


@dataclass
class DatasetSource:
    """Any indexed data set. Its `__getitem__` is called by one thread at a time, for it may not be safe."""

    dataset: Any
    kind: str = "dataset"
    classes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.kind = f"dataset {type(self.dataset).__name__}"
        self.classes = [str(name) for name in getattr(self.dataset, "classes", None) or []]

    def __len__(self) -> int:
        return len(self.dataset)

    def get(self, index: int) -> tuple[Any, int | float]:
        with self._lock:
            sample = self.dataset[index]
        if isinstance(sample, dict):
            image = sample.get("image", sample.get("img"))
            if image is None or "label" not in sample:
                raise DataError(
                    f"it has the keys {sorted(sample)}; 'image' (or 'img') and 'label' are needed"
                )
            return image, plain_label(sample["label"])
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(f"it is a {type(sample).__name__}; a pair (image, label) or a dict is needed")
        return sample[0], plain_label(sample[1])

    def describe(self, index: int) -> str:
        return f"sample {index}"


def plain_label(label: Any) -> int | float:
    """A label as a Python int or finite float.

    Raises:
        DataError: if it is neither.
    """
    if isinstance(label, torch.Tensor | np.ndarray | np.generic) and getattr(label, "ndim", 0) == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise DataError(f"its label is {label!r:.80}; an int (class) or a float (target) is needed")
    if isinstance(label, float) and not abs(label) <= LARGEST_TARGET:
        raise DataError(f"its label is {label}; a target must be finite and fit float32")
    if isinstance(label, int) and abs(label) >= 1 << 31:
        raise DataError(f"its label is {label}; a class must fit 32 bits")
    if isinstance(label, float) and abs(label) < SMALLEST_TARGET:
        return 0.0
    return label
