"""Limits of time and memory: stopped loads end, coefficients are counted, repeated scans are refused everywhere."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, convert, open_beton, verify
from drivetrain.loaders.conversion.encode import Encoding, encode_image
from drivetrain.loaders.native import jpegs
from drivetrain.loaders.native.stop import Stop
from loader_pictures import file_bytes, image_folder, run_script
from PIL import Image


def progressive(side: int, scans: int) -> bytes:
    """A flat progressive picture with the scan of its DC values so many times."""
    data = file_bytes(Image.new("RGB", (side, side), "teal"), "JPEG", progressive=True)
    begin = data.index(b"\xff\xda")
    head = begin + 2 + int.from_bytes(data[begin + 2 : begin + 4], "big")
    end = next(at for at in range(head, len(data)) if data[at] == 0xFF and data[at + 1] != 0)
    scan = data[begin : head - 1] + b"\0" + data[head:end]  # all bits of the values, which may be repeated
    return data[:begin] + scan * scans + b"\xff\xd9"


def test_a_stopped_decoding_ends_at_once() -> None:
    """Of 110 scans of 36 megapixels, which take some seconds."""
    bomb, stop = progressive(6000, 110), Stop()
    threading.Timer(0.3, stop.set).start()
    begin = monotonic()
    assert jpegs.complaint(bomb, 6000, 6000, stop.limits(1 << 31)) == "it was stopped"
    assert monotonic() - begin < 3  # beside a busy process


def test_pixels_times_scans_are_bounded() -> None:
    assert jpegs.complaint(progressive(64, 500), 64, 64) == ""
    assert jpegs.complaint(progressive(64, 501), 64, 64) == "it has more than 500 scans, the most for its size"
    jpegs.check_scans(progressive(64, 500))
    for side, scans, most in ((64, 501, 500), (6000, 120, 119)):
        with pytest.raises(ValueError, match=f"more than {most} scans"):
            jpegs.check_scans(progressive(side, scans))


def test_conversion_does_not_go_round_the_limit_through_pillow() -> None:
    with pytest.raises(DataError, match="more than 500 scans, the most for its size"):
        encode_image(progressive(64, 501), Encoding(max_resolution=32))


def test_coefficients_beyond_the_memory_are_refused_before_they_are_allocated(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "train", {"0.jpg": progressive(2000, 1)})
    convert(folder, tmp_path / "p.beton", keep_bytes=True)
    with FFCVLoader(tmp_path / "p.beton", batch_size=1, image_size=32, workers=1, train=False) as loader:
        assert next(iter(loader))[0].shape == (1, 3, 32, 32)
        loader._decoder.coefficient_bytes = 1_000_000
        with pytest.raises(DataError, match=r"sample 0 .* 12\.0 MB of 1\.0 MB.*fewer workers, or convert"):
            next(iter(loader))


@pytest.mark.process
@pytest.mark.parametrize("work", ["verify", pytest.param("convert", marks=pytest.mark.slow)])
def test_ctrl_c_ends_the_reading_of_repeated_scans(tmp_path: Path, work: str) -> None:
    """Of 110 scans of 36 megapixels, which take some seconds in each of four pictures."""
    bomb = progressive(6000, 110)
    image_folder(tmp_path / "train", {f"{number}.jpg": bomb for number in range(4)})
    stored = tmp_path / "a.beton"
    convert(tmp_path / "train", stored, keep_bytes=True, check="structure")
    program = """
import sys
from drivetrain.loaders import convert, verify
print("ready", flush=True)
if sys.argv[1] == "convert":
    convert(sys.argv[2], sys.argv[3], workers=1)
else:
    verify(sys.argv[3], workers=1)
"""
    out = stored if work == "verify" else tmp_path / "b.beton"
    command = [sys.executable, "-c", program, work, tmp_path / "train", out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        sleep(0.4)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        begin = monotonic()
        _, complaints = process.communicate(timeout=60)
        assert monotonic() - begin < 3  # beside a busy process
    assert "KeyboardInterrupt" in complaints
    assert not (tmp_path / "b.beton").exists()


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the system's peak of memory")
def test_memory_is_reckoned_as_it_is_taken(tmp_path: Path) -> None:
    """Of pictures of 3 MB, of 36 kinds: never less than is taken, and at most twice as much where all is decoded."""
    output = run_script("loader_memory.py", tmp_path, MALLOC_MMAP_THRESHOLD_="65536")
    kinds = [json.loads(line) for line in output.splitlines()]
    assert len(kinds) == 36
    libjpeg = 1 << 20  # its tables, and rounding up to pages
    wrong = [one for one in kinds if not one[2] <= one[1] + libjpeg or (one[3] and one[1] > 2 * one[2])]
    assert not wrong


def test_a_forked_process_is_told_that_it_has_no_threads(tmp_path: Path) -> None:
    pictures = [(np.full((8, 8, 3), i, np.uint8), i) for i in range(4)]
    convert(pictures, tmp_path / "a.beton")
    with FFCVLoader(tmp_path / "a.beton", batch_size=2, image_size=8, workers=1, train=False) as loader:
        list(loader)
        loader._process -= 1  # as it is in a child
        with pytest.raises(DataError, match=r"forked .* spawn"):
            next(iter(loader))
        loader._process = os.getpid()


def test_a_manifest_of_brackets_is_no_manifest(tmp_path: Path) -> None:
    convert([(np.zeros((8, 8, 3), np.uint8), 0)], tmp_path / "a.beton")
    (tmp_path / "a.beton.json").write_text("[" * 200_000)
    with pytest.raises(BetonError, match="is not a manifest"):
        open_beton(tmp_path / "a.beton")


def test_verify_and_the_loader_agree_on_large_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's limit of pixels is for pictures to convert."""
    folder = image_folder(tmp_path / "train", {"0.jpg": Image.new("RGB", (500, 500), "teal")})
    convert(folder, tmp_path / "a.beton")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert verify(tmp_path / "a.beton").sound
