"""`launch` in this process: results, and the first cause if a rank fails."""

import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import launch
from drivetrain.strategies.launching import launcher
from drivetrain.strategies.launching.group import is_main_process, is_rank
from forked_ranks import RankServer
from strategy_jobs import fail_on_rank_1, ignore_ctrl_c, join_with_a_slow_rank, surroundings, wait_for_ever
from unloadable import Unloadable

pytestmark = pytest.mark.process


def test_which_process_is_a_rank_and_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is left over from another program makes no rank."""
    with monkeypatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        assert (is_rank(), is_main_process()) == (False, True)
        for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
            patch.setenv(name, value)
            assert (is_rank(), is_main_process()) == (False, True)
        patch.setenv("MASTER_PORT", "1")
        assert (is_rank(), is_main_process()) == (True, False)
        patch.setenv("RANK", "0")
        assert (is_rank(), is_main_process()) == (True, True)


@pytest.mark.usefixtures("one_process_group")
def test_the_first_of_a_group_is_its_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        assert (is_rank(), is_main_process()) == (True, True)


def traces() -> dict[str, Any]:
    """Everything of this process that a launch must leave as it was."""
    return {
        "environment": {**os.environ, "PYTEST_CURRENT_TEST": ""},  # pytest names the phase there
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "descriptors": set(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": set(threading.enumerate()),
        "children": psutil.Process().children(recursive=True),
    }


def ends(pid: int, seconds: float = 3.0) -> bool:
    """Whether a process that somebody has killed is gone, or about to go."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank_server: RankServer) -> Iterator[None]:
    rank_server.ready()  # it is there before and after
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()  # files of earlier tests, which would be closed at any moment
    before = traces()
    yield
    after = traces()
    for name in ("descriptors", "threads"):  # those of servers that earlier tests began may end meanwhile
        assert after.pop(name) <= before.pop(name), name
    assert after == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked")
def test_a_folder_for_temporary_files_with_signs_of_addresses(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("a?b#c")))
    assert launch(int, devices=2, device="cpu", timeout=60) == [0, 0]


@pytest.mark.usefixtures("forked")
def test_a_rank_waits_until_all_have_joined(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Else one whose function returns at once closes connections that another is still opening."""
    folder = str(tmp_path_factory.mktemp("again"))
    taken = launch(join_with_a_slow_rank, folder, 0.5, devices=2, device="cpu", timeout=60)
    assert min(taken) >= 0.5


def test_every_rank_answers_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    results = launch(surroundings, 7, devices=2, timeout=60)
    assert [r["rank"] for r in results] == [0, 1]
    assert [(r["value"], r["size"], r["sum"]) for r in results] == [(7, 2, 3.0)] * 2
    assert len({os.getpid(), *(r["pid"] for r in results)}) == 3
    assert all(ends(r["helper"]) for r in results)  # what a rank started goes with it
    cores = len(os.sched_getaffinity(0))
    assert all(r["threads"] <= max(1, cores // 2) for r in results)
    assert all(r["interface"] == os.environ.get("GLOO_SOCKET_IFNAME", "lo") for r in results)
    output = capfd.readouterr().out
    assert all(f"hello from rank {number}" in output for number in (0, 1))


@pytest.mark.usefixtures("forked")
def test_large_jobs_and_results_of_local_functions() -> None:
    """More than any pipe holds, both ways, by functions that no rank could import."""
    weights = torch.arange(2_000_000, dtype=torch.float32)

    class Local:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    results = launch(lambda tensor: Local(tensor + 1), weights, devices=2, timeout=60)
    assert all(type(result) is Local and torch.equal(result.tensor, weights + 1) for result in results)


@pytest.mark.parametrize(
    ("how", "words", "cause"),
    [
        ("raise", "rank 1 of 2 raised ValueError: rank one's own mistake", ValueError),
        pytest.param(
            "raise what cannot be loaded",
            "rank 1 of 2 raised Boom: leftright",
            type(None),
            marks=pytest.mark.slow,
        ),
        ("SIGKILL", "rank 1 of 2 was killed by SIGKILL before it returned", type(None)),
        ("exit", "rank 1 of 2 exited with code 0 before it returned", type(None)),
        ("return", r"rank 0 of 2 raised .*Rank\(s\) \[1\] had already returned", RuntimeError),
    ],
)
@pytest.mark.usefixtures("forked")
def test_the_first_cause_is_named(how: str, words: str, cause: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "return":  # nothing else comes
        monkeypatch.setattr("drivetrain.strategies.launching.launcher._ECHO_PATIENCE", 0.5)
    with pytest.raises(StrategyError, match=f"(?s)launch: {words}") as caught:
        launch(fail_on_rank_1, how, devices=2, timeout=60)
    assert type(caught.value.__cause__) is cause
    if how.startswith("raise"):
        assert "in fail_on_rank_1" in str(caught.value)  # the traceback


@pytest.mark.usefixtures("forked")
def test_ctrl_c_ends_ranks_that_do_not_listen(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a script then ends with: `test_launch_scripts.py`."""
    ready, sent = tmp_path_factory.mktemp("ready"), list[float]()

    def interrupt() -> None:
        deadline = time.monotonic() + 50
        while len(list(ready.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        launch(ignore_ctrl_c, ready, devices=2, device="cpu", timeout=60, patience=0.5)
    assert time.monotonic() - sent[0] < 15
    interrupting.join()
    assert len(list(ready.iterdir())) == 2


def test_a_rank_starts_in_a_folder_with_a_module_of_pythons_name(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("own")
    (folder / "json.py").write_text("raise SystemExit(3)\n")
    (folder / "tiny.py").write_text("import os\n\ndef main(order, job, answer):\n    os.write(answer, b'begun')\n")
    monkeypatch.chdir(folder)
    order = {"path": [*sys.path, str(folder)], "argv": [], "rank_main": "tiny"}
    with launcher._file_in_memory("job") as job, launcher._file_in_memory("answer") as answer:
        job.write(json.dumps(order).encode() + b"\n")
        job.flush()
        process = launcher.start_interpreter({**os.environ}, job.fileno(), answer.fileno())
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
        assert os.pread(answer.fileno(), 10, 0) == b"begun"


@pytest.mark.usefixtures("forked")
def test_a_rank_that_never_returns_meets_the_time_limit(tmp_path: Path) -> None:
    start = time.monotonic()
    # On a busy machine rank 0 may not have come so far.
    with pytest.raises(StrategyError, match=r"rank\(s\) \[(0, )?1\] of 2 did not return within timeout=1 s"):
        launch(wait_for_ever, devices=2, timeout=1)
    assert time.monotonic() - start < 10
    (tmp_path / f"drivetrain-stacks-{os.getpid()}.txt").unlink()  # see test_stacks.py


@pytest.mark.parametrize(
    ("function", "arguments", "devices", "words"),
    [
        (print, [threading.Lock()], 2, r"argument 1 \(a lock\) cannot be sent"),
        (threading.Lock().acquire, [0], 2, "the function 'acquire' cannot be sent"),
        (print, [Unloadable()], 1, "could not load the job: ValueError: this object cannot"),
        (lambda: threading.Lock(), [], 1, "returned a lock that cannot be pickled"),
        (lambda: Unloadable(), [], 1, "rank 0 returned a Unloadable, which cannot be loaded here"),
        (print, [], 0, "devices=0"),
    ],
)
@pytest.mark.usefixtures("forked")
def test_what_cannot_be_sent_is_named(function: Any, arguments: list[Any], devices: int, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        launch(function, *arguments, devices=devices, timeout=60)
