"""`jpegs.decodes`, which decodes at an eighth of the size, rejects the same files as the loader's full decode."""

from __future__ import annotations

import numpy as np
import pytest
from drivetrain.loaders.native.jpegs import decodes
from ffcv_library import library
from loader_pictures import jpeg_bytes, picture

MUTANTS = 100
SIDES = (90, 130)


def decodes_in_full(jpeg: bytes, width: int, height: int) -> bool:
    """As FFCV's own library does."""
    source, target = np.frombuffer(jpeg, np.uint8), np.empty(width * height * 3, np.uint8)
    status = library().imdecode(
        source.ctypes.data, len(jpeg), height, width, target.ctypes.data,
        height, width, 0, 0, 1, 1, False, False,
    )  # fmt: skip
    return bool(status == 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}, {"quality": 30}],
    ids=str,
)
def test_refuses_the_same_damaged_files(options: dict[str, object]) -> None:
    """Cut, flipped, overwritten and with stretches left out: 500 mutants in all."""
    rng, sound = np.random.default_rng(5), jpeg_bytes(picture(4, *SIDES), **options)
    refused = 0
    for number in range(MUTANTS):
        data = bytearray(sound)
        at = int(rng.integers(2, len(data)))
        if number % 4 == 0:
            del data[at:]
        elif number % 4 == 1:
            data[at] ^= 1 << int(rng.integers(8))
        elif number % 4 == 2:
            data[at : at + 8] = rng.bytes(8)
        else:
            del data[at : at + int(rng.integers(1, 40))]
        full = decodes_in_full(bytes(data), SIDES[1], SIDES[0])
        assert decodes(bytes(data), SIDES[1], SIDES[0]) == full, (number, at)
        refused += not full
    assert 20 < refused < MUTANTS  # both happen, so that the comparison is worth something
    assert decodes(sound, SIDES[1], SIDES[0])
