"""The parent's side of a launch: start the ranks' processes, take their answers, and leave no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO, Any, Self

from .rank_main import BOOT, COMPLETE

_ROUND = 0.02  # seconds between two looks for answers, and for ranks that died without one
_EXIT_PATIENCE = 10.0  # seconds a rank that has answered may take to exit by itself


@dataclass(frozen=True)
class Report:
    """How a rank ended."""

    kind: str
    """`"result"`, `"error"` (it raised) or `"died"` (it ended without an answer)."""
    what: str
    """The end of a sentence that begins with "rank 1 of 2"."""
    traceback: str = ""
    echo: bool = False
    """Whether it is probably a consequence of another rank's end."""
    time: float = field(default_factory=time.monotonic)
    """When it failed, on the clock `time.monotonic`, which all processes share."""


class Rank:
    """One child process, and the file in memory for its answer."""

    def __init__(self, number: int, devices: int, job: int) -> None:
        self.number = number
        self.report: Report | None = None
        self.heard = 0.0
        """When its answer last grew, by `time.monotonic`."""
        self._size = 0  # of the answer so far, in bytes
        self._file = _file_in_memory("drivetrain-answer")
        try:
            self.process = start_interpreter(_environment(number, devices), job, self._file.fileno())
        except BaseException:
            self._file.close()
            raise

    def look(self) -> None:
        """Record how the process ended, if it has answered, or ended without an answer."""
        if self.report is not None:
            return
        ended = self.exited()  # before the answer is looked for: it may come in between
        if os.pread(self._file.fileno(), len(COMPLETE), 0) == COMPLETE:
            self._file.seek(len(COMPLETE))
            self.report = Report(**pickle.load(self._file))
        elif ended:
            self.report = Report("died", _cause_of_death(self.process.pid))
        elif (size := os.fstat(self._file.fileno()).st_size) != self._size:
            self._size, self.heard = size, time.monotonic()

    def load(self) -> Any:
        """Return the result or exception of a rank that has answered; call it once."""
        return pickle.load(self._file)

    def exited(self) -> bool:
        """Whether the process has ended. It is not reaped, so that its process id is not reused."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped elsewhere: SIGCHLD is ignored, or another thread waits
            return True

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Reap the process, which has been killed."""
        self._file.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def _file_in_memory(name: str) -> IO[bytes]:
    """Return a file that only processes which inherit its descriptor see, and that takes no disk."""
    # Not `os.memfd_create`: a Python that was built for older systems lacks it.
    descriptor = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), 1)  # MFD_CLOEXEC
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return os.fdopen(descriptor, "w+b")


def _cause_of_death(pid: int) -> str:
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        status = None
    if status is None:
        return "ended before it returned"
    if status.si_code == os.CLD_EXITED:
        return f"exited with code {status.si_status} before it returned"
    name = signal.Signals(status.si_status).name
    hint = " (often the system ran out of memory: use fewer devices or a smaller batch)"
    return f"was killed by {name} before it returned" + (hint if name == "SIGKILL" else "")


class Ranks:
    """`devices` running ranks; leaving the `with` block kills and reaps those that are still running."""

    def __init__(self, job: bytes, devices: int, device: str | None, timeout: float) -> None:
        self.all: list[Rank] = []
        self._directory = tempfile.TemporaryDirectory(prefix="drivetrain-")
        order = {
            "path": [str(entry) for entry in sys.path],
            "argv": sys.argv,
            "rank_main": f"{__package__}.rank_main",
            "directory": self._directory.name,
            "device": device,
            "timeout": timeout,
        }
        try:
            with _file_in_memory("drivetrain-job") as file:
                file.write(json.dumps(order).encode() + b"\n")
                file.write(job)
                file.flush()
                for number in range(devices):
                    self.all.append(Rank(number, devices, file.fileno()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def look(self) -> None:
        """Wait for a moment, then record which ranks have answered or died."""
        time.sleep(_ROUND)
        for rank in self.all:
            rank.look()

    def signal(self, number: int) -> None:
        """Send a signal to every rank that has not answered yet."""
        for rank in self.all:
            if rank.report is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def wait_for_exit(self) -> None:
        """Give ranks that have answered some time to run their exit handlers."""
        deadline = time.monotonic() + _EXIT_PATIENCE
        while time.monotonic() < deadline and not all(rank.exited() for rank in self.all):
            time.sleep(0.01)

    def close(self) -> None:
        """Kill, reap and remove everything."""
        for rank in self.all:
            rank.kill()
        for rank in self.all:
            rank.close()
        self.all = []
        self._directory.cleanup()


def start_interpreter(environment: dict[str, str], job: int, answer: int) -> subprocess.Popen[bytes]:
    """Start a rank's process, which inherits the descriptors of its job and of its answer."""
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, str(job), str(answer)],
        stdin=subprocess.PIPE,
        pass_fds=[job, answer],
        env=environment,
        start_new_session=True,  # the terminal's Ctrl-C reaches the parent only
        bufsize=0,
    )


def _environment(number: int, devices: int) -> dict[str, str]:
    environment = {
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": str(devices),
    }
    # All ranks are on this machine; looking up its host name can hang or return a foreign address.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
