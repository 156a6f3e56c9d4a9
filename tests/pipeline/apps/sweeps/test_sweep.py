"""`drivetrain sweep`: its values, its processes, what is skipped, resumed and reported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import process_state
import psutil
import pytest
from command_line import ENVIRONMENT, call, toy_values
from drivetrain import PlanError
from drivetrain.pipeline.apps.sweeps.space import Axis, name_of, space, split
from drivetrain.pipeline.apps.sweeps.sweep import (
    Combination,
    Outcome,
    Swept,
    _ended_with,
    _files,
    _is_done,
    _record,
    _start,
    _terminating,
    job_environment,
    sweep,
)
from drivetrain.pipeline.recipes.presets import completed
from drivetrain.pipeline.runs.analysis.compare import RunSummary, read_run
from drivetrain.pipeline.telemetry.history import Epoch, Evaluation, History
from pipeline_data import Toy


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1,2", ["1", "2"]), ('["a,b"],[]', ['["a,b"]', "[]"]), ("{a,b}.beton", ["{a,b}.beton"]),
        ('"\\",",2', ['"\\","', "2"]),
    ],
)  # fmt: skip
def test_values_are_divided_outside_of_json(text: str, parts: list[str]) -> None:
    assert split(text) == parts


def test_a_grid_has_all_combinations_and_a_random_search_its_number() -> None:
    grid = space(["a=1,2", "b=x,y,z", "seed=0..2", "epochs=3"])
    assert (len(grid.combinations), grid.seeds, grid.fixed) == (6, ("0", "1", "2"), {"epochs": "3"})
    assert len(grid.runs()) == 18
    assert [*grid.combinations] == [{"a": a, "b": b} for a in "12" for b in "xyz"]
    assert grid.runs() == [{"a": a, "b": b, "seed": seed} for a in "12" for b in "xyz" for seed in "012"]
    drawn = space(["a=1,2", "b=1e-4..1e-1", "seed=0,1"], 20, seed=3)
    assert drawn == space(["a=1,2", "b=1e-4..1e-1", "seed=0,1"], 20, seed=3)
    assert drawn != space(["a=1,2", "b=1e-4..1e-1", "seed=0,1"], 20, seed=4)
    few = space(["a=1,2", "b=1e-4..1e-1", "seed=0,1"], 5, seed=3)
    assert drawn.combinations[:5] == few.combinations  # so that a longer search continues a shorter one
    values = [float(one["b"]) for one in drawn.combinations]
    assert len(set(values)) == 20
    assert all(1e-4 <= value <= 1e-1 for value in values)
    assert sum(value < 3e-3 for value in values) > 4  # by logarithm
    assert space(["a=1,2", "b=0,1"], 100) == space(["a=1,2", "b=0,1"])
    assert space(["a=1,2", "seed=0..4"], 5000) == space(["a=1,2", "seed=0..4"])  # 10 runs, not 25,000
    with pytest.raises(PlanError, match="more than 10,000 runs"):
        space(["a=0.1..2", "seed=0..4"], 5000)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["lr"], "is not KEY=VALUES"), (["a=1,1"], "given twice"), (["a=1", "a=2"], "given twice"),
        (["lr=0.1..1"], "--random N"), (["a=4..1"], "from a smaller number"), (["a=0..99999"], "more than 10,000"),
        (["a=0..999", "b=0..999"], "more than 10,000 runs"), (["a=0.1..1,2"], "cannot be one of several"),
        (["seed=0.5..2"], "whole numbers"),
        (["seed=-2.5..0"], "whole numbers"),
    ],
)  # fmt: skip
def test_what_is_no_space(pairs: list[str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        space(pairs)


def test_names_of_folders() -> None:
    assert name_of({"optimizer.lr": "0.1", "seed": "0"}) == "optimizer.lr=0.1,seed=0"
    odd = [name_of({"transforms": text}) for text in ('[{"name": "EMA"}]', '[{"name": "SWA"}]', "../..", "x" * 900)]
    assert len(set(odd)) == 4
    assert not any("/" in name or len(name) > 120 for name in odd)
    assert Axis.parse("a=-1..1").texts == ("-1", "0", "1")


def test_bad_values_end_the_sweep_before_it_begins(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    end = call("sweep", "cifar10-quickstart", "optimzer.lr=0.1,1", "--out", str(out))
    assert "optimizer" in end.line
    assert not out.exists()


def test_a_random_search_names_the_number_of_combinations_if_there_are_fewer(tmp_path: Path) -> None:
    """Here before it is refused, for the name of the last key."""
    values = ["optimizer.lr=0.1,1", "momentun=0.9"]
    end = call("sweep", "cifar10-quickstart", *values, "--random", "5", "--out", str(tmp_path / "sweep"))
    assert end.code == 1
    assert "--random 5: these values have only 2 combination(s).\n" in end.err
    end = call("sweep", "cifar10-quickstart", *values, "--random", "2", "--out", str(tmp_path / "sweep"))
    assert "combination" not in end.err


def test_the_seed_of_a_random_search_is_not_that_of_trainings(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    end = call("sweep", "cifar10-quickstart", "optimizer.lr=0.1,1", "--seed", "3", "--out", str(out))
    assert "Pass --random N, too; or seed=3, the seed of the trainings." in end.line
    assert not out.exists()


@pytest.mark.parametrize(
    ("gpus", "jobs", "parts"),
    [
        ("01234567", 4, ["0,1", "2,3", "4,5", "6,7"]), ("01", 3, ["0", "1", "0"]), ("012", 2, ["0", "1"]),
        ("01", 1, ["unset"]), ("0", 2, ["unset"] * 2), ("", 2, ["unset"] * 2),
    ],
)  # fmt: skip
def test_jobs_share_the_gpus(
    gpus: str, jobs: int, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = ["sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-unset}"]
    for slot in range(jobs):
        _start(tmp_path / f"{slot}", command, job_environment(gpus, slot, jobs)).wait()
    assert [(tmp_path / f"{slot}" / "output.txt").read_text().strip() for slot in range(jobs)] == parts


@pytest.mark.process
@pytest.mark.long
def test_runs_are_trained_skipped_and_their_failures_reported(toy: Toy, tmp_path: Path) -> None:
    """The first of three runs is there already; the second and third are processes."""
    out = tmp_path / "sweep"
    values = ["cifar10-quickstart", *(one for one in toy_values(toy) if one != "epochs=2"), "transforms=[]"]
    first = out / "optimizer.lr=0.01"
    assert call("train", *values, "epochs=1", "optimizer.lr=0.01", "--out", str(first)).code == 0
    written = (first / "history.json").stat().st_mtime_ns
    command = ["sweep", *values, "--out", str(out), "seed=0"]

    end = call(*command, "epochs=1", "optimizer.lr=0.01,0.02,1e30", "--jobs", "2", "--json")
    assert end.code == 1, end
    assert "1 of 3 runs are finished already." in end.err
    *good, bad = json.loads(end.out)["combinations"]
    assert [one["values"]["optimizer.lr"] for one in good] in (["0.01", "0.02"], ["0.02", "0.01"])
    assert [(len(one["runs"]), one["runs"][0]["failure"], one["runs"][0]["seed"]) for one in good] == [(1, "", "0")] * 2
    assert bad["mean"] is None
    assert "NonFiniteError" in bad["runs"][0]["failure"]

    end = call(*command, "epochs=1", "optimizer.lr=0.01,0.02")
    assert "2 of 2 runs are finished already." in end.err
    assert (first / "history.json").stat().st_mtime_ns == written
    assert "top1, mean" in end.out
    assert max(map(len, end.out.splitlines())) <= 100
    assert "epochs=1, not 2" in call(*command, "epochs=2", "optimizer.lr=0.01,0.02").line
    record = out / "sweep.json"
    known = json.loads(record.read_text())
    record.write_text(json.dumps({name: {**one, "data": {toy.train: [1, 2]}} for name, one in known.items()}))
    assert "is a run of other data" in call(*command, "epochs=1", "optimizer.lr=0.01,0.02").line
    record.write_text(json.dumps({name: {**one, "data": None} for name, one in known.items()}))  # of older versions
    assert call(*command, "epochs=1", "optimizer.lr=0.01,0.02").code == 0
    assert Combination({}, ()).name == "the recipe"


@pytest.mark.parametrize(("higher", "order"), [(True, "2413"), (False, "1423")])
def test_the_best_combination_is_first(higher: bool, order: str) -> None:
    """By the mean over its seeds of what the runs monitor; one without results is last."""

    def outcome(share: float | None) -> Outcome:
        history = History()
        if share is not None:
            monitor = {"name": "share", "higher_is_better": higher}
            history = History([Epoch(1, 1.0, 1.0, {"share": share}, 1.0, 0.0, 1.0, 0.1)], {"monitor": monitor})
        return Outcome("", {}, RunSummary("", None, history, {}))

    shares: dict[str, tuple[float | None, ...]]
    shares = {"3": (None, None), "4": (0.0, 0.2), "2": (0.5, 0.9), "1": (None, 0.0)}
    swept = Swept([Combination({"lr": lr}, tuple(map(outcome, own))) for lr, own in shares.items()])
    assert [one["values"]["lr"] for one in swept.to_dict()["combinations"]] == [*order]


def test_a_run_that_was_stopped_within_its_first_epoch_is_finished(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"planned": 2, "monitor": {"name": "share", "higher_is_better": False}}
    within = [Evaluation(1, 3, 1.0, {"share": 0.5})]
    History([], facts, within).save(tmp_path / "history.json")
    assert not _is_done(read_run(tmp_path))
    stopped = {"reason": "enough", "epoch": 0, "step": 3, "within": 3}
    History([], facts | {"stopped": stopped}, within).save(tmp_path / "history.json")
    run = read_run(tmp_path)
    assert _is_done(run)
    swept = Swept([Combination({}, (Outcome("", {}, run),))])
    assert (swept.failed, swept.to_dict()["monitor"]) == (0, "share")
    assert swept.combinations[0].mean == 0.5


def test_what_is_recorded_of_runs(tmp_path: Path, toy: Toy) -> None:
    values = completed("cifar10-quickstart", {"train": "a.beton", "val": None, "epochs": 1}).values

    def record(data: Any, **changed: Any) -> Any:
        _record(tmp_path, {"run": values | {"data": {"a.beton": data}} | changed})
        return json.loads((tmp_path / "sweep.json").read_text())["run"]["data"]["a.beton"]

    assert (record([]), record([1, 2]), record([3, 4])) == ([], [1, 2], [3, 4])  # no run has finished
    with pytest.raises(PlanError, match="epochs=1, not 2"):
        record([3, 4], epochs=2)
    toy.named().fit(epochs=1, out=tmp_path / "run", progress=False)
    assert record([]) == [3, 4]  # gone, or its store does not answer
    with pytest.raises(PlanError, match=r"other data: a\.beton has changed"):
        record([5, 6])
    known = json.loads((tmp_path / "sweep.json").read_text())
    del known["run"]["stream"]  # which version 0.2.0 did not have
    (tmp_path / "sweep.json").write_text(json.dumps(known))
    assert record([3, 4]) == [3, 4]


def test_files_that_select_samples_are_data_of_a_run() -> None:
    data: dict[str, Any] = {"train": "{a,b}.beton", "val": None, "epochs": 1}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"indices": "some.npy", "balance": "weights.txt"}, ["some.npy", "weights.txt"]),
        ({"indices": [0, 2], "balance": "class"}, []),
    ]
    for chosen, files in cases:
        assert _files(completed("cifar10-quickstart", data | chosen).values) == ["a.beton", "b.beton", *files]


def test_the_description_of_a_recipe_may_change(tmp_path: Path) -> None:
    """As the results do that a recipe reports, from version to version."""
    values = completed("cifar10-quickstart", {"train": "a.beton", "epochs": 1}).values | {"data": {}}
    reworded = {"description": "Mine.", "measured": "90 %, on two cores", "notes": {"seed": "any"}, "name": "mine.yaml"}
    _record(tmp_path, {"run": dict(values)})
    _record(tmp_path, {"run": values | reworded})
    assert json.loads((tmp_path / "sweep.json").read_text())["run"]["description"] == "Mine."
    with pytest.raises(PlanError, match="is a run of other values: seed=0, not 3"):
        _record(tmp_path, {"run": values | reworded | {"seed": 3}})


@pytest.mark.parametrize("name", ["start.pth", "earlier/model.safetensors"])
def test_other_weights_that_a_finished_run_began_with_are_other_data(name: str, toy: Toy, tmp_path: Path) -> None:
    """In a file, or in the folder of a run, which may have a new report, but not other weights."""
    weights, out = tmp_path / name, tmp_path / "sweep"
    place = weights if weights.parent == tmp_path else weights.parent
    weights.parent.mkdir(exist_ok=True)
    weights.write_bytes(b"one")
    toy.named().fit(epochs=1, out=out / "run", progress=False)
    what, sources = space([f"init_from={place}", "epochs=1"]), {"train": toy.train, "val": toy.val}
    assert sweep("cifar10-quickstart", what, out, sources).failed == 0
    weights.with_name("report.html").touch()
    assert sweep("cifar10-quickstart", what, out, sources).failed == 0
    weights.write_bytes(b"other")
    with pytest.raises(PlanError, match=rf"run is a run of other data: {re.escape(str(weights))} has changed since"):
        sweep("cifar10-quickstart", what, out, sources)


def test_a_sweep_under_nohup_continues_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _terminating():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt, match="SIGHUP"), _terminating():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.process
@pytest.mark.parametrize("ignored", [True, False])
def test_runs_save_also_where_ctrl_c_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ignored: bool
) -> None:
    """As in what a script starts with `&`, and all that this starts."""
    monkeypatch.setattr("drivetrain.pipeline.apps.sweeps.sweep.PATIENCE", 5.0)
    saves = "trap 'exit 75' INT TERM; echo ready; while :; do sleep 0.02; done"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        process = _start(tmp_path, ["sh", "-c", saves], {})
        with _ended_with({"a": process}):
            process_state.wait_until(lambda: "ready" in (tmp_path / "output.txt").read_text(), seconds=10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == 75


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_leaves_no_process_and_goes_on(toy: Toy, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "sweep"
    values = [one for one in toy_values(toy) if one != "epochs=2"]
    command = [
        sys.executable, "-m", "drivetrain", "sweep", "cifar10-quickstart", *values, "epochs=60", "transforms=[]",
        "seed=0,1", "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        process_state.wait_until((out / "seed=0" / "history.json").exists, process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "0 of 2 runs have ended; the same command continues the others." in error
    assert children
    assert process_state.wait_until_ended(children, 5) == []
    assert "--resume" in (out / "seed=0" / "output.txt").read_text()
    assert not (out / "seed=1").exists()
    if number == signal.SIGINT:
        done = process_state.run(*command, env=ENVIRONMENT)
        assert done.returncode == 0, done
        assert "± " in done.stdout
        assert "Resumed from" in (out / "seed=0" / "output.txt").read_text()
