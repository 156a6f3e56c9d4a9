"""Images of any height and width, in both loaders: crops, draws, preprocessing, and a training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import Pipeline
from drivetrain.common.errors import DataError, PlanError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.decode.augmentation import central_crops, draw_choices
from drivetrain.loaders.decode.draws import NAMES, magnitudes, sample_keys
from drivetrain.loaders.decode.preprocess import Evaluation
from drivetrain.loaders.options import LoaderOptions
from drivetrain.transforms import ProgressiveResizing
from loader_pictures import load as load_images
from loader_pictures import picture, raw_beton, raw_pictures
from PIL import Image
from torch import nn

SIZE = (24, 40)
LOADERS = [FFCVLoader, TorchLoader]


def load(kind: Any, path: Path, **options: Any) -> torch.Tensor:
    return load_images(kind, path, **{"batch_size": 6, "image_size": SIZE, **options})


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("options", [{}, {"train": False}, {"cutout": 9}, {"policy": {"name": "aug_mix"}}], ids=str)
def test_images_have_height_and_width(kind: Any, options: dict[str, Any], photos: Path) -> None:
    images = load(kind, photos, **options)
    assert images.shape == (18, 3, *SIZE)
    assert torch.equal(load(kind, photos, image_size=[*SIZE], **options), images)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_training_crops_are_pillows(photos: Path, interpolation: str) -> None:
    images = load(FFCVLoader, photos, interpolation=interpolation, seed=4)
    beton, made = open_beton(photos), LoaderOptions(batch_size=6, image_size=SIZE)
    chosen = draw_choices(made, sample_keys(4, 0, np.arange(18)), *(
        each.astype(np.int64) for each in (beton.heights, beton.widths)
    ))  # fmt: skip
    resampling = getattr(Image.Resampling, interpolation.upper())
    for index, (top, left, height, width) in enumerate(chosen.boxes.tolist()):
        crop = beton.image(index).crop((left, top, left + width, top + height))
        expected = np.asarray(crop.resize(SIZE[::-1], resampling)).astype(int)
        expected = expected[:, ::-1] if chosen.flips[index] else expected
        off = np.abs(images[index].permute(1, 2, 0).numpy() - expected)
        if min(height / SIZE[0], width / SIZE[1]) < 2:  # not decoded at a half
            assert off.max() <= (0 if interpolation == "nearest" else 2)


@pytest.mark.parametrize("kind", LOADERS)
def test_evaluation_is_the_preprocessing(kind: Any, photos: Path) -> None:
    """The largest central crop of the shape, times the ratio."""
    images = load(kind, photos, image_size=(36, 60), train=False, eval_ratio=0.75)
    made = LoaderOptions(batch_size=1, image_size=(36, 60), eval_ratio=0.75, dtype=torch.uint8)
    make, beton = Evaluation(made), open_beton(photos)
    for index, image in enumerate(images):
        assert torch.equal(image, make(beton.image(index)))


def test_central_crops() -> None:
    """Rounded down, as FFCV's."""
    heights, widths = np.array([100, 100, 30]), np.array([200, 100, 300])
    crops = central_crops(heights, widths, (20, 30), 1.0).tolist()
    assert crops == [[0, 25, 100, 150], [17, 0, 66, 100], [0, 127, 30, 45]]
    assert central_crops(heights, widths, (20, 20), 0.5).tolist()[0] == [25, 75, 50, 50]
    sides = np.arange(1, 700)
    squares = central_crops(sides, sides[::-1], (32, 32), 224 / 256)[:, 2:]
    lengths = [max(int(224 / 256 * min(pair)), 1) for pair in zip(sides, sides[::-1], strict=True)]
    assert squares.tolist() == [[length] * 2 for length in lengths]
    for height, width in ((7, 30), (30, 7), (224, 224)):  # of its own shape, all of an image
        many = np.arange(1, 90)
        whole = central_crops(many * height, many * width, (height, width), 1.0)
        assert (whole == np.stack([0 * many, 0 * many, many * height, many * width], axis=1)).all()


