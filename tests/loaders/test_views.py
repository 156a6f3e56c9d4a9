"""Several views per sample: one decoding, and draws that are functions of (seed, epoch, sample, view)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, open_beton
from drivetrain.loaders.options import LoaderOptions
from loader_pictures import jpeg_beton, raw_beton

MULTI_CROP = (
    {"count": 2, "scale": (0.4, 1.0)},
    {"count": 3, "image_size": 24, "scale": (0.05, 0.4), "color_jitter": (0.4, 0.4, 0.4)},
)


def load(path: Path, kind: Any = FFCVLoader, **options: Any) -> tuple[Any, torch.Tensor]:
    """Return the images of one epoch of all samples as one batch, and the labels."""
    given = {"batch_size": 18, "image_size": 40, "order": "sequential", "workers": 2, **options}
    with kind(path, **given) as loader:
        ((images, labels),) = list(loader)
    return images, labels


def test_views_are_a_dimension_after_the_samples(photos: Path) -> None:
    images, labels = load(photos, views=3)
    assert images.shape == (18, 3, 3, 40, 40)
    assert labels.shape == (18,)
    assert images.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


def test_the_first_view_is_that_of_a_loader_without_views(photos: Path) -> None:
    """Nearest pixels, because they are decoded at full size whatever the other views are."""
    images, _ = load(photos, views=2, interpolation="nearest", seed=4)
    alone, _ = load(photos, interpolation="nearest", seed=4)
    assert torch.equal(images[:, 0], alone)
    assert not torch.equal(images[:, 1], alone)


def test_views_are_those_of_single_loads_with_the_same_draws(photos: Path) -> None:
    """With each group of views alone, the pixels are the same as with the other group beside it."""
    options = {"interpolation": "bicubic", "seed": 2, "cutout": 8, "flip": True}
    first, second = load(photos, views=MULTI_CROP, **options)[0]
    alone = load(photos, views=2, scale=(0.4, 1.0), **options)[0]
    assert torch.equal(first, alone)
    whole = {"image_size": 24, "scale": (0.05, 0.4), "color_jitter": (0.4, 0.4, 0.4)}
    five = load(photos, views=5, **{**options, **whole})[0]
    assert torch.equal(second, five[:, 2:])


def test_a_group_of_one_view_has_the_draws_of_its_number(photos: Path) -> None:
    options = {"interpolation": "nearest", "seed": 3}
    three, _ = load(photos, views=3, **options)
    groups, _ = load(photos, views=[{}, {}, {}], **options)
    for number, group in enumerate(groups):
        assert torch.equal(group[:, 0], three[:, number])


def test_bilinear_views_are_within_two_levels_of_those_decoded_alone(photos: Path) -> None:
    """A JPEG is decoded at the size that suffices for all views."""
    options = {"dtype": torch.uint8, "scale": (0.8, 1.0), "seed": 1}
    both = load(photos, views=[{"image_size": 12}, {"image_size": 64}], **options)[0]
    alone = load(photos, image_size=12, **options)[0]
    difference = (both[0][:, 0].int() - alone.int()).abs()
    assert 0 < difference.max() <= 16  # decoded at a quarter of its size, or at full size
    assert difference.float().mean() < 2


@pytest.mark.parametrize("views", [2, MULTI_CROP])
def test_views_do_not_depend_on_workers_and_ranks(photos: Path, views: Any) -> None:
    def flat(images: Any) -> torch.Tensor:
        groups = images if isinstance(images, tuple) else (images,)
        return torch.cat([group.flatten(1) for group in groups], 1)

    whole = flat(load(photos, views=views, workers=1)[0])
    assert torch.equal(whole, flat(load(photos, views=views, workers=5)[0]))
    ranks = [flat(load(photos, views=views, rank=rank, world_size=3)[0]) for rank in range(3)]
    assert torch.equal(whole, torch.cat(ranks))


def test_views_change_with_epoch_and_seed_and_differ(photos: Path) -> None:
    with FFCVLoader(photos, batch_size=18, image_size=16, order="sequential", views=4) as loader:
        first, second = (next(iter(loader))[0] for _ in range(2))
    other = load(photos, image_size=16, views=4, seed=1)[0]
    every = torch.cat([first, second, other], 1).flatten(2)
    for sample in every:
        assert len(torch.unique(sample, dim=0)) == 12


def test_evaluation_has_one_view(photos: Path) -> None:
    images, _ = load(photos, train=False, views=2)
    assert torch.equal(images, load(photos, train=False)[0])
    assert load(photos, train=False, views=MULTI_CROP)[0].shape == (18, 3, 40, 40)


def test_views_have_the_mean_and_spread_of_torchvisions(photos: Path) -> None:
    """The two loaders draw differently, so distributions are compared, over views and epochs."""
    many = tuple({**group, "count": 20} for group in MULTI_CROP)
    for views in (12, many):
        ours, theirs = (
            load(photos, kind, views=views, workers=workers)[0] for kind, workers in ((FFCVLoader, 2), (TorchLoader, 0))
        )
        groups = zip(*((each,) if isinstance(each, torch.Tensor) else each for each in (ours, theirs)), strict=True)
        for own, other in groups:
            assert own.shape == other.shape
            assert own.dtype == other.dtype
            assert torch.allclose(own.mean((1, 3, 4)).mean(0), other.mean((1, 3, 4)).mean(0), atol=0.15)
            assert abs(own.std() - other.std()) < 0.15


def test_views_of_raw_images_shifted_and_resized(tmp_path: Path) -> None:
    """Groups may crop differently: here the full image is shifted, and crops of it are resized."""
    path = raw_beton(tmp_path / "raw.beton", 8)
    groups = [{"crop": "padded", "padding": 0, "flip": False}, {"count": 2, "image_size": 6}]
    options = {"batch_size": 8, "image_size": 12, "dtype": torch.uint8}
    shifted, resized = load(path, views=groups, **options)[0]
    stored = load(path, train=False, eval_ratio=1.0, **options)[0]
    assert torch.equal(shifted[:, 0], stored)
    assert resized.shape == (8, 2, 3, 6, 6)


def test_a_group_of_another_crop_does_not_have_the_options_of_the_others() -> None:
    """What all views have, only those of its crop use."""
    made = LoaderOptions(
        batch_size=1, image_size=16, crop="padded", padding=2, padding_mode="constant", scale=(0.3, 0.5),
        views=[{}, {"crop": "resized"}, {"crop": "whole"}],
    )  # fmt: skip
    shifted, resized, whole = (own for _, own in made.groups)
    assert (shifted.padding, shifted.padding_mode, resized.scale) == (2, "constant", (0.3, 0.5))
    assert (resized.padding, whole.padding_mode, whole.scale) == (4, "reflect", (0.25, 1.0))


def test_a_damaged_sample_is_replaced_in_all_views(tmp_path: Path) -> None:
    path = jpeg_beton(tmp_path / "photos.beton")
    beton = open_beton(path)
    with path.open("r+b") as file:
        file.seek(int(beton.pointers[3]))
        file.write(bytes(int(beton.sizes[3])))
    images, _ = load(path, views=MULTI_CROP, on_error="skip", seed=5)
    again, _ = load(path, views=MULTI_CROP, on_error="skip", seed=5, workers=1)
    assert all(torch.equal(one, other) for one, other in zip(images, again, strict=True))
    assert all(np.isfinite(group.numpy()).all() for group in images)


@pytest.mark.parametrize(
    ("views", "message"),
    [
        (0, "views=0 must be at least 1"),
        (2.0, "views=2.0 must be an integer"),
        ([], "views=\\(\\) must be an integer, or a list of dicts"),
        ([2], r"views=\[2\] must be an integer or a list of dicts"),
        ([{"count": 0}], "count=0 must be a positive integer"),
        ([{"number": 2}], "'number' cannot differ among views"),
        ([{"interpolation": "area"}], "'interpolation' cannot differ"),
        ([{"image_size": -1}], "image_size=-1 must be a positive integer"),
        ([{"scale": (2, 3)}], "scale=\\(2, 3\\) must be two fractions"),
        ([{"cutout": 41}], "cutout=41 must be a side"),
    ],
)
def test_unusable_views_are_refused(photos: Path, views: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FFCVLoader(photos, batch_size=2, image_size=40, views=views)


def test_alternating_flips_are_of_one_view(photos: Path) -> None:
    with pytest.raises(DataError, match="flip='alternating' must be True or False with several views"):
        FFCVLoader(photos, batch_size=2, image_size=40, views=2, flip="alternating")
    for kind in (FFCVLoader, TorchLoader):
        with pytest.raises(DataError, match="flip='alternating' must be True or False with several views"):
            kind(photos, batch_size=2, image_size=40, views=[{"count": 2, "flip": "alternating"}, {"image_size": 24}])


def test_progressive_resizing_keeps_the_sizes_of_groups(photos: Path) -> None:
    with FFCVLoader(photos, batch_size=6, image_size=40, views=MULTI_CROP) as loader:
        loader.set_image_size(32)
        images, _ = next(iter(loader))
    assert [group.shape[-1] for group in images] == [32, 24]
