"""How FFCVLoader splits a batch among its threads: never into chunks that cost more to start than to load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain.loaders import FFCVLoader
from loader_pictures import jpeg_beton, raw_beton


def chunks(path: Path, batch: int, **options: Any) -> list[int]:
    """Return how many samples each chunk of an epoch's first batch has."""
    loader = FFCVLoader(path, batch_size=batch, **options)
    load, seen = loader._decoder.load, list[tuple[Any, slice]]()

    def recorded(job: Any, part: slice) -> None:
        seen.append((job, part))
        load(job, part)

    loader._decoder.load = recorded  # type: ignore[method-assign]
    for _ in loader:
        pass
    loader.close()
    first = seen[0][0]
    return [min(part.stop, len(job.indices)) - part.start for job, part in seen if job is first]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw_beton(tmp_path_factory.mktemp("chunks") / "small.beton", 512, 32)


@pytest.mark.parametrize(
    ("workers", "ahead", "expected"),
    [
        (1, 3, [128]),  # no larger than the batch
        (4, 3, [128]),  # four batches in preparation have one for each
        (16, 3, [64, 64]),  # never fewer
        (16, 1, [64, 64]),
    ],
)
def test_small_images_in_large_chunks(small: Path, workers: int, ahead: int, expected: list[int]) -> None:
    """32 × 32 pixels, read and written: 170 of them are a megabyte."""
    options: dict[str, Any] = {"image_size": 32, "workers": workers, "batches_ahead": ahead}
    assert sorted(chunks(small, 128, **options)) == expected


def test_chunks_of_large_batches(small: Path) -> None:
    assert sorted(chunks(small, 512, image_size=32, workers=2)) == [2, 170, 170, 170]


def test_large_images_in_small_chunks(tmp_path: Path) -> None:
    """So that no worker idles at the end of a batch of photographs."""
    path = jpeg_beton(tmp_path / "photos.beton")
    assert max(chunks(path, 16, image_size=224, workers=4)) <= 6


def test_batches_do_not_depend_on_chunks(small: Path) -> None:
    batches = [
        [images.clone() for images, _ in FFCVLoader(small, batch_size=128, image_size=32, workers=workers)]
        for workers in (1, 16)
    ]
    assert all(torch.equal(*pair) for pair in zip(*batches, strict=True))
