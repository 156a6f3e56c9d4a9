"""The training data in another storage format, as a change to try. They are converted only if a sample loads faster,
and if they fit into the time, onto the disk and into the memory; and removed unless the change is accepted."""

import io
import json
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from PIL import Image

from ....common import machine
from ....common.errors import DrivetrainError
from ....common.storage.addresses import is_address, stamp
from ....common.storage.files import write_file
from ....loaders.advice.report import bytes_text
from ....loaders.advice.sample import Converted, DataSet, Sample, converted, formats, loading_rate
from ....loaders.beton.data_set import BetonFiles, open_files
from ....loaders.beton.layout import MODE_JPEG
from ....loaders.beton.manifest import manifest_path
from ....loaders.conversion.convert import convert
from ....loaders.image_size import height_width
from ....loaders.native import jpegs
from ....loaders.options import check_workers
from ....loaders.sources import files_of
from ...describe.pipeline_spec import PipelineSpec
from ...describe.resolve import ResolvedPlan
from ...ledger.statistics import WORTH
from ..trials import phases
from ..variants import with_data

RAW = {"write_mode": "raw"}
SAMPLE = 64  # images that are converted first
ROUNDS, ROUND_SECONDS = 3, 0.3  # of loading them in both formats
SHARE = 1 / 3  # of the time that is left, for a conversion: the trials take time, too
FREE = 0.9  # of the free disk, at most
NO_FOLDER = "converted data need a folder to stay in: pass out= (--out)"
# Parts of the reasons that hold for a folder, its disk, the memory or the time, of which another call may have others.
OF_A_CALL = EXISTS, TAKES, TOO_MUCH = "exists already", "takes about", "do not fit into the free memory"


def may_be_tried(reason: str) -> bool:
    """Whether data that were not converted for this reason may be in another call, which has a folder."""
    return any(part in reason for part in (NO_FOLDER, *OF_A_CALL))


