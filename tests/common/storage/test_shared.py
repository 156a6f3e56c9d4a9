"""Arrays that one process of a machine computes: the others map them, and none is worse off where that fails."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest
from drivetrain.common.errors import DataError
from drivetrain.common.storage import shared
from drivetrain.common.storage.shared import forget_array, forget_arrays, joint_array, key_of, shared_arrays

JOINT = """
import sys
import numpy as np
from drivetrain.common.storage.shared import joint_array

array = joint_array("name", 1 << 18, np.float32)
for line in sys.stdin:
    array[int(line)] += 1
    print(array.sum(), flush=True)
"""
SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
from drivetrain.common.storage.shared import shared_arrays

def make():
    with Path("made").open("a") as file:
        file.write("x")
    time.sleep(0.5)
    return {"one": np.arange(1000), "two": np.ones(3)}

arrays = shared_arrays("key", make)
mapped = "drivetrain-" in Path("/proc/self/maps").read_text()
print(sorted(arrays), int(arrays["one"].sum()), mapped, arrays["one"].flags.writeable)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"drivetrain-{os.getuid()}"


def make() -> dict[str, np.ndarray]:
    return {"numbers": np.arange(5)}


@pytest.mark.process
@pytest.mark.timeout(60)
def test_one_process_computes_them_and_all_map_them(tmp_path: Path, started: list[Popen[str]]) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for _ in range(3):
        command = [sys.executable, "-c", SCRIPT]
        started.append(Popen(command, cwd=tmp_path, env=environment, stdout=PIPE, text=True))
    answers = [process.communicate(timeout=50)[0] for process in started]
    assert answers == ["['one', 'two'] 499500 True False\n"] * 3
    assert (tmp_path / "made").read_text() == "x"


def test_another_key_is_computed_and_old_ones_are_removed(own_folder: Path) -> None:
    old = shared_arrays("old", make)
    shared_arrays("new", make)
    assert {path.name for path in own_folder.iterdir()} == {"old", "old.lock", "new", "new.lock"}
    past = time.time() - 2 * shared._KEPT
    os.utime(own_folder / "old", (past, past))
    shared_arrays("newest", make)
    assert {path.name for path in own_folder.iterdir()} == {"old.lock", "new", "new.lock", "newest", "newest.lock"}
    assert old["numbers"].tolist() == [0, 1, 2, 3, 4]  # still mapped
    with pytest.raises(ValueError, match="read-only"):
        old["numbers"][0] = 1


def test_an_interrupt_leaves_nothing(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared_arrays("key", make)
    assert {path.name for path in own_folder.iterdir()} == {"key.lock"}
    assert shared_arrays("key", make)["numbers"].tolist() == [0, 1, 2, 3, 4]


def test_where_they_cannot_be_shared_each_has_its_own(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted() -> dict[str, np.ndarray]:
        made.append(1)
        return make()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    own_folder.mkdir()
    own_folder.chmod(0o777)  # others could put arrays there
    assert shared_arrays("key", counted)["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert list(own_folder.iterdir()) == []
    own_folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        assert shared_arrays("key", counted)["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert len(made) == 2  # once each time
    shared_arrays("key", counted)
    (own_folder / "key/numbers.npy").write_bytes(b"damaged")
    assert shared_arrays("key", counted)["numbers"].tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setattr(tempfile, "tempdir", str(own_folder / "missing"))
    assert shared_arrays("key", counted)["numbers"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("gone", ["numbers.npy", "others.npy", "names.json"])
@pytest.mark.parametrize("emptied", [True, False])
def test_what_is_half_removed_is_made_again(own_folder: Path, gone: str, *, emptied: bool) -> None:
    """By an interrupted removal, or by what cleans up folders for temporary files; after a crash, files are empty."""

    def two() -> dict[str, np.ndarray]:
        return {"numbers": np.arange(5), "others": np.ones(2)}

    shared_arrays("key", two)
    file = own_folder / "key" / gone
    if emptied:
        file.write_bytes(b"")
    else:
        file.unlink()
    for _ in range(2):
        assert sorted(shared_arrays("key", two)) == ["numbers", "others"]
        assert file.stat().st_size > 0


def test_what_cannot_be_made_is_tried_once(own_folder: Path) -> None:
    tried = []

    def refused() -> dict[str, np.ndarray]:
        tried.append(1)
        raise DataError("There is nothing.")

    with pytest.raises(DataError, match="There is nothing"):
        shared_arrays("key", refused)
    assert tried == [1]
    assert {path.name for path in own_folder.iterdir()} == {"key.lock"}


def test_nobody_waits_for_other_keys() -> None:
    """Another run of this user may take minutes, or be suspended."""

    def slow() -> dict[str, np.ndarray]:
        begun.set()
        assert go_on.wait(30)
        return make()

    begun, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared_arrays, "slow", slow)
        assert begun.wait(30)
        try:
            assert len(pool.submit(shared_arrays, "quick", make).result(5)) == 1
        finally:
            go_on.set()
        assert len(first.result(30)) == 1


def test_arrays_that_may_have_changed_are_made_again(own_folder: Path) -> None:
    made = []

    def counted() -> dict[str, np.ndarray]:
        made.append(1)
        return make()

    for _ in range(2):
        shared_arrays("key", counted, within=60)
    assert len(made) == 1
    past = time.time() - 61
    os.utime(own_folder / "key/names.json", (past, past))
    shared_arrays("key", counted)
    assert len(made) == 1
    shared_arrays("key", counted, within=60)
    assert len(made) == 2
    forget_arrays("key")
    forget_arrays("another")
    shared_arrays("key", counted)
    assert len(made) == 3


def test_a_key_is_of_all_that_it_depends_on() -> None:
    keys = [key_of(*facts) for facts in (("a", 1), ("a", 2), ("a", "1"), ("a", [1]), ("a", 1, None))]
    assert len({*keys}) == 5
    assert key_of("a", 1) == keys[0]


@pytest.mark.process
@pytest.mark.timeout(60)
def test_an_array_that_all_write(tmp_path: Path, own_folder: Path, started: list[Popen[str]]) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for _ in range(2):
        command = [sys.executable, "-c", JOINT]
        started.append(Popen(command, cwd=tmp_path, env=environment, stdin=PIPE, stdout=PIPE, text=True))
    mine = joint_array("name", 1 << 18, np.float32)
    assert not mine.any()
    for number, process in enumerate([*started, *started]):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        assert float(process.stdout.readline()) == mine.sum() == number + 1
        if number == 1:  # both have it
            forget_array("name")
            forget_array("name")
            assert list(own_folder.iterdir()) == []
    for process in started:
        process.communicate(timeout=30)
    assert mine[:5].tolist() == [1, 1, 1, 1, 0]


def test_on_a_full_disk_each_has_an_array_of_its_own(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    first, second = (joint_array("name", 10, np.uint8) for _ in range(2))
    first[:], second[:] = 1, 2
    assert (first.sum(), second.sum()) == (10, 20)
    forget_array("name")
    assert list(own_folder.iterdir()) == []


def test_a_system_that_cannot_reserve_room(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS."""
    monkeypatch.delattr(os, "posix_fallocate")
    first, second = (joint_array("name", 10, np.uint8) for _ in range(2))
    first[:] = 1
    assert second.sum() == 10
    forget_array("name")
    assert list(own_folder.iterdir()) == []
