"""The output of FFCVLoader: shapes, normalization, and each crop compared with a reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.loaders import FFCVLoader, convert, open_beton
from drivetrain.loaders.decode.augmentation import draw_choices
from drivetrain.loaders.decode.draws import random_resized_crops, sample_keys, uniforms
from drivetrain.loaders.native.library import BICUBIC, NEAREST, SHIFT
from drivetrain.loaders.options import LoaderOptions
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_pictures import image_folder, jpeg_bytes, picture, raw_beton, raw_pictures
from native_pixels import load_pictures
from PIL import Image
from torchvision.transforms import v2

SIDE = 12


@pytest.fixture(scope="module")
def raws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw_beton(tmp_path_factory.mktemp("values") / "raws.beton", 10, SIDE)


def load(path: Path, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole file as one pair."""
    with FFCVLoader(path, **{"batch_size": 4, "image_size": 32, "workers": 2, **options}) as loader:
        batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def test_shapes_types_and_layout(photos: Path) -> None:
    with FFCVLoader(photos, batch_size=4, image_size=32) as loader:
        batches = list(loader)
    assert [len(labels) for _, labels in batches] == [4, 4, 4, 4, 2]
    for images, labels in batches:
        assert images.shape == (len(labels), 3, 32, 32)
        assert images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
    images, _ = load(photos, dtype=torch.uint8)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("train", [True, False])
def test_floats_are_the_bytes_normalized(photos: Path, train: bool) -> None:
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.5)
    floats, labels = load(photos, train=train, mean=mean, std=std)
    levels, same = load(photos, train=train, dtype=torch.uint8)
    expected = (levels.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(floats, expected, atol=1e-6)
    assert labels.tolist() == same.tolist()


def test_one_sample_alone(tmp_path: Path) -> None:
    """An array of one element passes for contiguous wherever it lies."""
    raw_beton(tmp_path / "one.beton", 1, SIDE)
    images, labels = load(tmp_path / "one.beton", batch_size=1, image_size=SIDE, train=False, eval_ratio=1.0)
    assert images.shape == (1, 3, SIDE, SIDE)
    assert labels.tolist() == [0]


def test_stored_pixels_come_out_exactly(raws: Path) -> None:
    images, labels = load(raws, image_size=SIDE, train=False, eval_ratio=1.0, dtype=torch.uint8)
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), raw_pictures(10, SIDE)[0])
    assert labels.tolist() == list(range(10))


def area_weights(count: int, source: int) -> np.ndarray:
    """`(count, source)`: the share of each source pixel in each pixel of the line shrunk to `count`."""
    edges = np.linspace(0, source, count + 1)
    begin, end = edges[:-1, None], edges[1:, None]
    pixels = np.arange(source)
    overlap = np.minimum(end, pixels + 1) - np.maximum(begin, pixels)
    return overlap.clip(0) / (source / count)


def center_average(image: np.ndarray, side: int, ratio: float) -> np.ndarray:
    """The central square, shrunk to `side` by exact averages of areas."""
    height, width, _ = image.shape
    edge = int(min(height, width) * ratio)
    top, left = (height - edge) // 2, (width - edge) // 2
    weights = area_weights(side, edge)
    cut = image[top : top + edge, left : left + edge].astype(float)
    averages: np.ndarray = np.einsum("ij,jkc,lk->ilc", weights, cut, weights, optimize=True)
    return averages


@pytest.mark.long
@pytest.mark.parametrize(("side", "ratio"), [(32, 224 / 256), (64, 1.0), (24, 0.5)])
def test_area_averages_the_center(photos: Path, tmp_path: Path, side: int, ratio: float) -> None:
    """Against numpy: raw images to the last level, JPEGs up to the decoders' difference (fast inverse DCT)."""
    shapes = [(70, 58), (58, 70), (64, 64)]
    samples = [(picture(seed, *shape), seed) for seed, shape in enumerate(shapes)]
    options = {"image_size": side, "train": False, "eval_ratio": ratio, "dtype": torch.uint8}
    options["interpolation"] = "area"
    if side < 58 * ratio:
        convert(samples, tmp_path / "raw.beton")
        beton = open_beton(tmp_path / "raw.beton")
        assert beton.modes.tolist() == [1, 1, 1]
        images, _ = load(beton.path, **options)
        for image, (pixels, _) in zip(images, samples, strict=True):
            expected = center_average(pixels, side, ratio)
            assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() < 0.51
    images, _ = load(photos, **options)
    for index, image in enumerate(images):
        expected = center_average(np.asarray(open_beton(photos).image(index)), side, ratio)
        error = np.abs(image.permute(1, 2, 0).numpy() - expected)
        assert error.mean() < 1.5
        assert error.max() < 10


