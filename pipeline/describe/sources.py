"""Check data sources before anything is loaded: can the loader load them, is the validation data also trained on?"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.errors import DataError, PlanError, first_of
from ...common.storage.addresses import is_address
from ...loaders.beton.layout import read_header
from ...loaders.order.batches import as_array, between, check_batch_size
from ...loaders.selection import frequencies, once, selected
from ...loaders.sources import Files, Source, files_of
from ..tasks.standard import Regression, Segmentation
from ..tasks.target_scale import TargetScale
from ..tasks.task import Task
from .config import DataConfig

if TYPE_CHECKING:
    from ...loaders.beton.data_set import BetonFiles


def check_loader(data: DataConfig, settings: Mapping[str, Any]) -> None:
    """Raise DataError for a source or a setting that FFCV's own loader lacks."""
    if data.loader != "ffcv_stock":
        return
    if data.balance is not None:
        raise DataError(
            "balance= is not available with loader='ffcv_stock', whose augmentation would be the same for each "
            "repetition. Use loader='ffcv'."
        )
    from ...loaders.stock_loader import check_stock_source, stock_options  # here: it imports torch

    given: Any = data.read_options | {"rank": 0, "world_size": 1} | dict(settings)
    stock_options(given)
    for source in (data.train, data.val):
        if source is not None:
            check_stock_source(source)


def folder_of(data: DataConfig, source: Source) -> str | None:
    """Return the folder of images that a source is, also the part of it that is held out, which plain PyTorch loads as
    it is; None for files."""
    files = files_of(source)
    name = str(files)
    single = data.loader == "torch" and files.weights is None
    return name if single and os.path.isdir(name) else None  # noqa: PTH112 - the text of a mix is too long for a path


def check_sources(data: DataConfig, devices: int) -> None:
    """Check headers, and that the samples fill a batch. Named data sets and remote files are not looked for."""
    from ...loaders.datasets.names import NAMES, resolve  # here: it imports all of conversion

    for source in (data.train, data.val):
        if source is None or folder_of(data, source) is not None:
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


def sample_notes(data: DataConfig, task: Task) -> tuple[str, str]:
    """Return how many samples are trained on and evaluated, if some are selected, and what `Regression` notes on the
    targets that are trained on; "" without, and if the files are not here. A selection that cannot be made raises here,
    before any work."""
    files = files_of(data.train)
    if not (data.selects or isinstance(task, Regression)) or not _all_here(files):
        return "", ""
    from ...loaders.beton.data_set import open_files

    with closing(open_files(files)) as beton:
        chosen = selected(data, beton, near=data.order == "quasi_random")
        counts = ""
        if data.selects:
            evaluated = "" if chosen.val is None else f", {len(chosen.val):,} evaluated"
            counts = f" ({len(chosen.train):,} of {len(beton):,} samples trained on{evaluated})"
        if beton.label_name in beton.targets or not isinstance(task, Regression):
            return counts, ""
        some = beton.read(beton.label_name, np.arange(1))
        if some.dtype.kind not in "biuf" or some.ndim > 2:
            return counts, ""  # building raises

        def fit() -> TargetScale | None:
            used, mix = as_array(chosen.train), beton.parts
            parts = [between(used, first, end) for _, first, end in mix] or list(chosen.parts)
            shares = [weight for weight, _, _ in mix] or [1.0] * len(parts)
            often = frequencies(used, parts, shares, chosen.weights)
            return task.fit_scale(beton.labels, used, often, str(files))

        return counts, task.note(scale_of_targets(task, data, beton, fit))


def scale_of_targets(
    task: Regression, data: DataConfig, beton: BetonFiles | None, fit: Callable[[], TargetScale | None]
) -> TargetScale | None:
    """Return what `fit` returns, from the targets that are trained on; of large data, one process of this machine calls
    it."""
    if beton is None:
        return fit()

    def arrays_of(scale: TargetScale | None) -> dict[str, NDArray[np.float32]]:
        return {} if scale is None else {name: each.numpy() for name, each in scale._asdict().items()}

    what = f"scale, {type(task).__qualname__}, {task.scale_targets=}, {task.loss_in_model=}"
    arrays = once(data, beton, what, lambda: arrays_of(fit()))
    return TargetScale(*(torch.from_numpy(arrays[name].copy()) for name in TargetScale._fields)) if arrays else None


