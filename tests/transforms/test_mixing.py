"""MixUp and CutMix: formulas, randomness, composition, and rejected inputs."""

import math

import pytest
import torch
import torch.nn.functional as F
from drivetrain.common.errors import DataError
from drivetrain.transforms import BatchContext, CutMix, LabelSmoothing, MixUp, Transform
from drivetrain.transforms.common.draws import draw_beta
from drivetrain.transforms.cutmix import area, box_around

IMAGES = torch.randn(6, 3, 10, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 4, 3, 3, 2, 1])
SOFT = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).softmax(1)
MIXERS = [MixUp(), MixUp(alpha=2.0), CutMix(), CutMix(alpha=0.3)]


def context(seed: int = 0, classes: int | None = 5) -> BatchContext:
    return BatchContext(generator=torch.Generator().manual_seed(seed), classes=classes)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 4.0, 300.0])
def test_beta_has_the_moments_and_quantiles_of_torchs(alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([draw_beta(alpha, generator) for _ in range(4000)], dtype=torch.float64)
    assert draws.isfinite().all()
    assert ((draws >= 0) & (draws <= 1)).all()
    beta = torch.distributions.Beta(torch.tensor(alpha, dtype=torch.float64), alpha)
    deviation = beta.stddev.item()
    assert draws.mean().item() == pytest.approx(0.5, abs=4 * deviation / math.sqrt(4000))
    assert draws.var().item() == pytest.approx(beta.variance.item(), rel=0.1)
    torch.manual_seed(0)
    reference = beta.sample((40000,))
    for bound in (0.001, 0.1, 0.3, 0.45, 0.5, 0.55, 0.7, 0.9, 0.999):
        share, expected = (float((sample < bound).double().mean()) for sample in (draws, reference))
        assert share == pytest.approx(expected, abs=0.03), bound


def test_mixup_by_hand() -> None:
    """Every image is a mixture of itself and one other; the targets have the same weights."""
    mixed, targets = MixUp(alpha=1.0).batch(IMAGES, LABELS, context())
    generator = torch.Generator().manual_seed(0)
    z = draw_beta(1.0, generator)
    share, partner = min(z, 1 - z), torch.randperm(6, generator=generator)
    assert 0.01 < share <= 0.5
    torch.testing.assert_close(mixed, (1 - share) * IMAGES + share * IMAGES[partner])
    hot = F.one_hot(LABELS, 5).float()
    torch.testing.assert_close(targets, (1 - share) * hot + share * hot[partner])


def test_cutmix_by_hand() -> None:
    """Counting the replaced pixels of each image gives the target's share."""
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 10, 12)
    for seed in range(20):
        mixed, targets = CutMix().batch(images, torch.arange(6), context(seed, classes=6))
        for i in range(6):
            counts = torch.bincount(mixed[i, 0].flatten().long(), minlength=6) / 120
            torch.testing.assert_close(targets[i], counts, rtol=0, atol=1e-6)


def test_cutmix_boxes() -> None:
    assert box_around(5, 6, 10, 12, kept=0.75) == (3, 7, 3, 9)  # sides halved: 5 → 4 rows, 6 columns
    assert box_around(0, 11, 10, 12, kept=0.0) == (0, 5, 5, 12)  # the whole size, cut at two edges
    assert area(box_around(5, 6, 10, 12, kept=1.0)) == 0


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
@pytest.mark.parametrize("targets", [LABELS, LABELS.int(), LABELS.to(torch.uint8), SOFT, SOFT.bfloat16()])
def test_targets_stay_distributions(mixer: Transform, targets: torch.Tensor) -> None:
    before = IMAGES.clone(), targets.clone()
    _, mixed = mixer.batch(IMAGES, targets, context())
    assert mixed.shape == (6, 5)
    assert mixed.dtype == torch.float32
    tolerance = 1e-2 if targets.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(mixed.sum(1), torch.ones(6), rtol=0, atol=tolerance)
    assert torch.equal(IMAGES, before[0]), "the batch was written to"
    assert torch.equal(targets, before[1])


