"""Predict pictures with a trained model, in batches: which pictures a source names, and one row for each."""

from __future__ import annotations

import glob
import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from ...common.checks import check_whole, plain
from ...common.errors import DataError, PlanError
from ...common.pictures import gallery
from ...common.terminal import progress_bar
from ...loaders.beton.data_set import BetonFiles, open_files
from ...loaders.beton.image_modes import CHANNELS
from ...loaders.beton.layout import MODE_RAW
from ...loaders.conversion.folders import EXTENSIONS, files_below
from ...strategies.options import Precision, half_dtype
from ...transforms import Transform
from ..describe.config import DistributedConfig
from ..describe.inputs import Inputs
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import choose_precision
from ..tasks.nests import map_tensors, to_float
from ..tasks.task import Task
from ..training.hooks import evaluated_outputs
from .analysis.judge import shown
from .analysis.picture import masked

SHOWN = 24  # predictions that a notebook shows with pictures
BATCH = 32  # images that `predict` takes at once: enough for speed, little memory
OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Picture:
    """A picture to predict: its name (path, or number), how to get it, and whether the name is that of a file."""

    name: str | int
    read: Callable[[], Any]
    named: bool = True


@dataclass(frozen=True)
class Predicted:
    """What the model says of a picture: `prediction`, its part of what `Task.predict` returned, or why there is none.
    `size`: height and width of the picture; `pixels`: of the first pictures, what the model saw, `(H, W, 3)`."""

    name: str | int
    prediction: Any = None
    size: tuple[int, int] = (0, 0)
    error: str = ""
    pixels: NDArray[np.uint8] | None = None

    def row(self, task: Task, inputs: Inputs) -> dict[str, Any]:
        if self.error:
            return {"image": self.name, "error": self.error}
        return {"image": self.name, **task.row(self.prediction, inputs.classes)}


