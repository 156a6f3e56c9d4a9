"""The parent's side of a launch: start the ranks' processes, communicate with them, and leave none behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from .rank_main import BOOT

_ROUND = 0.05  # seconds between two checks whether a rank died without an answer
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
    time: float = 0.0
    """When it failed, on the clock `time.monotonic`, which all processes share."""
    payload: bytes = b""
    """The pickled result or exception; empty for an exception that cannot be pickled."""


@dataclass
class Rank:
    """One child process, and the data sent to and received from it."""

    number: int
    process: subprocess.Popen[bytes]
    orders: int
    answers: int
    unsent: list[memoryview]
    inbox: bytearray = field(default_factory=bytearray)
    report: Report | None = None
    heard: float = 0.0
    """When its last byte arrived, by `time.monotonic`."""

    def send(self) -> bool:
        """Write what the pipe accepts; return whether there is more to write."""
        try:
            self.unsent[0] = self.unsent[0][os.write(self.orders, self.unsent[0]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # it died, and its report has the reason
            self.unsent.clear()
            return False
        if not self.unsent[0]:
            del self.unsent[0]
        return bool(self.unsent)

    def receive(self) -> bool:
        """Read what is available; return whether more may come."""
        try:
            part = os.read(self.answers, 1 << 20)
        except BlockingIOError:
            return True
        self.inbox += part
        self.heard = time.monotonic()
        line_end = self.inbox.find(b"\n")
        if line_end >= 0 and self.report is None:
            header = json.loads(self.inbox[:line_end])
            size = header.pop("bytes")
            if len(self.inbox) - line_end - 1 == size:
                payload = bytes(memoryview(self.inbox)[line_end + 1 :])
                self.report = Report(**header, payload=payload)
                self.inbox = bytearray()
        return bool(part) and self.report is None

    def exited(self) -> bool:
        """Whether the process has ended. It is not reaped, so that its process id is not reused."""
        return not _is_running(self.process.pid)

    def look_for_death(self) -> None:
        """Record a report if the process ended without one."""
        if self.report is not None or not self.exited():
            return
        while self.report is None:  # its last data may still be in the pipe
            before = len(self.inbox)
            if not self.receive() or len(self.inbox) == before:
                break
        if self.report is None:
            self.report = Report("died", _cause_of_death(self.process.pid), time=time.monotonic())

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # reaped elsewhere: SIGCHLD is ignored, or another thread waits
        return False


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
        self._device, self._timeout = device, timeout
        self._job = job
        self._devices = devices
        self._selector = selectors.DefaultSelector()
        self._directory = tempfile.TemporaryDirectory(prefix="drivetrain-")

    def __enter__(self) -> Ranks:
        try:
            for number in range(self._devices):
                self._start(number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, number: int) -> None:
        answers, answer = os.pipe()
        try:
            process = start_interpreter(_environment(number, self._devices), answer)
        except BaseException:
            os.close(answers)
            raise
        finally:
            os.close(answer)
        assert process.stdin is not None
        order = {
            "path": [str(entry) for entry in sys.path],
            "argv": sys.argv,
            "rank_main": f"{__package__}.rank_main",
            "directory": self._directory.name,
            "device": self._device,
            "timeout": self._timeout,
            "answer": answer,
            "bytes": len(self._job),
        }
        unsent = [memoryview(json.dumps(order).encode() + b"\n"), memoryview(self._job)]
        rank = Rank(number, process, process.stdin.fileno(), answers, unsent)
        self.all.append(rank)
        os.set_blocking(rank.orders, False)
        os.set_blocking(rank.answers, False)
        self._selector.register(rank.orders, selectors.EVENT_WRITE, (rank, rank.send))
        self._selector.register(rank.answers, selectors.EVENT_READ, (rank, rank.receive))

    def pump(self) -> None:
        """Transfer data for a moment, then record reports for the ranks that have died."""
        for key, _ in self._selector.select(_ROUND):
            more: Callable[[], bool] = key.data[1]
            if not more():
                self._selector.unregister(key.fd)
        if not self._selector.get_map():
            time.sleep(_ROUND)  # every pipe is done: nothing to select on
        for rank in self.all:
            rank.look_for_death()

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
        self._selector.close()
        for rank in self.all:
            os.close(rank.answers)
            if rank.process.stdin is not None:
                rank.process.stdin.close()
            rank.process.wait()
        self.all = []
        self._directory.cleanup()


def start_interpreter(environment: dict[str, str], answer: int) -> subprocess.Popen[bytes]:
    """Start a rank's process, which reads its order from its standard input and inherits the descriptor `answer`."""
    return subprocess.Popen(
        [sys.executable, "-c", BOOT],
        stdin=subprocess.PIPE,
        pass_fds=[answer],
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
