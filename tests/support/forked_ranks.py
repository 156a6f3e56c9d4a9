"""Ranks without the seconds that each takes to import torch: forked from one process of `rank_server.py`.

What a rank runs, its environment, pipes, session and end are those of an interpreter that `launch` starts. Those are
started in `tests/strategies/launching`, where no test asks for `forked`, and by `make test-all`
(`DRIVETRAIN_RANKS=started`) in the slow tests and in one test of each file.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from places import SUPPORT

STARTED = os.environ.get("DRIVETRAIN_RANKS", "") == "started"
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class ForkedRank:
    """A rank as its parent sees it: the part of `subprocess.Popen` that `launch` uses."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def adopting() -> Iterator[None]:
    """A descendant whose parent ends inside the block becomes a child of this process, which can then wait for it.

    No longer than that: the zombies of others would stay here.
    """
    _adopt(True)
    try:
        yield
    finally:
        _adopt(False)


def _adopt(on: bool) -> None:
    if _prctl(_PR_SET_CHILD_SUBREAPER, on, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class RankServer:
    """One process of `rank_server.py`, started when the first rank is."""

    forked = 0
    """Number of ranks that the tests of this process have forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ready(self) -> None:
        """Start the process, unless it runs."""
        if self._process is None or self._process.poll() is not None:
            self._begin()

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SUPPORT / "rank_server.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def start(self, environment: dict[str, str], job: int, answer: int) -> ForkedRank:
        """As `launcher.start_interpreter`."""
        RankServer.forked += 1
        order = {"environment": environment, "folder": str(Path.cwd())}
        theirs, ours = os.pipe()
        try:
            with self._lock:
                self.ready()
                with adopting():
                    socket.send_fds(self._control, [json.dumps(order).encode()], [theirs, 1, 2, job, answer])
                    pid = int(self._control.recv(100))
        finally:
            os.close(theirs)
        return ForkedRank(pid, os.fdopen(ours, "wb", buffering=0))

    def close(self) -> None:
        if self._process is not None:
            self._control.close()
            self._process.wait(20)
