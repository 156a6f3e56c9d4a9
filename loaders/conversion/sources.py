"""What can be converted: folders of images, tar shards, indexable data sets and arrays, behind one interface."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ...common.errors import DataError
from .folders import EXTENSIONS, files_below, is_hidden


class Source(Protocol):
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
) -> Source:
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
    from .dataset_sources import ArraySource, DatasetSource
    from .labelled_folder import LabelledFolder
    from .mask_folder import MaskFolder
    from .tar_source import TarSource, is_shards

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


class FolderSource:
    """A folder with one folder per class; class indices follow the sorted names, as in torchvision's ImageFolder.

    Files and folders whose names begin with a dot, and `__MACOSX`, are ignored.

    Attributes:
        ignored: the other files in the folders of classes, which are not images by their suffixes.
    """

    kind = "folder"

    def __init__(self, root: Path) -> None:
        if not root.exists():
            raise DataError(
                f"{root} does not exist. Pass a folder that contains one folder of images per class."
            )
        if not root.is_dir():
            raise DataError(f"{root} is a file. Pass a folder that contains one folder of images per class.")
        folders = sorted(child for child in root.iterdir() if child.is_dir() and not is_hidden(child.name))
        if not folders:
            raise DataError(
                f"{root} contains no folders. Put the images of each class into a separate folder there."
            )
        self.root, self.classes = root, [folder.name for folder in folders]
        self.ignored: list[str] = []
        self._files: list[str] = []  # strings, not Path objects: a tenth of the memory
        self._starts = array("q")  # first index of each class in `_files`
        for folder in folders:
            files, others = files_below(folder)
            self.ignored += others
            if not files:
                raise DataError(
                    f"{folder} contains no images ({', '.join(EXTENSIONS)}). Add some, or remove it: each folder "
                    "in the root is a class."
                )
            self._starts.append(len(self._files))
            self._files += files

    def __len__(self) -> int:
        return len(self._files)

    def get(self, index: int) -> tuple[bytes, int]:
        try:
            with open(self._files[index], "rb") as file:  # noqa: PTH123 — half the time of Path.open
                return file.read(), bisect_right(self._starts, index) - 1
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from None

    def describe(self, index: int) -> str:
        return self._files[index]

    def listed(self) -> list[tuple[str, int]]:
        """Return path and label of every sample."""
        return [(path, bisect_right(self._starts, index) - 1) for index, path in enumerate(self._files)]
