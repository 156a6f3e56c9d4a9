"""LabelSmoothing and BinaryCrossEntropy: formulas, the losses they know and do not know, and ignored rows."""

import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from drivetrain.common.errors import DataError, PlanError
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.training.build import training_loss
from drivetrain.transforms import BatchContext, BinaryCrossEntropy, LabelSmoothing, MixUp, SelectiveBackprop
from drivetrain.transforms.binary_cross_entropy import binary_cross_entropy
from drivetrain.transforms.label_smoothing import SmoothedLoss, smooth_targets
from drivetrain.transforms.selective_backprop import unreduced
from ledgers import in_process
from pipeline_data import Toy
from torch import Tensor, nn

LOGITS_BC = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
LABELS_B = torch.tensor([0, 9, 3, 3, 7, 1])
SOFT_BC = 0.3 * F.one_hot(LABELS_B, 10) + 0.7 * F.one_hot(LABELS_B.flip(0), 10)
IGNORING_B = torch.tensor([0, -100, 3, 3, -100, 1])


def by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    """A cross entropy that Drivetrain cannot recognize; it takes only soft targets."""
    assert targets.is_floating_point()
    return -(logits.log_softmax(1) * targets).sum(1).mean()


def summed_bce(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)


@pytest.mark.parametrize("smoothing", [0, 0.0, 0.08, 0.1, 0.99])
def test_the_formula(smoothing: float) -> None:
    expected = (1 - smoothing) * F.one_hot(LABELS_B, 10) + smoothing / 10
    torch.testing.assert_close(smooth_targets(LOGITS_BC, LABELS_B, smoothing), expected.float())
    given = SOFT_BC.clone()
    soft = smooth_targets(LOGITS_BC, given, smoothing)
    torch.testing.assert_close(soft, ((1 - smoothing) * SOFT_BC + smoothing / 10).float())
    torch.testing.assert_close(soft.sum(1), torch.ones(6))
    assert torch.equal(given, SOFT_BC), "the targets were written to"


@pytest.mark.parametrize("targets", [LABELS_B, SOFT_BC, LABELS_B.int(), IGNORING_B])
def test_known_and_unknown_losses_agree(targets: Tensor) -> None:
    smooth = LabelSmoothing(0.1)
    unknown = smooth.loss(by_hand)(LOGITS_BC, targets)
    native = targets if targets.is_floating_point() else targets.long()
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(), partial(F.cross_entropy, reduction="mean")):
        smoothed = smooth.loss(loss)
        assert not isinstance(smoothed, SmoothedLoss)
        torch.testing.assert_close(smoothed(LOGITS_BC, native), unknown)


def test_torchs_own_smoothing_is_used_with_its_options() -> None:
    weight = torch.linspace(0.1, 1, 10)
    expected = F.cross_entropy(LOGITS_BC, LABELS_B, weight, ignore_index=3, label_smoothing=0.2)
    module = nn.CrossEntropyLoss(weight, ignore_index=3)
    for loss in (module, partial(F.cross_entropy, weight=weight, ignore_index=3)):
        torch.testing.assert_close(LabelSmoothing(0.2).loss(loss)(LOGITS_BC, LABELS_B), expected)
    assert module.label_smoothing == 0.0, "the loss for evaluation was changed"


@pytest.mark.parametrize("base", [by_hand, summed_bce])
def test_ignored_rows_drop_out_of_the_mean(base) -> None:
    kept = IGNORING_B != -100
    loss = LabelSmoothing(0.1).loss(base)
    torch.testing.assert_close(loss(LOGITS_BC, IGNORING_B), loss(LOGITS_BC[kept], IGNORING_B[kept]))
    logits = LOGITS_BC.clone().requires_grad_()
    loss(logits, IGNORING_B).backward()
    assert torch.equal(logits.grad.abs().sum(1) > 0, kept)


def test_all_rows_ignored_is_what_torch_says() -> None:
    targets = torch.full((6,), -100)
    assert LabelSmoothing(0.1).loss(F.cross_entropy)(LOGITS_BC, targets).isnan()
    assert LabelSmoothing(0.1).loss(by_hand)(LOGITS_BC, targets).isnan()


def test_bfloat16_logits_get_exact_targets() -> None:
    targets = smooth_targets(LOGITS_BC.bfloat16(), LABELS_B, 0.1)
    assert targets.dtype == torch.float32
    assert targets.max().item() == pytest.approx(0.91, abs=1e-7)
    assert LabelSmoothing(0.1).loss(summed_bce)(LOGITS_BC.bfloat16(), LABELS_B).isfinite()
    assert smooth_targets(LOGITS_BC.double(), LABELS_B, 0.1).dtype == torch.float64


