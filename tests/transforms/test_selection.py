"""SelectiveBackprop and SeqLengthWarmup: the schedule, what is kept, and rejected inputs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from drivetrain.common.errors import DataError, PlanError
from drivetrain.transforms import BatchContext, LabelSmoothing, SelectiveBackprop, SeqLengthWarmup
from drivetrain.transforms.selective_backprop import choose, unreduced
from surgery_models import small
from torch import Tensor, nn

IMAGES = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 4, 3, 3, 2, 1, 0, 2])
LOGITS = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))


def context(seed: int = 0, **options) -> BatchContext:
    given = {"progress": 0.6, "model": small(), "loss": F.cross_entropy, "step": 0, **options}
    return BatchContext(generator=torch.Generator().manual_seed(seed), **given)


def test_a_batch_that_is_not_selected_from_stays() -> None:
    """`test_composer.py` compares when that is."""
    for off in (context(progress=0.2), context(step=1)):
        images, targets = SelectiveBackprop().batch(IMAGES, LABELS, off)
        assert images is IMAGES
        assert targets is LABELS


def test_high_losses_are_favored_by_the_published_weights() -> None:
    losses, generator = torch.tensor([3.0, 0.0, 2.0, 1.0]), torch.Generator().manual_seed(0)
    draws = torch.cat([choose(losses, 0.25, generator) for _ in range(4000)])
    weights = torch.tensor([0.875, 0.125, 0.625, 0.375]) ** 3  # quantiles to the power of 1 / keep - 1
    found = torch.bincount(draws, minlength=4) / 4000
    torch.testing.assert_close(found, weights / weights.sum(), rtol=0, atol=0.025)
    for _ in range(20):
        assert len(set(choose(losses, 0.5, generator).tolist())) == 2, "drawn twice"
    assert len(choose(losses, 0.1, generator)) == 1, "at least one"
    with torch.device("meta"):  # another default device of the caller
        assert choose(losses, 0.5, generator).device == losses.device


def test_the_kept_rows_belong_together() -> None:
    numbered = torch.arange(8.0)[:, None, None, None].expand(8, 3, 12, 12).clone()
    images, targets = SelectiveBackprop(keep=0.4).batch(numbered, LABELS, context())
    assert images.shape == (3, 3, 12, 12)
    assert torch.equal(targets, LABELS[images[:, 0, 0, 0].long()])
    soft = F.one_hot(LABELS, 5).float()
    again, probabilities = SelectiveBackprop(keep=0.4).batch(numbered, soft, context())
    assert torch.equal(again, images)
    assert torch.equal(probabilities.argmax(1), targets)


def test_the_forward_leaves_no_trace() -> None:
    given = context()
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    SelectiveBackprop(scale_factor=0.5).batch(IMAGES, LABELS, given)
    assert all(torch.equal(value, before[name]) for name, value in given.model.state_dict().items())
    assert all(parameter.grad is None for parameter in given.model.parameters())


def test_the_forward_sees_smaller_images() -> None:
    seen = []
    net = small()

    def watched(images: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        seen.append(images.shape)
        return net(images)

    kept, _ = SelectiveBackprop(scale_factor=0.5).batch(IMAGES, LABELS, context(model=watched))
    assert seen == [(8, 3, 6, 6)]
    assert kept.shape == (4, 3, 12, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_dtype_and_memory_format_stay(dtype: torch.dtype, form: torch.memory_format) -> None:
    images = IMAGES.to(dtype).contiguous(memory_format=form)
    kept, _ = SelectiveBackprop().batch(images, LABELS, context(model=small().to(dtype)))
    assert kept.dtype == dtype
    assert kept.is_contiguous(memory_format=form)


def test_the_generator_decides() -> None:
    contexts = [context(seed, model=small()) for seed in (7, 7, 8)]
    state = torch.get_rng_state()
    first, again, other = (SelectiveBackprop().batch(IMAGES, LABELS, each)[1] for each in contexts)
    assert torch.equal(torch.get_rng_state(), state), "drew from the global generator"
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("loss", [
    F.cross_entropy, nn.CrossEntropyLoss(), functools.partial(F.cross_entropy, label_smoothing=0.1),
    LabelSmoothing(0.1).loss(F.cross_entropy), LabelSmoothing(0.1).loss(nn.CrossEntropyLoss()),
    LabelSmoothing(0.1).loss(F.binary_cross_entropy_with_logits), LabelSmoothing().loss(nn.BCEWithLogitsLoss()),
])  # fmt: skip
def test_losses_for_each_image(loss) -> None:
    each = unreduced(loss)(LOGITS, LABELS)
    assert len(each) == 8
    torch.testing.assert_close(each.mean(), loss(LOGITS, LABELS))
    SelectiveBackprop().batch(IMAGES, LABELS, context(loss=loss))


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits * targets).sum()


@pytest.mark.parametrize("loss", [summed, LabelSmoothing().loss(summed), nn.Identity()])
def test_losses_that_cannot(loss) -> None:
    """At any progress, so that a training does not fail in its middle."""
    with pytest.raises(PlanError, match=r"needs a loss for each image.*reduction='none'"):
        SelectiveBackprop().batch(IMAGES, LABELS, context(loss=loss, progress=0.0))


@pytest.mark.parametrize("missing", ["model", "loss", "step"])
def test_the_context_must_be_complete(missing: str) -> None:
    with pytest.raises(PlanError, match=f"Pass BatchContext.*{missing}="):
        SelectiveBackprop().batch(IMAGES, LABELS, context(**{missing: None}))


def test_a_loss_that_drops_rows() -> None:
    loss = LabelSmoothing(0.1).loss(F.binary_cross_entropy_with_logits)
    with pytest.raises(DataError, match=r"one loss per image.*-100"):
        SelectiveBackprop().batch(IMAGES, LABELS.where(LABELS != 2, -100), context(loss=loss))


TOKENS = torch.arange(40).view(2, 20)
CLASSES = torch.tensor([1, 0])


def at(progress: float) -> BatchContext:
    return BatchContext(generator=torch.Generator(), progress=progress)


def test_lengths() -> None:
    warm = SeqLengthWarmup(duration=0.3, min_seq_length=8, max_seq_length=32, step_size=8)
    lengths = [warm.length(k / 100) for k in (0, 9, 10, 19, 20, 29, 30, 31, 100)]
    assert lengths == [8, 8, 16, 16, 24, 24, 32, 32, 32]
    uneven = SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=30, step_size=8)
    assert [uneven.length(k / 4) for k in range(5)] == [8, 16, 30, 30, 30]
    assert SeqLengthWarmup(duration=0).length(0) == 1024
    assert SeqLengthWarmup(min_seq_length=5, max_seq_length=6, step_size=8).length(0.29) == 5


def test_truncation_and_division() -> None:
    cut = SeqLengthWarmup(min_seq_length=8, max_seq_length=20)
    tokens, targets = cut.batch(TOKENS, TOKENS + 1, at(0))
    assert torch.equal(tokens, TOKENS[:, :8])
    assert torch.equal(targets, tokens + 1)
    tokens, targets = cut.batch(TOKENS, CLASSES, at(0))
    assert tokens.shape == (2, 8)
    assert targets is CLASSES
    divide = SeqLengthWarmup(min_seq_length=8, max_seq_length=20, truncate=False)
    tokens, targets = divide.batch(TOKENS, TOKENS + 1, at(0))
    assert torch.equal(tokens, torch.arange(40).view(5, 8))
    assert torch.equal(targets, tokens + 1)
    assert divide.batch(TOKENS[:, :19], TOKENS[:, :19], at(0))[0].shape == (4, 8)
    assert cut.batch(TOKENS, CLASSES, at(0.9))[0] is TOKENS


def test_what_sequences_cannot_be() -> None:
    with pytest.raises(DataError, match=r"truncate=False.* cannot be split"):
        SeqLengthWarmup(truncate=False).batch(TOKENS, CLASSES, at(0))
    for tokens, targets in ((IMAGES, LABELS), (TOKENS, CLASSES[:1]), (TOKENS, TOKENS[:, :5])):
        with pytest.raises(DataError, match=r"Pass tokens \(B, L\)"):
            SeqLengthWarmup().batch(tokens, targets, at(0))