def _all_here(files: Files) -> bool:
    return all(name.endswith(".beton") and Path(name).is_file() for name in files.names)


def number_of_classes(data: DataConfig, task: Task) -> int:
    """Return how many values per image, or per pixel, a model of the training data returns, from the names of the
    classes, else the labels. Of masks only the names are used, because to read all masks would take minutes."""
    files = files_of(data.train)
    if any(is_address(name) or not name.endswith(".beton") for name in files.names):
        raise PlanError(
            f"The number of classes is 'auto', that of the training data, but {files} is not a .beton file on this "
            "machine. Pass the number: num_classes=10; in a recipe: model_options.num_classes=10."
        )
    from ...loaders.beton.data_set import open_files

    with closing(open_files(files)) as beton:
        if beton.label_name not in beton.targets:
            if isinstance(task, Regression):  # whole numbers are targets, too, and not indices of classes
                return prod(beton.label_facts.shape)
            return len(beton.classes) or beton.label_facts.outputs
        ignored = task.ignored if isinstance(task, Segmentation) else ()
        counted = [value + 1 for value in range(len(beton.classes)) if value not in ignored]
    if not counted:
        raise PlanError(
            f"The number of classes is 'auto', but {files} has masks without names of their classes. Convert it with "
            "classes= (--classes A,B,C), or pass the number to Segmentation and to the model."
        )
    return counted[-1]


_EDGE = 1 << 16  # bytes of a file's both ends that are compared; a `.beton` file ends with a digest of all


def trained_on(train: Source, val: Source) -> list[str]:
    """Return the validation files that are trained on, too: by the same name, through a link, or as a copy."""
    theirs = files_of(train).names
    names, places = set(theirs), {place for place in map(_place, theirs) if place is not None}
    by_size: dict[int, list[str]] = {}
    for name in theirs:
        by_size.setdefault(_size(name), []).append(name)
    return [
        name
        for name in files_of(val).names
        if name in names or _place(name) in places or _has_copy(name, by_size.get(_size(name), []))
    ]


_REMOTE = ("cache", "cache_limit", "patience", "stream")  # options of files at addresses


def data_cautions(data: DataConfig) -> str:
    return "; ".join(filter(None, [_same_data_caution(data), _remote_caution(data)]))


def _remote_caution(data: DataConfig) -> str:
    """No error: a recipe may have these options for some of the data that it is used with."""
    names = [name for source in (data.train, data.val) if source is not None for name in files_of(source).names]
    given = [f"{name}=" for name in _REMOTE if name in data.changed()]
    if not given or any(map(is_address, names)):
        return ""
    return f"without effect: {', '.join(given)}, because none of the files is at an address"


def _same_data_caution(data: DataConfig) -> str:
    shared = [] if data.val is None or data.held_out else trained_on(data.train, data.val)
    if not shared:
        return ""
    return (
        f"the validation data has {first_of(shared, 1)}, which is also trained on: its metrics do not show how the "
        "model does on new images"
    )


def _size(name: str) -> int:
    path = Path(name)
    return path.stat().st_size if path.is_file() else -1


def _place(name: str) -> tuple[int, int] | None:
    try:
        status = Path(name).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_copy(name: str, others: list[str]) -> bool:
    return _size(name) > 0 and any(_edges(name) == _edges(other) for other in others)


def _edges(name: str) -> int:
    with Path(name).open("rb") as file:
        crc = zlib.crc32(file.read(_EDGE))
        file.seek(max(_size(name) - _EDGE, 0))
        return zlib.crc32(file.read(_EDGE), crc)
