"""A toy data set, and tiny models that learn it in seconds. A module, because ranks import it."""

import json
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from drivetrain import Callback, DrivetrainError, Pipeline, RunView
from drivetrain.loaders import FFCVLoader, convert
from torch import nn

CLASSES, SIDE = 4, 16
TRAIN, VAL, BATCH = 128, 50, 32  # the last validation batch is partial


def toy_arrays(samples: int, seed: int, side: int = SIDE) -> tuple[np.ndarray, np.ndarray]:
    """Noise in which one quarter of the image is brighter: the class is its index."""
    noise = np.random.default_rng(seed)
    labels = np.arange(samples) % CLASSES
    images = noise.integers(0, 120, (samples, side, side, 3), dtype=np.uint8)
    half = side // 2
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[row * half : (row + 1) * half, column * half : (column + 1) * half] += 100
    return images, labels


def write_toy(path: Path, samples: int, seed: int, classes: Any = ("a", "b", "c", "d"), side: int = SIDE) -> Path:
    convert(toy_arrays(samples, seed, side), path, classes=classes and list(classes), progress=False)
    return path


class Toy:
    samples: ClassVar[int] = TRAIN

    def __init__(self, folder: Path) -> None:
        self.train = str(write_toy(folder / "train.beton", self.samples, seed=1))
        self.val = str(write_toy(folder / "val.beton", VAL, seed=2))

    def pipeline(self, model: Any = None, **load: Any) -> Pipeline:
        """SGD at a constant rate on one device; any argument of `load` can be replaced."""
        load = {"batch_size": BATCH, "image_size": SIDE, "flip": False, "workers": 1} | load
        made = Pipeline(plain_model if model is None else model).load(self.train, self.val, **load)
        return made.optimize("sgd", lr=0.1, momentum=0.9, schedule="constant")

    def named(self, lr: float = 0.1, **load: Any) -> Pipeline:
        """A small ResNet on one device, in names: a recipe can express it."""
        load = {"batch_size": BATCH, "image_size": SIDE, "workers": 1} | load
        made = Pipeline("cifar_resnet", num_classes=CLASSES, width=4).load(self.train, self.val, **load)
        return made.optimize("sgd", lr=lr, schedule="constant")


def plain_model(classes: int = CLASSES) -> nn.Module:
    """Without BatchNorm: what a rank computes does not depend on how the batch is split."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(8 * 16, classes),
    )  # fmt: skip


class Layered(nn.Module):
    """`plain_model` in a module, whose `forward` a subclass defines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain_model()


class Loud(Layered):
    """Its gradients overflow at the first loss scale, 65536, and not at a sixteenth of it."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images * 30)
        return logits


def batch_norm_model(classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(8 * 16, classes),
    )  # fmt: skip


class AllBut(nn.Module):
    """Accepts images of all sizes but one."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.layer = side, nn.Linear(3, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[-1] == self.side:
            raise ValueError(f"not {self.side}")
        return self.layer(images.mean((2, 3)))


class Drawing(nn.Sequential):
    """Notes a number that it draws in each training step."""

    drawn: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__(*plain_model())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.drawn.append(torch.rand(()).item())
        return super().forward(images)  # type: ignore[no-any-return]


class Sleepy(nn.Module):
    """A model whose forward takes `seconds` at least, from the first training step on."""

    def __init__(self, seconds: float, classes: int = CLASSES) -> None:
        super().__init__()
        self.layers, self.seconds = plain_model(classes), seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layers(images)


class FailsAt(Sleepy):
    """Raises `error` instead of training step `step`, counted from 0."""

    def __init__(self, step: int, error: type[BaseException]) -> None:
        super().__init__(0)
        self.left, self.error = step, error

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.left -= self.training and len(images) == BATCH
        if self.left < 0:
            raise self.error
        return super().forward(images)


