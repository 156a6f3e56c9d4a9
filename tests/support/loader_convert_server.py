"""Converts slowly on purpose, each time in processes forked for it, so that tests can kill them in the middle.

One line of stdin, `OUT STDERR LIMIT RENAMES COUNT`, starts conversions to OUT with stderr in a file, a limit on the
size of files (0: none), and after so many renames a SIGKILL (-1: none); so many at a time, of different pictures.
Answers: their process ids at once, their exit statuses when all have ended.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
from drivetrain.common.errors import DrivetrainError
from drivetrain.loaders import convert


class Slow:
    """60 small pictures, `pause` seconds each; labels and layout are the same for any `shade`."""

    def __init__(self, shade: int, pause: float) -> None:
        self.shade, self.pause = shade, pause

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(self.pause)
        return np.full((64, 64, 3), index + self.shade, np.uint8), index


def die_after(renames: int) -> None:
    """Kill this process when a conversion has renamed that many of its files, and is about to rename the next."""
    rename, done = Path.replace, 0

    def replace(path: Path, target: Path) -> Path:
        nonlocal done
        if done == renames:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        return rename(path, target)

    Path.replace = replace


def child(out: str, stderr: str, limit: int, renames: int, number: int) -> int:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if renames >= 0:
        die_after(renames)
    try:
        classes = [f"{number}-{label}" for label in range(60)]
        convert(Slow(number, 0.012 if renames < 0 else 0.0), out, workers=2, classes=classes)
    except DrivetrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    for line in sys.stdin:
        out, stderr, *numbers = line.split()
        limit, renames, count = map(int, numbers)
        pids = []
        for number in range(count):
            pids.append(os.fork())
            if pids[-1] == 0:
                os._exit(child(out, stderr, limit, renames, number))
        print(*pids, flush=True)
        print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
