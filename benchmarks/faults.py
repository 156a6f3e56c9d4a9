"""What happens to a job on two machines when something fails: seconds, and steps that are trained again.

    python benchmarks/faults.py [--rounds 3] [--only WORDS] [--out benchmarks/results]

Runs the tests of such failures, which record their times: two agents of torchrun, each in namespaces of its own with a
network between them, one rank per machine, a small model, 50 ms a step, and a checkpoint after each. The seconds of a
restart are those from the last step before it to the first one after it, the others those that the row names, mostly
imports of torch. `--only` selects tests, as `pytest -k` does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from drivetrain.common.table import Table
from measuring import save, summarize

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/pipeline/runs/test_agents.py", "tests/pipeline/runs/test_network.py")


def recorded(only: str) -> dict[str, list[float]]:
    """Run the tests once; return what they have recorded."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-o", "junit_family=xunit1", "-p", "no:xdist",
                   f"--junitxml={report}", *(["-k", only] if only else []), *TESTS]  # fmt: skip
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit("A test has failed: see above. Nothing is written.")
        found: dict[str, list[float]] = {}
        for one in ET.parse(report).iter("property"):
            found.setdefault(one.attrib["name"], []).append(float(one.attrib["value"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    values: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, found in recorded(options.only).items():
            values.setdefault(name, []).extend(found)
    events: dict[str, dict[str, Any]] = {}
    for name, found in values.items():
        what, _, until = name.partition(": ")
        row = events.setdefault(what, {"steps repeated": None})
        if until == "steps repeated":
            row[until] = summarize(found)
        else:
            row |= {"until": until.removeprefix("until "), "seconds": summarize(found)}
    cells = []
    for what, row in events.items():
        seconds, steps = row["seconds"], row["steps repeated"]
        spread = f"{min(seconds['values']):.1f} to {max(seconds['values']):.1f}"
        again = "" if steps is None else f"{steps['median']:g}"
        cells.append((what, row["until"], f"{seconds['median']:.1f}", spread, again))
    tables = [Table(("what happens", "seconds until", "median", "range", "steps repeated"), cells)]
    save(tables, {"rounds": options.rounds, "events": events}, options.out / "faults.json")


if __name__ == "__main__":
    main()
