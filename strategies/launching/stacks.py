"""The Python stacks of ranks in one file: when one hangs, and at SIGQUIT.

`faulthandler` writes a rank's stacks in C, whatever its Python code is doing, to a file of its own: those of several
ranks would interleave line by line. What collects them appends whole blocks to the file of the job.
"""

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ...common.signals import is_unhandled

PATIENCE = 2.0  # seconds that ranks have to write
_ROUND = 0.05  # seconds between two looks whether they have


def append(path: Path | None, why: str, texts: Mapping[str, str]) -> Path | None:
    """Append the stacks of ranks, by name, to a file (None: of this process, in the folder for temporary files), and
    return it; None if it cannot be written, which must not hide why a job ends."""
    path = path or Path(tempfile.gettempdir(), f"drivetrain-stacks-{os.getpid()}.txt")
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    blocks = [f"--- {name}\n{text.rstrip()}\n" for name, text in texts.items()]
    whole = "\n".join([f"=== {socket.gethostname()}, {now}: {why}", *blocks, ""])
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(whole.encode())
    except OSError:
        return None
    return path


def note(path: Path | None) -> None:
    """Print where stacks are that a signal asked for."""
    print(f"Stacks are in {path}" if path else "Stacks could not be written", file=sys.stderr, flush=True)


@contextmanager
def written_at_sigquit(file: IO[bytes]) -> Iterator[None]:
    """Inside the block, SIGQUIT writes the stacks of all threads to `file`, unless the signal has a handler already."""
    if not is_unhandled(signal.SIGQUIT):
        yield
        return
    faulthandler.register(signal.SIGQUIT, file=file, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGQUIT)


def write_own(directory: str, rank: int) -> None:
    """In a rank that `launch` has started, for the rest of its process: write stacks at SIGQUIT, and at a fatal error
    such as a segmentation fault. The file appears when the signal can no longer end the process."""
    path = _own(directory, rank)
    file = path.with_suffix(".new").open("wb")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGQUIT, file=file, all_threads=True)
    path.with_suffix(".new").rename(path)
    _FILES.append(file)


_FILES: list[IO[bytes]] = []  # that stay open


def _own(directory: str, rank: int) -> Path:
    return Path(directory, f"stacks-{rank}")


class Stacks:
    """The stacks of the ranks that `launch` has started, in the file `path` of the job; they write to `directory`."""

    def __init__(self, path: Path | None, directory: str) -> None:
        self._path, self._directory = path, directory
        self._taken: dict[int, int] = {}  # bytes of each rank that have been read
        self._sizes: dict[int, int] = {}  # at the last look
        self.wanted = False  # set by SIGQUIT to this process

    def look(self, pids: Mapping[int, int]) -> None:
        """Collect the stacks of these ranks if they are wanted, and those that a rank has written by itself."""
        if self.wanted:
            self.wanted = False
            note(self.collect("SIGQUIT", pids))
        sizes = self._now(pids)
        for rank, size in sizes.items():
            if size == self._sizes.get(rank) and size > self._taken.get(rank, 0):  # it is complete
                note(append(self._path, "SIGQUIT", {_name(rank, pids[rank]): self.take(rank)}))
        self._sizes = sizes

    def collect(self, why: str, pids: Mapping[int, int], known: Mapping[int, str] | None = None) -> Path | None:
        """Append the stacks of running ranks, and what is `known` of others; return the file."""
        before, sizes, end = self._now(pids), dict[int, int](), time.monotonic() + PATIENCE
        for rank, pid in pids.items():
            if _own(self._directory, rank).exists():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGQUIT)
        while time.monotonic() < end:
            time.sleep(_ROUND)
            last, sizes = sizes, self._now(pids)
            if sizes == last and all(sizes[rank] > before[rank] for rank in pids):
                break
        silent = f"No answer within {PATIENCE:g} s: the process is stopped, or has just begun."
        texts = {_name(rank, pid): self.take(rank) or silent for rank, pid in pids.items()}
        return append(self._path, why, {f"rank {rank}": text for rank, text in (known or {}).items()} | texts)

    def take(self, rank: int) -> str:
        """Return what a rank has written since the last call."""
        try:
            text = _own(self._directory, rank).read_bytes()
        except OSError:
            return ""
        begin, self._taken[rank] = self._taken.get(rank, 0), len(text)
        return text[begin:].decode(errors="replace")

    def _now(self, pids: Mapping[int, int]) -> dict[int, int]:
        return {rank: self._size(rank) for rank in pids}

    def _size(self, rank: int) -> int:
        try:
            return _own(self._directory, rank).stat().st_size
        except OSError:
            return 0


def _name(rank: int, pid: int) -> str:
    return f"rank {rank}, process {pid}"