@pytest.mark.parametrize("kind", LOADERS)
def test_padded_crops_of_rectangles(kind: Any, tmp_path: Path) -> None:
    pictures = np.stack([picture(seed, *SIZE) for seed in range(6)])
    convert((pictures, np.zeros(6, int)), tmp_path / "raw.beton", write_mode="raw")
    plain = load(kind, tmp_path / "raw.beton", crop="padded", padding=0, flip=False)
    assert torch.equal(plain, torch.from_numpy(pictures).permute(0, 3, 1, 2))
    square = raw_beton(tmp_path / "square.beton", 6, 24)
    assert raw_pictures(1, 24)[0].shape[1:3] == (24, 24)
    with pytest.raises(DataError, match=r"24 × 40 pixels \(height × width\); .* has 24 × 24"):
        load(kind, square, crop="padded", padding=2)


@pytest.mark.parametrize("kind", LOADERS)
def test_random_crops_are_pieces_of_the_image(kind: Any, photos: Path) -> None:
    """Each is somewhere in its picture; all places occur."""
    images, beton = load(kind, photos, crop="random", flip=False), open_beton(photos)
    places = []
    for index, image in enumerate(images):
        whole = np.asarray(beton.image(index))
        windows = np.lib.stride_tricks.sliding_window_view(whole, (*SIZE, 3))[:, :, 0]
        same = np.argwhere((windows == image.permute(1, 2, 0).numpy()).all((2, 3, 4)))
        assert len(same) == 1, index
        places.append(same[0])
    assert np.std(places, axis=0).min() > 5
    with pytest.raises(DataError, match=r"cuts 200 × 40 pixels .* has \d+ × \d+\. Use a smaller"):
        load(kind, photos, crop="random", image_size=(200, 40))


def test_random_crops_are_uniform() -> None:
    made = LoaderOptions(batch_size=1, image_size=(4, 6), crop="random")
    boxes = draw_choices(made, sample_keys(0, 0, np.arange(9000)), np.full(9000, 6), np.full(9000, 8)).boxes
    assert (boxes[:, 2:] == (4, 6)).all()
    counts = np.bincount(boxes[:, 0] * 3 + boxes[:, 1], minlength=9)
    assert counts.min() > 850  # of 9 places, 1000 each


@pytest.mark.parametrize("kind", LOADERS)
def test_whole_images_are_resized(kind: Any, photos: Path) -> None:
    size = 48, 60
    images, beton = load(kind, photos, crop="whole", flip=False, image_size=size), open_beton(photos)
    for index, image in enumerate(images):
        expected = np.asarray(beton.image(index).resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() <= 2


def test_translations_are_relative_to_their_own_side() -> None:
    table = magnitudes("rand_augment", (100, 300), 31)
    across, down = (table[NAMES.index(name)].max() for name in ("TranslateX", "TranslateY"))
    assert across == pytest.approx(3 * down)


@pytest.mark.parametrize("size", [0, (24,), (24, 0), (24, 32, 3), 24.5, "24", (24, "40"), None, True])
def test_sizes_that_are_none(size: Any, photos: Path) -> None:
    with pytest.raises(DataError, match=r"image_size=.* must be a positive integer, or two: height and width"):
        FFCVLoader(photos, batch_size=6, image_size=size)


def network() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(*layers)


def test_a_pipeline_on_rectangles(photos: Path, tmp_path: Path) -> None:
    """Trained, shown, written as a recipe, and used."""
    pipeline = (
        Pipeline(network)
        .load(photos, photos, batch_size=6, image_size=SIZE, eval_image_size=(32, 48), workers=1)
        .optimize("sgd", lr=0.01)
        .distribute("single")
    )
    assert "24 × 40 px" in str(pipeline.plan())
    result = pipeline.fit(epochs=1, out=tmp_path / "out")
    assert pipeline.to_recipe()["image_size"] == [24, 40]
    assert result.preprocess(Image.new("RGB", (90, 50))).shape == (3, 32, 48)
    square = pipeline.replace(data=None).load(photos, batch_size=6, image_size=(24, 24))
    assert square.data is not None
    assert square.data.image_size == 24
    with pytest.raises(PlanError, match=r"eval_image_size=.* must be a positive integer, or two"):
        pipeline.load(photos, batch_size=6, image_size=24, eval_image_size=(24, -1))


def test_progressive_resizing_keeps_the_proportions() -> None:
    resizing = ProgressiveResizing(initial_scale=0.5, delay=0.0, finetune=0.5, size_increment=4)
    assert resizing.size((24, 40), 0.0) == (12, 20)
    assert resizing.size((24, 40), 0.25) == (19, 32)
    assert resizing.size((24, 40), 1.0) == (24, 40)
