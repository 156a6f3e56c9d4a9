"""`Pipeline.tune` and `drivetrain tune` on real pipelines: budgets, files, interrupts, and the tuned training."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
import yaml
from command_line import call, toy_values
from drivetrain import Pipeline, PlanError
from drivetrain.errors import LedgerError
from drivetrain.pipeline import TuneInterrupted
from pipeline_data import Sleepy, Toy, living_threads, plain_model


def pipeline_of(toy: Toy, **load: Any) -> Pipeline:
    options = {"batch_size": 16, "image_size": 8, "workers": 1, **load}
    return Pipeline(plain_model).load(toy.train, toy.val, **options).optimize("sgd", lr=0.05)


@pytest.mark.long
def test_a_training_is_tuned_within_its_budget_and_stays_the_same(toy: Toy, tmp_path: Path) -> None:
    pipeline, threads, state = pipeline_of(toy), living_threads(), torch.get_rng_state()
    start = perf_counter()
    tuned = pipeline.tune(seconds=8, out=tmp_path / "tuned.json", progress=False)
    assert perf_counter() - start < 10
    assert not [one for one in living_threads() - threads if one.name.startswith("drivetrain")]
    assert torch.equal(torch.get_rng_state(), state)
    assert tuned.trials
    assert {one.outcome for one in tuned.trials} <= {"accepted", "dropped", "failed", "not tried"}
    for one in tuned.trials:
        assert (one.ratio is None) == (one.outcome in ("failed", "not tried")), one
    before, after = (one.fit(epochs=1, progress=False) for one in (pipeline, tuned.pipeline))
    assert after.history.epochs[0].loss == pytest.approx(before.history.epochs[0].loss, abs=1e-5)
    saved = json.loads((tmp_path / "tuned.json").read_text())
    assert [one["name"] for one in saved["trials"]] == [one.name for one in tuned.trials]
    for suffix in ("yaml", "png"):
        if suffix == "png":
            pytest.importorskip("matplotlib")
            tuned.save(tmp_path / "tuned.png")
    with pytest.raises(PlanError, match=r"must end in \.yaml"):
        tuned.save(tmp_path / "tuned.txt")


@pytest.mark.long
def test_a_file_of_something_else_is_refused_and_a_second_call_goes_on(toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    first = pipeline_of(toy).tune(seconds=6, out=file, progress=False)
    done = {one.name for one in first.trials if one.outcome in ("accepted", "dropped")}
    second = pipeline_of(toy).tune(seconds=6, out=file, progress=False)
    assert done <= {one.name for one in second.trials if one.outcome in ("accepted", "dropped")}
    assert [one for one in second.trials if one.name in done][: len(done)] == [
        one for one in first.trials if one.name in done
    ]
    with pytest.raises(LedgerError, match="is of another batch_size"):
        pipeline_of(toy, batch_size=8).tune(seconds=6, out=file, progress=False)
    file.write_text("{}")
    with pytest.raises(LedgerError, match="is not the file of a tuning"):
        pipeline_of(toy).tune(seconds=6, out=file, progress=False)


@pytest.mark.long
def test_an_interrupt_keeps_what_was_learned(toy: Toy, tmp_path: Path) -> None:
    def interrupt() -> None:
        sleep(3)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    slow = pipeline_of(toy).replace(model=Sleepy, model_options={"seconds": 0.1})
    with pytest.raises(TuneInterrupted, match="after") as raised:
        slow.tune(seconds=60, out=tmp_path / "tuned.json", progress=False)
    thread.join()
    assert raised.value.tuned.stopped == "Interrupted (Ctrl-C)."
    assert (tmp_path / "tuned.json").exists()


def test_what_cannot_be_tuned_is_refused(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="must be positive and finite"):
        pipeline_of(toy).tune(seconds=0)
    with pytest.raises(PlanError, match=r"must end in \.json"):
        pipeline_of(toy).tune(seconds=5, out=tmp_path / "tuned.yaml")
    with pytest.raises(PlanError, match="Build it with num_classes"):
        pipeline_of(toy).replace(model_options={"classes": 7}).tune(seconds=20, progress=False)


@pytest.mark.long
def test_the_command_writes_a_recipe_that_trains(toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    end = call("tune", "cifar10-quickstart", *toy_values(toy), "--out", str(out), "--seconds", "12")
    assert (end.code, end.err) == (0, "")
    assert "changes accepted" in end.out
    recipe = yaml.safe_load((out / "tuned.yaml").read_text())
    assert Pipeline.from_recipe(recipe).plan().steps
    assert call("train", str(out / "tuned.yaml"), "epochs=1").code == 0
