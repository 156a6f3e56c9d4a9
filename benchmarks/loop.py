"""Our loop beside a hand-written PyTorch loop, Lightning's Trainer and Composer's Trainer: time of a turn.

    python benchmarks/loop.py [--rounds 15] [--steps 100] [--batch 32] [--only "by hand" Drivetrain …]

All train the same model, from the same weights, on the same batches, which are in memory, with SGD at a constant
rate, in fp32 on one device; bars, logging, checkpoints and evaluation are off. A turn is one epoch of `--steps`
steps; contenders take turns within a round, and ratios are taken round by round. Lightning and Composer are timed
from the first batch of a turn to the last one's end, so that the start of their Trainers does not count.

The batches are small on purpose: what a loop adds to each step shows best beside a step of few milliseconds.
"""

from __future__ import annotations

import argparse
import copy
import logging
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from drivetrain import strategies
from drivetrain.pipeline.loop import train_epoch
from drivetrain.pipeline.models import cifar_resnet
from drivetrain.pipeline.nonfinite import LossGuard
from drivetrain.pipeline.provenance import version
from measuring import Contender, compare, measure, save
from torch import nn
from torch.nn import functional

HAND, OURS, LIGHTNING, COMPOSER = "by hand", "Drivetrain", "Lightning", "Composer"
SIDE, RATE = 32, 1e-3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Batches:
    """The same batches in every epoch; notes when the first was taken and when all were done.

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

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        synchronise()
        self._start = perf_counter()
        yield from self._batches

    def stop(self) -> None:
        """The last step is done. Called by each contender: a Trainer asks for no batch after the last."""
        synchronise()
        self._seconds = perf_counter() - self._start

    def take(self) -> float:
        """Seconds from the first batch to `stop`, once."""
        seconds, self._seconds = self._seconds, 0.0
        if not seconds:
            raise RuntimeError("the turn was not stopped")
        return seconds


def synchronise() -> None:
    """Waits for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def by_hand(model: nn.Module, batches: Batches) -> Contender:
    """Seconds of a turn of a loop as anybody would write it, with a running loss."""
    model = model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

    def turn() -> float:
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

    return turn


def ours(model: nn.Module, batches: Batches) -> Contender:
    """Seconds of a turn of `train_epoch`, with the guard against losses that are not finite that `fit` has."""
    engine = strategies.get("single").prepare(
        model, lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
    )
    guard = LossGuard(engine, "raise", lambda: 0, lambda: "")

    def turn() -> float:
        train_epoch(engine, batches, functional.cross_entropy, guard=guard)
        batches.stop()
        return batches.take()

    return turn


def with_lightning(model: nn.Module, batches: Batches) -> Contender:
    """Seconds of a turn of Lightning's Trainer; None of its extras."""
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
            return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()

    def turn() -> float:
        trainer = pl.Trainer(
            accelerator=DEVICE if DEVICE == "cpu" else "gpu", devices=1, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, batches)
        return batches.take()

    return turn


def with_composer(model: nn.Module, batches: Batches) -> Contender:
    """Seconds of a turn of Composer's Trainer; None of its extras. Its signal handlers are taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    from composer import Callback, ComposerModel, DataSpec, Trainer

    class Stops(Callback):  # type: ignore[misc]
        def epoch_end(self, state: Any, logger: Any) -> None:  # noqa: ARG002
            batches.stop()

    class Module(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> torch.Tensor:
            logits: torch.Tensor = self.model(batch[0])
            return logits

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return functional.cross_entropy(outputs, batch[1])

    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    trainer = Trainer(
        model=module, optimizers=optimizer, max_duration="1ep", progress_bar=False, log_to_console=False,
        callbacks=[Stops()],
        train_dataloader=DataSpec(batches, get_num_samples_in_batch=lambda batch: len(batch[0])),
        device=DEVICE if DEVICE == "cpu" else "gpu", precision="fp32",
        device_train_microbatch_size=len(batches.first),
    )  # fmt: skip
    for number, handler in handlers.items():
        signal.signal(number, handler)

    def turn() -> float:
        trainer.fit(duration="1ep", reset_time=False)
        return batches.take()

    return turn


MAKERS = {HAND: by_hand, OURS: ours, LIGHTNING: with_lightning, COMPOSER: with_composer}


def contenders(
    names: list[str], batch: int, steps: int, width: int
) -> tuple[dict[str, Contender], dict[str, str]]:
    """A turn of each contender that can be made, and why the others cannot."""
    torch.manual_seed(0)
    model = cifar_resnet(width=width)
    made, missing = {}, {}
    images = [torch.randn(batch, 3, SIDE, SIDE, device=DEVICE) for _ in range(min(steps, 16))]
    labels = [torch.randint(10, (batch,), device=DEVICE) for _ in images]
    pairs = list(zip(images, labels, strict=True))
    for name in names:
        batches = Batches([pairs[number % len(pairs)] for number in range(steps)])
        try:
            made[name] = MAKERS[name](copy.deepcopy(model), batches)
            made[name]()
        except Exception as error:  # whatever a foreign Trainer raises on this torch
            made.pop(name, None)
            missing[name] = f"{type(error).__name__}: {error}"
            print(f"{name} is left out: {missing[name]:.300}")
    return made, missing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the foreign Trainers
    made, missing = contenders(
        [*dict.fromkeys([OURS, *options.only])], options.batch, options.steps, options.width
    )
    figures = measure(made, options.rounds)
    table, rows = compare(f"{options.steps} steps of {options.batch} images", "s", figures, OURS)
    foreign = {name: version(name) for name in ("lightning", "mosaicml")}
    settings = {name: getattr(options, name) for name in ("rounds", "steps", "batch", "width")}
    save(
        [table],
        {"turns": rows, "left_out": missing, "versions": foreign, **settings},
        options.out / "loop.json",
    )


if __name__ == "__main__":
    main()
