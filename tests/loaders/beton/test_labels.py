"""What is known of all labels: as of the whole array, however many are read at a time; of large data, by one rank."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.common.errors import BetonError
from drivetrain.loaders import convert, open_beton
from drivetrain.loaders.beton import data_set
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.beton.labels import LabelFacts
from hypothesis import given, settings
from hypothesis import strategies as st

IMAGES = np.zeros((40, 4, 4, 3), np.uint8)
LABELS: dict[str, Any] = {
    "indices": np.arange(40) % 7 + 2,
    "numbers": np.linspace(-1, 3.5, 40),
    "vectors": np.linspace(-1, 3.5, 120).reshape(40, 3).astype(np.float32),
    "several": (np.arange(200).reshape(40, 5) % 3 == 0).astype(np.uint8),
}


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(st.sampled_from([0, 1, 1, 5, -3, np.nan, np.inf]), min_size=1, max_size=20),
    kind=st.sampled_from(["int64", "float64", "float32"]), cuts=st.lists(st.integers(0, 20), max_size=3),
)  # fmt: skip
def test_they_are_those_of_the_whole_array(values: list[float], kind: str, cuts: list[int]) -> None:
    labels = np.array([value if np.isfinite(value) or kind != "int64" else 7 for value in values]).astype(kind)
    facts = LabelFacts.of(np.split(labels, sorted(cuts)))
    assert facts.finite == bool(np.isfinite(labels).all())
    assert facts.binary == bool(np.isin(labels, [0, 1]).all())
    whole = kind == "int64"
    assert (facts.shape, facts.whole) == ((), whole)
    assert (facts.least, facts.greatest) == ((labels.min(), labels.max()) if whole else (0, 0))
    assert LabelFacts.shared(facts.arrays()) == facts
    assert facts.outputs == (labels.max() + 1 if whole else 1)


@pytest.mark.parametrize("kind", LABELS)
def test_large_data_are_read_once_on_a_machine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert((IMAGES, LABELS[kind]), tmp_path / "{0..1}.beton", progress=False)
    with closing(open_files(tmp_path / "{0..1}.beton")) as small:
        expected = LabelFacts.of([small.labels])
        assert small.label_facts == expected
    monkeypatch.setattr(data_set, "CHECKED", 0)
    monkeypatch.setattr(data_set, "_AT_ONCE", 7)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(open_files(tmp_path / "{0..1}.beton")) as first:
        assert first.label_facts == expected
    monkeypatch.setattr(data_set.BetonFiles, "read", None)
    with closing(open_files(tmp_path / "{0..1}.beton")) as again:
        assert again.label_facts == expected
    assert expected.outputs == {"indices": 9, "numbers": 1, "vectors": 3, "several": 5}[kind]


def test_a_vector_that_is_not_finite_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert` refuses such a label; other writers do not."""
    convert((IMAGES, LABELS["vectors"]), tmp_path / "{0..1}.beton", progress=False)
    with closing(open_beton(tmp_path / "1.beton")) as beton, (tmp_path / "1.beton").open("r+b") as file:
        file.seek(int(beton.columns["label"].pointers[3]))
        file.write(np.float32(np.nan).tobytes())
    monkeypatch.setattr(data_set, "CHECKED", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(open_files(tmp_path / "{0..1}.beton")) as files:
        for _ in range(2):
            with pytest.raises(BetonError, match=r"1.beton: sample 3: its label is not finite"):
                _ = files.label_facts


@pytest.mark.parametrize("checked", [data_set.CHECKED, 0])
def test_masks_are_not_read(checked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert((IMAGES, np.zeros((40, 4, 4), np.uint8)), tmp_path / "masks.beton", progress=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(data_set, "CHECKED", checked)
    files = open_files(tmp_path / "masks.beton")
    with closing(files), pytest.raises(BetonError, match="its labels are masks"):
        _ = files.label_facts
