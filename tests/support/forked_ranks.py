"""Python programs without the seconds that each takes to import torch: forked from one process of `rank_server.py`.

Arguments, environment, descriptors and end are those of an interpreter that is started in a session of its own. Forked
are the ranks of `launch`, and whatever a test with the fixture `forked_programs` starts. Interpreters are started in
`tests/strategies/launching`, where no test asks for `forked`, and by `make test-all` (`DRIVETRAIN_RANKS=started`) in
the slow tests and in one test of each file.
"""

import _posixsubprocess
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from drivetrain.strategies.launching.launcher import start_interpreter
from places import SUPPORT

STARTED = os.environ.get("DRIVETRAIN_RANKS", "") == "started"
_ENVIRONMENT = dict(os.environ)
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def _is_program(command: list[str]) -> bool:
    """Whether it is Python's, without options of the interpreter, and nothing that stays for later tests."""
    program, first = (*command, "-")[:2]
    python = program == sys.executable and (first in ("-c", "-m") or not first.startswith("-"))
    ours = python or program == str(Path(sys.executable).with_name("drivetrain"))
    return ours and not re.search("rank_server|resource_tracker", " ".join(command))


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter and its libraries read once: other values need another process."""
    names = {name for name, value in environment.items() if value} - {"PYTHONPATH"}
    return {name: environment[name] for name in names if name.startswith(("PYTHON", "OMP_", "MALLOC_", "LD_"))}


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
    """One process of `rank_server.py`, started when the first program is."""

    forked = 0
    """Number of programs that the tests of this process have forked."""

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
                [sys.executable, str(SUPPORT / "rank_server.py"), str(theirs.fileno())], env=_ENVIRONMENT,
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def start(self, *given: Any) -> subprocess.Popen[bytes]:
        """As `launcher.start_interpreter`."""
        with self.forking():
            return start_interpreter(*given)

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Inside the block, what `subprocess` and `multiprocessing` would start is forked."""
        start = _posixsubprocess.fork_exec

        def fork_exec(*given: Any) -> int:
            command, (kept, folder, lines), ends = [*map(os.fsdecode, given[0])], given[3:6], given[6:12]
            environment = dict(os.environ if lines is None else (os.fsdecode(line).split("=", 1) for line in lines))
            other = given[21] is not None or _read_at_start(environment) != _read_at_start(_ENVIRONMENT)  # preexec_fn
            if other or not _is_program(command):
                return int(start(*given))
            pipes = enumerate((ends[0], ends[3], ends[5]))  # -1: none
            places = {number: number if end == -1 else end for number, end in pipes}
            places |= {number: number for number in kept if number != given[13]}  # where errors of exec are written
            order = {
                "command": command, "environment": environment, "places": [*places],
                "folder": str(Path(os.fsdecode(folder or ".")).absolute()),
                "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            }  # fmt: skip
            RankServer.forked += 1
            with self._lock:
                self.ready()
                with adopting():
                    socket.send_fds(self._control, [json.dumps(order).encode()], [*places.values()])
                    return int(self._control.recv(100))

        with (
            mock.patch.object(_posixsubprocess, "fork_exec", fork_exec),
            mock.patch.object(subprocess, "_fork_exec", fork_exec),
        ):
            yield

    def close(self) -> None:
        if self._process is not None:
            self._control.close()
            self._process.wait(20)
