"""Measure loading from a file that is larger than the memory, with and without asking for the samples in advance.

    python benchmarks/beyond_memory.py FOLDER [--gigabytes 5] [--memory 1.6] [--rounds 7] [--workers 2] [--out …]

FOLDER is an ImageFolder tree of JPEGs, which are repeated until the file has that many gigabytes. The loaders run in a
control group with a memory limit (in GB, with the pages of the file that the system keeps), so it needs the right to
create one. Each figure is that of an epoch's first batches, all contenders in turn; the file is read from the disk
again and again. Stock FFCV is left out: an epoch that is left early keeps its thread and memory, and a whole one takes
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from drivetrain.common import machine
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.loaders.conversion.folders import FolderSource
from measuring import Contender, compare, measure, save
from one_shot import BATCH, SIDE

OURS = "FFCVLoader, random"


class Repeated:
    """The images of a folder, `times` times."""

    def __init__(self, folder: Path, times: int) -> None:
        self._source, self._times = FolderSource(folder), times

    def __len__(self) -> int:
        return len(self._source) * self._times

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return self._source.get(index % len(self._source))


def loader(path: Path, workers: int, order: Any, *, ahead: bool) -> FFCVLoader:
    """Return a loader, which asks for samples in advance or not, whatever it would decide by itself."""
    made = FFCVLoader(path, batch_size=BATCH, image_size=SIDE, workers=workers, order=order)
    made.beton.__dict__["exceeds_memory"] = ahead  # the cached property
    return made


def epochs_of(loader: Any, most: int) -> Contender:
    """Return a contender that measures images/s over an epoch's first `most` batches."""

    def epoch() -> float:
        start, count = perf_counter(), 0
        for number, (images, *_) in enumerate(loader):
            count += len(images)
            if number + 1 == most:
                break
        seconds = perf_counter() - start
        if isinstance(loader, FFCVLoader):
            loader.close()  # its memory counts, too
        return count / seconds

    return epoch


def inside(path: Path, workers: int, rounds: int, batches: int) -> dict[str, list[float]]:
    """Measure, in the process that has the memory limit."""
    contenders = {
        f"FFCVLoader, {order}{'' if ahead else ', without read-ahead'}": epochs_of(
            loader(path, workers, order, ahead=ahead), batches
        )
        for order in ("random", "quasi_random")
        for ahead in (True, False)
    }
    return measure(contenders, rounds)


@contextmanager
def limited(gigabytes: float) -> Iterator[Path]:
    """Yield a new control group with this memory limit, inside that of this process."""
    name = "memory.limit_in_bytes"
    group = next(machine.control_groups("memory"), None)
    if group is None:
        group, name = next(machine.control_groups("")), "memory.max"
    made = group / f"drivetrain-{os.getpid()}"
    try:
        made.mkdir()
        (made / name).write_text(str(int(gigabytes * 1e9)))
    except OSError as error:
        sys.exit(f"A control group with a memory limit cannot be created: {error}. Run this as root.")
    try:
        yield made
    finally:
        made.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--memory", type=float, default=1.6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(inside(asked.folder, asked.workers, asked.rounds, asked.batches)))
        return
    with tempfile.TemporaryDirectory(dir=".") as scratch, limited(asked.memory) as group:
        path = Path(scratch) / "large.beton"
        size = sum(file.stat().st_size for file in asked.folder.rglob("*") if file.is_file())
        convert(
            Repeated(asked.folder, int(asked.gigabytes * 1e9 // size) + 1),
            path,
            check="structure",
            progress=False,
        )
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # this process read it without a limit
        again = [sys.executable, __file__, str(path), "--inside", "--workers", str(asked.workers)]
        again += ["--rounds", str(asked.rounds), "--batches", str(asked.batches)]
        command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *again]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        gigabytes = path.stat().st_size / 1e9
    table, rows = compare("loading", "images/s", figures, OURS)
    about = {
        "file_gb": round(gigabytes, 2),
        "memory_limit_gb": asked.memory,
        "batch": BATCH,
        "batches": asked.batches,
    }
    save([table], {**about, "loading": rows}, asked.out / "beyond_memory.json")


if __name__ == "__main__":
    main()
