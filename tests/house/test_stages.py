"""The runner of GPU stages, with real processes and without a GPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from places import GPU, ROOT, load_script
from process_state import wait_until, wait_until_ended

pytestmark = pytest.mark.process

run, stages = load_script("run", GPU), load_script("stages", GPU)

WORK = """
import json, pathlib, sys, time
out, marks, number, seconds, place = sys.argv[1:]
with open(marks, "a") as file:
    file.write(number + "\\n")
time.sleep(float(seconds))
facts = {"hardware": {"gpus": [place], "processor": "p"}, "versions": {}, "git_revision": "r"}
pathlib.Path(out, "result.json").write_text(json.dumps({"number": int(number), "provenance": facts}))
"""


FAILS = f"{WORK}\nraise SystemExit(3)"


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


def unit(folder: Path, number: int, seconds: float = 0.0, work: str = WORK, place: str = "H100") -> Any:
    command = (sys.executable, "-c", work, "{out}", str(folder / "marks"), str(number), str(seconds), place)
    return run.Unit(f"unit-{number}", command, read)


def stage(*units: Any) -> Any:
    return run.Stage("trial", units, lambda results: {"sum": sum(one["number"] for one in results.values())})


def three(folder: Path, seconds: float = 0.0, number: int = 3) -> Any:
    return stage(*(unit(folder, each, seconds) for each in range(number)))


def go(made: Any, folder: Path, seconds: float = 120.0) -> str:
    return run.run_stage(made, folder / "state", folder / "results", seconds)


def marks(folder: Path) -> list[str]:
    return (folder / "marks").read_text().split()


def state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state" / "gpu-trial.json").read_text())


def test_a_stage_runs_once_and_its_result_is_copied(tmp_path: Path) -> None:
    assert [go(three(tmp_path), tmp_path) for _ in range(2)] == ["complete"] * 2  # nothing is repeated
    assert marks(tmp_path) == ["0", "1", "2"]
    kept = json.loads((tmp_path / "results" / "gpu-trial.json").read_text())
    assert kept == state(tmp_path)
    assert kept["complete"]
    assert kept["summary"] == {"sum": 3}
    assert list(kept["units"]) == ["unit-0", "unit-1", "unit-2"]
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["gpu-trial.json"]


def test_a_failed_unit_is_repeated_and_nothing_else(tmp_path: Path) -> None:
    bad = unit(tmp_path, 1, work=FAILS)
    assert go(stage(unit(tmp_path, 0), bad, unit(tmp_path, 2)), tmp_path) == "failed"
    assert marks(tmp_path) == ["0", "1", "2"]  # one that fails stops no other
    kept = state(tmp_path)
    assert not kept["complete"]
    assert "exit status 3" in kept["not_done"]["unit-1"]["what"]
    assert not (tmp_path / "results").exists()
    assert go(three(tmp_path), tmp_path) == "complete"
    assert marks(tmp_path) == ["0", "1", "2", "1"]
    assert state(tmp_path)["not_done"] == {}


def test_units_that_fail_and_do_not_fit_into_one_call_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make gpu` calls a stage again as long as units are left; each unit gets its turn."""
    monkeypatch.setattr(run, "MARGIN", 1e6)  # of those whose time is known, no second one fits
    bad = [unit(tmp_path, number, 0.2, work=FAILS) for number in (0, 1)]
    assert [go(stage(*bad), tmp_path) for _ in range(3)] == ["failed"] * 3
    assert marks(tmp_path) == ["0", "1", "0", "1"]


def test_a_result_of_an_earlier_call_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    assert go(stage(unit(tmp_path, 0, work=FAILS)), tmp_path) == "failed"
    assert go(stage(run.Unit("unit-0", (sys.executable, "-c", "pass"), read)), tmp_path) == "failed"
    assert "left no result" in state(tmp_path)["not_done"]["unit-0"]["what"]


@pytest.mark.slow
def test_the_time_limit_ends_a_unit_and_all_its_processes(tmp_path: Path) -> None:
    """It is not done, nor is its stage; and a process that it has started does not live on."""
    children = (
        "import subprocess, sys, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[2] + '.child', 'w').write(str(child.pid))\n"
    )
    start = time.monotonic()
    with pytest.raises(run.StageError, match=r"trial: unit-0 did not end within 14 s\. Pass more --seconds"):
        go(stage(unit(tmp_path, 0, 600, work=children + WORK)), tmp_path, 14.0)
    assert time.monotonic() - start < 60
    child = int((tmp_path / "marks.child").read_text())
    if psutil.pid_exists(child):
        assert wait_until_ended([psutil.Process(child)], 20) == []
    kept = state(tmp_path)
    assert not kept["complete"]
    assert kept["units"] == {}
    assert kept["not_done"]["unit-0"]["what"] == run.KILLED


@pytest.mark.slow
def test_a_unit_that_would_not_fit_waits_for_the_next_call(tmp_path: Path) -> None:
    made, calls = three(tmp_path, seconds=3, number=4), 0
    while (outcome := go(made, tmp_path, run.GRACE + 6.5)) == "more":  # one fits, and a second does not
        calls += 1
        assert not state(tmp_path)["complete"]
    assert outcome == "complete"
    assert calls
    assert sorted(marks(tmp_path)) == ["0", "1", "2", "3"]  # none twice


