"""CutOut, ColOut, ProgressiveResizing, MixUp and CutMix: pixels, sizes, randomness, composition, rejected inputs."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drivetrain import transforms as t
from drivetrain.common.errors import DataError, PlanError
from drivetrain.transforms.common.draws import draw_beta
from drivetrain.transforms.cutout import inside

IMAGES = torch.randn(6, 3, 20, 16, generator=torch.Generator().manual_seed(0)) + 5
LABELS = torch.tensor([0, 4, 3, 3, 2, 1])
SOFT = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).softmax(1)
METHODS = [
    t.CutOut(),
    t.CutOut(holes=3, length=0.2),
    t.ColOut(),
    t.ColOut(row=0, column=0.5),
    t.ProgressiveResizing(),
]
FORMS = pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
MIXERS = [t.MixUp(), t.MixUp(alpha=2.0), t.CutMix(), t.CutMix(alpha=0.3)]


def context(seed: int = 0, progress: float = 0.0, classes: int | None = 5) -> t.BatchContext:
    return t.BatchContext(torch.Generator().manual_seed(seed), progress=progress, classes=classes)


def test_cutout_blanks_one_square_per_image() -> None:
    cut, targets = t.CutOut(length=0.5).batch(IMAGES, LABELS, context(1))
    assert targets is LABELS
    holes = cut == 0
    assert torch.equal(cut[~holes], IMAGES[~holes])
    assert torch.equal(holes[:, 0], holes[:, 1]), "all channels alike"
    assert len({tuple(hole[0].flatten().tolist()) for hole in holes}) > 1, "each image has its own"
    assert (holes[:, 0].sum((1, 2)) <= 64).all()
    assert (holes[:, 0].sum((1, 2)) >= 16).all()


def test_cutout_squares() -> None:
    mask = inside(torch.tensor([[5], [0]]), torch.tensor([[5], [15]]), 20, 16, side=8)
    expected = torch.zeros(2, 20, 16, dtype=torch.bool)
    expected[0, 1:9, 1:9] = True
    expected[1, 0:4, 11:16] = True  # cut at two edges
    assert torch.equal(mask, expected)
    assert inside(torch.tensor([[5, 15]]), torch.tensor([[5, 10]]), 20, 16, side=2).sum() == 8


def test_cutout_of_the_whole_side_and_of_less_than_two_pixels() -> None:
    assert (t.CutOut(length=1).batch(IMAGES, LABELS, context())[0] == 0).any()
    expected = t.CutOut(length=2 / 16).batch(IMAGES, LABELS, context())[0]
    assert 0 < (expected == 0)[:, 0].sum() <= 4 * len(IMAGES)
    for length in (0.01, 1 / 16, 1.9 / 16):
        assert torch.equal(t.CutOut(length=length).batch(IMAGES, LABELS, context())[0], expected)


def test_colout_keeps_rows_and_columns_in_order() -> None:
    images = (torch.arange(20.0)[:, None] * 100 + torch.arange(16.0)).expand(6, 3, 20, 16)
    small, targets = t.ColOut().batch(images, LABELS, context(2))
    assert small.shape == (6, 3, 17, 13)  # int(0.85 · 20), int(0.85 · 16)
    assert targets is LABELS
    rows, columns = small[0, 0, :, 0] // 100, small[0, 0, 0] % 100
    assert (rows.diff() > 0).all()
    assert (columns.diff() > 0).all()
    torch.testing.assert_close(small, (rows[:, None] * 100 + columns).expand_as(small))


def test_colout_keeps_at_least_one() -> None:
    assert t.ColOut(row=0.99, column=0).batch(IMAGES, LABELS, context())[0].shape == (6, 3, 1, 16)


@pytest.mark.parametrize(("options", "size", "progress", "expected"), [
    ({}, 225, 1.0, 225),  # Composer ends at 224: no multiple of 4
    ({}, 6, 0.0, 4),  # never above the full size, never nothing
    ({"initial_scale": 0.01}, 32, 0.0, 4),  # Composer: 0 pixels
    ({"size_increment": 64}, 32, 0.0, 32),
    ({"delay": 0.8}, 224, 0.79, 112),  # no ramp: Composer divides by zero
    ({"delay": 0.8}, 224, 0.8, 224),
    ({"delay": 0.7, "finetune": 0.3}, 224, 0.7, 224),
    ({"delay": 0, "finetune": 0}, 224, 0.5, 168),
    ({"delay": 0, "finetune": 1}, 224, 0.0, 224),
    ({"initial_scale": 1}, 224, 0.3, 224),
])  # fmt: skip
def test_schedules_at_the_edges(options: dict[str, float], size: int, progress: float, expected: int) -> None:
    assert t.ProgressiveResizing(**options).size(size, progress) == expected  # type: ignore[arg-type]


def test_resizing_is_bilinear_and_antialiased() -> None:
    small, targets = t.ProgressiveResizing().batch(IMAGES, LABELS, context(progress=0))
    # The width is the multiple of 4, and the height keeps the proportions.
    assert small.shape == (6, 3, 10, 8)
    assert targets is LABELS
    torch.testing.assert_close(small.mean((2, 3)), IMAGES.mean((2, 3)), rtol=0, atol=0.1)
    stripes = torch.tensor([0.0, 1.0]).repeat(16).expand(1, 3, 32, 32)
    gray = t.ProgressiveResizing().batch(stripes, LABELS[:1], context())[0]
    assert gray.shape == (1, 3, 16, 16)
    torch.testing.assert_close(gray[..., 2:-2], torch.full((1, 3, 16, 12), 0.5), rtol=0, atol=0.13)
    assert t.ProgressiveResizing().batch(IMAGES, LABELS, context(progress=0.9))[0] is IMAGES


@pytest.mark.parametrize("method", [*METHODS, *MIXERS], ids=str)
def test_torchs_default_device_changes_nothing(method: t.Transform) -> None:
    expected, _ = method.batch(IMAGES, SOFT, context())
    with torch.device("meta"):
        found, _ = method.batch(IMAGES, SOFT, context())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@FORMS
def test_dtype_and_memory_format_stay(method: t.Transform, dtype: torch.dtype, form: Any) -> None:
    images = (IMAGES * 10).to(dtype).contiguous(memory_format=form)
    before = images.clone()
    made, _ = method.batch(images, LABELS, context())
    assert made.dtype == dtype
    assert made.is_contiguous(memory_format=form)
    expected, _ = method.batch(IMAGES * 10, LABELS, context())
    torch.testing.assert_close(made.float(), expected, rtol=0.01, atol=1.0)
    assert torch.equal(images, before), "the batch was written to"


@pytest.mark.parametrize("method", [*METHODS, *MIXERS], ids=repr)
def test_the_generator_decides(method: t.Transform) -> None:
    state = torch.get_rng_state()
    first, again, other = (method.batch(IMAGES, LABELS, context(seed)) for seed in (7, 7, 8))
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, first, other)) == isinstance(method, t.ProgressiveResizing)
    assert torch.equal(torch.get_rng_state(), state), "drew from the global generator"


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_refused(method: t.Transform) -> None:
    size = (6, 20, 15 if isinstance(method, t.CutOut) else 16)  # CutOut takes masks of the images' size
    for images, targets in ((IMAGES[0], LABELS), (IMAGES, LABELS[:3]), (IMAGES, torch.zeros(size))):
        with pytest.raises(DataError, match=rf"{type(method).__name__}: unsupported batch of images"):
            method.batch(images, targets, context())


def test_more_than_the_whole_training() -> None:
    with pytest.raises(PlanError, match=r"delay=0.9, finetune=0.2\): together they exceed the full training"):
        t.ProgressiveResizing(delay=0.9, finetune=0.2)


# ---- MixUp and CutMix ----


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


def test_cutmix_by_hand() -> None:
    """Counting the replaced pixels of each image gives the target's share."""
    images = torch.arange(6.0)[:, None, None, None].expand(6, 3, 10, 12)
    for seed in range(20):
        mixed, targets = t.CutMix().batch(images, torch.arange(6), context(seed, classes=6))
        for i in range(6):
            counts = torch.bincount(mixed[i, 0].flatten().long(), minlength=6) / 120
            torch.testing.assert_close(targets[i], counts, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
@pytest.mark.parametrize("targets", [LABELS, LABELS.int(), LABELS.to(torch.uint8), SOFT, SOFT.bfloat16()])
def test_targets_stay_distributions(mixer: t.Transform, targets: torch.Tensor) -> None:
    before = IMAGES.clone(), targets.clone()
    _, mixed = mixer.batch(IMAGES, targets, context())
    assert mixed.shape == (6, 5)
    assert mixed.dtype == torch.float32
    tolerance = 1e-2 if targets.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(mixed.sum(1), torch.ones(6), rtol=0, atol=tolerance)
    assert torch.equal(IMAGES, before[0]), "the batch was written to"
    assert torch.equal(targets, before[1])


@pytest.mark.parametrize("order", [(t.MixUp(1.0), t.CutMix()), (t.CutMix(), t.MixUp(1.0))], ids=repr)
def test_they_compose_in_either_order(order: tuple[t.Transform, ...]) -> None:
    """Image i is a plane of channels, the i-th 1: after any mixing, the mean of plane c is target c's."""
    images = torch.eye(6)[:, :, None, None].expand(6, 6, 10, 12)
    shared = context(3, classes=6)
    targets = torch.arange(6)
    for mixer in order:
        images, targets = mixer.batch(images, targets, shared)
    torch.testing.assert_close(images.mean((2, 3)), targets, rtol=0, atol=1e-6)
    assert (targets > 0).sum(1).max() > 2, "mixed twice, some image has more than two sources"


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_a_batch_of_one_stays(mixer: t.Transform) -> None:
    images, targets = mixer.batch(IMAGES[:1], LABELS[:1], context())
    assert torch.equal(images, IMAGES[:1])
    assert targets.tolist() == [[1, 0, 0, 0, 0]]


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_a_batch_of_nothing_stays(mixer: t.Transform) -> None:
    images, targets = mixer.batch(IMAGES[:0], LABELS[:0], context())
    assert (images.shape, targets.shape) == ((0, *IMAGES.shape[1:]), (0, 5))


@pytest.mark.parametrize("mixer", [t.MixUp(), t.CutMix()], ids=repr)
@pytest.mark.parametrize(("targets", "classes", "message"), [
    (torch.tensor([0, -100, 3, 3, 2, 1]), 5, r"target -100 is not a class index from 0 to 4.*Drop such rows"),
    (torch.tensor([0, 5, 3, 3, 2, 1]), 5, r"target 5 is not a class index from 0 to 4"),
    (LABELS, None, r"number of classes cannot be inferred.*classes="),
    (SOFT, 6, r"5 wide, but there are 6 classes"),
    (LABELS.float(), 5, r"neither class indices"),
    (F.one_hot(LABELS, 5), 5, r"neither class indices"),
    (LABELS[:5], 5, r"unsupported batch of images .* and targets \(5,\)"),
    (torch.zeros(6, 20, 16), 5, r"unsupported batch of images .* and targets \(6, 20, 16\)"),
])  # fmt: skip
def test_targets_that_cannot_be_mixed(
    mixer: t.Transform, targets: torch.Tensor, classes: int | None, message: str
) -> None:
    with pytest.raises(DataError, match=f"{type(mixer).__name__}: .*{message}"):
        mixer.batch(IMAGES, targets, context(classes=classes))


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_soft_targets_need_no_number_of_classes(mixer: t.Transform) -> None:
    assert mixer.batch(IMAGES, SOFT, context(classes=None))[1].shape == (6, 5)


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_smoothing_after_mixing_reaches_the_whole_mixture(mixer: t.Transform) -> None:
    """The other order leaves a smallest target of 0.0089 in Composer, where 0.01 is right."""
    _, targets = mixer.batch(IMAGES, LABELS, context())
    seen = []
    loss = t.LabelSmoothing(0.1).loss(lambda logits, targets: seen.append(targets) or logits.sum())
    loss(torch.zeros(6, 5), targets)
    assert seen[0].min().item() == pytest.approx(0.02, abs=1e-6)
    assert F.cross_entropy(torch.zeros(6, 5), targets).item() == pytest.approx(math.log(5))


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@FORMS
def test_mixing_keeps_dtype_and_memory_format(mixer: t.Transform, dtype: Any, form: Any) -> None:
    mixed, _ = mixer.batch((IMAGES - 5).to(dtype).contiguous(memory_format=form), LABELS, context())
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=form)
    expected, _ = mixer.batch(IMAGES - 5, LABELS, context())
    torch.testing.assert_close(mixed.float(), expected, rtol=0, atol=0.02)


def test_cutmix_takes_integers_and_mixup_does_not() -> None:
    images = (IMAGES * 10).clamp(0, 255).to(torch.uint8)
    assert t.CutMix().batch(images, LABELS, context())[0].dtype == torch.uint8
    with pytest.raises(DataError, match=r"MixUp: images of torch.uint8 .* Normalize"):
        t.MixUp().batch(images, LABELS, context())
