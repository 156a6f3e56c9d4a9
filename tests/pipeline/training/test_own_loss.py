"""A custom loss, as a transform: it trains, and targets that it does not support are an error before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drivetrain import PlanError
from drivetrain.transforms import CutMix, LabelSmoothing, Loss, MixUp, Transform
from own_loss import Own, by_image, hard
from pipeline_data import Toy, plain_model


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
