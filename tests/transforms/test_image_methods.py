"""CutOut, ColOut and ProgressiveResizing: pixels, sizes, randomness, dtype and memory format."""

import pytest
import torch
from drivetrain.common.errors import DataError, PlanError
from drivetrain.transforms import BatchContext, ColOut, CutOut, ProgressiveResizing, Transform
from drivetrain.transforms.cutout import inside

IMAGES = torch.randn(4, 3, 20, 16, generator=torch.Generator().manual_seed(0)) + 5
LABELS = torch.tensor([0, 4, 3, 2])
METHODS = [CutOut(), CutOut(holes=3, length=0.2), ColOut(), ColOut(row=0, column=0.5), ProgressiveResizing()]


def context(seed: int = 0, progress: float = 0.0) -> BatchContext:
    return BatchContext(generator=torch.Generator().manual_seed(seed), progress=progress)


def test_cutout_blanks_one_square_per_image() -> None:
    cut, targets = CutOut(length=0.5).batch(IMAGES, LABELS, context(1))
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
    two = inside(torch.tensor([[5, 15]]), torch.tensor([[5, 10]]), 20, 16, side=2)
    assert two.sum() == 8


def test_cutout_of_the_whole_side_and_of_less_than_a_pixel() -> None:
    assert (CutOut(length=1).batch(IMAGES, LABELS, context())[0] == 0).any()
    assert torch.equal(CutOut(length=0.01).batch(IMAGES, LABELS, context())[0], IMAGES)


def test_colout_keeps_rows_and_columns_in_order() -> None:
    images = (torch.arange(20.0)[:, None] * 100 + torch.arange(16.0)).expand(4, 3, 20, 16)
    small, targets = ColOut().batch(images, LABELS, context(2))
    assert small.shape == (4, 3, 17, 13)  # int(0.85 · 20), int(0.85 · 16)
    assert targets is LABELS
    rows, columns = small[0, 0, :, 0] // 100, small[0, 0, 0] % 100
    assert (rows.diff() > 0).all()
    assert (columns.diff() > 0).all()
    torch.testing.assert_close(small, (rows[:, None] * 100 + columns).expand_as(small))


def test_colout_keeps_at_least_one() -> None:
    assert ColOut(row=0.99, column=0).batch(IMAGES, LABELS, context())[0].shape == (4, 3, 1, 16)


def test_the_schedule() -> None:
    sizes = ProgressiveResizing(initial_scale=0.5, delay=0.5, finetune=0.2, size_increment=4)
    expected = {0: 112, 0.49: 112, 0.5: 112, 0.65: 168, 0.79: 220, 0.8: 224, 0.9: 224, 1: 224}
    assert {progress: sizes.size(224, progress) for progress in expected} == expected
    path = [sizes.size(224, k / 1000) for k in range(1001)]
    assert path == sorted(path)
    assert all(size % 4 == 0 for size in path)


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
    assert ProgressiveResizing(**options).size(size, progress) == expected  # type: ignore[arg-type]


def test_resizing_is_bilinear_and_antialiased() -> None:
    small, targets = ProgressiveResizing().batch(IMAGES, LABELS, context(progress=0))
    # The width is the multiple of 4, and the height keeps the proportions.
    assert small.shape == (4, 3, 10, 8)
    assert targets is LABELS
    torch.testing.assert_close(small.mean((2, 3)), IMAGES.mean((2, 3)), rtol=0, atol=0.1)
    stripes = torch.tensor([0.0, 1.0]).repeat(16).expand(1, 3, 32, 32)
    grey = ProgressiveResizing().batch(stripes, LABELS[:1], context())[0]
    assert grey.shape == (1, 3, 16, 16)
    torch.testing.assert_close(grey[..., 2:-2], torch.full((1, 3, 16, 12), 0.5), rtol=0, atol=0.13)
    assert ProgressiveResizing().batch(IMAGES, LABELS, context(progress=0.9))[0] is IMAGES


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_dtype_and_memory_format_stay(
    method: Transform, dtype: torch.dtype, form: torch.memory_format
) -> None:
    images = (IMAGES * 10).to(dtype).contiguous(memory_format=form)
    before = images.clone()
    made, _ = method.batch(images, LABELS, context())
    assert made.dtype == dtype
    assert made.is_contiguous(memory_format=form)
    expected, _ = method.batch(IMAGES * 10, LABELS, context())
    torch.testing.assert_close(made.float(), expected, rtol=0.01, atol=1.0)
    assert torch.equal(images, before), "the batch was written to"


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_generator_decides(method: Transform) -> None:
    state = torch.get_rng_state()
    first, again, other = (method.batch(IMAGES, LABELS, context(seed))[0] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == isinstance(method, ProgressiveResizing)
    assert torch.equal(torch.get_rng_state(), state), "drew from the global generator"


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_refused(method: Transform) -> None:
    size = (4, 20, 15 if isinstance(method, CutOut) else 16)  # CutOut takes masks of the images' size
    for images, targets in ((IMAGES[0], LABELS), (IMAGES, LABELS[:3]), (IMAGES, torch.zeros(size))):
        with pytest.raises(DataError, match=rf"{type(method).__name__}: unsupported batch of images"):
            method.batch(images, targets, context())


def test_more_than_the_whole_training() -> None:
    with pytest.raises(PlanError, match=r"delay=0.9, finetune=0.2\): together they exceed the full training"):
        ProgressiveResizing(delay=0.9, finetune=0.2)
