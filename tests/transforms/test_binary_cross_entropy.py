"""BinaryCrossEntropy: the formula, its targets, its place among the other methods, and training."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from drivetrain import Pipeline
from drivetrain.common.errors import DataError, PlanError
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.training.build import training_loss
from drivetrain.transforms import BatchContext, BinaryCrossEntropy, LabelSmoothing, MixUp, SelectiveBackprop
from drivetrain.transforms.binary_cross_entropy import binary_cross_entropy
from drivetrain.transforms.selective_backprop import unreduced
from pipeline_data import Toy
from torch import nn

LOGITS_BC = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
LABELS_B = torch.tensor([0, 9, 3, 3, 7, 1])
SOFT_BC = 0.3 * F.one_hot(LABELS_B, 10) + 0.7 * F.one_hot(LABELS_B.flip(0), 10)
IGNORING_B = torch.tensor([0, -100, 3, 3, -100, 1])


def by_hand(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """From probabilities, in float64: for each class log p where it is, log(1 - p) where it is not."""
    p = 1 / (1 + 10 * (-logits.double()).exp())  # sigmoid of the logit less log 10
    return -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1)


def test_the_formula() -> None:
    loss = BinaryCrossEntropy().loss(F.cross_entropy)
    for targets, probabilities in ((LABELS_B, F.one_hot(LABELS_B, 10)), (SOFT_BC, SOFT_BC)):
        torch.testing.assert_close(
            loss(LOGITS_BC, targets).double(), by_hand(LOGITS_BC, probabilities).mean()
        )
    for dtype in (torch.int16, torch.int32):
        assert loss(LOGITS_BC, LABELS_B.to(dtype)) == loss(LOGITS_BC, LABELS_B)
    assert pickle.loads(pickle.dumps(loss)) is loss


@pytest.mark.parametrize("classes", [10, 1000])
def test_an_untrained_models_loss_is_small(classes: int) -> None:
    loss = binary_cross_entropy(torch.zeros(4, classes), torch.arange(4))
    # -log(1 / (C + 1)), and C - 1 times -log(C / (C + 1)), which together are nearly 1
    assert loss == pytest.approx(math.log(classes) + 1, rel=0.05)


def test_ignored_rows_count_for_nothing() -> None:
    logits = LOGITS_BC.clone().requires_grad_()
    kept = IGNORING_B != -100
    loss = binary_cross_entropy(logits, IGNORING_B)
    torch.testing.assert_close(loss, binary_cross_entropy(LOGITS_BC[kept], IGNORING_B[kept]))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[~kept].eq(0).all()
    each = binary_cross_entropy(LOGITS_BC, IGNORING_B, reduction="none")
    assert each[~kept].eq(0).all()
    torch.testing.assert_close(each.sum() / 4, loss.detach())


def test_half_precision_is_summed_in_float32() -> None:
    logits = LOGITS_BC.bfloat16()
    assert binary_cross_entropy(logits, SOFT_BC.bfloat16()).dtype == torch.float32
    assert binary_cross_entropy(LOGITS_BC.double(), SOFT_BC).dtype == torch.float64
    assert binary_cross_entropy(logits, LABELS_B) == binary_cross_entropy(logits.float(), LABELS_B)


@pytest.mark.parametrize("targets", [LABELS_B[:5], LABELS_B.float(), SOFT_BC[:, :9], SOFT_BC[None]])
def test_targets_that_do_not_fit(targets: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"BinaryCrossEntropy: logits \(6, 10\) do not match targets"):
        binary_cross_entropy(LOGITS_BC, targets)


@pytest.mark.parametrize("loss", [nn.MSELoss(), LabelSmoothing().loss(F.cross_entropy), binary_cross_entropy])
def test_it_replaces_plain_cross_entropy_only(loss) -> None:
    with pytest.raises(PlanError, match="Apply it first, before LabelSmoothing"):
        BinaryCrossEntropy().loss(loss)


def test_smoothing_comes_after_it_in_any_order(toy: Toy) -> None:
    pipeline = toy.pipeline().transform(LabelSmoothing(0.1), MixUp(), BinaryCrossEntropy())
    names = [step.what.split("(")[0] for step in pipeline.plan().steps]
    assert names.index("MixUp") < names.index("BinaryCrossEntropy") < names.index("LabelSmoothing")
    smoothed = 0.9 * F.one_hot(LABELS_B, 10) + 0.01
    found = training_loss(resolve(pipeline, files=False), torch.device("cpu"))(LOGITS_BC, LABELS_B)
    torch.testing.assert_close(found.double(), by_hand(LOGITS_BC, smoothed).mean())


def test_selective_backprop_takes_it() -> None:
    loss = LabelSmoothing(0.1).loss(BinaryCrossEntropy().loss(F.cross_entropy))
    each = unreduced(loss)(LOGITS_BC, LABELS_B)
    torch.testing.assert_close(each.mean(), loss(LOGITS_BC, LABELS_B))
    context = BatchContext(
        torch.Generator(), 0.6, model=lambda images: images.flatten(1)[:, :10], loss=loss, step=0
    )
    images, labels = SelectiveBackprop().batch(torch.randn(6, 3, 4, 4), LABELS_B, context)
    assert len(images) == len(labels) == 3


def test_a_training_by_it(toy: Toy) -> None:
    """It learns, and validation reports plain cross entropy, as for any other loss."""
    pipeline: Pipeline = toy.pipeline(loader="torch", workers=0).transform(
        BinaryCrossEntropy(), LabelSmoothing(0.1)
    )
    history = pipeline.fit(epochs=3, progress=False).history
    first, last = history.epochs[0], history.epochs[-1]
    assert last.loss < first.loss
    assert last.val_loss is not None
    assert last.val_loss < 2 * math.log(10)
