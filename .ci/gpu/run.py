"""Run the tests and measurements for GPU machines, in stages that continue where they stopped: `make gpu`.

    python .ci/gpu/run.py [--stage NAME …] [--seconds 480] [--state FOLDER] [--results FOLDER] [--photos FOLDER]

A stage is a list of units (a file of tests, a seed, a surgery), each a separate process. When a unit ends, its result
is stored in `STATE/gpu-STAGE.json`, and the unit is not repeated. A unit that was killed or failed counts as not done.
A stage stops within `--seconds`; the next call continues it. When all of its units are done, the file is marked as
complete, gets a summary, and is copied to `--results`. The exit status is 0 if all stages are complete, 75 if another
call is needed, and 1 if a unit failed.

Without `--stage`, all stages run, each until it is complete or fails. With `--rehearse`, everything runs on the CPU
with small data: this tests the commands, and the figures are meaningless.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import stages
from units import ROOT, Stage, StageError, Unit

GRACE = 8.0  # seconds for a unit to exit after SIGTERM: pytest writes its report, ranks end
MARGIN = 1.25  # a unit starts if the time left is at least the longest one's so far, times this
MORE = 75  # EX_TEMPFAIL

Outcome = Literal["complete", "more", "failed"]


class StageFile:
    """The state of one stage: a JSON file that is replaced atomically after each unit.

    Args:
        path: of the file; created at the first change.
        stage: the stage's name, which an existing file must have.
        rehearsal: likewise.

    Raises:
        StageError: if the file is damaged, or belongs to something else.
    """

    def __init__(self, path: Path, stage: str, rehearsal: bool) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "stage": stage, "rehearsal": rehearsal, "complete": False, "units": {}, "not_done": {}
        }  # fmt: skip
        if path.exists():
            self.data = self._read(path, stage, rehearsal)

    @staticmethod
    def _read(path: Path, stage: str, rehearsal: bool) -> dict[str, Any]:
        try:
            data = json.loads(path.read_text())
            fits = data["stage"] == stage and isinstance(data["units"], dict) and isinstance(data["not_done"], dict)
            rehearsed = bool(data["rehearsal"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise StageError(f"{path} is damaged ({error}). Delete it to restart the stage.") from error
        if not fits or rehearsed != rehearsal:
            kind = "a rehearsal" if rehearsed else "a measurement"
            raise StageError(f"{path} is of {kind} of stage {data['stage']!r}. Delete it, or pass another --state.")
        return dict(data)

    def record(self, unit: str, seconds: float, result: dict[str, Any]) -> None:
        """Store the result of a unit.

        Raises:
            StageError: if it was measured on another machine or revision than the units before.
        """
        here, earlier = place(result), self.data.get("place")
        if here is not None:
            if earlier is not None and earlier != here:
                raise StageError(
                    f"{self.path} holds units from {earlier}; {unit!r} was measured on {here}. Figures of two "
                    f"machines or revisions cannot be combined: pass another --state."
                )
            self.data["place"] = here
        self.data["units"][unit] = {"seconds": round(seconds, 1), "result": result}
        self.data["not_done"].pop(unit, None)
        self.write()

    def note(self, unit: str, seconds: float, what: str, end_of_log: str) -> None:
        """Store why a unit is not done, as the last entry."""
        self.data["not_done"].pop(unit, None)
        self.data["not_done"][unit] = {"seconds": round(seconds, 1), "what": what, "end_of_log": end_of_log}
        self.write()

    def write(self) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace(self.path, json.dumps(self.data, indent=1) + "\n")


def place(result: dict[str, Any]) -> list[Any] | None:
    """Return hardware, versions and revision from a result's provenance; None without one."""
    provenance = result.get("provenance")
    if not isinstance(provenance, dict):
        return None
    hardware = provenance.get("hardware", {})
    versions, revision = provenance.get("versions"), provenance.get("git_revision")
    return [hardware.get("gpus"), hardware.get("processor"), versions, revision]


def replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def run_stage(stage: Stage, state: Path, results: Path, seconds: float, rehearsal: bool = False) -> Outcome:
    """Run the units of a stage that are not done, for at most `seconds`.

    Args:
        stage: the stage to run.
        state: folder for the stage's file, and its units' logs and scratch folders.
        results: folder to which the file is copied when the stage is complete.
        seconds: the limit. The first unit of a call may use all of it; the next ones start only if they should fit.
        rehearsal: whether the figures are meaningless.

    Raises:
        StageError: see `StageFile`; and if a unit does not end within the full `seconds`.
    """
    start, file = monotonic(), StageFile(state / f"gpu-{stage.name}.json", stage.name, rehearsal)
    units, not_done = file.data["units"], file.data["not_done"]
    tried = list(not_done)  # least recently tried first, so that each gets its turn
    pending = sorted(
        (unit for unit in stage.units if unit.name not in units),
        key=lambda unit: tried.index(unit.name) if unit.name in not_done else -1,
    )
    failed, ran = False, False
    for unit in pending:
        left = seconds - (monotonic() - start)
        if ran and left < MARGIN * expected(file, stage, unit) + GRACE:
            # Two units that fail, and do not fit into one call, would be repeated forever.
            again = failed and not_done.get(unit.name, {}).get("what", KILLED) != KILLED
            return "failed" if again else "more"
        began = monotonic()
        what, result = run_unit(unit, stage, state, left)
        spent, ran = monotonic() - began, True
        if result is not None:
            file.record(unit.name, spent, result)
            print(f"{stage.name}: {unit.name}: done in {spent:.0f} s", flush=True)
            continue
        file.note(unit.name, spent, what, tail(state / "logs" / f"{stage.name}-{unit.name}.log"))
        print(f"{stage.name}: {unit.name}: {what}", flush=True)
        if what == KILLED:
            if left < 0.9 * seconds:
                return "more"
            raise StageError(f"{stage.name}: {unit.name} did not end within {seconds:g} s. Pass more --seconds.")
        failed = True
    if failed or any(unit.name not in units for unit in stage.units):
        return "failed"
    file.data |= {
        "complete": True,
        "summary": stage.summarize({name: unit["result"] for name, unit in units.items()}),
    }
    file.write()
    results.mkdir(parents=True, exist_ok=True)
    replace(results / file.path.name, file.path.read_text())
    return "complete"


KILLED = "killed at the time limit"


def expected(file: StageFile, stage: Stage, unit: Unit) -> float:
    """Return the seconds that a unit may take: those of its unfinished run, or the longest of the others."""
    names = {one.name for one in stage.units}
    done = [float(one["seconds"]) for name, one in file.data["units"].items() if name in names]
    own = file.data["not_done"].get(unit.name, {}).get("seconds", 0.0)
    return max([*done, float(own)], default=0.0)


def run_unit(unit: Unit, stage: Stage, state: Path, seconds: float) -> tuple[str, dict[str, Any] | None]:
    """Run a unit's process; return its outcome in words, and its result if it has one."""
    log = state / "logs" / f"{stage.name}-{unit.name}.log"
    out = state / "scratch" / stage.name / unit.name
    for folder in (log.parent, out):
        folder.mkdir(parents=True, exist_ok=True)
    for old in out.rglob("*.json"):  # left by a killed call; must not be taken for this one's
        old.unlink()
    command = [word.replace("{out}", str(out)) for word in unit.command]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, **dict(stage.environment)}, process_group=0,
        )  # fmt: skip
        try:
            status = process.wait(max(seconds - GRACE, 0.1))
        except subprocess.TimeoutExpired:
            return KILLED, None
        finally:
            end(process)
    if status:
        return f"failed with exit status {status}; see {log}", None
    try:
        return "done", unit.read(out)
    except (OSError, ValueError, KeyError, StageError) as error:
        return f"left no result ({type(error).__name__}: {error}); see {log}", None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a unit's process group: SIGTERM, then SIGKILL for the rest."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE / 2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(path: Path, characters: int = 3000) -> str:
    """Return the end of a log."""
    try:
        return path.read_text(errors="replace")[-characters:]
    except OSError:
        return ""


def main(arguments: list[str]) -> int:
    """Run the stages, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=stages.NAMES)
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit of a stage in one call")
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs with one folder per class")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU with small data, to test the commands")
    options = parser.parse_args(arguments)
    state, results = options.state.resolve(), options.results.resolve()
    if options.rehearse:
        results = state / "rehearsal"  # kept apart from real results
    outcomes: dict[str, str] = {}
    for name in options.stage or stages.NAMES:
        try:
            stage = stages.make(name, state, options.photos, options.rehearse)
            outcome = run_stage(stage, state, results, options.seconds, options.rehearse)
            while outcome == "more" and not options.stage:
                outcome = run_stage(stage, state, results, options.seconds, options.rehearse)
        except StageError as error:
            print(f"StageError: {error}", file=sys.stderr)
            outcome = "failed"
        outcomes[name] = outcome
        print(f"stage {name}: {outcome}", flush=True)
    if "failed" in outcomes.values():
        return 1
    return MORE if "more" in outcomes.values() else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running unit is ended, too
    sys.exit(main(sys.argv[1:]))