class Predictions(list[dict[str, Any]]):
    """Predictions, a dict per image, which a notebook shows with the first images as the model saw them."""

    def __init__(self, rows: Iterable[dict[str, Any]] = (), colors: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self._first, self._colors = list[Predicted](), colors

    def add(self, one: Predicted, row: dict[str, Any]) -> None:
        """Append a row; keep the pictures of the first."""
        self.append(row)
        if len(self) <= SHOWN:
            self._first.append(one)

    def _repr_html_(self) -> str:
        tiles = []
        for one, row in zip(self._first, self, strict=False):
            if one.pixels is not None:
                mask, picture = one.prediction, one.pixels
                if isinstance(mask, torch.Tensor) and mask.shape == picture.shape[:2] and not mask.is_floating_point():
                    picture = masked(picture, mask.numpy(), self._colors)
                tiles.append(((picture,), _caption(row)))
        failed = [f"{row['image']}: {row['error']}" for row in self if "error" in row]
        left = len(self) - len(failed) - len(tiles)
        notes = ([f"and {left:,} more"] if left else []) + failed[:SHOWN]
        return gallery(tiles) + "".join(f"<p>{html.escape(note)}</p>" for note in notes)


def _caption(row: Mapping[str, Any]) -> str:
    name = row["image"] if isinstance(row["image"], int) else Path(row["image"]).name
    match row:
        case {"class": best, "probability": float(share)}:
            return f"{best} {share:.0%}\n{name}"
        case {"labels": list(labels), "probabilities": _}:
            return f"{', '.join(labels) or 'none'}\n{name}"
        case {"value": float() | [float(), *_] as value}:
            values = value if isinstance(value, list) else [value]
            return f"{', '.join(f'{value:.4g}' for value in values)}\n{name}"
    return str(name)  # also of what a custom task returns


class Trained(Protocol):
    """What a prediction needs of a `FitResult`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def task(self) -> Task: ...
    @property
    def inputs(self) -> Inputs: ...
    @property
    def transforms(self) -> tuple[Transform, ...]: ...
    @property
    def spec(self) -> PipelineSpec | None: ...


def predicted(
    run: Trained, given: Sequence[Picture], batch_size: int, on_error: OnError, progress: bool
) -> Iterator[Predicted]:
    """Yield what the model says of each picture, in order."""
    if on_error not in ("raise", "skip"):
        raise PlanError(f"predict(on_error={on_error!r}) must be 'raise' or 'skip'.")
    check_whole("predict: batch_size", plain(batch_size), PlanError, 1)
    inputs = run.inputs
    transform = inputs.transform()
    device = next((p.device for p in run.model.parameters()), torch.device("cpu"))
    with progress_bar(len(given), progress, desc="predict", unit=" images", dynamic_ncols=True) as bar:
        for start in range(0, len(given), batch_size):
            part = given[start : start + batch_size]
            pixels: list[torch.Tensor] = []
            found: list[Predicted] = []
            for each in part:
                try:
                    image, size = transform.measured(each.read())
                except DataError as error:
                    if on_error == "raise":
                        raise _refusal(each, error, alone=len(given) == 1) from error
                    found.append(Predicted(each.name, error=str(error)))
                else:
                    pixels.append(image)
                    found.append(Predicted(each.name, size=size))
            outputs = _forward(run, torch.stack(pixels).to(device)) if pixels else None
            at = 0
            for one in found:
                if one.error:
                    yield one
                    continue
                seen = shown(pixels[at], inputs.mean, inputs.std) if start + at < SHOWN else None
                yield Predicted(one.name, map_tensors(itemgetter(at), outputs), one.size, pixels=seen)
                at += 1
            bar.update(len(part))


def _forward(run: Trained, batch: torch.Tensor) -> Any:
    """Predict as the run's evaluation does: with its evaluation transforms, and in its precision."""
    model, task, training = run.model, run.task, run.model.training
    model.eval()
    try:
        with torch.no_grad():
            with _precision(run.spec, batch.device):
                outputs = evaluated_outputs(run.transforms, lambda seen: task.outputs(model(seen)))(batch)
            predictions = task.predict(to_float(outputs))
    finally:
        model.train(training)
    return map_tensors(partial(_of_images, task, len(batch)), predictions)


def _of_images(task: Task, count: int, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU; raise PlanError unless it has an entry for each image. One number for all of them,
    such as a mean, would depend on the batch."""
    if values.shape[:1] != (count,):
        raise PlanError(
            f"{type(task).__name__}.predict returned a tensor of shape {tuple(values.shape)} for {count} image(s). "
            "Each tensor that it returns must have an entry per image: define predict(self, outputs) so that it leaves "
            "the others out."
        )
    return values.cpu()


def _precision(spec: PipelineSpec | None, device: torch.device) -> AbstractContextManager[Any]:
    """Emulated, half precision is slower than float32, and another device than the run's may have to emulate it."""
    given = "fp32" if spec is None else spec.distributed.precision
    precision: Precision = "fp32"
    if given == "fp16" and device.type != "cpu":
        precision = "fp16"
    elif given in ("bf16", "auto"):
        precision, _ = choose_precision(DistributedConfig(options={"device": str(device)}))
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=half_dtype(precision))


def _refusal(picture: Picture, error: DataError, *, alone: bool) -> DataError:
    if alone and not picture.named:
        return error
    name = str(picture.name) if picture.named else f"Image {picture.name} of those given"
    where = "" if str(error).startswith(name) else f"{name}: "
    return DataError(f"{where}{error} Leave it out, or pass on_error='skip' (--on-error skip).")


def listed(images: Any, channels: int) -> list[Picture]:
    """Return the pictures that `predict` was given: one, or several, of which each path may be a folder, a pattern or
    a `.beton` file."""
    one = isinstance(images, str | Path | bytes | Image.Image)
    if isinstance(images, np.ndarray | torch.Tensor):  # of one channel, (N, H, W) are several, but (H, W, 3) is one
        one = images.ndim == 2 or (images.ndim == 3 and (channels > 1 or images.shape[2] in CHANNELS))
    if not one and not isinstance(images, Iterable):
        raise DataError(f"predict() takes paths or images, not a {type(images).__name__}.")
    found: list[Picture] = []
    for image in [images] if one else images:
        if isinstance(image, str | Path):
            found += _at(str(image), channels)
        else:
            found.append(Picture(len(found), partial(_itself, image), named=False))
    return found


def _at(path: str, channels: int) -> list[Picture]:
    if path.lower().endswith(".beton"):
        return _samples(path, channels)
    place = Path(path)
    if place.is_dir():
        paths = [each for each in files_below(place)[0] if not Path(each).is_fifo()]  # a pipe may never be written
        if not paths:
            raise DataError(f"{path} has no images. Pass a folder with {', '.join(EXTENSIONS)}.")
    elif not place.exists() and glob.has_magic(path):
        paths = sorted(each for each in glob.glob(path, recursive=True) if Path(each).is_file())  # noqa: PTH207
        if not paths:
            raise DataError(f"No file matches {path}. Pass a folder, or quote a pattern such as 'photos/**/*.jpg'.")
    elif not place.exists():
        raise DataError(f"{path} is not a file or folder. Pass images, a folder, a pattern or a .beton file.")
    else:
        paths = [path]
    return [Picture(each, partial(_itself, each)) for each in paths]


def _samples(path: str, channels: int) -> list[Picture]:
    beton = open_files(path)
    if beton.channels != channels:
        raise DataError(f"{path} has images of {beton.channels} channels; the model takes {channels}.")
    return [Picture(f"{path}[{n}]", partial(_stored, beton, n)) for n in range(len(beton))]


def _itself(image: Any) -> Any:
    return image


def _stored(beton: BetonFiles, index: int) -> Any:
    """Return a sample's file, or its pixels if they are stored."""
    one, own = beton.locate(index)
    return one.pixels(own) if one.modes[own] == MODE_RAW else one.stored(own)
