"""`advise`: what limits each format, which one it advises, and that it leaves nothing behind."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain import DataError
from drivetrain.loaders import Advice, advise, convert, inspect
from drivetrain.loaders.advice import advise as module
from drivetrain.loaders.advice.report import Rate, Row, bound, by_loss, bytes_text, choose
from drivetrain.loaders.advice.sample import converted, disk_rate, loading_rate, open_data_set
from loader_pictures import jpeg_bytes, jpeg_folder, picture
from PIL import Image
from process_state import wait_until

QUICK: dict[str, Any] = {"image_size": 32, "seconds": 1.5, "progress": False}


def row(name: str, rate: float, *, size: float = 1e6, bottleneck: str = "CPU", **values: Any) -> Row:
    measured = Rate(rate, rate, rate)
    known = {
        "options": {}, "bytes_per_image": 100.0, "pixels": 100.0, "reencoded": 0.0, "one_worker": measured,
        "all_workers": measured, "disk": None, "fits": True,
    }  # fmt: skip
    return Row(name=name, size=size, rate=rate, bottleneck=bottleneck, **{**known, **values})


def advice(rows: list[Row], wanted: float | None = None, memory: int = 10**9, disk: float | None = 1e8) -> Advice:
    return Advice(
        source="photos", images=10_000, sampled=300, unusable=0, image_size=(224, 224), workers=2, memory=memory,
        disk=disk, scratch="/disk", rounds=7, seconds=60.0, wanted=wanted, rows=rows, left_out=[],
    )  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return jpeg_folder(tmp_path / "photos")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


@pytest.mark.parametrize(
    ("loader", "disk", "size", "expected"),
    [
        (2000.0, 500.0, 8e9, (2000.0, "CPU")),  # in memory from the second epoch on
        (2000.0, 500.0, 8e9 + 1, (500.0, "disk")),
        (2000.0, 5000.0, 80e9, (2000.0, "CPU")),  # the disk is fast enough
        (2000.0, 2000.0, 80e9, (2000.0, "CPU")),
        (2000.0, None, 80e9, (2000.0, "CPU")),  # unknown
    ],
)
def test_the_disk_limits_what_does_not_fit_into_memory(
    loader: float, disk: float | None, size: float, expected: tuple[float, str]
) -> None:
    assert bound(loader, disk, size, 8e9) == expected


def test_a_bound_is_never_above_the_loader_and_never_falls_with_memory() -> None:
    draw = random.Random(0)
    for _ in range(300):
        loader, disk, size = (draw.uniform(1, 1000) for _ in range(3))
        rates = [bound(loader, disk, size, memory)[0] for memory in (0, 250, 500, 1000)]
        assert rates == sorted(rates)
        assert rates[-1] == loader
        assert rates[0] == min(loader, disk)


def test_the_first_format_that_suffices_is_chosen_and_otherwise_the_fastest() -> None:
    draw = random.Random(1)
    for _ in range(300):
        rates = [draw.randint(1, 50) for _ in range(draw.randint(1, 5))]
        rows = [row(str(number), rate) for number, rate in enumerate(rates)]
        assert choose(rows, None).rate == max(rates)
        wanted = draw.randint(1, 60)
        enough = [number for number, rate in enumerate(rates) if rate >= wanted]
        expected = enough[0] if enough else rates.index(max(rates))
        assert choose(rows, wanted).name == str(expected)


def test_formats_are_ordered_by_the_quality_they_lose() -> None:
    rows = [
        row("small jpeg", 9, pixels=50, reencoded=1.0), row("small raw", 8, pixels=50),
        row("stored", 1, pixels=200), row("jpeg", 2, pixels=120, reencoded=1.0),
    ]  # fmt: skip
    for order in itertools.permutations(rows):
        assert [one.name for one in by_loss(order)] == ["stored", "jpeg", "small raw", "small jpeg"]


def test_the_advice_in_words() -> None:
    slow = row("as stored", 1000)
    raw = row("raw", 4000, size=5e6, options={"min_resolution": 256, "write_mode": "raw"})
    fastest = advice([slow, raw])
    assert fastest.chosen == "raw"
    what = "'raw' (--min-resolution 256 --write-mode raw)"
    assert f"{what} is the fastest with 4,000 images/s" in fastest.advice
    assert "4 times the rate of 'as stored', at 5 times the size" in fastest.advice
    enough = advice([slow, raw], wanted=900).advice
    assert enough == "'as stored' loses the least quality of the formats that reach 900 images/s: 1,000."
    more = advice([slow, raw], wanted=1500)
    assert "reach 1,500 images/s: 4,000. 'as stored' reaches 1,000: there the CPU is" in more.advice
    assert "No format reaches 9,000 images/s." in advice([slow, raw], wanted=9000).advice
    assert "Use more cores" in advice([slow, raw], wanted=9000).advice
    large = row("as stored", 300, size=5e11, bottleneck="disk", fits=False)
    limited = advice([large], wanted=900)
    assert "the disk is the bottleneck. Use a faster disk, or 500 GB of free memory." in limited.advice
    assert "(500 GB) does not fit into the free memory (1 GB), so each epoch reads it" in limited.advice
    assert "the speed of its disk is unknown" in advice([large], disk=None).advice


def test_sizes_have_three_digits() -> None:
    shown = [bytes_text(size) for size in (999, 999.6, 12_345, 999_600, 5e11, 2e15)]
    assert shown == ["999 bytes", "1 KB", "12.3 KB", "1 MB", "500 GB", "2,000 TB"]


def test_a_folder_is_measured_and_nothing_is_left(photos: Path, scratch: Path, tmp_path: Path) -> None:
    measured = advise(photos, scratch=scratch, workers=2, **QUICK)
    assert list(scratch.iterdir()) == []
    assert [one.name for one in measured.rows] == [
        "as stored", "JPEG, longest side 71", "JPEG, longest side 57", "raw, shortest side 37", "JPEG, shortest side 37"
    ]  # fmt: skip
    assert (measured.images, measured.sampled, measured.unusable, measured.left_out) == (18, 18, 0, [])
    for one in measured.rows:
        convert(photos, tmp_path / "full.beton", progress=False, **one.options)
        found = inspect(tmp_path / "full.beton")
        assert one.size == pytest.approx(found.image_bytes.mean * 18)
        assert one.one_worker.low <= one.one_worker.median <= one.one_worker.high
        assert one.all_workers.median > 0
        assert one.rate == one.all_workers.median
        assert (one.bottleneck, one.fits) == ("CPU", True)
    assert measured.rounds >= 1
    assert measured.chosen == max(measured.rows, key=lambda one: one.rate).name
    read = json.loads(json.dumps(measured.to_dict()))
    assert (read["chosen"], read["advice"], len(read["rows"])) == (measured.chosen, measured.advice, 5)
    assert measured.advice in str(measured)
    assert "<table>" in measured._repr_html_()


def test_a_beton_is_measured_as_the_folder_it_is_from(photos: Path, scratch: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "a.beton", progress=False)
    kwargs = {**QUICK, "scratch": scratch, "workers": 1}
    folder, beton = advise(photos, **kwargs), advise(tmp_path / "a.beton", **kwargs)
    assert [(one.name, one.size) for one in beton.rows] == [(one.name, one.size) for one in folder.rows]
    assert "2 workers" not in str(beton)


def test_raw_pixels_stay_raw_and_equal_formats_are_left_out(scratch: Path, tmp_path: Path) -> None:
    images = np.stack([picture(seed, 40, 40) for seed in range(20)])
    convert((images, np.zeros(20, np.int64)), tmp_path / "a.beton", write_mode="raw", progress=False)
    measured = advise(tmp_path / "a.beton", scratch=scratch, **{**QUICK, "image_size": 40})
    assert [one.name for one in measured.rows] == ["as stored"]
    assert len(measured.left_out) == 4
    assert measured.rows[0].bytes_per_image == 40 * 40 * 3


def test_a_beton_of_other_images_is_refused(tmp_path: Path, scratch: Path) -> None:
    """It would be measured as RGB, of three times the bytes."""
    images = np.stack([picture(seed, 40, 40)[..., 0] for seed in range(8)])
    for mode, stored in (("L", images), ("I;16", images.astype(np.uint16))):
        path = tmp_path / f"{mode[0]}-other.beton"
        convert((stored, np.zeros(8, np.int64)), path, image_mode=mode, progress=False)
        with pytest.raises(DataError, match=r"other.beton has images of 1 channel of (8|16) bits.*no formats"):
            advise(path, scratch=scratch, **QUICK)
    assert list(scratch.iterdir()) == []


def test_images_that_are_not_jpeg_lose_quality_as_jpeg(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for seed in range(5):
        Image.fromarray(picture(seed, 80, 80)).save(tmp_path / "flat" / f"{seed}.png")
    measured = advise(tmp_path / "flat", scratch=scratch, **{**QUICK, "image_size": 80})
    assert [one.name for one in measured.rows] == ["raw, shortest side 91", "JPEG, own size"]
    assert [one.reencoded for one in measured.rows] == [0.0, 1.0]


def test_bad_images_are_left_out_and_counted(photos: Path, scratch: Path) -> None:
    for name in ("000", "003"):
        (photos / "bee" / f"{name}.jpg").write_bytes(b"\xff\xd8 not an image")
    measured = advise(photos, scratch=scratch, **QUICK)
    assert (measured.sampled, measured.unusable) == (16, 2)
    assert "2 images of the sample cannot be read" in str(measured)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0}, "seconds=0 must be a finite number above 0"),
        ({"seconds": 1e-6}, "seconds=1e-06 is too short"),
        ({"wanted": -1}, "wanted=-1 must be"),
        ({"samples": 0}, "samples=0 must be a positive integer"),
        ({"image_size": 0}, "image_size=0 must be"),
        ({"workers": 0}, "workers=0 must be"),
        ({"scratch": "missing"}, "No temporary folder can be made in missing: .* \\(--scratch\\)"),
    ],
)
def test_bad_arguments(photos: Path, scratch: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        advise(photos, **{**QUICK, "scratch": scratch, **options})
    assert list(scratch.iterdir()) == []


def test_bad_sources(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.jpg").write_bytes(b"")
    (tmp_path / "b.beton").write_bytes(b"no beton")
    for source, message in {
        tmp_path / "none": "does not exist", tmp_path / "empty": "contains no images", tmp_path / "a.txt":
        "is not a folder", tmp_path / "broken": "None of the 1 samples", tmp_path / "b.beton": "b.beton", 3: "source=3",
    }.items():  # fmt: skip
        with pytest.raises(DataError, match=message):
            advise(source, scratch=scratch, **QUICK)  # type: ignore[arg-type]
    assert list(scratch.iterdir()) == []


def test_a_full_disk_is_found_before_it_is_filled(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**6, 999_000, 1000))
    with pytest.raises(DataError, match=r"temporary files need .* KB, and .* has 1 KB left"):
        advise(jpeg_folder(tmp_path / "many", 20), scratch=scratch, **{**QUICK, "seconds": 60})
    assert list(scratch.iterdir()) == []


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize(
    "delay", [pytest.param(0.0, id="converting", marks=pytest.mark.slow), pytest.param(1.0, id="measuring")]
)
def test_an_interrupt_leaves_nothing(photos: Path, scratch: Path, delay: float) -> None:
    program = Path(sys.executable).with_name("drivetrain")
    command = [program, "advise", photos, "--scratch", scratch, "--image-size", "32", "--seconds", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: list(scratch.glob("*/0.beton")), process)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, line = process.communicate(timeout=30)
    assert process.returncode == 130
    assert line.endswith("Interrupted: stopped by Ctrl-C.\n")  # Python may print where it was ignored at first
    assert list(scratch.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_ignores_is_not_lost(
    photos: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Removed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    trials: list[float] = []

    def interrupted(*arguments: Any) -> float:
        if len(trials) == 2:
            Removed()
        trials.append(loading_rate(*arguments))
        return trials[-1]

    monkeypatch.setattr(module, "loading_rate", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        advise(photos, scratch=scratch, **{**QUICK, "seconds": 30})
    assert len(trials) < 10
    assert list(scratch.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.long
def test_the_time_limits_sample_and_rounds(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    data = jpeg_bytes(picture(0, 1500, 2000))
    for number in range(200):
        (tmp_path / "large" / f"{number}.jpg").write_bytes(data)
    start = time.perf_counter()
    measured = advise(tmp_path / "large", samples=200, scratch=scratch, workers=2, seconds=6, progress=False)
    assert 16 <= measured.sampled < 200
    # One round of the shortest trials may exceed the time, and other processes may slow it down.
    assert time.perf_counter() - start < 60
    assert list(scratch.iterdir()) == []


def test_the_disk_is_read_or_known_to_be_unknown(photos: Path, tmp_path: Path) -> None:
    sample = open_data_set(photos).sample(18)
    file = converted(sample, tmp_path / "a.beton", {}, 1)
    rates = [disk_rate(file, 2, seconds, 0) for seconds in (0.0, 5.0)]
    assert all(rate is None or rate > 0 for rate in rates)
    shared = Path("/dev/shm")
    if not shared.is_dir() or "/dev/shm tmpfs" not in Path("/proc/mounts").read_text():
        pytest.skip("no file system in memory")
    path = shared / f"drivetrain-{time.time_ns()}.beton"
    try:
        assert disk_rate(converted(sample, path, {}, 1), 2, 5.0, 0) is None
    finally:
        for one in shared.glob(f"{path.name}*"):
            one.unlink()


def test_a_trial_of_the_disk_leaves_the_file_in_memory(photos: Path, tmp_path: Path) -> None:
    """Else the loader's next trial would read from disk, and its rate would be given as that of the CPU."""
    file = converted(open_data_set(photos).sample(18), tmp_path / "a.beton", {}, 1)
    if disk_rate(file, 1, 0.0, 0) is None:
        pytest.skip("this system does not report what is in memory")
    with file.path.open("rb") as opened:
        for place in file.pointers.tolist():
            os.preadv(opened.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)  # raises BlockingIOError if it is not


def test_a_sample_is_the_same_in_every_call(photos: Path) -> None:
    data = open_data_set(photos)
    first, second = data.sample(7), data.sample(7)
    assert [image for image, _ in first] == [image for image, _ in second]
    assert len({image for image, _ in first}) == 7
    assert [image for image, _ in data.sample(3)] == [image for image, _ in first.first(3)]


@pytest.mark.timeout(30)
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jpg")
    assert open_data_set(tmp_path).get(0) == b""
