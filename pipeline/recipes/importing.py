"""Make a user's modules importable on the command line, e.g. that of a recipe's model."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .files import is_file_name


@contextmanager
def modules_of(recipe: str | None = None) -> Iterator[None]:
    """Make modules in a recipe file's folder and in the working directory importable inside the block.

    They take precedence over installed packages but not over the standard library, whose modules Python itself needs.
    Ranks and loader processes started inside the block inherit the path.
    """
    folders = [Path(recipe).parent] if recipe is not None and is_file_name(recipe) else []
    before = list(sys.path)
    added = [str(folder.resolve()) for folder in (*folders, Path.cwd())]
    added = [folder for folder in dict.fromkeys(added) if folder not in before]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    place = next((number for number, path in enumerate(before) if path in installed), len(before))
    sys.path[place:place] = added
    try:
        yield
    finally:
        sys.path[:] = [path for path in sys.path if path not in added]