class Recording(Sleepy):
    """Under torchrun, appends a line per training step to a file in the folder `$SEEN_SAMPLES`: the step, counted from
    1, which checkpoints keep, and the CRC of each sample.

    While the file `$SLOW` exists, a step of a single rank takes a second: time for another machine to start."""

    steps: torch.Tensor

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._file: Path | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result = super().forward(images)
        if self.training and "RANK" in os.environ and len(images) > 2:  # two images try it before training
            self.steps += 1
            if os.environ["WORLD_SIZE"] == "1" and Path(os.environ["SLOW"]).exists():
                time.sleep(1)
            self._keep(images)
        return result

    def _keep(self, images: torch.Tensor) -> None:
        if self._file is None:
            self._file = Path(os.environ["SEEN_SAMPLES"], _start())
        with self._file.open("a") as file:
            crcs = [zlib.crc32(image.contiguous().numpy().tobytes()) for image in images]
            file.write(json.dumps([int(self.steps), crcs]) + "\n")


class StopsAt(Callback):
    """Stops a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, view: RunView) -> None:
        if view.step == self.step:
            view.stop("enough")


def _start() -> str:
    """When rank 0 began, this rank, and the number of ranks. Every start of the ranks has keys of its own."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("began", f"{time.time_ns()}")
    return f"{store.get('began').decode()}-{dist.get_rank()}-{dist.get_world_size()}"


def evaluated(model: nn.Module, path: str) -> tuple[float, float]:
    """Mean cross entropy and accuracy on a file, all of it in one batch."""
    with FFCVLoader(path, batch_size=VAL, image_size=SIDE, train=False, workers=1) as loader, torch.no_grad():
        ((images, labels),) = list(loader)
        logits = model.eval()(images)
    right = (logits.argmax(1) == labels).float().mean().item()
    return nn.functional.cross_entropy(logits, labels).item(), right


def numbers(result: Any) -> list[tuple[float, float, float]]:
    """What must agree between two runs, of each epoch: loss, validation loss, accuracy."""
    return [(epoch.loss, epoch.val_loss, epoch.accuracy) for epoch in result.history.epochs]


def attempt(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except DrivetrainError as error:
        return f"{type(error).__name__}: {error}"


def fitted(pipeline: Pipeline, **fit: Any) -> Any:
    """Numbers and weights of a training of two epochs, or its error as text."""

    def train() -> tuple[Any, Any]:
        result = pipeline.fit(**{"epochs": 2, "progress": False} | fit)
        return numbers(result), result.model.state_dict()

    return attempt(train)


def fit_all(pipelines: dict[str, Pipeline]) -> dict[str, Any]:
    """On each rank: several trainings, so that one launch serves them all."""
    return {name: fitted(pipeline) for name, pipeline in pipelines.items()}


def crcs(batches: Iterable[Any]) -> list[list[int]]:
    """Of each batch the CRC of each image."""
    return [[zlib.crc32(image.contiguous().numpy().tobytes()) for image in images] for images, _ in batches]


def own_loops(pipelines: list[Pipeline], ports: list[int]) -> list[tuple[list[list[int]], float]]:
    """On each rank, of each pipeline built for a loop of one's own: what this rank loads, and the seconds that its
    collectives wait. As in a script that torchrun starts, there is no group before."""
    found = []
    for pipeline, port in zip(pipelines, ports, strict=True):
        dist.barrier()
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with pipeline.build() as built:
            group: Any = dist.group.WORLD
            limit = group._get_backend(torch.device("cpu")).options._timeout
            found.append((crcs(built.train), limit.total_seconds()))
    return found


RUN_FILES = ["checkpoints", "curves.png", "history.json", "model.safetensors", "plan.txt"]
"""What every run leaves in its folder."""


def left_in(folder: Path) -> list[str]:
    """The names in a run's folder, without that of the recipe, which not every pipeline has."""
    return sorted(path.name for path in folder.iterdir() if path.name != "recipe.yaml")


def living_threads() -> set[threading.Thread]:
    """The threads that would keep this process from ending."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def surroundings() -> tuple[Any, ...]:
    """The global state that no run may change."""
    return (
        random.getstate(), np.random.get_state()[1].tolist(),  # type: ignore[index]  # noqa: NPY002
        torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_num_interop_threads(),
        torch.get_default_dtype(), torch.is_grad_enabled(), signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
