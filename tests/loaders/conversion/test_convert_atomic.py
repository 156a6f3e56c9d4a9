"""A conversion that fails, is interrupted, is killed or fills the disk leaves no file that looks complete."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from drivetrain.common.errors import BetonError, DataError, DrivetrainError
from drivetrain.loaders import convert, open_beton
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.loaders.conversion.encode import Encoding
from drivetrain.loaders.conversion.sample_source import open_source
from drivetrain.loaders.conversion.single import Conversion, encoded_samples, first_fields
from loader_pictures import jpeg_folder, raw_beton, raw_pictures
from process_state import start_server

pytestmark = pytest.mark.process


class Server:
    """Starts slow conversions in processes that can be killed; see `loader_convert_server.py`."""

    def __init__(self) -> None:
        self.process = start_server("loader_convert_server.py")

    def start(self, out: Path, limit: int = 0, renames: int = -1) -> int:
        """The process id of a conversion that has begun: its partial file is there."""
        (pid,) = self._begin(out, limit, renames, 1)
        partials = f".{out.name}.{pid}-*.partial"
        while not list(out.parent.glob(partials)) and Path(f"/proc/{pid}").exists():
            time.sleep(0.002)
        return pid

    def status(self) -> int:
        """Wait until it ends."""
        (status,) = self._numbers()
        return status

    def convert_at_once(self, out: Path, count: int) -> list[int]:
        """Return the exit statuses of `count` conversions."""
        self._begin(out, 0, -1, count)
        return self._numbers()

    def processes(self) -> list[int]:
        """The server and whatever is left of those it started: all of its session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended meanwhile
                state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(stat.parent.name))
        return found

    def _begin(self, out: Path, *numbers: int) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{out} {out}.stderr {' '.join(map(str, numbers))}\n")
        self.process.stdin.flush()
        return self._numbers()

    def _numbers(self) -> list[int]:
        assert self.process.stdout is not None
        return [int(number) for number in self.process.stdout.readline().split()]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_failure_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    out = raw_beton(tmp_path / "out.beton", 5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    images, labels = raw_pictures(9)
    with pytest.raises(DataError):
        convert((images, labels - 1), out)  # noticed after all images are written
    folder = jpeg_folder(tmp_path / "images")
    (folder / "cat" / "zzz.jpg").write_text("not a picture")
    with pytest.raises(DataError, match=r"zzz\.jpg"):
        convert(folder, out)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert len(open_beton(out)) == 5


def test_manifest_that_cannot_be_written_fails_before_the_file_appears(tmp_path: Path) -> None:
    manifest_path(tmp_path / "out.beton").mkdir()
    with pytest.raises(DrivetrainError, match=r"out\.beton\.json could not be written"):
        convert(raw_pictures(5), tmp_path / "out.beton")
    assert names_in(tmp_path) == ["out.beton.json"]


def test_new_conversion_replaces_both(tmp_path: Path) -> None:
    out = raw_beton(tmp_path / "out.beton", 5)
    raw_beton(out, 8)
    assert open_beton(out).manifest["samples"] == 8
    assert names_in(tmp_path) == ["out.beton", "out.beton.json"]


def test_an_open_file_survives_its_replacement(tmp_path: Path) -> None:
    """Somebody trains from it meanwhile: the pages mapped are those of the old file."""
    out = raw_beton(tmp_path / "out.beton", 5)
    old = open_beton(out)
    before = [old.stored(index) for index in range(5)]
    convert((raw_pictures(5)[0][::-1], raw_pictures(5)[1]), out)
    assert [old.stored(index) for index in range(5)] == before
    assert open_beton(out).stored(0) == before[4]


@pytest.mark.process
@pytest.mark.parametrize(
    "older", [pytest.param(False, id="new", marks=pytest.mark.slow), pytest.param(True, id="older")]
)
def test_sigkill_leaves_no_file_that_looks_finished(server: Server, tmp_path: Path, older: bool) -> None:
    """At six random moments: an older pair of files stays whole or is refused with the remedy."""
    killed, moments = 0, np.random.default_rng(11 + older).uniform(0, 0.45, 6)
    for number, delay in enumerate(moments):
        folder = tmp_path / str(number)
        folder.mkdir()
        out = folder / "out.beton"
        if older:
            raw_beton(out, 5)
        pid = server.start(out)
        time.sleep(delay)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = server.status()
        killed += status == -signal.SIGKILL
        assert status in (0, -signal.SIGKILL)
        assert server.processes() == [server.process.pid]
        for partial in folder.glob(".*.partial"):
            with pytest.raises(BetonError):
                open_beton(partial)
        assert whole_or_refused(out) in ({60} if status == 0 else {0, 5, 60} if older else {0, 60})
    assert killed >= 3


@pytest.mark.long
@pytest.mark.parametrize(
    "older", [pytest.param(False, id="new", marks=pytest.mark.slow), pytest.param(True, id="older")]
)
def test_sigkill_between_the_renames(server: Server, tmp_path: Path, older: bool) -> None:
    """It never pairs new names with old pixels: the older file's layout, labels and tables are the same."""
    out, found = tmp_path / "out.beton", []
    for renames in range(3):
        if older:
            images = np.repeat(np.arange(195, 255, dtype=np.uint8), 64 * 64 * 3).reshape(60, 64, 64, 3)
            names = [f"old-{label}" for label in range(60)]
            convert((images, np.arange(60)), out, classes=names, write_mode="raw")
        server.start(out, renames=renames)
        assert server.status() == (0 if renames == 2 else -signal.SIGKILL)
        if whole_or_refused(out):
            beton = open_beton(out)
            found.append((beton.classes[7], int(beton.data[int(beton.pointers[7])])))
        elif older:
            with pytest.raises(BetonError, match=r"does not belong to out\.beton, .* damaged: its seal"):
                open_beton(out)
        partials = [path.name for path in tmp_path.glob(".*.partial")]
        assert len(partials) == 2 - renames, "those that the next conversion finds, and removes"
    assert found == ([("old-7", 202)] if older else []) + [("0-7", 7)]
    assert names_in(tmp_path) == ["out.beton", "out.beton.json", "out.beton.stderr"]


def test_conversions_to_one_name_at_a_time_in_several_processes(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.beton"
    assert server.convert_at_once(out, 4) == [0] * 4
    assert whole_or_refused(out) == 60
    beton = open_beton(out)
    writer = int(beton.classes[0][0])
    assert [int(beton.data[int(start)]) for start in beton.pointers] == list(range(writer, writer + 60))
    assert names_in(tmp_path) == ["out.beton", "out.beton.json", "out.beton.stderr"]


def test_conversions_to_one_name_at_a_time_in_several_threads(tmp_path: Path) -> None:
    """Each replaces both files; a reader that opens them at any time finds two that belong together."""
    out, opened = raw_beton(tmp_path / "out.beton", 5), set()

    def write(shade: int) -> None:
        for turn in range(8):
            images = np.full((10 + shade + turn % 2, 8, 8, 3), shade, np.uint8)
            classes = [f"{shade}-{label}" for label in range(len(images))]
            convert((images, np.arange(len(images))), out, classes=classes, workers=1)

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, shade) for shade in range(4)]
        while not all(writer.done() for writer in writers):
            beton = open_beton(out)
            if beton.classes:
                assert beton.classes[0] == f"{beton.data[int(beton.pointers[0])]}-0"
            opened.add(tuple(beton.classes))
    assert [writer.exception() for writer in writers] == [None] * 4
    assert len(opened) > 2
    assert whole_or_refused(out) >= 10
    assert names_in(tmp_path) == ["out.beton", "out.beton.json"]


