"""The data of a pipeline, as far as it can be looked at before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from ...errors import DataError
from ...loaders.beton.tables import read_header
from ...loaders.order import check_batch_size
from .config import DataConfig


def check_sources(data: DataConfig, devices: int) -> None:
    """Looks at the files of a pipeline as far as their headers; data sets by name are not fetched.

    Raises:
        DataError: for a file that is missing, cannot be read, or is not a finished `.beton` file, for a folder where a
            file is needed, and for fewer training samples than a batch has.
    """
    from ...loaders.datasets.names import NAMES, resolve  # which imports all that converts

    for source in (data.train, data.val):
        if source is None or source in NAMES or (data.loader == "torch" and Path(source).is_dir()):
            continue
        path = resolve(source)
        try:
            samples = int(read_header(path)["num_samples"])
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None
        if source == data.train:
            check_batch_size(data.batch_size, samples, full=True, world_size=devices)
