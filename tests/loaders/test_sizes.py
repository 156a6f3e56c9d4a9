"""An image size that changes between epochs, and settings that exceed the memory."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import Pipeline
from drivetrain.common.errors import BetonError, DataError
from drivetrain.common.machine import rank_free_memory
from drivetrain.loaders import FFCVLoader, TorchLoader, convert
from loader_pictures import make as make_loader
from loader_pictures import raw_beton, raw_pictures
from pipeline_data import plain_model

LOADERS = [FFCVLoader, TorchLoader]


def make(kind: Any, path: Path, **options: Any) -> Any:
    return make_loader(kind, path, **{"image_size": 32, "dtype": torch.uint8, **options})


@pytest.mark.parametrize("kind", LOADERS)
def test_each_epoch_at_its_size_is_that_of_a_loader_of_that_size(kind: Any, photos: Path) -> None:
    with make(kind, photos) as loader:
        for epoch, side in enumerate((16, 40, 32)):
            loader.set_image_size(side)
            found = list(loader)
            assert {tuple(images.shape[1:]) for images, _ in found} == {(3, side, side)}
            with make(kind, photos, image_size=side) as other:
                other.set_epoch(epoch)
                for (images, labels), (expected, same) in zip(found, other, strict=True):
                    assert torch.equal(images, expected)
                    assert torch.equal(labels, same)


@pytest.mark.slow
@pytest.mark.process
def test_worker_processes_take_the_new_size(photos: Path) -> None:
    with make(TorchLoader, photos.with_name("photos-images"), workers=1) as loader:
        next(iter(loader))
        loader.set_image_size(20)
        assert next(iter(loader))[0].shape == (4, 3, 20, 20)


@pytest.mark.parametrize("kind", LOADERS)
def test_sizes_that_cannot_be(kind: Any, photos: Path, tmp_path: Path) -> None:
    with make(kind, photos) as loader:
        before = list(loader)
        for size, words in (
            (0, "a positive integer"),
            (16.5, "a positive integer"),
            (None, "a positive integer"),
        ):
            with pytest.raises(DataError, match=f"image_size={size} must be {words}"):
                loader.set_image_size(size)
        loader.set_epoch(0)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(before, loader, strict=True))
    raw_beton(tmp_path / "raw.beton", 8, 32)
    with make(kind, tmp_path / "raw.beton", crop="padded") as loader:
        with pytest.raises(DataError, match="crop='padded'"):
            loader.set_image_size(24)
        assert next(iter(loader))[0].shape == (4, 3, 32, 32)


@pytest.mark.parametrize("crop", ["random", "padded"])
def test_samples_that_are_left_out_may_have_any_size(crop: str, tmp_path: Path) -> None:
    """In the loader, at another size, and in a pipeline."""
    images = [np.full((side, side, 3), side, np.uint8) for side in (16, 12) for _ in range(8)]
    convert([(image, n % 4) for n, image in enumerate(images)], tmp_path / "sizes.beton")
    large, small = range(8), range(8, 16)
    options: dict[str, Any] = {"crop": crop, "image_size": 16, "batch_size": 4}
    with make(FFCVLoader, tmp_path / "sizes.beton", indices=large, **options) as loader:
        assert all(images.shape[-1] == 16 for images, _ in loader)
        with pytest.raises(DataError, match=rf"crop='{crop}' .* sample 8 of .*sizes.beton has 12 × 12"):
            loader.set_indices(small)
        with pytest.raises(DataError, match=rf"crop='{crop}' .* sample 0 of .* has 16 × 16"):
            loader.set_image_size(20)
        assert len(list(loader)) == 2
    pipeline = Pipeline(plain_model).load(tmp_path / "sizes.beton", indices=[*large], workers=1, **options)
    with pipeline.build() as built:
        assert len(built.train) == 2
    with pytest.raises(DataError, match="sample 8 of"):
        pipeline.replace(data=dataclasses.replace(pipeline.data, indices=None)).build()


def test_a_loop_under_way_is_told(photos: Path) -> None:
    with make(FFCVLoader, photos) as loader:
        batches = iter(loader)
        next(batches)
        loader.set_image_size(16)
        with pytest.raises(DataError, match="closed or iterated again"):
            next(batches)


def test_memory_is_computed_before_it_is_taken(photos: Path) -> None:
    """`memory` counts the batches ahead, the one in use, and what each worker needs."""
    with make(FFCVLoader, photos, batches_ahead=1, workers=1) as small:
        with make(FFCVLoader, photos, batches_ahead=5, workers=1) as more:
            assert more.memory - small.memory == 4 * 4 * 32 * 32 * 3
        with make(FFCVLoader, photos, batches_ahead=1, workers=1, dtype=torch.float32) as floats:
            assert floats.memory - small.memory == 4 * 4 * 32 * 32 * 3 * 3
        with make(FFCVLoader, photos, batches_ahead=1, workers=4) as many:
            assert many.memory > small.memory + 3 * 72 * 96 * 3


def test_what_cannot_fit_is_refused_at_once(photos: Path) -> None:
    """The smallest size that memory cannot hold on this machine."""
    side = int((rank_free_memory() / (4 * 3 * 4 * 5)) ** 0.5) * 2
    with pytest.raises(DataError, match=r"would need [\d,.]+ GB \(6 batches of .* free\. Use a smaller batch_size"):
        make(FFCVLoader, photos, image_size=side, dtype=torch.float32, workers=1)
    with make(FFCVLoader, photos) as loader:
        with pytest.raises(DataError, match=r"would need .* Use a smaller batch_size or image_size"):
            loader.set_image_size(side * 10)
        assert next(iter(loader))[0].shape == (4, 3, 32, 32)


def test_an_image_that_cannot_be_decoded_for_its_size(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.common.machine.rank_free_memory", lambda: 72 * 96 * 3)
    with pytest.raises(BetonError, match=r"largest image of the file needs .* max_resolution"):
        make(FFCVLoader, photos, image_size=4)


def test_labels_and_classes_are_there(photos: Path, tmp_path: Path) -> None:
    for kind, source in (
        (FFCVLoader, photos),
        (TorchLoader, photos),
        (TorchLoader, photos.with_name("photos-images")),
    ):
        with make(kind, source) as loader:
            assert loader.classes == ["ant", "bee", "cat"]
            assert loader.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6
            assert loader.num_classes == 3
    convert(raw_pictures(9), tmp_path / "plain.beton")
    with make(FFCVLoader, tmp_path / "plain.beton", image_size=12) as loader:
        assert (loader.classes, loader.num_classes) == ([], 9)
