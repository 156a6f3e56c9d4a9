"""The loops that `loop.py` compares: a hand-written one, ours, Lightning's Trainer and Composer's."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from drivetrain import Pipeline, strategies
from drivetrain.common.signals import handlers_kept
from drivetrain.loaders.epochs import Batch, EpochLoader
from drivetrain.loaders.options import LoaderOptions
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.models import cifar_resnet
from drivetrain.pipeline.runs.artifacts import FitJob, RankResult
from drivetrain.pipeline.runs.run import Run
from drivetrain.pipeline.tasks.standard import Classification
from drivetrain.pipeline.tasks.task import TaskLoss
from drivetrain.pipeline.telemetry.history import Monitor
from drivetrain.pipeline.training.build import Built
from drivetrain.pipeline.training.guard import NonFiniteGuard
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import train_epoch
from drivetrain.strategies import Engine
from measuring import Contender
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

HAND, OURS, UNGUARDED, ALL = "by hand", "Drivetrain", "Drivetrain, no guard", "Drivetrain, all extras"
LIGHTNING, COMPOSER = "Lightning", "Composer"
SIDE, RATE, MOMENTUM = 32, 1e-3, 0.9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOSS = TaskLoss(Classification(), functional.cross_entropy, checked=True)
"""As a pipeline has it."""


class Batches:
    """The same batches in every epoch, with a timer from the first batch to the end of the last step.

    Args:
        batches: `(images (B, 3, H, W), labels (B,))`, on the device.
    """

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._batches = batches
        self._start, self._seconds = 0.0, 0.0

    @property
    def first(self) -> torch.Tensor:
        """The images of the first batch."""
        return self._batches[0][0]

    @property
    def labels(self) -> NDArray[Any]:
        """The labels of all images, `(N,)`."""
        joined: NDArray[Any] = torch.cat([labels for _, labels in self._batches]).cpu().numpy()
        return joined

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        synchronize()
        self._start = perf_counter()
        yield from self._batches

    def stop(self) -> None:
        """Stop the timer. Each contender calls it after the last step: a Trainer requests no further batch then."""
        synchronize()
        self._seconds = perf_counter() - self._start

    def take(self) -> float:
        """Return the seconds from the first batch to `stop`, and reset them."""
        seconds, self._seconds = self._seconds, 0.0
        if not seconds:
            raise RuntimeError("the timer was not stopped")
        return seconds


class InMemory(EpochLoader):
    """The batches as the loader of a run, which requests one more batch after the last step."""

    workers, _ahead = 1, 0

    def __init__(self, batches: Batches) -> None:
        self._in_memory, self._device = batches, batches.first.device
        self._labels = batches.labels
        settings = LoaderOptions(batch_size=len(batches.first), image_size=SIDE)
        super().__init__(settings, None, len(self._labels), None)

    def _loaded(self, epoch: int, start: int) -> Generator[Batch, None, None]:  # noqa: ARG002
        yield from self._in_memory
        self._in_memory.stop()

    def _release(self) -> None:
        pass

    @property
    def classes(self) -> list[str]:
        return []

    @property
    def labels(self) -> NDArray[Any]:
        return self._labels


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer that all contenders use."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def by_hand(model: nn.Module, batches: Batches) -> Contender:
    """Time a typical hand-written loop with a running loss."""
    model = model.to(DEVICE)
    optimizer = sgd(model.parameters())

    def trial() -> float:
        model.train()
        total = torch.zeros((), device=DEVICE)
        for images, labels in batches:
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        total.item()
        batches.stop()
        return batches.take()

    return trial


def prepared(model: nn.Module) -> Engine:
    """Return the engine of our contenders."""
    return strategies.get("single", device=DEVICE).prepare(model, sgd)


def ours(model: nn.Module, batches: Batches, *, guarded: bool = True) -> Contender:
    """Time `train_epoch`, with the guard that `fit` has."""
    engine = prepared(model)
    guard = NonFiniteGuard(engine, "raise", lambda: "") if guarded else None

    def trial() -> float:
        train_epoch(engine, batches, LOSS, observer=guard)
        batches.stop()
        return batches.take()

    return trial


def with_extras(model: nn.Module, batches: Batches) -> Contender:
    """Time what `fit` runs: progress bar (to /dev/null), CSV log every 50 steps, guard, schedule.

    History and weights are written after an epoch, and do not count.
    """
    loader = InMemory(batches)
    pipeline = Pipeline(cifar_resnet).load("in memory", batch_size=len(batches.first), image_size=SIDE)
    pipeline = pipeline.optimize("sgd", lr=RATE, momentum=MOMENTUM, schedule="constant")
    plan = resolve(pipeline, files=False)
    built = Built(plan, prepared(model), loader, None, LOSS, TrainingHooks(()), (), Monitor("val_loss", False))

    def trial() -> float:
        with (
            tempfile.TemporaryDirectory() as folder,
            Path(os.devnull).open("w") as nowhere,
            contextlib.redirect_stderr(nowhere),
            contextlib.redirect_stdout(nowhere),
        ):
            job = FitJob(epochs=1, out=Path(folder), checkpoints=None, logger=("csv",))
            Run(plan, built, job, RankResult()).train()
            lines = (Path(folder) / "metrics.csv").read_text().splitlines()
            entries = len(lines) - 2  # without the header and the epoch
        if entries != len(batches) // job.log_every:
            raise RuntimeError(f"{entries} steps were logged")
        return batches.take()

    return trial


def with_lightning(model: nn.Module, batches: Batches) -> Contender:
    """Time Lightning's Trainer in its barebones mode, which is meant for such measurements."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:  # noqa: ARG002
            images, labels = batch
            return functional.cross_entropy(self.model(images), labels)

        def on_train_epoch_end(self) -> None:
            batches.stop()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters())

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    module = Module()

    def trial() -> float:
        trainer = pl.Trainer(
            accelerator=DEVICE if DEVICE == "cpu" else "gpu", devices=1, max_epochs=1, barebones=True,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, batches)
        return batches.take()

    return trial


def with_composer(model: nn.Module, batches: Batches) -> Contender:
    """Time Composer's Trainer without extras. Its signal handlers are removed."""
    with handlers_kept():
        from composer import Callback, ComposerModel, DataSpec, Trainer

    class Stops(Callback):
        def epoch_end(self, state: Any, logger: Any) -> None:  # noqa: ARG002
            batches.stop()

    class Module(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> torch.Tensor:
            logits: torch.Tensor = self.model(batch[0])
            return logits

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return functional.cross_entropy(outputs, batch[1])

    module = Module()
    with handlers_kept():
        trainer = Trainer(
            model=module, optimizers=sgd(module.parameters()), max_duration="1ep", progress_bar=False,
            log_to_console=False, callbacks=[Stops()],
            train_dataloader=DataSpec(batches, get_num_samples_in_batch=lambda batch: len(batch[0])),
            device=DEVICE if DEVICE == "cpu" else "gpu", precision="fp32",
            device_train_microbatch_size=len(batches.first),
        )  # fmt: skip

    def trial() -> float:
        trainer.fit(duration="1ep", reset_time=False)
        return batches.take()

    return trial


MAKERS: dict[str, Callable[[nn.Module, Batches], Contender]] = {
    HAND: by_hand,
    OURS: ours,
    UNGUARDED: partial(ours, guarded=False),
    ALL: with_extras,
    LIGHTNING: with_lightning,
    COMPOSER: with_composer,
}
OTHERS = (LIGHTNING, COMPOSER)
"""Other libraries, which may not work with this torch."""
