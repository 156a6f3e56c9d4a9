"""The images in a folder."""

from __future__ import annotations

import os
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
