"""Atomic files, with any number of concurrent writers, including killed ones."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nfs
import pytest
from drivetrain.common.errors import DrivetrainError
from drivetrain.common.storage import files
from drivetrain.common.storage.files import atomic_file, atomic_files, exclusive_lock, renames_held, wait_for_renames


def test_atomic_file(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a") as file:
        file.write(b"whole")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"whole"
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "a") as file:
        file.write(bytes([1 // (file.write(b"half") - 4)]))
    assert (tmp_path / "a").read_bytes() == b"whole"
    for name, words in {"no/b": "No such file", "a/b": "Not a directory", "x" * 250: "too long"}.items():
        with pytest.raises(DrivetrainError, match=words), atomic_file(tmp_path / name):
            pass
    assert names(tmp_path) == ["a"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_one_has_locked_is_refused_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to one that has opened the lock file before the first one removed it: its lock would keep out nobody."""
    lock = tmp_path / ".lock"
    with exclusive_lock(lock, "Taken."):
        with pytest.raises(DrivetrainError, match="Taken"), exclusive_lock(lock, "Taken."):
            pass
        assert names(tmp_path) == [".lock"]
    assert names(tmp_path) == []
    acquire = files.acquire

    def late(file: Any, **how: bool) -> bool:
        lock.unlink()
        return acquire(file, **how)

    with monkeypatch.context() as patch:
        patch.setattr(files, "acquire", late)
        with pytest.raises(DrivetrainError, match="Taken"), exclusive_lock(lock, "Taken."):
            pass
    with exclusive_lock(lock, "Taken."):
        pass


def write_both(folder: Path) -> None:
    with atomic_files(folder / "b", folder / "a"):
        pass


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_the_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append((place.suffix, (tmp_path / "a").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_file(tmp_path / "a"):
        pass
    assert flushed == [(".partial", False), ("", True)]


def test_its_folder_may_be_renamed_as_soon_as_a_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 renames that of a checkpoint when it sees the last rank's note."""
    partial, complete, replace = tmp_path / "partial", tmp_path / "complete", Path.replace

    def replace_and_rename(path: Path, target: Path) -> None:
        replace(path, target)
        partial.rename(complete)

    partial.mkdir()
    monkeypatch.setattr(Path, "replace", replace_and_rename)
    with atomic_file(partial / "note"):
        pass
    assert names(complete) == ["note"]


def test_several_files_appear_together(tmp_path: Path) -> None:
    paths = tmp_path / "b", tmp_path / "a"
    with atomic_files(*paths) as files:
        for number, file in enumerate(files):
            file.write(bytes([number]))
        assert not any(path.exists() for path in paths)
    assert [path.read_bytes() for path in paths] == [b"\0", b"\1"]
    with pytest.raises(ZeroDivisionError), atomic_files(*paths) as (first, _):
        first.write(bytes([1 // (first.write(b"half") - 4)]))
    assert [path.read_bytes() for path in paths] == [b"\0", b"\1"]
    assert names(tmp_path) == ["a", "b"]


def test_the_first_rename_that_fails_leaves_the_others_undone(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_bytes(b"old")
    with (
        pytest.raises(DrivetrainError, match=r"/b could not be written: Is a directory"),
        atomic_files(tmp_path / "b", tmp_path / "a") as (_, file),
    ):
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a", "b"]


def test_writers_of_one_path_do_not_disturb_each_other(tmp_path: Path) -> None:
    """All have it open at a time, and the last to finish wins."""
    path, together = tmp_path / "a", threading.Barrier(8, timeout=60)

    def write(number: int) -> None:
        with atomic_file(path) as file:
            together.wait()
            file.write(bytes([number]) * 100_000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    content = path.read_bytes()
    assert content == content[:1] * 100_000
    with atomic_file(path) as slow:
        with atomic_file(path) as quick:
            quick.write(b"quick")
        assert path.read_bytes() == b"quick"
        slow.write(b"slow")
    assert path.read_bytes() == b"slow"
    assert names(tmp_path) == ["a"]


def test_leftovers_of_dead_writers_go_and_others_stay(tmp_path: Path) -> None:
    dead = tmp_path / ".a.7-0123abcd.partial"
    others = [f"{end}-0123abcd.partial" for end in (".ab.7", ".a.x", "a.7")] + [f"{dead.name}.txt"]
    for name in (dead.name, *others):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".a.8-0123abcd.partial").mkdir()
    with atomic_file(tmp_path / "a") as file:
        file.write(b"new")
        assert not dead.exists()
    stay = sorted([*others, ".a.8-0123abcd.partial", "a"])
    assert names(tmp_path) == stay
    dead.write_bytes(b"of somebody who still writes")
    with dead.open("r+b") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        with atomic_file(tmp_path / "a") as file:
            file.write(b"newer")
        assert names(tmp_path) == sorted([*stay, dead.name])


def test_a_lock_file_that_a_killed_writer_left_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / ".a.lock").touch()
    wait_for_renames(tmp_path / "a")
    write_both(tmp_path)
    assert names(tmp_path) == ["a", "b"]


def test_renames_wait_for_those_of_another_writer(tmp_path: Path) -> None:
    lock = tmp_path / ".a.lock"
    with lock.open("ab") as held, ThreadPoolExecutor(2) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        writer, reader = pool.submit(write_both, tmp_path), pool.submit(wait_for_renames, tmp_path / "a")
        with pytest.raises(TimeoutError):
            writer.result(timeout=0.3)
        assert not (tmp_path / "b").exists()
        assert not reader.done()
        lock.unlink()  # as its holder does before it lets go
        fcntl.flock(held, fcntl.LOCK_UN)
        writer.result(timeout=30)
        reader.result(timeout=30)
    assert names(tmp_path) == ["a", "b"]


def test_a_reader_waits_for_renames_over_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", nfs.flock)
    with (tmp_path / ".a.lock").open("ab") as held, ThreadPoolExecutor(1) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        reader = pool.submit(wait_for_renames, tmp_path / "a")
        with pytest.raises(TimeoutError):
            reader.result(timeout=0.3)
        fcntl.flock(held, fcntl.LOCK_UN)
        reader.result(timeout=30)


def test_a_reader_holds_writers_that_come_later(tmp_path: Path) -> None:
    """A writer that begins while the reader reads waits, too; afterwards no lock file is left."""
    with ThreadPoolExecutor(1) as pool:
        with renames_held(tmp_path / "a"):
            writer = pool.submit(write_both, tmp_path)
            with pytest.raises(TimeoutError):
                writer.result(timeout=0.3)
            assert not (tmp_path / "b").exists()
        writer.result(timeout=30)
    assert names(tmp_path) == ["a", "b"]


def test_a_reader_needs_no_right_to_write_the_folder(tmp_path: Path) -> None:
    with renames_held(tmp_path / "nowhere" / "a"):  # where no lock file can be created either
        pass


def test_ctrl_c_as_soon_as_a_temporary_file_is_there_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt within `open`, and one while the file is locked."""
    opened = Path.open

    def interrupted(self: Path, *arguments: Any, **options: Any) -> Any:
        opened(self, *arguments, **options).close()
        raise KeyboardInterrupt

    def locked(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    for owner, name, function in ((Path, "open", interrupted), (files, "acquire", locked)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, function)
            with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "a.json"):
                pass
        assert list(tmp_path.iterdir()) == [], name
