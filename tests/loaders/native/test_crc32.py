"""The native core's CRC-32 is zlib's."""

import zlib

import numpy as np
from drivetrain.loaders.native.library import library


def test_it_is_zlibs_for_any_length_and_place() -> None:
    core, data = library(), np.random.default_rng(0).bytes(70_000)
    for size in [*range(300), 511, 512, 1000, 4095, 65_536, 69_990]:
        for start in (0, 1, 7):
            part = data[start : start + size]
            assert core.dt_crc32(0, part, len(part)) == zlib.crc32(part), (size, start)
    assert core.dt_crc32(zlib.crc32(data[:777]), data[777:], len(data) - 777) == zlib.crc32(data)
    for byte in (b"\0", b"\xff"):
        assert core.dt_crc32(0, byte * 5000, 5000) == zlib.crc32(byte * 5000)
