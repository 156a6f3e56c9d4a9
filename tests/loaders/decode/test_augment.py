"""Color jitter, CutOut and bfloat16 in both loaders, compared with Pillow and torchvision."""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert
from drivetrain.loaders.decode.augmentation import draw_choices
from drivetrain.loaders.decode.draws import sample_keys
from drivetrain.loaders.options import LoaderOptions
from loader_pictures import load, picture
from native_pixels import load_pictures
from PIL import Image, ImageEnhance
from torchvision.transforms import v2

SIDE = 24
LOADERS = [FFCVLoader, TorchLoader]


@pytest.fixture(scope="module")
def gray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 pictures of one gray, so that whatever differs was painted."""
    path = tmp_path_factory.mktemp("augment") / "gray.beton"
    convert((np.full((200, SIDE, SIDE, 3), 100, np.uint8), np.zeros(200, int)), path)
    return path


def test_colors_are_pillows_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    images = np.stack([picture(seed, 30, 30) for seed in range(12)])
    factors = np.concatenate([rng.uniform(0, 2.5, (12, 3)), np.arange(12)[:, None] % 6], axis=1)
    found = load_pictures(images, colors=factors)
    enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    for number, (image, drawn) in enumerate(zip(images, factors, strict=True)):
        expected = Image.fromarray(image)
        for what in list(permutations(range(3)))[number % 6]:
            expected = enhancers[what](expected).enhance(drawn[what])
        assert np.array_equal(found[number], np.asarray(expected))


def test_colors_are_drawn_as_torchvision_draws_them() -> None:
    """Range, mean and spread of each factor; each order of the three about as often."""
    made = LoaderOptions(batch_size=1, image_size=8, color_jitter=(0.4, 0.2, 1.5))
    keys = sample_keys(1, 2, np.arange(6000))
    drawn = draw_choices(made, keys, np.full(6000, 9), np.full(6000, 9)).color
    torch.manual_seed(0)
    jitter = v2.ColorJitter(0.4, 0.2, 1.5)
    theirs = [jitter.make_params([]) for _ in range(6000)]
    for k, name in enumerate(("brightness_factor", "contrast_factor", "saturation_factor")):
        factors = np.array([one[name] for one in theirs])
        low, high = getattr(jitter, name.split("_")[0])
        assert drawn[:, k].min() >= low
        assert drawn[:, k].max() <= high
        assert abs(drawn[:, k].mean() - factors.mean()) < 0.04 * (high - low)
        assert abs(drawn[:, k].std() - factors.std()) < 0.04 * (high - low)
    assert np.bincount(drawn[:, 3].astype(int), minlength=6).min() > 850


@pytest.mark.parametrize("kind", LOADERS)
def test_colors_change_and_only_when_asked(kind: Any, photos: Path) -> None:
    plain = load(kind, photos, flip=False, scale=(1, 1))
    jittered = load(kind, photos, flip=False, scale=(1, 1), color_jitter=(0.5, 0.5, 0.5))
    if kind is FFCVLoader:  # its crops do not depend on what else is drawn
        means = plain.float().mean((1, 2, 3)) - jittered.float().mean((1, 2, 3))
        assert means.abs().max() > 5
    assert not torch.equal(plain, jittered)
    evaluated = load(kind, photos, train=False)
    assert torch.equal(evaluated, load(kind, photos, train=False, color_jitter=(0.5, 0.5, 0.5), cutout=8))


@pytest.mark.parametrize("kind", LOADERS)
def test_images_of_evaluation_may_be_smaller_than_what_is_cut_out_in_training(kind: Any, photos: Path) -> None:
    evaluated = load(kind, photos, train=False)
    assert torch.equal(evaluated, load(kind, photos, train=False, cutout=SIDE + 1))


@pytest.mark.parametrize("kind", LOADERS)
def test_cutout_is_one_square_of_the_mean_color_anywhere_inside(kind: Any, gray: Path) -> None:
    images = load(kind, gray, cutout=6, mean=(0.1, 0.5, 0.9), seed=5)
    painted = (images != 100).any(1)
    assert (painted.sum((1, 2)) == 36).all()
    assert images[0][:, painted[0]].unique(dim=1).flatten().tolist() == [26, 128, 230]
    tops = painted.any(2).int().argmax(1)
    lefts = painted.any(1).int().argmax(1)
    for places in (tops, lefts):  # 19 places, 200 draws
        assert places.min() == 0
        assert places.max() == SIDE - 6
        assert abs(places.float().mean() - (SIDE - 6) / 2) < 1.6
    for image, top, left in zip(painted, tops, lefts, strict=True):
        assert image[top : top + 6, left : left + 6].all()
    assert not torch.equal(painted, (load(kind, gray, cutout=6, seed=6) != 100).any(1))


@pytest.mark.parametrize("kind", LOADERS)
def test_bfloat16_is_float32_rounded(kind: Any, photos: Path) -> None:
    exact = load(kind, photos, dtype=torch.float32)
    rounded = load(kind, photos, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert rounded.shape == exact.shape
    torch.testing.assert_close(rounded.float(), exact, rtol=2**-8, atol=1e-6)
    if kind is FFCVLoader:
        assert rounded[:4].shape[1] == 3
        with kind(photos, batch_size=4, image_size=SIDE, dtype=torch.bfloat16) as loader:
            assert next(iter(loader))[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cutout": SIDE + 1}, "cutout=25 must be a side from 0 to image_size"),
        ({"cutout": -1}, "cutout=-1"),
        ({"cutout": 1.5}, "cutout=1.5 must be an integer"),
        ({"color_jitter": 0.4}, "color_jitter=0.4 must be 3 finite numbers"),
        ({"color_jitter": (0.4, -1, 0)}, "three strengths"),
        ({"color_jitter": (float("nan"), 0, 0)}, "3 finite numbers"),
        ({"interpolation": "cubic"}, "interpolation='cubic' is not known. Did you mean 'bicubic'"),
        ({"verify": True, "fields": ["weight"]}, "'weight' is not a field"),
        ({"fields": "label"}, "fields='label' must be a list of texts"),
        ({"fields": {"label"}}, r"fields=\{'label'\} must be a list of texts, in the order of a batch"),
    ],
)
def test_settings_that_cannot_be(kind: Any, photos: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        kind(photos, **{"batch_size": 4, "image_size": SIDE, **options})


@pytest.mark.parametrize("kind", LOADERS)
def test_alternating_flips_show_both_sides_in_two_epochs(kind: Any, tmp_path: Path) -> None:
    pictures = np.stack([picture(seed, SIDE, SIDE) for seed in range(40)])
    convert((pictures, np.zeros(40, int)), tmp_path / "raw.beton")
    whole = {"crop": "padded", "padding": 0, "flip": "alternating", "dtype": torch.uint8}
    options: dict[str, Any] = {
        "batch_size": 8,
        "image_size": SIDE,
        "workers": 0 if kind is TorchLoader else 2,
    }

    def epochs(**changed: Any) -> list[torch.Tensor]:
        found = []
        with kind(tmp_path / "raw.beton", **options, **{**whole, **changed, "order": "sequential"}) as loader:
            for epoch in range(3):
                loader.set_epoch(epoch)
                found.append(torch.cat([images for images, _ in loader]))
        return found

    first, second, third = epochs()
    originals = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    as_is = (first == originals).flatten(1).all(1)
    assert torch.equal(first[~as_is], originals[~as_is].flip(3))
    assert 8 < as_is.sum() < 32
    assert torch.equal(second, first.flip(3))
    assert torch.equal(third, first)
    assert not torch.equal(epochs(seed=1)[0], first)
    assert torch.equal(epochs(flip=False)[1], originals)
    evaluated = epochs(train=False, eval_ratio=1.0)
    assert torch.equal(evaluated[0], evaluated[1])


@pytest.mark.parametrize("flip", ["alternate", 1, None])
def test_a_flip_that_is_none(flip: Any) -> None:
    with pytest.raises(DataError, match=rf"flip={flip!r} must be True, False or 'alternating'"):
        LoaderOptions(batch_size=1, image_size=8, flip=flip)
