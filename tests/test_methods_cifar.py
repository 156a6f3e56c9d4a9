"""Each training method at work on real images: a few thousand of CIFAR-10, a small residual network, some epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drivetrain import DataError, Pipeline
from drivetrain.loaders import cifar10, convert
from drivetrain.pipeline import FitResult
from drivetrain.transforms import (
    EMA,
    SAM,
    SWA,
    AugMix,
    ColOut,
    CutMix,
    CutOut,
    GradientClipping,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    NoWeightDecay,
    ProgressiveResizing,
    RandAugment,
    SelectiveBackprop,
    TestTimeFlip,
    Transform,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IMAGES, EPOCHS, BATCH = 5000, 20, 100
POINTS = {"CutMix": 0.1}
"""How far below plain training a method may end: 0.02, except where it shows only in far longer trainings. CutMix's
box takes half of an image in the mean, whatever alpha; it ends 5 to 7 points below after 20 epochs.
"""

METHODS: list[Transform] = [
    LabelSmoothing(0.1), MixUp(0.05), CutMix(0.2), CutOut(length=0.25), ColOut(), ProgressiveResizing(0.75),
    SelectiveBackprop(), RandAugment(1, 5), AugMix(severity=1),
    EMA(half_life=30), SWA(0.8, 0.97), SAM(), GradientClipping("norm", 1.0), GradientClipping("value", 0.1),
    GradientClipping("adaptive", 0.1), NoWeightDecay(), TestTimeFlip(), LayerFreezing(0.5, 0.5),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The first images of the training set, and all test images."""
    try:
        folder = cifar10.fetch_cifar10()
    except DataError as error:
        pytest.skip(str(error).splitlines()[0])
    out = tmp_path_factory.mktemp("cifar")
    images, labels = cifar10.load_cifar10(folder, "train")
    convert((images[:IMAGES], labels[:IMAGES]), out / "train.beton", classes=cifar10.CLASSES, progress=False)
    test_images, test_labels = cifar10.load_cifar10(folder, "test")
    convert((test_images, test_labels), out / "test.beton", classes=cifar10.CLASSES, progress=False)
    return str(out / "train.beton"), str(out / "test.beton")


def train(files: tuple[str, str], *transforms: Transform) -> FitResult:
    loading: dict[str, Any] = {"scale": (0.5, 1.0), "eval_ratio": 1.0}
    pipeline = (
        Pipeline("cifar_resnet", num_classes=10, width=8)
        .load(*files, batch_size=BATCH, image_size=32, **loading)
        .transform(*transforms)
        .optimize("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4, schedule="linear", warmup=0.2)
    )
    return pipeline.fit(epochs=EPOCHS, progress=False)


@pytest.fixture(scope="module")
def plain(files: tuple[str, str]) -> float:
    """Accuracy without any method."""
    accuracy = train(files).accuracy
    assert accuracy is not None
    assert accuracy > 0.45
    return accuracy


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_it_trains_to_about_the_accuracy_of_plain_training(
    method: Transform, files: tuple[str, str], plain: float
) -> None:
    result = train(files, method)
    losses = [epoch.loss for epoch in result.history.epochs]
    print(f"{method}: {result.accuracy:.2%}, plain {plain:.2%}")
    assert losses[-1] < losses[0]
    assert np.isfinite(losses).all()
    assert result.accuracy is not None
    assert result.accuracy > plain - POINTS.get(type(method).__name__, 0.02)
