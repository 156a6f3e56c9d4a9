"""Measure what it costs the ranks of a machine that a part of a large data set is held out, or balanced, and what it
costs to look at all labels, as at targets that are numbers.

    python benchmarks/selections.py [--rounds 3] [--most 100000000] [--ranks 10000] [--out …]

The files are those of `scale.py`. The first rank of a machine computes the selection, the following ones map it: both
are processes of their own that open the data with `FFCVLoader` and compute their order of an epoch. Memory is the
process's own at its highest, above what it was before, without pages of files, which the ranks share.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from drivetrain.common.table import Table
from drivetrain.loaders.sample_options import SampleOptions
from measuring import save, summarize
from scale import SHARD, answer_of, compute_order, highest, open_last, write_shards

BATCH = 8  # samples of a rank
LABELS = "all labels"
OPTIONS: dict[str, dict[str, Any]] = {
    "val_split=0.01": {"indices": SampleOptions(val_split=0.01)}, "folds=5": {"indices": SampleOptions(folds=5)},
    "balance='class'": {"indices": SampleOptions(balance="class")},
    "balance='class', order='quasi_random'": {"indices": SampleOptions(balance="class"), "order": "quasi_random"},
    LABELS: {},
}  # fmt: skip


def inside(pattern: str, option: str, ranks: int) -> dict[str, float]:
    """Measure, in a process of its own."""
    own = psutil.Process()

    def private() -> int:
        memory = own.memory_info()
        return int(memory.rss - memory.shared)

    before, start = private(), perf_counter()
    with highest(private) as most:
        loader = open_last(pattern, BATCH, ranks, **OPTIONS[option])
        if option == LABELS:
            assert loader.label_facts.finite
        opened = perf_counter()
        compute_order(loader, BATCH)
        ordered = perf_counter()
    loader.close()
    return {"opening": opened - start, "order": ordered - opened, "megabytes": (most[0] - before) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=10**8)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(inside(asked.inside[0], asked.inside[1], asked.ranks)))
        return
    rows, cells = dict[str, object](), []
    for samples in (size for size in (10**power for power in range(6, 10)) if size <= asked.most):
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            pattern = write_shards(Path(scratch), samples, max(samples // SHARD, 1))
            for option in OPTIONS:
                figures: dict[str, list[dict[str, float]]] = {"first": [], "others": []}
                again = [sys.executable, __file__, "--inside", pattern, option, "--ranks", str(asked.ranks)]
                for _ in range(asked.rounds):
                    with tempfile.TemporaryDirectory(dir=scratch) as empty:
                        for kept in figures.values():
                            kept.append(answer_of(again, TMPDIR=empty))
                row = {
                    rank: {name: summarize([each[name] for each in kept]) for name in kept[0]}
                    for rank, kept in figures.items()
                }
                rows[f"{option}, {samples:,}"] = {"samples": samples, "option": option, **row}
                medians = [
                    f"{row[rank][name]['median']:,.{digits}f}"
                    for rank in row for name, digits in (("opening", 2), ("order", 3), ("megabytes", 0))
                ]  # fmt: skip
                cells.append((option, f"{samples:,}", *medians))
    heads = ("option", "samples", *("opening s", "order s", "MB") * 2)
    table = Table(heads, cells, "First three figures: the machine's first rank; then each other one.")
    save([table], {"ranks": asked.ranks, "selections": rows}, asked.out / "selections.json")


if __name__ == "__main__":
    main()
