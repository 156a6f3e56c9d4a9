"""Run all tests but those that need a GPU, in phases, and continue where an earlier call was stopped: `make test-all`.

    python .ci/test_all.py [--keep]

The outcome of each test is appended to `.build/test-all/TREE.jsonl` as soon as it has ended
(`tests/support/outcomes.py`), where TREE is a hash of the repository's files. A call runs the tests without an outcome
and those that failed. If a file changes, everything is run again; with `--keep`, the outcomes of the newest other tree
are taken over, and counted.

The tests of `make test` run as they do there. The slow ones start each rank in an interpreter of its own, as users do,
instead of forking it. So does one test of each other file that forked ranks, the shortest, when it runs once more.

The exit status is 0 if every test has passed or was skipped with a reason, 130 after Ctrl-C, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".build/test-all"
LIST = "list"  # the phase that lists the tests
GRACE = 60.0  # seconds for pytest to end after Ctrl-C, and for an earlier call to end
SHOWN = 15  # of the slowest
KEPT = 5  # journals
PR_SET_PDEATHSIG = 1
UNTIMED = {"call": 0.0, "at": 0.0}  # of entries that no call of pytest has written


@dataclass(frozen=True)
class Phase:
    """One run of pytest.

    Attributes:
        name: unique.
        started: whether ranks start in interpreters of their own.
        processes: of pytest-xdist; 0: none.
        chooses: returns whether a test with these markers belongs to it; None: the phase repeats a sample.
    """

    name: str
    started: bool
    processes: int
    chooses: Callable[[set[str]], bool] | None


PHASES = (
    Phase("default", False, 2, lambda marks: not marks & {"slow", "alone"}),
    Phase("alone", False, 0, lambda marks: marks & {"slow", "alone"} == {"alone"}),
    Phase("slow", True, 2, lambda marks: marks & {"slow", "alone"} == {"slow"}),
    Phase("slow, alone", True, 0, lambda marks: marks >= {"slow", "alone"}),
    Phase("started ranks", True, 2, None),
)


@dataclass
class Journal:
    """What is known about the tests of one tree.

    Attributes:
        path: of the file.
        listed: whether all tests are in `marks`.
        marks: the markers of each test.
        outcomes: the last outcome of each test, by phase and test.
        began: tests that began and have no outcome yet, by phase.
        seconds: the duration of all calls of pytest.
    """

    path: Path
    listed: bool = False
    marks: dict[str, set[str]] = field(default_factory=dict)
    outcomes: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    began: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: float = 0.0

    def read(self) -> None:
        """Read the file again. Its last line may be incomplete."""
        self.listed, self.marks, self.outcomes, self.began = False, {}, {}, defaultdict(set)
        calls: dict[float, float] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:  # empty, or the process was killed while it wrote
                continue
            if "listed" in entry:
                self.listed = True
                continue
            calls[entry["call"]] = entry["at"]
            self._take(entry)
        self.seconds = sum(calls.values())

    def _take(self, entry: dict[str, Any]) -> None:
        phase, test = entry["phase"], entry["test"]
        if phase == LIST:
            self.marks[test] = set(entry["marks"])
        elif entry["outcome"] == "began":
            self.began[phase].add(test)
        else:
            self.began[phase].discard(test)
            self.outcomes[phase, test] = entry

    def write(self, entries: Iterable[dict[str, Any]]) -> None:
        """Append lines, after a line break in case that the last one is incomplete, and read the file."""
        with self.path.open("a") as file:
            file.write("\n" + "".join(f"{json.dumps(entry)}\n" for entry in entries))
        self.read()

    def of(self, phase: Phase) -> list[str]:
        """Return the tests of a phase."""
        if phase.chooses is not None:
            return [test for test, marks in self.marks.items() if "gpu" not in marks and phase.chooses(marks)]
        shortest: dict[str, dict[str, Any]] = {}
        slow = {file_of(test) for test, marks in self.marks.items() if "slow" in marks}
        for entry in self.outcomes.values():
            name = file_of(entry["test"])
            if entry["outcome"] == "passed" and entry["ranks"] and entry["test"] in self.marks and name not in slow:
                shortest[name] = min(shortest.get(name, entry), entry, key=lambda one: float(one["seconds"]))
        return [entry["test"] for entry in shortest.values()]

    def left(self, phase: Phase) -> list[str]:
        """Return those of its tests that have not passed, and were not skipped."""
        known = {test: self.outcomes.get((phase.name, test)) for test in self.of(phase)}
        return [test for test, entry in known.items() if entry is None or entry["outcome"] == "failed"]


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.split("::")[0]


def tree() -> str:
    """Return a hash of the repository's files, those that git ignores left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.split(b"\0")
    digest = hashlib.sha256(sys.version.encode())
    for name in sorted(set(names)):
        path = ROOT / os.fsdecode(name)
        if path.is_file():
            content = path.read_bytes()
            digest.update(b"%s\0%d\0" % (name, len(content)) + content)
    return digest.hexdigest()[:12]


