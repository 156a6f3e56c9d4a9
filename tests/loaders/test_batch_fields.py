"""Additional fields of a `.beton`, and vector labels: the same from both loaders, in any order and on any rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert
from drivetrain.loaders.beton.layout import Field
from drivetrain.loaders.conversion.encode import Encoding, encode_image
from drivetrain.loaders.conversion.writer import Sample, write_betons
from drivetrain.loaders.sample_options import SampleOptions
from loader_pictures import make as make_loader
from loader_pictures import raw_pictures

COUNT, SIDE = 11, 12
LOADERS = [FFCVLoader, TorchLoader]
NAMES = ("weight", "rank", "box", "note", "facts")


def sample(index: int) -> dict[str, Any]:
    """What belongs to a picture besides its pixels."""
    return {
        "weight": index / 7,
        "rank": index * 10**12,
        "box": np.arange(6, dtype=np.float32).reshape(2, 3) + index,
        "note": bytes(range(index)),
        "facts": {"name": f"no. {index}", "list": [index, None]},
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images, labels = raw_pictures(COUNT, SIDE)
    data = [
        {"image": image, "label": int(label), **sample(index)}
        for index, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    out = tmp_path_factory.mktemp("fields") / "fields.beton"
    convert(data, out, fields=NAMES)
    return out


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels of three numbers."""
    images, _ = raw_pictures(COUNT, SIDE)
    labels = np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)
    out = tmp_path_factory.mktemp("fields") / "vectors.beton"
    convert([(image, label) for image, label in zip(images, labels, strict=True)], out)
    return out


def make(kind: Any, path: Path, **options: Any) -> Any:
    return make_loader(kind, path, **{"image_size": SIDE, **options})


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("options", [{}, {"verify": True, "rank": 1, "world_size": 2, "drop_last": False}], ids=str)
def test_fields_come_with_their_samples(kind: Any, path: Path, options: dict[str, Any]) -> None:
    with make(kind, path, fields=NAMES, **options) as loader:
        batches = list(loader)
    assert len(batches) == 3
    for images, labels, weight, rank, box, note, facts in batches:
        expected = [sample(int(label)) for label in labels]
        assert len(images) == len(expected)
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, torch.tensor([one["weight"] for one in expected]))
        assert rank.tolist() == [one["rank"] for one in expected]
        assert box.dtype == torch.float32
        assert np.array_equal(box.numpy(), np.array([one["box"] for one in expected]))
        assert note == [one["note"] for one in expected]
        assert facts == [one["facts"] for one in expected]


@pytest.mark.parametrize("kind", LOADERS)
def test_fields_of_samples_that_an_epoch_repeats(kind: Any, path: Path) -> None:
    """Their repetitions have numbers above those of the file's samples."""
    with make(kind, path, fields=("rank", "note")) as loader:
        loader.select(loader.selection(SampleOptions(balance=(9.0, *[1.0] * (COUNT - 1)))))
        numbers = np.concatenate(loader.shares(0))
        batches = list(loader)
    assert numbers.max() >= COUNT
    expected = [sample(number) for number in (numbers % COUNT).tolist()]
    assert torch.cat([labels for _, labels, *_ in batches]).tolist() == (numbers % COUNT).tolist()
    assert torch.cat([rank for _, _, rank, _ in batches]).tolist() == [one["rank"] for one in expected]
    assert [note for batch in batches for note in batch[3]] == [one["note"] for one in expected]


@pytest.mark.parametrize("kind", LOADERS)
def test_only_what_was_asked_for(kind: Any, path: Path) -> None:
    with make(kind, path) as loader:
        assert len(next(iter(loader))) == 2
    with make(kind, path, fields=["rank"]) as loader:
        _, labels, rank = next(iter(loader))
        assert rank.tolist() == [int(label) * 10**12 for label in labels]
    with pytest.raises(DataError, match=r"'wieght' is not a field of .*Did you mean 'weight'"):
        make(kind, path, fields=["wieght"])


@pytest.mark.parametrize("kind", LOADERS)
def test_vector_labels(kind: Any, vectors: Path) -> None:
    with make(kind, vectors, order="sequential") as loader:
        labels = torch.cat([labels for _, labels in loader])
        assert labels.dtype == torch.float32
        assert labels.shape == (COUNT, 3)
        assert np.array_equal(labels.numpy(), loader.labels)
    with make(kind, vectors, rank=3, world_size=4, drop_last=False) as loader:  # no share is empty
        assert list(loader)[-1][1].shape == (1, 3)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("dtype", ["|u1", "|b1", "<i8", "<f2", "<f8", ">f4"])
def test_vectors_of_another_type(kind: Any, dtype: str, tmp_path: Path) -> None:
    """FFCV's writer stores any type; binary cross entropy, for one, takes floats only."""
    images, _ = raw_pictures(COUNT, SIDE)
    labels = np.random.default_rng(0).integers(0, 2, (COUNT, 3)).astype(dtype)
    samples = [
        Sample(encode_image(image, Encoding()), (label.tobytes(),)) for image, label in zip(images, labels, strict=True)
    ]
    fields = [Field("image", "rgb_image"), Field("label", "ndarray", np.dtype(dtype), (3,))]
    path = tmp_path / "vectors.beton"
    write_betons([path], samples, COUNT, fields, {"classes": []})
    with make(kind, path, order="sequential") as loader:
        found = torch.cat([labels for _, labels in loader])
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), labels)
