"""Check a pipeline's data sources, and whether its loader can load them, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.errors import DataError
from ...common.storage.addresses import is_address
from ...loaders.beton.layout import read_header
from ...loaders.order import check_batch_size
from ...loaders.sources import files_of
from .config import DataConfig


def check_loader(data: DataConfig, settings: Mapping[str, Any]) -> None:
    """Check that the loader has what the pipeline needs of it.

    Args:
        data: what to load.
        settings: additional settings of the training loader.

    Raises:
        DataError: naming the setting or source, and the remedy.
    """
    if data.loader != "ffcv_stock":
        return
    from ...loaders.stock_loader import check_stock_source, stock_options  # here: it imports torch

    given: Any = data.read_options | {"rank": 0, "world_size": 1} | dict(settings)
    stock_options(given)
    for source in (data.train, data.val):
        if source is not None:
            check_stock_source(source)


def check_sources(data: DataConfig, devices: int) -> None:
    """Check the headers of a pipeline's files. Named data sets and remote files are not looked for.

    Raises:
        DataError: for a file that is missing, unreadable, or not a complete `.beton` file, for a folder instead of a
            file, and for fewer training samples than a batch needs.
    """
    from ...loaders.datasets.names import NAMES, resolve  # here: it imports all of conversion

    for source in (data.train, data.val):
        if source is None or (data.loader == "torch" and isinstance(source, str) and Path(source).is_dir()):
            continue
        files = files_of(source).names
        local = [resolve(file) for file in files if file not in NAMES and not is_address(file)]
        samples = sum(map(_samples, local))
        if source == data.train and len(local) == len(files):
            check_batch_size(data.batch_size, samples, full=True, world_size=devices)


def _samples(path: Path) -> int:
    try:
        return int(read_header(path)["num_samples"])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
