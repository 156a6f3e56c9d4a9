"""A conversion that fails, is interrupted, is killed or fills the disk leaves nothing that looks finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from drivetrain.errors import BetonError, DataError, DrivetrainError
from drivetrain.files import atomic_file
from drivetrain.loaders import convert, open_beton
from drivetrain.loaders.encode import Encoding
from drivetrain.loaders.manifest import manifest_path
from drivetrain.loaders.sampling import Job, encoded_samples, first_fields
from drivetrain.loaders.sources import open_source
from loader_pictures import jpeg_folder, raw_beton, raw_pictures


class Server:
    """Starts slow conversions in processes that can be killed; see `loader_convert_server.py`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("loader_convert_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def start(self, out: Path, limit: int = 0) -> int:
        """The process id of a conversion that has begun: its partial file is there."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{out} {out}.stderr {limit}\n")
        self.process.stdin.flush()
        pid = self._number()
        partial = out.with_name(f".{out.name}.{pid}.partial")
        while not partial.exists() and Path(f"/proc/{pid}").exists():
            time.sleep(0.002)
        return pid

    def status(self) -> int:
        """Waits until it ends."""
        return self._number()

    def processes(self) -> list[int]:
        """The server and whatever is left of those it started: all of its session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it ended meanwhile
                state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(stat.parent.name))
        return found

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def test_failure_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    out = raw_beton(tmp_path / "out.beton", 5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    images, labels = raw_pictures(9)
    with pytest.raises(DataError):
        convert((images, labels - 1), out, progress=False)  # noticed after all images are written
    folder = jpeg_folder(tmp_path / "images")
    (folder / "cat" / "zzz.jpg").write_text("not a picture")
    with pytest.raises(DataError, match=r"zzz\.jpg"):
        convert(folder, out, progress=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert len(open_beton(out)) == 5


def test_manifest_that_cannot_be_written_fails_before_the_file_appears(tmp_path: Path) -> None:
    manifest_path(tmp_path / "out.beton").mkdir()
    with pytest.raises(DrivetrainError, match=r"out\.beton\.json could not be written"):
        convert(raw_pictures(5), tmp_path / "out.beton", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.beton.json"]


def test_new_conversion_replaces_both(tmp_path: Path) -> None:
    out = raw_beton(tmp_path / "out.beton", 5)
    raw_beton(out, 8)
    assert open_beton(out).manifest["samples"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.beton", "out.beton.json"]


def test_an_open_file_survives_its_replacement(tmp_path: Path) -> None:
    """Somebody trains from it meanwhile: the pages mapped are those of the old file."""
    out = raw_beton(tmp_path / "out.beton", 5)
    old = open_beton(out)
    before = [old.stored(index) for index in range(5)]
    convert((raw_pictures(5)[0][::-1], raw_pictures(5)[1]), out, progress=False)
    assert [old.stored(index) for index in range(5)] == before
    assert open_beton(out).stored(0) == before[4]


@pytest.mark.parametrize("older", [False, True], ids=["new", "older"])
def test_sigkill_at_random_moments_leaves_no_file_that_looks_finished(
    server: Server, tmp_path: Path, older: bool
) -> None:
    """Ten times each: an older pair of files stays whole or is refused with the remedy."""
    killed, moments = 0, np.random.default_rng(11 + older).uniform(0, 0.75, 10)
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
    assert killed >= 5


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
    time.sleep(0.2)
    begin = time.monotonic()
    os.kill(pid, signal.SIGINT)
    assert server.status() == 130
    assert time.monotonic() - begin < 5
    assert [path.name for path in tmp_path.iterdir()] == ["out.beton.stderr"]


def test_full_disk_is_one_error_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: writing fails in the middle in the same way."""
    server.start(tmp_path / "out.beton", limit=8_500_000)
    assert server.status() == 1
    stderr = (tmp_path / "out.beton.stderr").read_text()
    assert stderr == f"DrivetrainError: {tmp_path / 'out.beton'} could not be written: File too large.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.beton.stderr"]


def test_left_alone_it_ends_well_and_says_nothing(server: Server, tmp_path: Path) -> None:
    """Also no progress bar, for stderr is no terminal there."""
    server.start(tmp_path / "out.beton")
    assert server.status() == 0
    assert (tmp_path / "out.beton.stderr").read_text() == ""
    assert len(open_beton(tmp_path / "out.beton")) == 60


def test_no_thread_remains(tmp_path: Path) -> None:
    before = threading.active_count()
    convert(raw_pictures(20), tmp_path / "out.beton", workers=4, progress=False)
    with pytest.raises(DataError):
        convert(
            (raw_pictures(20)[0], raw_pictures(20)[1] - 1), tmp_path / "x.beton", workers=4, progress=False
        )
    assert threading.active_count() == before


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
    samples = encoded_samples(Job(opened, Encoding(), first_fields(opened, {}, "raise"), "raise"), 2, False)
    for number, _ in enumerate(samples, 1):
        if number % 20 == 0:
            time.sleep(0.01)
        ahead.append(source.given - number)
    assert len(ahead) == 200
    assert max(ahead) <= 8 * 2 + 1


def test_atomic_file(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a") as file:
        file.write(b"whole")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"whole"
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "a") as file:
        file.write(bytes([1 // (file.write(b"half") - 4)]))
    assert (tmp_path / "a").read_bytes() == b"whole"
    with pytest.raises(DrivetrainError, match="No such file"), atomic_file(tmp_path / "no" / "b"):
        pass
    with pytest.raises(DrivetrainError, match="Not a directory"), atomic_file(tmp_path / "a" / "b"):
        pass
    with pytest.raises(DrivetrainError, match="too long"), atomic_file(tmp_path / ("x" * 250)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
