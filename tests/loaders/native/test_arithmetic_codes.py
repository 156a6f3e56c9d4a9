"""Arithmetic codes that were cut off decode without a warning of libjpeg: they are refused, and sound ones never."""

import re
from pathlib import Path

import native_fuzz
import pytest
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.loaders.conversion.encode import Encoding, encode_image
from drivetrain.loaders.native import jpegs

pytestmark = [pytest.mark.process]
HEIGHT, WIDTH = 400, 560
ARITHMETIC, ARITHMETIC_PROGRESSIVE = 2, 4
LITTLE = 200
"""Bytes of codes whose loss changes too little to be noticed."""
EARLY = r"Premature end of arithmetic codes|bad arithmetic code"
KINDS = [(sampling, way) for sampling in ("1111", "2211") for way in (ARITHMETIC, ARITHMETIC_PROGRESSIVE)]


def scans(data: bytes) -> list[tuple[int, int, bool]]:
    """Begin and end of the codes of each scan, and whether it refines others."""
    found, at = [], 2
    while data[at + 1] != 0xD9:
        kind, begin = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        at = begin
        if kind == 0xDA:
            while data[at] != 0xFF or data[at + 1] == 0:
                at += 1
            found.append((begin, at, data[begin - 1] >> 4 > 0))
    return found


def cut(data: bytes, scan: tuple[int, int, bool], part: float) -> bytes:
    """The file with the first part of this scan, and its end."""
    begin, end, _ = scan
    at = begin + int(part * (end - begin))
    return data[: at - (data[at - 1] == 0xFF)] + (b"\xff\xd9" if scan == scans(data)[-1] else data[end:])


@pytest.mark.parametrize(("sampling", "way"), KINDS)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_codes_that_were_cut_off(tmp_path: Path, sampling: str, way: int, part: float) -> None:
    (tmp_path / "a").mkdir()
    data = native_fuzz.write_jpeg(tmp_path / "a", (HEIGHT, WIDTH), sampling, way).read_bytes()
    assert jpegs.complaint(data, WIDTH, HEIGHT) == ""
    refused = 0
    for scan in scans(data):
        damaged = cut(data, scan, part)
        if scan[2] or (1 - part) * (scan[1] - scan[0]) < LITTLE:  # or the last bits only, which no decoder misses
            continue
        assert re.search(EARLY, jpegs.complaint(damaged, WIDTH, HEIGHT))
        assert not jpegs.decodes(damaged, WIDTH, HEIGHT)
        for read in (jpegs.recoded, jpegs.huffman_coded):
            with pytest.raises(ValueError, match=EARLY):
                read(damaged)
        with pytest.raises(DataError, match=EARLY):
            encode_image(damaged, Encoding())
        with pytest.raises(DataError, match=EARLY):
            encode_image(damaged, Encoding(keep_bytes=True))
        refused += 1
    assert refused >= 1


@pytest.mark.parametrize(("sampling", "way"), KINDS)
@pytest.mark.parametrize("detail", [0, 1, 16, 200, 399, 400])
def test_codes_whose_zeros_were_left_out(tmp_path: Path, sampling: str, way: int, detail: int) -> None:
    """Sound pictures that are plain from some line on: their codes end long before the picture does."""
    (tmp_path / "a").mkdir()
    data = native_fuzz.write_jpeg(tmp_path / "a", (HEIGHT, WIDTH), sampling, way, detail).read_bytes()
    assert jpegs.complaint(data, WIDTH, HEIGHT) == ""
    assert encode_image(data, Encoding()).treatment == "recoded losslessly as baseline"


def test_the_loader_names_the_sample(tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    path = native_fuzz.write_jpeg(tmp_path / "train" / "a", (HEIGHT, WIDTH), "2211", ARITHMETIC)
    convert(tmp_path / "train", tmp_path / "a.beton", keep_bytes=True)
    data, beton = path.read_bytes(), (tmp_path / "a.beton").read_bytes()
    ((begin, end, _),) = scans(data)
    middle = (begin + end) // 2
    damaged = data[: middle - (data[middle - 1] == 0xFF)] + b"\xff\xd9"
    (tmp_path / "a.beton").write_bytes(beton.replace(data, damaged.ljust(len(data), b"\0")))
    options = {"batch_size": 1, "image_size": 32, "workers": 1, "train": False}
    with (
        FFCVLoader(tmp_path / "a.beton", **options) as loader,
        pytest.raises(DataError, match=f"sample 0: .*({EARLY})"),
    ):
        next(iter(loader))