@pytest.mark.parametrize("loss", [
    F.cross_entropy, nn.CrossEntropyLoss(torch.ones(10)), by_hand, nn.BCEWithLogitsLoss(),
])  # fmt: skip
def test_pickles(loss) -> None:
    smoothed = LabelSmoothing(0.1).loss(loss)
    again = pickle.loads(pickle.dumps(smoothed))
    torch.testing.assert_close(again(LOGITS_BC, LABELS_B), smoothed(LOGITS_BC, LABELS_B), rtol=0, atol=0)


def test_smoothing_twice_is_refused() -> None:
    smooth = LabelSmoothing(0.1).loss
    for loss in (smooth(F.cross_entropy), smooth(by_hand), nn.CrossEntropyLoss(label_smoothing=0.1)):
        with pytest.raises(PlanError, match=r"LabelSmoothing\(0.2\): the loss already smooths .* by 0.1"):
            LabelSmoothing(0.2).loss(loss)


@pytest.mark.parametrize("targets", [
    LABELS_B[:5], LABELS_B.float(), SOFT_BC[:, :9], LABELS_B[:, None], torch.tensor(3),
])  # fmt: skip
def test_shapes_that_do_not_fit(targets: Tensor) -> None:
    with pytest.raises(DataError, match=r"logits \(6, 10\) do not match targets"):
        LabelSmoothing(0.1).loss(by_hand)(LOGITS_BC, targets)


def test_a_class_out_of_range_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        LabelSmoothing(0.1).loss(by_hand)(LOGITS_BC, LABELS_B + 1)


def test_it_does_not_change_models() -> None:
    with pytest.raises(TypeError, match="LabelSmoothing does not change the model"):
        LabelSmoothing().apply(nn.Linear(1, 1))
    assert LabelSmoothing.kind == "loss"


# ---- BinaryCrossEntropy: the formula, its targets, its place among the other methods, and training ----


def bce_by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    """From probabilities, in float64: for each class log p where it is, log(1 - p) where it is not."""
    p = 1 / (1 + 10 * (-logits.double()).exp())  # sigmoid of the logit less log 10
    return -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1)


def test_the_formula_of_binary_cross_entropy() -> None:
    loss = BinaryCrossEntropy().loss(F.cross_entropy)
    for targets, probabilities in ((LABELS_B, F.one_hot(LABELS_B, 10)), (SOFT_BC, SOFT_BC)):
        expected = bce_by_hand(LOGITS_BC, probabilities).mean()
        torch.testing.assert_close(loss(LOGITS_BC, targets).double(), expected)
    for dtype in (torch.int16, torch.int32):
        assert loss(LOGITS_BC, LABELS_B.to(dtype)) == loss(LOGITS_BC, LABELS_B)
    assert pickle.loads(pickle.dumps(loss)) is loss


@pytest.mark.parametrize("classes", [10, 1000])
def test_an_untrained_models_loss_is_small(classes: int) -> None:
    loss = binary_cross_entropy(torch.zeros(4, classes), torch.arange(4))
    # -log(1 / (C + 1)), and C - 1 times -log(C / (C + 1)), which together are nearly 1
    assert loss == pytest.approx(math.log(classes) + 1, rel=0.05)


def test_ignored_rows_of_it_count_for_nothing() -> None:
    logits = LOGITS_BC.clone().requires_grad_()
    kept = IGNORING_B != -100
    loss = binary_cross_entropy(logits, IGNORING_B)
    torch.testing.assert_close(loss, binary_cross_entropy(LOGITS_BC[kept], IGNORING_B[kept]))
    loss.backward()
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
def test_targets_that_do_not_fit(targets: Tensor) -> None:
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
    torch.testing.assert_close(found.double(), bce_by_hand(LOGITS_BC, smoothed).mean())


def test_selective_backprop_takes_it() -> None:
    loss = LabelSmoothing(0.1).loss(BinaryCrossEntropy().loss(F.cross_entropy))
    each = unreduced(loss)(LOGITS_BC, LABELS_B)
    torch.testing.assert_close(each.mean(), loss(LOGITS_BC, LABELS_B))
    given = {"model": lambda images: images.flatten(1)[:, :10], "loss": loss, "step": 0}
    images = torch.randn(6, 3, 4, 4)
    images, labels = SelectiveBackprop().batch(images, LABELS_B, BatchContext(torch.Generator(), 0.6, **given))
    assert len(images) == len(labels) == 3


def test_a_training_by_it(toy: Toy) -> None:
    """It learns, and validation reports plain cross entropy, as for any other loss."""
    pipeline = in_process(toy).transform(BinaryCrossEntropy(), LabelSmoothing(0.1))
    first, *_, last = pipeline.fit(epochs=3, progress=False).history.epochs
    assert last.loss < first.loss
    assert last.val_loss < 2 * math.log(10)
