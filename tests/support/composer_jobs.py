"""Algorithms as users of Composer write them, and a training by Composer's own Trainer. Ranks import them from here."""

# ruff: noqa: ARG002, NPY002 - Composer's signatures, and the global generators that its algorithms draw from
import copy
import random
import warnings
from collections.abc import Sequence
from typing import Any

import composer_reference
import numpy as np
import torch
from drivetrain import Pipeline
from pipeline_data import BATCH, CLASSES
from torch import nn

composer = composer_reference.load("composer")
algorithms = composer_reference.load("composer.algorithms")
Algorithm: Any = composer.Algorithm
Event: Any = composer.Event


class Doubles(Algorithm):  # type: ignore[misc]
    """Two events: it scales the images, and adds a penalty of the outputs to the loss."""

    def __init__(self, factor: float = 2.0, penalty: float = 0.01) -> None:
        self.factor, self.penalty = factor, penalty

    def match(self, event: Any, state: Any) -> bool:
        return event in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        if event == Event.BEFORE_FORWARD:
            state.batch_set_item(0, state.batch_get_item(0) * self.factor)
            logger.log_metrics({"factor": self.factor})
        else:
            state.loss = state.loss + self.penalty * state.outputs.square().mean()


class Counts(Algorithm):  # type: ignore[misc]
    """With a state: the loss depends on the number of steps and on a sum of losses."""

    def __init__(self) -> None:
        self.steps, self.total = 0, torch.zeros(())

    def match(self, event: Any, state: Any) -> bool:
        return event in (Event.AFTER_LOSS, Event.BATCH_END)

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        if event == Event.BATCH_END:
            self.steps += 1
            self.total = self.total + state.loss.detach()
        else:
            state.loss = state.loss * (1 + 0.1 * self.steps + 0.01 * self.total)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": [self.total, {"unit": "nats"}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.total = state["steps"], state["sums"][0]
        assert state["sums"][1] == {"unit": "nats"}


class Draws(Algorithm):  # type: ignore[misc]
    """Draws from all three global generators."""

    def match(self, event: Any, state: Any) -> bool:
        return event == Event.BEFORE_FORWARD

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        drawn = torch.rand(()).item() + np.random.rand() + random.random()
        state.batch_set_item(0, state.batch_get_item(0) * drawn)


class Everything(Algorithm):  # type: ignore[misc]
    """Notes at each event what it sees."""

    seen: list[tuple[Any, ...]] = []  # noqa: RUF012 - copies share it

    def match(self, event: Any, state: Any) -> bool:
        return event.value in PLACED

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        batch = None if event == Event.INIT else getattr(state, "batch", None)
        time = state.timestamp
        position = (int(one) for one in (time.epoch, time.batch, time.batch_in_epoch, time.sample))
        images = None if batch is None else len(batch[0])
        self.seen.append((event.value, *position, images, len(state.optimizers)))


class Once(Algorithm):  # type: ignore[misc]
    """Runs at one event, from a step on or at that one only, and does what it is given."""

    def __init__(self, event: str, what: str = "", batch: int = 0, only: bool = False) -> None:
        self.event, self.what, self.batch, self.only = event, what, batch, only

    def match(self, event: Any, state: Any) -> bool:
        number = int(state.timestamp.batch)
        reached = number == self.batch if self.only else number >= self.batch
        return bool(event.value == self.event and reached)

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        exec(self.what, {"state": state, "self": self, "torch": torch, "logger": logger})


class Seeded:
    """Seeds the global generators by the position of the run, so that both libraries draw the same."""

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        if event in (Event.BEFORE_FORWARD, Event.AFTER_DATALOADER):
            np.random.seed(int(state.timestamp.batch))
            torch.manual_seed(int(state.timestamp.batch))
        super().apply(event, state, logger)  # type: ignore[misc]


DRAWING = ("MixUp", "CutMix", "CutOut", "ColOut", "SelectiveBackprop")
SEEDED = {name: type(f"Seeded{name}", (Seeded, getattr(algorithms, name)), {}) for name in DRAWING}


PLACED = (
    "init", "fit_start", "epoch_start", "after_dataloader", "batch_start", "before_train_batch", "before_forward",
    "after_forward", "before_loss", "after_loss", "before_backward", "after_backward", "after_train_batch", "batch_end",
    "epoch_end", "eval_start", "eval_end", "fit_end",
)  # fmt: skip


def strided_model(classes: int = CLASSES) -> nn.Module:
    """With a strided convolution, for BlurPool; without BatchNorm, whose statistics would depend on the ranks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(8 * 16, classes),
    )  # fmt: skip


class Recorded:
    batch_size = BATCH

    def __init__(self, epochs: list[list[Any]]) -> None:
        self._epochs, self._next = epochs, 0

    def __len__(self) -> int:
        return len(self._epochs[0])

    def __iter__(self) -> Any:
        self._next += 1
        return iter(self._epochs[self._next - 1])


def by_composer(
    pipeline: Pipeline, given: Sequence[Any], epochs: int = 2, split: int | None = None
) -> dict[str, torch.Tensor]:
    """Train the pipeline's model on the same batches with Composer's Trainer, and return its weights. The pipeline is
    without transforms, on one device, with the optimizer of `Toy.pipeline`; a microbatch has `split` images."""
    with pipeline.build() as built:
        model, recorded = copy.deepcopy(built.engine.plain_model), []
        for epoch in range(epochs):
            built.train.set_epoch(epoch)
            recorded.append([(images.clone(), labels.clone()) for images, labels in built.train])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = nn.functional.cross_entropy
        wrapped = composer.models.ComposerClassifier(model, num_classes=CLASSES, loss_fn=loss)
        trainer = composer.Trainer(
            model=wrapped, train_dataloader=Recorded(recorded), max_duration=f"{epochs}ep",
            optimizers=torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9), algorithms=list(given),
            device="cpu", device_train_microbatch_size=split, progress_bar=False, seed=0, spin_dataloaders=False,
        )  # fmt: skip
        trainer.fit()
        trainer.close()
    return dict(model.state_dict())
