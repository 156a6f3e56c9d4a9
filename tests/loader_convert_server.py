"""Converts slowly on purpose, each time in a process forked for it, so that tests can kill it in the middle.

One line of stdin, `OUT STDERR LIMIT`, starts a conversion to OUT with stderr in a file and a limit on the size
of files (0: none). Answers: its process id at once, its exit status when it ended.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

import numpy as np
from drivetrain.errors import DrivetrainError
from drivetrain.loaders import convert


class Slow:
    """60 small pictures, 20 ms each."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(0.02)
        return np.full((64, 64, 3), index, np.uint8), index


def child(out: str, stderr: str, limit: int) -> int:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        convert(Slow(), out, workers=2)
    except DrivetrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        out, stderr, limit = line.split()
        pid = os.fork()
        if pid == 0:
            os._exit(child(out, stderr, int(limit)))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
