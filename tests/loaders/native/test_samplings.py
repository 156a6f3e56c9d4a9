"""Crops of JPEGs of every sampling, decoded at a smaller size, have the pixels of the whole, as Pillow decodes it."""

import io
import subprocess
from pathlib import Path

import native_fuzz
import numpy as np
import pytest
from drivetrain.loaders.native import library
from native_pixels import load_pictures
from PIL import Image

pytestmark = [pytest.mark.process]
BASELINE, RESTARTS, ARITHMETIC, SEPARATE = 0, 1, 2, 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samplings") / "corpus"
    folder.mkdir()
    native_fuzz.write_corpus(folder)
    return folder


@pytest.mark.parametrize("share", [2, 4, 8])
@pytest.mark.parametrize("way", [BASELINE, RESTARTS, ARITHMETIC, SEPARATE])
def test_crops_are_parts_of_the_whole(corpus: Path, way: int, share: int) -> None:
    """Each file is loaded in several crops of a size that is reached without a resize after decoding."""
    height, width = 64 // share, 80 // share
    files = sorted(corpus.glob(f"64x80-*-{way}.jpg"))
    assert len(files) == 32
    for file in files:
        stored = file.read_bytes()
        with Image.open(io.BytesIO(stored)) as image:
            image.draft("RGB", (width, height))
            whole = np.asarray(image)
        assert whole.shape == (height, width, 3)
        for top, left, rows, columns in (
            (0, 0, height, width), (1, 0, height - 2, width // 2), (0, width // 2, height, width // 2),
            (height // 4, width // 4, height // 2, width // 2), (1, width - 3, height - 1, 2),
        ):  # fmt: skip
            box = [[share * top, share * left, share * rows, share * columns]]
            (found,) = load_pictures([np.empty((64, 80, 3), np.uint8)], (rows, columns), jpegs=[stored], boxes=box)
            expected = whole[top : top + rows, left : left + columns]
            np.testing.assert_array_equal(found, expected, f"{file.name}: {top, left, rows, columns}")


def test_a_library_of_other_sources_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "libdrivetrain.so"
    native_fuzz.build_library(stale, ["-DDT_INTERFACE=1"])
    monkeypatch.setattr(library, "_FILE", stale)
    with pytest.raises(library.DrivetrainError, match=r"built from other sources than this version .* make"):
        library.library.__wrapped__()
    assert library.library().dt_interface is not None


def test_gcc_before_10_compiles_it() -> None:
    """Which lacks `__has_builtin`."""
    command = ["gcc", "-std=gnu11", "-fsyntax-only", "-U__has_builtin", native_fuzz.NATIVE / "resize.c"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