class Storage:
    """The training data, as `convert` stores them with these options, in `folder`; None: there is no place for them."""

    def __init__(self, plan: ResolvedPlan, files: BetonFiles, options: dict[str, Any]) -> None:
        self._data, self._files, self._options = plan.data, files, options
        self._threads = check_workers(plan.data.workers)
        self.folder: Path | None = None
        self.end = 0.0  # of the time budget, in `perf_counter` time

    @property
    def name(self) -> str:
        sides = {"max_resolution": "longest", "min_resolution": "shortest"}
        limits = [f"{sides[name]} side {side}" for name, side in self._options.items() if name in sides]
        return ", ".join(["raw pixels" if "write_mode" in self._options else "JPEG", *limits])

    @property
    def path(self) -> Path:
        assert self.folder is not None
        first = Path(files_of(self._data.train).names[0]).stem
        return self.folder / f"{first}-{self.name.replace(', ', '-').replace(' ', '-').lower()}.beton"

    @property
    def exists(self) -> bool:
        """Whether it is there, made by an earlier call from the data as they are now."""
        return self.folder is not None and self.path.is_file() and self._noted().get("from") == self._stamps()["from"]

    @property
    def _note(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tune.json")

    def _noted(self) -> dict[str, Any]:
        """Return what was noted of the file that is there; nothing of one that tuning has not made."""
        found: Any = None
        with suppress(OSError, ValueError):
            found = json.loads(self._note.read_bytes())
        return found if isinstance(found, dict) and found.get("made") == stamp(self.path) else {}

    def _stamps(self) -> dict[str, Any]:
        return {
            "made": stamp(self.path), "from": {name: stamp(name) for name in files_of(self._data.train).names}
        }  # fmt: skip

    def change(self, spec: PipelineSpec) -> PipelineSpec:
        """Return the pipeline that trains on the converted data; those of the evaluation stay."""
        return with_data(spec, train=str(self.path))

    def convert(self) -> str:
        """Convert the data; return why not, or ""."""
        if self.folder is None:
            return NO_FOLDER
        if self.exists:
            return ""
        noted = self._noted()
        if self.path.exists() and not noted:
            return f"{self.path} {EXISTS}: delete it, or pass it to load()"
        if noted.get("accepted") and noted["from"].keys() != self._stamps()["from"].keys():
            return f"{self.path} {EXISTS}, accepted by a tuning of other data: pass another folder (out=, --out)"
        self._remove()
        try:
            if reason := self._in_vain():
                return reason
            convert(
                self, self.path, workers=self._threads, classes=self._files.classes or None, progress=False,
                **self._options,
            )  # fmt: skip
            write_file(self._note, json.dumps(self._stamps()))
        except DrivetrainError as error:
            return str(error)
        return ""

    def accept(self) -> None:
        """Note that a tuning trains on it, so that no other one removes it."""
        write_file(self._note, json.dumps(self._stamps() | {"accepted": True}))

    def discard(self) -> None:
        """Remove it, unless a tuning has accepted it."""
        if not self._noted().get("accepted"):
            self._remove()

    def _remove(self) -> None:
        for path in (self.path, manifest_path(self.path), self._note):
            path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._image(index, raw=self._options == RAW), self._files.labels[index]

    def _image(self, index: int, *, raw: bool) -> Any:
        """Return a picture as loaders take it, whatever its EXIF data; it is decoded where it is encoded, in threads.
        One that may be scaled is returned as stored, so that it is not compressed again if it is small."""
        beton, own = self._files.locate(index)
        if beton.modes[own] != MODE_JPEG:
            return beton.image(own)
        stored = beton.stored(own)
        if not raw:
            return stored
        picture = Image.open(io.BytesIO(jpegs.huffman_coded(stored)))
        picture.info = {}
        return picture

    def _in_vain(self) -> str:
        """Convert a sample; return why it would be in vain to convert all, or ""."""
        numbers = np.random.default_rng(0).permutation(len(self))[:SAMPLE]
        with TemporaryDirectory(prefix=".drivetrain-tune-", dir=self.folder) as folder:
            both = [
                converted(
                    Sample(partial(self._image, raw=options == RAW), numbers), Path(folder, name), options,
                    self._threads,
                )
                for name, options in (("stored.beton", {}), ("made.beton", self._options))
            ]  # fmt: skip
            made, times = both[1], len(self) / len(both[1].sizes)
            if reason := self._too_much(int(made.sizes.sum()) * times, made.seconds * times):
                return reason
            ratio = median(self._ratio(both, number) for number in range(ROUNDS))
        if ratio >= WORTH:
            return ""
        return f"of {len(numbers)} images, the loader alone is {ratio:.2f} times as fast: nothing else is converted"

    def _too_much(self, size: float, seconds: float) -> str:
        """Return what bytes of files, and seconds of a conversion, do not fit into."""
        assert self.folder is not None
        free, memory = FREE * shutil.disk_usage(self.folder).free, machine.free_memory()
        left = max(SHARE * (self.end - perf_counter()), 0.0)
        if size > free:
            return f"it {TAKES} {bytes_text(size)}, and {self.folder} has {bytes_text(free)}"
        if size > max(memory, int(self._files.sizes.sum())):
            return f"its {bytes_text(size)} {TOO_MUCH}, {bytes_text(memory)}"
        if seconds > left:
            return f"to convert it {TAKES} {seconds:,.0f} s, more than a third of the time left (--seconds)"
        return ""

    def _ratio(self, both: list[Converted], number: int) -> float:
        """Return how many times as fast as the first file the second one loads."""
        size, seconds = self._data.image_size, ROUND_SECONDS
        rough = [loading_rate(one, size, self._threads, 0, 0, number) for one in both]
        first, second = (
            loading_rate(one, size, self._threads, rate, seconds, number) for one, rate in zip(both, rough, strict=True)
        )
        return second / first


def storages(plan: ResolvedPlan) -> list[tuple[Storage, bool]]:
    """Return other formats for the training data, and whether each changes the pixels that are trained on: none unless
    they are JPEGs with labels in files on this machine, loaded by our loader."""
    source = files_of(plan.data.train)
    if plan.data.loader != "ffcv" or plan.data.splits or source.weights or any(map(is_address, source.names)):
        return []
    files = open_files(source)
    if files.remote or files.targets or len(files.fields) != 2 or (files.known.modes != MODE_JPEG).any():
        return []
    side = max(height_width(plan.data.image_size))
    others = formats(DataSet(len(files), raw=False, get=files.locate), side)[1:]
    return [
        (Storage(plan, files, RAW), not keeps_pixels(plan, files)),
        *((Storage(plan, files, one), True) for one in others),
    ]


def keeps_pixels(plan: ResolvedPlan, files: BetonFiles) -> bool:
    """Whether training sees the pixels of fully decoded JPEGs: the loader does not decode them at a smaller size, nor,
    as for `"area"`, in a faster way."""
    settings = plan.train_settings
    sizes = {one.image_size for one in phases(plan.transforms, plan.data.image_size)}
    if settings.get("interpolation", "bilinear") != "bilinear":
        return settings["interpolation"] != "area" and len(sizes) == 1
    if len(sizes) > 1 or not isinstance(settings.get("views") or 1, int):
        return False
    height, width = height_width(plan.data.image_size)
    # A letterbox has the picture's own shape.
    smaller = np.maximum if settings.get("crop") == "fit" else np.minimum
    return bool((smaller(files.heights / height, files.widths / width) < 2).all())