def whole_or_refused(out: Path) -> int:
    """The number of samples, each as its checksum says; 0 if the file is not there, or refused with the remedy."""
    if not out.exists():
        return 0
    try:
        beton = open_beton(out)
    except BetonError:
        with pytest.raises(BetonError, match="Convert the data again"):
            open_beton(out)
        return 0
    assert beton.checksums is not None
    assert [beton.checksum(index) for index in range(len(beton))] == beton.checksums.tolist()
    return len(beton)


def test_ctrl_c_stops_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    pid = server.start(tmp_path / "out.beton")
    time.sleep(0.1)
    begin = time.monotonic()
    os.kill(pid, signal.SIGINT)
    assert server.status() == 130
    assert time.monotonic() - begin < 5
    assert names_in(tmp_path) == ["out.beton.stderr"]


def test_full_disk_is_one_error_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """A limit on file sizes simulates a full disk: writing fails in the middle in the same way."""
    server.start(tmp_path / "out.beton", limit=8_500_000)
    assert server.status() == 1
    stderr = (tmp_path / "out.beton.stderr").read_text()
    assert stderr == f"DrivetrainError: {tmp_path / 'out.beton'} could not be written: File too large.\n"
    assert names_in(tmp_path) == ["out.beton.stderr"]


def test_left_alone_it_ends_well_and_says_nothing(server: Server, tmp_path: Path) -> None:
    """It shows no progress bar either, because stderr is not a terminal."""
    server.start(tmp_path / "out.beton")
    assert server.status() == 0
    assert (tmp_path / "out.beton.stderr").read_text() == ""
    assert len(open_beton(tmp_path / "out.beton")) == 60


def test_no_thread_remains(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    convert(raw_pictures(20), tmp_path / "out.beton", workers=4)
    with pytest.raises(DataError):
        convert((raw_pictures(20)[0], raw_pictures(20)[1] - 1), tmp_path / "x.beton", workers=4)
    assert set(threading.enumerate()) <= before  # what an earlier test left may end meanwhile


def test_memory_is_bounded() -> None:
    """A writer slower than its readers: only a few samples wait, however many there are."""
    ahead = []

    class Counted:
        given = 0

        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> tuple[object, int]:
            self.given += 1
            return raw_pictures(1)[0][0], index

    source = Counted()
    opened = open_source(source)
    fields = first_fields(opened, {}, "raise", Encoding())
    samples = encoded_samples(Conversion(opened, Encoding(), fields, "raise"), 2, False)
    for number, _ in enumerate(samples, 1):
        if number % 20 == 0:
            time.sleep(0.01)
        ahead.append(source.given - number)
    assert len(ahead) == 200
    assert max(ahead) <= 8 * 2 + 1