@pytest.mark.parametrize("order", [(MixUp(1.0), CutMix()), (CutMix(), MixUp(1.0))], ids=repr)
def test_they_compose_in_either_order(order: tuple[Transform, ...]) -> None:
    """Image i is a plane of channels, the i-th 1: after any mixing, the mean of plane c is target c's."""
    images = torch.eye(6)[:, :, None, None].expand(6, 6, 10, 12)
    shared = context(3, classes=6)
    targets = torch.arange(6)
    for mixer in order:
        images, targets = mixer.batch(images, targets, shared)
    torch.testing.assert_close(images.mean((2, 3)), targets, rtol=0, atol=1e-6)
    assert (targets > 0).sum(1).max() > 2, "mixed twice, some image has more than two sources"


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_the_generator_decides(mixer: Transform) -> None:
    first, again, other = (mixer.batch(IMAGES, LABELS, context(seed)) for seed in (7, 7, 8))
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])
    state = torch.get_rng_state()
    mixer.batch(IMAGES, LABELS, context())
    assert torch.equal(torch.get_rng_state(), state), "drew from the global generator"


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_dtype_and_memory_format_stay(
    mixer: Transform, dtype: torch.dtype, form: torch.memory_format
) -> None:
    images = IMAGES.to(dtype).contiguous(memory_format=form)
    mixed, _ = mixer.batch(images, LABELS, context())
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=form)
    expected, _ = mixer.batch(IMAGES, LABELS, context())
    torch.testing.assert_close(mixed.float(), expected, rtol=0, atol=0.02)


def test_cutmix_takes_integers_and_mixup_does_not() -> None:
    images = (IMAGES * 10).clamp(0, 255).to(torch.uint8)
    assert CutMix().batch(images, LABELS, context())[0].dtype == torch.uint8
    with pytest.raises(DataError, match=r"MixUp: images of torch.uint8 .* Normalize"):
        MixUp().batch(images, LABELS, context())


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_a_batch_of_one_stays(mixer: Transform) -> None:
    images, targets = mixer.batch(IMAGES[:1], LABELS[:1], context())
    assert torch.equal(images, IMAGES[:1])
    assert targets.tolist() == [[1, 0, 0, 0, 0]]


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_a_batch_of_nothing_stays(mixer: Transform) -> None:
    images, targets = mixer.batch(IMAGES[:0], LABELS[:0], context())
    assert (images.shape, targets.shape) == ((0, *IMAGES.shape[1:]), (0, 5))


@pytest.mark.parametrize("mixer", [MixUp(), CutMix()], ids=repr)
@pytest.mark.parametrize(("targets", "classes", "message"), [
    (torch.tensor([0, -100, 3, 3, 2, 1]), 5, r"target -100 is not a class index from 0 to 4.*Drop such rows"),
    (torch.tensor([0, 5, 3, 3, 2, 1]), 5, r"target 5 is not a class index from 0 to 4"),
    (LABELS, None, r"number of classes cannot be inferred.*classes="),
    (SOFT, 6, r"5 wide, but there are 6 classes"),
    (LABELS.float(), 5, r"neither class indices"),
    (F.one_hot(LABELS, 5), 5, r"neither class indices"),
    (LABELS[:5], 5, r"unsupported batch of images .* and targets \(5,\)"),
    (torch.zeros(6, 10, 12), 5, r"unsupported batch of images .* and targets \(6, 10, 12\)"),
])  # fmt: skip
def test_refused(mixer: Transform, targets: torch.Tensor, classes: int | None, message: str) -> None:
    with pytest.raises(DataError, match=f"{type(mixer).__name__}: .*{message}"):
        mixer.batch(IMAGES, targets, context(classes=classes))


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_soft_targets_need_no_number_of_classes(mixer: Transform) -> None:
    assert mixer.batch(IMAGES, SOFT, context(classes=None))[1].shape == (6, 5)


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_smoothing_after_mixing_reaches_the_whole_mixture(mixer: Transform) -> None:
    """The other order leaves a smallest target of 0.0089 in Composer, where 0.01 is right."""
    _, targets = mixer.batch(IMAGES, LABELS, context())
    seen = []
    loss = LabelSmoothing(0.1).loss(lambda logits, targets: seen.append(targets) or logits.sum())
    loss(torch.zeros(6, 5), targets)
    assert seen[0].min().item() == pytest.approx(0.02, abs=1e-6)
    assert F.cross_entropy(torch.zeros(6, 5), targets).item() == pytest.approx(math.log(5))
