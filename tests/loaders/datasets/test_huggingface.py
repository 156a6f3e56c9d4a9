"""Hugging Face data sets as a source, created here and read offline."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.loaders import convert, open_beton
from loader_pictures import beton_of, jpeg_bytes, picture, refused
from PIL import Image

datasets: Any = pytest.importorskip("datasets", reason="the dev extra brings it")


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    """Six samples: five JPEGs (one of them a file) and a small PNG, a class, a vector and a text."""
    small = tmp_path / "small.png"
    Image.fromarray(picture(5, 20, 20)).save(small)
    images = [{"bytes": jpeg_bytes(picture(seed, 70, 90)), "path": None} for seed in range(5)]
    columns = {
        "image": [*images, str(small)],
        "label": [0, 1, 2, 0, 1, 2],
        "embedding": [[seed / 4, seed + 0.5] for seed in range(6)],
        "caption": [f"picture {seed}" for seed in range(6)],
    }
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["ant", "bee", "cat"]),
        embedding=datasets.Sequence(datasets.Value("float32")),
        caption=datasets.Value("string"),
    )
    return datasets.Dataset.from_dict(columns, features=features)


def test_features_become_fields_and_jpegs_pass_through(dataset: Any, tmp_path: Path) -> None:
    report = convert(dataset, tmp_path / "a.beton", fields=["embedding", "caption"])
    assert report.treatments == {"copied unchanged": 5, "stored": 1}
    beton = open_beton(tmp_path / "a.beton")
    assert beton.classes == ["ant", "bee", "cat"]
    assert beton.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert beton.stored(3) == jpeg_bytes(picture(3, 70, 90))
    assert np.array_equal(np.asarray(beton.image(5)), picture(5, 20, 20))
    assert beton.read("embedding", np.array([4])).tolist() == [[1.0, 4.5]]
    assert beton.read("caption", np.array([0, 5])) == ["picture 0", "picture 5"]
    assert isinstance(dataset[0]["image"], Image.Image)  # the user's own object is as it was


def test_a_transform_of_the_user_decides(dataset: Any, tmp_path: Path) -> None:
    def mirrored(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "image": [np.ascontiguousarray(np.asarray(image)[:, ::-1]) for image in batch["image"]],
            "label": batch["label"],
        }

    beton = beton_of(dataset.with_transform(mirrored), tmp_path / "a.beton")
    assert np.array_equal(np.asarray(beton.image(5)), picture(5, 20, 20)[:, ::-1])


def test_bad_sample_is_named(dataset: Any, tmp_path: Path) -> None:
    columns = dataset.cast_column("image", datasets.Image(decode=False)).to_dict()
    columns["image"][2]["bytes"] = columns["image"][2]["bytes"][:900]
    bad = datasets.Dataset.from_dict(columns, features=dataset.features)
    refused(bad, tmp_path, "sample 2: it cannot be decoded")
    refused(dataset, tmp_path, r"the fields \['rating'\] are missing", fields=["rating"])
    report = convert(bad, tmp_path / "a.beton", on_error="skip")
    assert [name for name, _ in report.skipped] == ["sample 2"]


def test_the_mode_of_a_column_counts(dataset: Any, tmp_path: Path) -> None:
    gray = dataset.cast_column("image", datasets.Image(mode="L"))
    beton = beton_of(gray, tmp_path / "a.beton")
    assert np.array_equal(beton.pixels(5), np.asarray(gray[5]["image"].convert("RGB")))  # the sample that is stored raw