def pytest(arguments: list[str], order: dict[str, str], *, started: bool, quiet: bool = False) -> int:
    """Run pytest, which is interrupted if this process ends, and return its exit status.

    Raises:
        KeyboardInterrupt: after it has ended.
    """
    ranks = "started" if started else ""
    environment = {**os.environ, "DRIVETRAIN_OUTCOMES": json.dumps(order), "DRIVETRAIN_RANKS": ranks}
    prctl = ctypes.CDLL(None).prctl

    # In a group of its own, so that Ctrl-C reaches it once: from here.
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=environment, pass_fds=[LOCK], process_group=0,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if quiet else None,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGINT),
    )  # fmt: skip
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def list_tests(journal: Journal) -> int:
    """Note all tests in the journal, and return pytest's exit status."""
    order = {"file": str(journal.path), "phase": LIST, "tests": ""}
    status = pytest(["--collect-only", "-q"], order, started=False, quiet=True)
    if status:  # say why
        return pytest(["--collect-only", "-qq"], {**order, "file": os.devnull}, started=False)
    journal.write([{"listed": True}])
    return 0


def run(phase: Phase, journal: Journal) -> None:
    """Run what is left of a phase; again without a test that ends the process."""
    lost, ends = set[str](), True
    while ends and (left := [test for test in journal.left(phase) if test not in lost]):
        wanted = STATE / "wanted.json"
        wanted.write_text(json.dumps(left))
        journal.write([])
        print(f"test-all: {phase.name}: {len(left):,} of {len(journal.of(phase)):,} tests", flush=True)
        files = sorted({file_of(test) for test in left})
        order = {"file": str(journal.path), "phase": phase.name, "tests": str(wanted)}
        processes = ["-n", str(phase.processes), "--dist", "loadfile"] if phase.processes else []
        status = pytest([*processes, "-q", *files], order, started=phase.started)
        journal.read()
        ends = status not in (0, 1) and bool(journal.began[phase.name] - lost)
        if ends:
            lost |= journal.began[phase.name]
            why = f"pytest ended with status {status} in this test"
            end = {"outcome": "failed", "why": why, "seconds": 0.0, "ranks": 0, **UNTIMED}
            journal.write({"phase": phase.name, "test": test, **end} for test in sorted(lost))


def journals() -> list[Path]:
    """Return the files of all trees, the newest last."""
    return sorted(STATE.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)


def take_over(journal: Journal) -> None:
    """Copy the outcomes of the newest other tree, of tests that this one has, too."""
    others = [path for path in journals() if path != journal.path]
    if not others:
        return
    old = Journal(others[-1])
    old.read()
    journal.write(
        {**entry, **UNTIMED, "tree": others[-1].stem}
        for key, entry in old.outcomes.items()
        if key not in journal.outcomes and entry["test"] in journal.marks
    )


def rows(title: str, lines: list[str]) -> None:
    """Print lines below a title, if there are any."""
    if lines:
        print(f"\n{title}\n" + "\n".join(f"  {line}" for line in lines))


