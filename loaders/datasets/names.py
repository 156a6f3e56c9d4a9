"""Data by name: `"cifar10:train"` resolves to the path of a converted, cached `.beton` file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal, cast

from ...common.errors import BetonError, DataError, suggest
from ...common.storage.addresses import is_address
from ...common.storage.cache import Remote, local_copy
from ..beton.reader import open_beton
from ..conversion.convert import convert
from . import cifar10

NAMES = ("cifar10:train", "cifar10:test")


def resolve(
    source: str | Path,
    *,
    progress: bool = True,
    remote: Remote = Remote(),  # noqa: B008  frozen
) -> Path:
    """Return the `.beton` file of a data source.

    Args:
        source: a path to a `.beton` file, its address, or one of `NAMES`. A named data set is downloaded, verified
            and converted at first use, and stored in the cache folder (`$DRIVETRAIN_DATA`, else
            `$XDG_CACHE_HOME/drivetrain`, by default `~/.cache/drivetrain`).
        progress: whether to show progress bars.
        remote: of an address: the folder of the local copies, its limit, and the patience with servers.

    Raises:
        DataError: for a folder (which must be converted first), an unknown name, or data that cannot be downloaded,
            with instructions to install it by hand.

    Example::

        >>> resolve("train.beton").name
        'train.beton'
    """
    if str(source) in NAMES:
        return _cifar10(cast(Literal["train", "test"], str(source).partition(":")[2]), progress)
    if is_address(source):
        return local_copy(str(source), remote)
    if source == "":
        raise DataError(f"The data source is empty. Pass a .beton file, or one of {', '.join(NAMES)}.")
    path = Path(source)
    if path.is_dir():
        out = f"{path.resolve().name or 'data'}.beton"
        command = f"drivetrain convert {shlex.quote(str(path))} {shlex.quote(out)}"
        raise DataError(f"{path} is a folder. Convert it first: {command}")
    if not path.exists() and not path.suffix:
        raise DataError(f"{path} is neither a file nor a named data set.{suggest(str(source), NAMES)}")
    return path


def _cifar10(split: Literal["train", "test"], progress: bool) -> Path:
    folder = cifar10.fetch_cifar10()
    out = folder / f"{split}.beton"
    try:
        if open_beton(out).classes == list(cifar10.CLASSES):
            return out
    except BetonError:
        pass  # missing or damaged: recreated below
    images, labels = cifar10.load_cifar10(folder, split)
    convert((images, labels), out, classes=cifar10.CLASSES, progress=progress)
    return out