def test_a_runner_that_is_killed_repeats_only_the_unit_in_flight(tmp_path: Path) -> None:
    program = (
        "import sys, json; from pathlib import Path; sys.path[:0] = sys.argv[2:4]\n"
        "import test_stages as t; folder = Path(sys.argv[1])\n"
        "units = [t.unit(folder, 0), t.unit(folder, 1, 600)]\n"
        "t.go(t.stage(*units), folder)"
    )
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), here, str(GPU)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    wait_until(lambda: (tmp_path / "marks").exists() and len(marks(tmp_path)) == 2, process, seconds=120)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    child.kill()  # nobody else ends it now
    assert list(state(tmp_path)["units"]) == ["unit-0"]
    assert go(stage(unit(tmp_path, 0), unit(tmp_path, 1)), tmp_path) == "complete"
    assert marks(tmp_path) == ["0", "1", "1"]


def test_figures_of_two_machines_are_not_put_together(tmp_path: Path) -> None:
    assert go(stage(unit(tmp_path, 0), unit(tmp_path, 1, work="raise SystemExit(1)")), tmp_path) == "failed"
    with pytest.raises(run.StageError, match=r"'unit-1' was measured on .*H200.* two machines or revisions"):
        go(stage(unit(tmp_path, 0), unit(tmp_path, 1, place="H200")), tmp_path)
    assert not state(tmp_path)["complete"]


@pytest.mark.parametrize("text", ["{", "[]", '{"stage": "other"}', '{"stage": "trial", "units": []}'])
def test_a_damaged_state_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state" / "gpu-trial.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(run.StageError, match=r"gpu-trial\.json is damaged .*Delete it to restart the stage"):
        go(stage(unit(tmp_path, 0)), tmp_path)


def test_a_rehearsal_is_no_measurement(tmp_path: Path) -> None:
    made = stage(unit(tmp_path, 0))
    run.run_stage(made, tmp_path / "state", tmp_path / "results", 60.0, True)
    with pytest.raises(run.StageError, match="is of a rehearsal of stage 'trial'"):
        go(made, tmp_path)


def test_the_stages_name_what_there_is(tmp_path: Path) -> None:
    """Surgeries, parts of the loaders' benchmark, and test files: each that exists, and no other."""
    text = (ROOT / "benchmarks" / "transforms.py").read_text()
    cases = text[text.index("CASES: dict") : text.index("def contenders")]
    assert all(f'"{name}": Case(' in cases for name in stages.SURGERIES)
    assert cases.count(": Case(") == len(stages.SURGERIES)
    parts = f"PARTS = {stages.LOADER_PARTS!r}".replace("'", '"')
    assert parts in (ROOT / "benchmarks" / "loaders.py").read_text()
    photos = tmp_path / "photos"
    photos.mkdir()
    made = {name: stages.make(name, tmp_path, photos, False) for name in stages.NAMES}
    files = sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_gpu_*.py"))
    assert [one.name for one in made["tests"].units] == files
    assert len(made["fast"].units) == stages.SEEDS == 10
    units = [one for name in ("loaders", "transforms", "fast") for one in made[name].units]
    assert all(Path(one.command[1]).exists() for one in units)


def test_seeds_are_summarized_with_those_that_missed_the_target() -> None:
    def seed(*seconds: float | None) -> dict[str, Any]:
        """Of both contenders."""
        rows = [{"seconds_to_target": each, "accuracy": 0.9, "training_s": 4.0} for each in seconds]
        return {
            "contenders": {"Drivetrain": rows[0], "plain PyTorch": rows[1]},
            "provenance": {"command": "c"},
        }

    found = stages.fast_summary({"a": seed(2.0, 4.0), "b": seed(None, 5.0), "c": seed(3.0, None)})
    ours, plain = found["contenders"]["Drivetrain"], found["contenders"]["plain PyTorch"]
    assert (ours["reached_target"], ours["n"], ours["seconds_to_target"]["median"]) == (2, 3, 2.5)
    assert plain["seconds_to_target"]["values"] == [4.0, 5.0]
    none = stages.fast_summary({"a": seed(None, None), "b": seed(None, None)})
    assert none["contenders"]["Drivetrain"]["seconds_to_target"] is None
    assert found["published"]["airbench94"]["source"]


def test_a_file_of_tests_that_were_all_skipped_is_not_done(tmp_path: Path) -> None:
    case = '<testsuite><testcase name="a"><skipped message="no CUDA device"/></testcase>{}</testsuite>'
    (tmp_path / "junit.xml").write_text(case.format(""))
    with pytest.raises(run.StageError, match=r"no test ran; 1 were skipped: \['no CUDA device'\]"):
        stages._junit(tmp_path)
    (tmp_path / "junit.xml").write_text(case.format('<testcase name="b"/>'))
    assert stages._junit(tmp_path) == {"passed": 1, "skipped": {"a": "no CUDA device"}}
