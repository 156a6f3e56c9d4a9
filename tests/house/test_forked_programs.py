"""A program that is forked (`tests/support/forked_ranks.py`) is what an interpreter would have started."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import RankServer

pytestmark = pytest.mark.process

SHOWS = """
import json, os, signal, sys, tempfile
print(json.dumps([
    sys.argv, sys.path, __name__, globals().get("__file__"), sys.modules["__main__"].__dict__ is globals(), os.getcwd(),
    tempfile.gettempdir(), os.environ["VARIABLE"], sys.stdin.read(), sorted(map(int, os.listdir("/proc/self/fd"))),
    os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
]))
"""
ENDS = [
    "", "import sys; sys.exit(3)", "import sys; sys.exit(-1)", "raise SystemExit('why')", "raise ValueError('wrong')",
    "import signal; signal.raise_signal(signal.SIGINT)", "import signal; signal.raise_signal(signal.SIGKILL)",
    "import atexit, threading\natexit.register(print, 'last')\nthreading.Timer(0.1, print, ['first']).start()",
]  # fmt: skip


@pytest.fixture
def same(rank_server: RankServer) -> Any:
    """Runs a command in a fork and in an interpreter; what it prints and its end are the same."""

    def run(*command: str, **options: Any) -> None:
        def done() -> tuple[int, str, list[str]]:
            process = subprocess.run(
                [sys.executable, *command], capture_output=True, text=True, timeout=60, check=False, **options
            )
            return process.returncode, process.stdout, process.stderr.splitlines()[-1:]

        number = RankServer.forked
        with rank_server.forking():
            forked = done()
        assert RankServer.forked == number + 1
        assert forked == done()

    return run


@pytest.mark.parametrize("command", [("-c", SHOWS, "a"), ("shows.py", "a", "-b"), ("-m", "shows", "a")])
def test_it_finds_what_it_was_given(same: Any, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    environment = os.environ | {"VARIABLE": "ü", "PYTHONPATH": f"{tmp_path}/a:{tmp_path}/b", "TMPDIR": str(tmp_path)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    with (tmp_path / "shows.py").open() as file:
        passed = (os.dup2(file.fileno(), 250),)
        same(*command, cwd=tmp_path, env=environment, input="line\n", start_new_session=True, pass_fds=passed)
        os.close(250)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("code", ENDS)
def test_it_ends_alike(same: Any, code: str) -> None:
    same("-c", code)


@pytest.mark.parametrize(("option", "variables"), [("-I", {}), ("-Xdev", {}), ("-c", {"OMP_NUM_THREADS": "7"})])
def test_what_is_read_at_the_start_needs_an_interpreter(
    rank_server: RankServer, option: str, variables: dict[str, str]
) -> None:
    number, command = RankServer.forked, [sys.executable, option, *(["-c"] * (option != "-c")), "pass"]
    with rank_server.forking():
        subprocess.run(command, env=os.environ | variables, check=True, timeout=60)
    assert RankServer.forked == number


def test_a_process_of_multiprocessing(rank_server: RankServer) -> None:
    number = RankServer.forked
    with rank_server.forking():
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0.01,))
        process.start()
        process.join(60)
    assert (process.exitcode, RankServer.forked) == (0, number + (not sys.flags.dont_write_bytecode))  # -B