def pillows(image: Image.Image, box: tuple[int, int, int, int], side: int) -> np.ndarray:
    """What Pillow, and so torchvision, makes of the crop (top, left, height, width)."""
    top, left, height, width = box
    cut = image.crop((left, top, left + width, top + height))
    return np.asarray(cut.resize((side, side), Image.Resampling.BILINEAR)).astype(int)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_crop_of_raw_pixels_is_pillows(data: st.DataObject) -> None:
    """The native core alone, on noise: the worst case for a filter, whose weights have 8 bits."""
    height, width = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 90))
    h, w = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    top, left = data.draw(st.integers(0, height - h)), data.draw(st.integers(0, width - w))
    side, flip = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    image = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    box = (top, left, h, w)
    found = load_pictures([image], (side, side), boxes=[box], flips=[flip])[0].astype(int)
    expected = pillows(Image.fromarray(image), (top, left, h, w), side)
    allowed = 2 if max(h, w) <= 8 * side else 4  # so far only raw images shrink at once
    assert np.abs(found - (expected[:, ::-1] if flip else expected)).max() <= allowed


@given(st.data())
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize(
    ("method", "pillows_filter"), [(BICUBIC, Image.Resampling.BICUBIC), (NEAREST, Image.Resampling.NEAREST)]
)
def test_bicubic_and_nearest_are_pillows_in_every_bit(
    method: int, pillows_filter: Image.Resampling, data: st.DataObject
) -> None:
    height, width = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 90))
    h, w = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    top, left = data.draw(st.integers(0, height - h)), data.draw(st.integers(0, width - w))
    size, flip = (data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))), data.draw(st.booleans())
    rng = np.random.default_rng(height * width)
    image = rng.integers(0, 256, (height, width, 3), np.uint8)
    if data.draw(st.booleans()):
        image = np.where(image > 127, np.uint8(255), np.uint8(0))  # the filter overshoots
    found = load_pictures([image], size, boxes=[(top, left, h, w)], flips=[flip], method=method)[0]
    crop = Image.fromarray(image).crop((left, top, left + w, top + h))
    # In two steps: Pillow 13 chooses the order by the shape.
    expected = np.asarray(crop.resize((size[1], h), pillows_filter).resize(size[::-1], pillows_filter))
    assert np.array_equal(found, expected[:, ::-1] if flip else expected)


def test_small_images_of_large_jpegs(tmp_path: Path) -> None:
    """Decoded at a half, a quarter and an eighth, a picture stays where it is and what it is."""
    files = {f"{seed}.jpg": jpeg_bytes(picture(seed, 261, 335)) for seed in range(4)}
    convert(image_folder(tmp_path / "images", files), tmp_path / "large.beton")
    for side in (120, 60, 30):
        options = {"image_size": side, "dtype": torch.uint8, "seed": 3, "order": "sequential"}
        images, _ = load(tmp_path / "large.beton", **options)
        made = settings_of(**options)
        keys = sample_keys(3, 0, np.arange(4))
        chosen = draw_choices(made, keys, np.full(4, 261), np.full(4, 335))
        for index, found in enumerate(images):
            expected = pillows(open_beton(tmp_path / "large.beton").image(index), tuple(chosen.boxes[index]), side)
            expected = expected[:, ::-1] if chosen.flips[index] else expected
            assert np.abs(found.permute(1, 2, 0).numpy() - expected).mean() < 2


