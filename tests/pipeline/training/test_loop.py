"""The overhead of the loop per step, counted in operations, because times depend on the machine and its load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drivetrain import strategies
from drivetrain.pipeline.tasks.standard import Classification
from drivetrain.pipeline.tasks.task import TaskLoss
from drivetrain.pipeline.training.guard import NonFiniteGuard
from drivetrain.pipeline.training.loop import train_epoch
from pipeline_data import BATCH, CLASSES, SIDE, batch_norm_model
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Counts what reaches a kernel, in the backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))) for _ in range(steps)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_hand() -> Callable[[int], object]:
    """An epoch of a typical hand-written loop."""
    model = batch_norm_model()
    optimizer = sgd(model.parameters())

    def train(steps: int) -> None:
        total = torch.zeros(())
        for images, labels in batches(steps):
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()

    return train


def ours(*, guarded: bool, accumulate: int = 1) -> Callable[[int], object]:
    engine = strategies.get("single", device="cpu").prepare(batch_norm_model(), sgd, accumulate=accumulate)
    guard = NonFiniteGuard(engine, "raise", str) if guarded else None
    loss = TaskLoss(Classification(), functional.cross_entropy, checked=True)  # as in a pipeline
    return lambda steps: train_epoch(engine, batches(steps), loss, observer=guard)


def in_a_step(train: Callable[[int], object]) -> Counter[str]:
    """The operations of one step more."""
    found = []
    train(1)  # makes the momentum
    for steps in (2, 3):
        with Counting() as counting:
            train(steps)
        found.append(counting.found)
    return found[1] - found[0]


def test_a_step_is_that_of_a_loop_by_hand() -> None:
    expected = in_a_step(by_hand())
    assert expected["aten.convolution_backward.default"] == 1
    assert in_a_step(ours(guarded=False)) == expected


def test_the_guard_reads_the_loss_and_does_nothing_else() -> None:
    bare, guarded = in_a_step(ours(guarded=False)), in_a_step(ours(guarded=True))
    assert guarded - bare == {"aten.view.default": 1}  # that it reads is no operation


@pytest.mark.parametrize("accumulate", [2, 4])
def test_the_loss_of_microbatches_is_their_mean(accumulate: int) -> None:
    torch.manual_seed(0)
    data = batches(1)
    losses = []
    for parts in (1, accumulate):
        torch.manual_seed(0)
        engine = strategies.get("single", device="cpu").prepare(
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, CLASSES)),
            sgd,
            accumulate=parts,
        )
        losses.append(train_epoch(engine, data, functional.cross_entropy).loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
