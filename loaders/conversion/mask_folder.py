"""A folder of images and one of their masks, with the same names."""

from __future__ import annotations

import os
from pathlib import Path

from ...common.errors import DataError
from .folders import EXTENSIONS, files_below


class MaskFolder:
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
        _match(root, masks, self._files, self._masks)

    def __len__(self) -> int:
        return len(self._files)

    def get(self, index: int) -> tuple[bytes, bytes]:
        return _read(self._files[index]), _read(self._masks[index])

    def describe(self, index: int) -> str:
        return self._files[index]


def _outside(masks: Path, root: Path) -> tuple[list[str], list[str]]:
    """Return the images and the other files below `root`, without those below `masks`."""
    images, others = files_below(root)
    if not masks.resolve().is_relative_to(root.resolve()):
        return images, others
    own = str(root / masks.resolve().relative_to(root.resolve())) + os.sep
    images, others = ([path for path in paths if not path.startswith(own)] for paths in (images, others))
    return images, others


def _match(root: Path, folder: Path, images: list[str], masks: list[str]) -> None:
    """Raise DataError unless each image has a mask of its own, and each mask in the folder an image."""
    there = {path for path in files_below(folder)[0] if path.endswith(".png")}
    missing = [(image, mask) for image, mask in zip(images, masks, strict=True) if mask not in there]
    if missing:
        image, mask = missing[0]
        raise DataError(
            f"{image} has no mask {mask}{_more(len(missing), 'images')}. Masks are PNG files in {folder} with the "
            "names of the images. Add the mask, or move the image away."
        )
    users: dict[str, str] = {}
    for image, mask in zip(images, masks, strict=True):
        if users.setdefault(mask, image) != image:
            raise DataError(f"{users[mask]} and {image} have the same mask, {mask}. Rename one of them.")
    if left := sorted(there - users.keys()):
        raise DataError(
            f"The mask {left[0]} has no image in {root}{_more(len(left), 'masks')}. Add the image, or move the mask "
            "away."
        )


def _more(count: int, what: str) -> str:
    return f" ({count} such {what})" if count > 1 else ""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 — half the time of Path.open
            return file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
