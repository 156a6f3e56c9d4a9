"""Data that is larger than its cache, from an object store: against litdata, MosaicML's Streaming and WebDataset.

    python benchmarks/streams.py FOLDER --python PEERS/bin/python [--rounds 5] [--workers 2] [--share 0.34]
        [--latency 0.02] [--rate 125e6] [--only drivetrain litdata streaming webdataset] [--out benchmarks/results]

Each contender has the images of an ImageFolder tree in its own format, with the bytes of the JPEGs as they are, on the
same store: a server of this machine whose answers begin after `--latency` seconds, with up to `--rate` bytes a second
in all (`range_server.py`), by HTTP for Drivetrain and WebDataset, by S3 for the others. Every trial streams two epochs
in a new process with an empty cache, which may keep `--share` of the data (`stream_epochs.py`); WebDataset keeps
nothing. Drivetrain's order is quasi-random; the others shuffle their shards, and among some of them. Measured: images/s
of both epochs (the first from opening the data on, without imports), seconds to the first batch, bytes that left the
store, and the largest memory of all processes (PSS, every 50 ms).

The peers have an environment of their own (`peers.txt`). litdata's client for S3 is configured for a store without a
certificate; a connection of Streaming's is closed before its workers, which are forked, would share it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from drivetrain.common.table import Table
from measuring import Contender, compare, measure, save, summarize
from range_server import Store, serving

SCRIPT = Path(__file__).with_name("stream_epochs.py")
OURS = "drivetrain"
NAMES = (OURS, "litdata", "streaming", "webdataset")
SECONDS = 300.0  # that a trial may take
PAUSE = 0.05
VARIABLES = {  # of the clients of S3
    "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1",
}  # fmt: skip


@contextmanager
def largest_memory(process: int) -> Iterator[list[int]]:
    """Watch a process and its children; the list has the largest sum of their memory, in bytes."""
    found, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(PAUSE):
            with suppress(psutil.Error):
                own = psutil.Process(process)
                total = 0
                for one in (own, *own.children(recursive=True)):
                    with suppress(psutil.Error):
                        total += one.memory_full_info().pss
                found[0] = max(found[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def trial(python: str, name: str, store: Store, limit: int, workers: int) -> dict[str, Any]:
    """Stream two epochs in a new process; return what it printed, its memory, and the bytes that the store sent."""
    with tempfile.TemporaryDirectory() as cache:
        given = (name, f"{store.address}/{name}", cache, str(limit), str(workers))
        process = subprocess.Popen(
            [python, str(SCRIPT), "read", *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | VARIABLES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        limiting = threading.Timer(SECONDS, process.kill)
        limiting.start()
        try:
            version = process.stdout.readline().strip()
            before = store.sent()
            with largest_memory(process.pid) as memory:
                process.stdin.write("\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{name} ended without a result: see its message above.")
            sent = store.sent() - before
            process.stdin.close()
            process.wait(timeout=60)
        finally:
            limiting.cancel()
            process.kill()
    return {**json.loads(line), "version": version, "memory": memory[0], "bytes": sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", help="of the peers' environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.34)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--rate", type=float, default=125e6)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.python is None and options.only != [OURS]:
        parser.error(f"--python is missing. Pass that of the peers' environment, or --only {OURS}.")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as directory:
        sizes = {}
        pythons = {name: sys.executable if name == OURS else options.python for name in options.only}
        for name, python in pythons.items():
            own = Path(directory, name)
            own.mkdir()
            subprocess.run([python, str(SCRIPT), "write", name, str(options.folder), str(own)], check=True)
            sizes[name] = sum(file.stat().st_size for file in own.rglob("*") if file.is_file())
        limit = int(options.share * sizes[OURS])

        def contender(name: str, store: Store) -> Contender:
            def run() -> float:
                found[name].append(trial(pythons[name], name, store, limit, options.workers))
                print(name, found[name][-1], flush=True)
                return float(found[name][-1]["seconds"]["epoch one"])

            return run

        with serving(Path(directory), options.latency, options.rate) as store:
            measure({name: contender(name, store) for name in options.only}, options.rounds)
    trials = {name: each[-options.rounds :] for name, each in found.items()}
    tables: list[Table] = []
    results: dict[str, Any] = {
        "data": {"bytes": sizes, "cache_bytes": limit}, "latency_s": options.latency,
        "rate_bytes_per_s": options.rate, "workers": options.workers,
        "versions": {name: each[0]["version"] for name, each in trials.items()},
    }  # fmt: skip
    for number, what in enumerate(("epoch one", "epoch two")):
        speeds = {n: [one["images"][number] / one["seconds"][what] for one in t] for n, t in trials.items()}
        table, results[what] = compare(what, "images/s", speeds, OURS)
        tables.append(table)
    first = {name: [one["seconds"]["first batch"] for one in each] for name, each in trials.items()}
    table, results["first batch"] = compare("first batch", "s", first, OURS)
    tables.append(table)
    rows = []
    for name, each in trials.items():
        memory, sent = (summarize([one[key] for one in each]) for key in ("memory", "bytes"))
        results.setdefault("memory", {})[name] = {"bytes": memory}
        results.setdefault("sent in two epochs", {})[name] = {"bytes": sent}
        times = sent["median"] / sizes[name]
        rows.append((name, f"{memory['median'] / 1e6:,.0f}", f"{sent['median'] / 1e6:,.1f}", f"{times:.2f}"))
    tables.append(Table(("", "MB of memory", "MB sent in two epochs", "times the data"), rows, figures=True))
    save(tables, results, options.out / "streams.json")


if __name__ == "__main__":
    main()