def settings_of(**options: Any) -> LoaderOptions:
    return LoaderOptions(batch_size=4, **options)


def crops(height: int, width: int, scale: Any, ratio: Any, count: int) -> np.ndarray:
    """`(count, 4)`: top, left, height, width, as the native core draws them for `count` samples."""
    limits = np.array(scale, np.float64), np.array(ratio, np.float64)
    keys = sample_keys(1, 2, np.arange(count))
    return random_resized_crops(keys, np.full(count, height), np.full(count, width), *limits)


@pytest.mark.parametrize(
    ("height", "width", "scale"), [(100, 140, (0.25, 1.0)), (333, 500, (0.08, 1.0)), (60, 300, (0.7, 1.0))]
)
def test_random_resized_crop_is_torchvisions(height: int, width: int, scale: tuple[float, float]) -> None:
    """Area share, aspect and position have the same distributions (two-sample Kolmogorov–Smirnov)."""
    ratio, count = (3 / 4, 4 / 3), 3000
    ours = crops(height, width, scale, ratio, count)
    torch.manual_seed(0)
    reference = v2.RandomResizedCrop(10, scale=scale, ratio=ratio)
    image = torch.empty(3, height, width)
    drawn = [reference.make_params([image]) for _ in range(count)]
    theirs = np.array([[d["top"], d["left"], d["height"], d["width"]] for d in drawn])
    for quantity in (
        lambda c: c[:, 2] * c[:, 3] / (height * width),
        lambda c: c[:, 3] / c[:, 2],
        lambda c: c[:, 0] / np.maximum(height - c[:, 2], 1),
        lambda c: c[:, 1] / np.maximum(width - c[:, 3], 1),
    ):
        assert distance(quantity(ours), quantity(theirs)) < 1.95 * np.sqrt(2 / count)  # p ≈ 0.001
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 2:] >= 1).all()


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two empirical distribution functions."""
    points = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def test_crops_of_extreme_shapes_stay_inside() -> None:
    for height, width in [(1, 1), (1, 500), (500, 1), (2, 3), (65535, 2)]:
        for top, left, h, w in crops(height, width, (0.25, 1.0), (3 / 4, 4 / 3), 50):
            assert 0 <= top <= top + h <= height
            assert 0 <= left <= left + w <= width
            assert min(h, w) >= 1


def test_images_of_extreme_shapes_load(tmp_path: Path) -> None:
    shapes = [(1, 1), (1, 60), (60, 1), (3, 200), (200, 3)]
    samples = [(np.full((*shape, 3), 10 * n, np.uint8), n) for n, shape in enumerate(shapes, 1)]
    convert(samples, tmp_path / "odd.beton")
    for train in (True, False):
        images, labels = load(tmp_path / "odd.beton", train=train, dtype=torch.uint8)
        for image, label in zip(images, labels, strict=True):
            assert (image == 10 * label).all()


@pytest.mark.parametrize("padding", [1, 4, SIDE - 1])
def test_shifted_copy_is_a_reflected_pad_and_crop(padding: int) -> None:
    image = raw_pictures(1, SIDE)[0][0]
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)), mode="reflect")
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            box = (padding - top, padding - left, SIDE, SIDE)
            found = load_pictures([image], boxes=[box], method=SHIFT)[0]
            assert np.array_equal(found, padded[top : top + SIDE, left : left + SIDE])


def test_padded_crop_gives_every_offset_and_nothing_else(tmp_path: Path) -> None:
    """200 copies of one picture, 12 epochs: each of the 9 × 9 offsets, each mirrored and not, about as often."""
    image = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    convert((np.repeat(image[None], 200, axis=0), np.zeros(200, int)), tmp_path / "same.beton")
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    names = {}
    for top in range(9):
        for left in range(9):
            cut = padded[top : top + SIDE, left : left + SIDE]
            names[cut.tobytes()] = (top, left, False)
            names[np.ascontiguousarray(cut[:, ::-1]).tobytes()] = (top, left, True)
    assert len(names) == 162
    options = {"batch_size": 200, "image_size": SIDE, "crop": "padded", "dtype": torch.uint8, "workers": 1}
    with FFCVLoader(tmp_path / "same.beton", **options) as loader:
        drawn = [
            names[np.ascontiguousarray(one.permute(1, 2, 0).numpy()).tobytes()]
            for _ in range(12)
            for images, _ in loader
            for one in images
        ]
    counts = {name: drawn.count(name) for name in names.values()}
    expected = 2400 / 162
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 161 + 3.5 * np.sqrt(2 * 161)
    assert min(counts.values()) > 0


def test_flip_share_and_switch(raws: Path) -> None:
    keys = np.concatenate([sample_keys(0, epoch, np.arange(100)) for epoch in range(40)])
    share = (uniforms(keys, 40, 1) < 0.5).mean()
    assert abs(share - 0.5) < 0.03
    options = {
        "image_size": SIDE,
        "crop": "padded",
        "padding": 0,
        "dtype": torch.uint8,
        "order": "sequential",
    }
    plain, _ = load(raws, flip=False, **options)
    originals = torch.from_numpy(raw_pictures(10, SIDE)[0]).permute(0, 3, 1, 2)
    assert torch.equal(plain, originals)
    mirrored, _ = load(raws, **options)
    as_is = (mirrored == originals).flatten(1).all(1)
    turned = (mirrored == originals.flip(3)).flatten(1).all(1)
    assert (as_is ^ turned).all()
    assert 0 < turned.sum() < 10


def test_uniform_draws_are_uniform_and_unrelated() -> None:
    draws = uniforms(sample_keys(0, 0, np.arange(4000)), 0, 41)[:, [0, 1, 40]]
    assert (draws >= 0).all()
    assert (draws < 1).all()
    for column in draws.T:
        assert distance(column, np.linspace(0, 1, 4000)) < 1.95 / np.sqrt(4000)
    assert np.abs(np.corrcoef(draws.T) - np.eye(3)).max() < 0.06


def test_batches_kept_are_not_overwritten(photos: Path) -> None:
    with FFCVLoader(photos, batch_size=2, image_size=32, workers=2, batches_ahead=1) as loader:
        copies, kept = [], []
        for images, labels in loader:
            kept.append((images, labels))
            copies.append((images.clone(), labels.clone()))
        list(loader)
    assert len({images.data_ptr() for images, _ in kept}) == len(kept)
    for (a, b), (c, d) in zip(kept, copies, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


@pytest.mark.long
@pytest.mark.parametrize(
    "hold",
    [
        lambda images: images,
        lambda images: images[1:, :, ::2],
        lambda images: images.numpy(),
        lambda images: images.untyped_storage(),
        lambda images: images.detach().permute(0, 2, 3, 1).flatten(1)[0],
    ],
    ids=["the batch", "a view", "an array", "the storage", "a row"],
)
def test_memory_is_used_again_only_when_nobody_holds_it(photos: Path, hold: Any) -> None:
    options = {"batch_size": 6, "image_size": 32, "workers": 2, "batches_ahead": 1, "dtype": torch.float32}
    with FFCVLoader(photos, **options) as loader:
        kept = [hold(images) for images, _ in loader]
        before = [content(held) for held in kept]
        for _ in range(4):
            for images, _ in loader:
                images.fill_(7.0)
        assert [content(held) for held in kept] == before


def content(held: Any) -> bytes:
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0, dtype=torch.uint8).set_(held)
    return np.asarray(held).tobytes()


def test_memory_is_used_again(photos: Path) -> None:
    """Five epochs of three batches, each let go before the next: a handful of places in memory serve all."""
    places = set()
    with FFCVLoader(photos, batch_size=6, image_size=32, workers=1, batches_ahead=1) as loader:
        for _ in range(5):
            places |= {images.data_ptr() for images, _ in loader}
    assert len(places) <= 5


def test_changing_a_batch_changes_nothing_else(raws: Path) -> None:
    with FFCVLoader(raws, batch_size=5, image_size=SIDE, train=False) as loader:
        for images, labels in loader:
            images.zero_()
            labels.fill_(99)
        assert torch.cat([labels for _, labels in loader]).tolist() == list(range(10))
