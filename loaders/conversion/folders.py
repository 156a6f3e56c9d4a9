"""Folders of images as sources: with a folder for each class, or with a folder of masks."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from pathlib import Path

from ...common.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""torchvision's `IMG_EXTENSIONS`."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder is not the user's data: `.ipynb_checkpoints`, `._0.jpg`, `__MACOSX`."""
    return name.startswith(".") or name == "__MACOSX"


def files_below(folder: Path) -> tuple[list[str], list[str]]:
    """Return all images below a folder, except hidden ones, and the other files; sorted as paths: by folder, then name.

    Takes a third of the time of `rglob`.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None

    images, others = [], []
    for root, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not is_hidden(name)]  # os.walk descends into these
        names = [
            name
            for name in (*folders, *files)
            if os.path.splitext(name)[1].lower() in EXTENSIONS and not is_hidden(name)  # noqa: PTH122
        ]
        images += [os.path.join(root, name) for name in names]  # noqa: PTH118 — strings, for speed
        if len(names) < len(files):
            known = {*names}
            rest = [name for name in files if not is_hidden(name)]
            others += [os.path.join(root, name) for name in rest if name not in known]  # noqa: PTH118
    return _in_order(images), _in_order(others)


def _in_order(paths: list[str]) -> list[str]:
    return sorted(paths, key=lambda path: path.split(os.sep))  # noqa: PTH206


def read_file(path: str, name: str = "it") -> bytes:
    """Return a file's bytes; raise `DataError` with this name for it."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 — half the time of Path.open
            return file.read()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from None


def and_more(count: int, what: str) -> str:
    """Return, for a message about the first of them, how many there are."""
    return f" ({count} such {what})" if count > 1 else ""


class PictureFiles:
    """Samples that each have a file of their own, by whose path messages name them."""

    _files: list[str]  # strings, not Path objects: a tenth of the memory

    def __len__(self) -> int:
        return len(self._files)

    def describe(self, index: int) -> str:
        return self._files[index]


class FolderSource(PictureFiles):
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
        self._files = []
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

    def get(self, index: int) -> tuple[bytes, int]:
        return read_file(self._files[index]), bisect_right(self._starts, index) - 1

    def listed(self) -> list[tuple[str, int]]:
        """Return path and label of every sample."""
        return [(path, bisect_right(self._starts, index) - 1) for index, path in enumerate(self._files)]


class MaskFolder(PictureFiles):
    """Images anywhere below a folder, and for each a mask in another folder: `a/1.jpg` has the mask `a/1.png`.

    Samples are in the order of their paths. Names that begin with a dot, and `__MACOSX`, are ignored; so are images in
    the folder of masks, if it is below that of the images.

    Args:
        root: the folder of images.
        masks: that of masks: PNG files with one class index per pixel.

    Attributes:
        ignored: the other files in the folder of images, which are not images by their suffixes.

    Raises:
        DataError: if there are no images, for an image without a mask of its own, and for a mask without an image.
    """

    kind = "folder with masks"
    classes: list[str] = []  # noqa: RUF012 — they are in no file, and nothing is ever added

    def __init__(self, root: Path, masks: Path) -> None:
        if not root.is_dir():
            raise DataError(f"{root} is not a folder. With labels, pass the folder of the images.")
        if root.resolve() == masks.resolve():
            raise DataError(
                f"{root} is the folder of images and of masks. Move the masks to a folder of their own."
            )
        self._files, self.ignored = _outside(masks, root)
        if not self._files:
            raise DataError(f"{root} contains no images ({', '.join(EXTENSIONS)}).")
        self._masks = [str(masks / Path(path).relative_to(root).with_suffix(".png")) for path in self._files]
        _match_masks(root, masks, self._files, self._masks)

    def get(self, index: int) -> tuple[bytes, bytes]:
        image, mask = self._files[index], self._masks[index]
        return read_file(image, image), read_file(mask, mask)


def _outside(masks: Path, root: Path) -> tuple[list[str], list[str]]:
    """Return the images and the other files below `root`, without those below `masks`."""
    images, others = files_below(root)
    if not masks.resolve().is_relative_to(root.resolve()):
        return images, others
    own = str(root / masks.resolve().relative_to(root.resolve())) + os.sep
    images, others = ([path for path in paths if not path.startswith(own)] for paths in (images, others))
    return images, others


def _match_masks(root: Path, folder: Path, images: list[str], masks: list[str]) -> None:
    """Raise DataError unless each image has a mask of its own, and each mask in the folder an image."""
    there = {path for path in files_below(folder)[0] if path.endswith(".png")}
    missing = [(image, mask) for image, mask in zip(images, masks, strict=True) if mask not in there]
    if missing:
        image, mask = missing[0]
        raise DataError(
            f"{image} has no mask {mask}{and_more(len(missing), 'images')}. Masks are PNG files in {folder} with the "
            "names of the images. Add the mask, or move the image away."
        )
    users: dict[str, str] = {}
    for image, mask in zip(images, masks, strict=True):
        if users.setdefault(mask, image) != image:
            raise DataError(f"{users[mask]} and {image} have the same mask, {mask}. Rename one of them.")
    if left := sorted(there - users.keys()):
        raise DataError(
            f"The mask {left[0]} has no image in {root}{and_more(len(left), 'masks')}. Add the image, or move the mask "
            "away."
        )
