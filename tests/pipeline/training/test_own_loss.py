"""A custom loss, as a transform: it trains, and targets that it does not support are an error before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drivetrain import Classification, PlanError, Task
from drivetrain.transforms import CutMix, LabelSmoothing, Loss, MixUp, Transform
from own_transforms import Own, by_image, hard
from pipeline_data import CLASSES, Toy, plain_model
from torch import nn
from torch.nn import functional


def no_tensor(logits: torch.Tensor, targets: torch.Tensor) -> Any:  # noqa: ARG001
    return 1.0


def test_it_trains_as_cross_entropy_does(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model, loader="torch", workers=0)
    own, plain = (p.fit(epochs=2, progress=False).history for p in (pipeline.transform(Own(hard)), pipeline))
    assert [epoch.loss for epoch in own.epochs] == pytest.approx(
        [epoch.loss for epoch in plain.epochs], abs=1e-5
    )


@pytest.mark.parametrize(
    ("function", "others", "words"),
    [
        (
            hard,
            [LabelSmoothing(0.1)],
            r"does not accept logits \(2, 4\) and class indices .*with LabelSmoothing",
        ),
        (
            hard,
            [MixUp()],
            r"does not accept logits \(2, 4\) and probabilities \(2, 4\): .*MixUp or CutMix, probabilities",
        ),
        (hard, [CutMix()], r"probabilities \(2, 4\)"),
        (by_image, [], r"returns \(2,\) for 2 images, but must return their mean"),
        (no_tensor, [], "returns float for 2 images"),
    ],
)
def test_what_it_cannot_take_is_told_before_training(
    toy: Toy, function: Loss, others: list[Transform], words: str
) -> None:
    pipeline = toy.pipeline(loader="torch", workers=0).transform(Own(function), *others)
    with pytest.raises(PlanError, match=words):
        pipeline.fit(epochs=1, progress=False)


class Scaled(nn.Module):
    """Cross entropy of logits that it scales for each class."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.inner = nn.ParameterDict({"scale": nn.Parameter(torch.ones(CLASSES), trained)})

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits * self.inner["scale"], targets)


class OwnTask(Task):
    """A task whose loss is that of a module in it."""

    def __init__(self) -> None:
        self.module = Scaled()

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.module(outputs, targets)
        return value


class Distilled(nn.Module):
    """Cross entropy, with a teacher of the logits which is not trained, and of which nothing was frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(CLASSES, CLASSES)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(logits).softmax(1)
        return functional.cross_entropy(logits, targets) + functional.cross_entropy(logits, wanted)


def test_trainable_parameters_of_a_loss_are_refused(toy: Toy) -> None:
    """The optimizer would not have them."""
    pipeline = toy.pipeline(plain_model, loader="torch", workers=0)
    held = Scaled()
    words = r"parameters of its own: {}\. .* \(loss='model'\), or freeze them with requires_grad_\(False\)"
    for refused, name in (
        (pipeline.task(Classification(loss=Scaled())), r"inner\.scale"),
        (pipeline.task(Classification(loss=Scaled())).transform(LabelSmoothing(0.1)), r"inner\.scale"),
        (pipeline.task(Classification(loss=lambda x, y: held(x, y))), r"a tensor \(4,\)"),
        (pipeline.task(OwnTask()), r"a tensor \(4,\)"),
        (pipeline.transform(Own(Scaled())), r"inner\.scale"),
    ):
        with pytest.raises(PlanError, match=words.format(name)):
            refused.fit(epochs=1, progress=False)
    for loss in (Scaled(trained=False), Distilled()):
        assert pipeline.task(Classification(loss=loss)).fit(epochs=1, progress=False).history.epochs