def slowest(entries: Iterable[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> list[str]:
    """Return lines with the longest times, added up by name."""
    times = defaultdict[str, float](float)
    for entry in entries:
        times[name(entry)] += entry["seconds"]
    longest = sorted(times.items(), key=lambda pair: -pair[1])[:SHOWN]
    return [f"{time:7.1f} s  {what}" for what, time in longest]


def skips(entries: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each reason, with the number of tests and the first one."""
    tests = defaultdict[str, list[str]](list)
    for entry in entries:
        tests[entry["why"]].append(entry["test"])
    return [f"{len(names):4} {why} ({names[0]}{', …' if len(names) > 1 else ''})" for why, names in tests.items()]


def report(journal: Journal, key: str) -> bool:
    """Print what was slow, skipped, failed and never ran. Return whether nothing failed and everything ran."""
    wanted = [(phase.name, test) for phase in PHASES for test in journal.of(phase)]
    known = [journal.outcomes[pair] for pair in wanted if pair in journal.outcomes]
    never = [pair for pair in wanted if pair not in journal.outcomes]
    skipped, failed = ([one for one in known if one["outcome"] == kind] for kind in ("skipped", "failed"))
    rows("Time of the tests of each phase, added up:", slowest(known, lambda one: one["phase"]))
    rows("Slowest files:", slowest(known, lambda one: file_of(one["test"])))
    rows("Slowest tests:", slowest(known, lambda one: f"{one['test']} ({one['phase']})"))
    rows("Skipped:", skips(skipped))
    rows("Never ran:", [f"{test} ({name})" for name, test in never[:SHOWN]] + ["…"] * (len(never) > SHOWN))
    rows("Failed:", [f"{one['test']} ({one['phase']}): {headline(one['why'])}" for one in failed])
    kept = sum("tree" in one for one in known)
    minutes, seconds = divmod(round(journal.seconds), 60)
    counts = (
        f"{len(known) - len(skipped) - len(failed):,} passed, {len(skipped):,} skipped, {len(failed):,} failed, "
        f"{len(never):,} never ran"
    )
    others = f"; {kept:,} outcomes are of other files" if kept else ""
    print(f"\ntest-all: {counts}, in {minutes} min {seconds} s (files {key}{others})", flush=True)
    return bool(wanted) and not failed and not never


def headline(why: str) -> str:
    """Return the error of a failure: pytest's first line that begins with E, or the last one."""
    lines = [line for line in why.splitlines() if line.strip()] or [""]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return (errors or [lines[-1]])[0][:200]


def lock() -> int:
    """Return a file descriptor that only one call has, and the pytest that it started. Wait for an earlier one's.

    Raises:
        SystemExit: if another call is running.
    """
    descriptor = os.open(STATE / "lock", os.O_RDWR | os.O_CREAT)
    until = monotonic() + GRACE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if monotonic() > until:
                raise SystemExit("test-all: another call is running in this clone. Wait for it, or end it.") from None
            sleep(0.5)


LOCK = -1


def main(arguments: list[str]) -> int:
    """Run what is left, print the report, and return the exit status."""
    global LOCK
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="take over the outcomes of the files before a change")
    options = parser.parse_args(arguments)
    STATE.mkdir(parents=True, exist_ok=True)
    LOCK = lock()
    key = tree()
    journal = Journal(STATE / f"{key}.jsonl")
    journal.read()
    for old in journals()[:-KEPT]:
        old.unlink()
    try:
        if not journal.listed and (status := list_tests(journal)):
            return status
        if options.keep:
            take_over(journal)
        for phase in PHASES:
            run(phase, journal)
    except KeyboardInterrupt:
        journal.read()
        report(journal, key)
        print("test-all: interrupted; the next call continues")
        return 130
    whole = report(journal, key)
    if tree() != key:
        print("test-all: files of the repository changed meanwhile; run it again")
        return 1
    return 0 if whole else 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
