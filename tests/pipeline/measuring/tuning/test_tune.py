"""`Pipeline.tune` and `drivetrain tune` on real pipelines: budgets, files, interrupts, and the tuned training."""

import json
import os
import shutil
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import yaml
from command_line import call, toy_values
from drivetrain import Pipeline, PlanError
from drivetrain.common.budget import OutOfTime
from drivetrain.common.errors import DrivetrainError, LedgerError
from drivetrain.pipeline import TuneInterrupted
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.variant import Trial, VariantId
from drivetrain.pipeline.measuring.runner import Failed, _boot
from drivetrain.pipeline.measuring.tuning.arena import Arena, Contender, collective_seconds
from drivetrain.pipeline.measuring.tuning.candidates import fitting
from drivetrain.pipeline.measuring.tuning.result import Tried, Tuned
from drivetrain.pipeline.measuring.tuning.tune import Tuner, recalled
from drivetrain.pipeline.measuring.variants import with_data
from drivetrain.pipeline.runs.facts import facts_of
from drivetrain.transforms import ChannelsLast, LabelSmoothing
from pipeline_data import Sleepy, Toy, living_threads, plain_model
from process_state import running_children, wait_until_ended
from tuning_models import Hungry, Informed

pytestmark = pytest.mark.usefixtures("own_cache")


def pipeline_of(toy: Toy, **load: Any) -> Pipeline:
    options = {"batch_size": 16, "image_size": 8, "workers": 1, **load}
    return Pipeline(plain_model).load(toy.train, toy.val, **options).optimize("sgd", lr=0.05)


@pytest.mark.long
def test_a_training_is_tuned_within_its_budget_and_stays_the_same(toy: Toy, tmp_path: Path) -> None:
    pipeline, threads, state = pipeline_of(toy), living_threads(), torch.get_rng_state()
    start = perf_counter()
    tuned = pipeline.tune(seconds=2.5, out=tmp_path / "tuned.json", progress=False)
    assert perf_counter() - start < 4.5
    assert not [one for one in living_threads() - threads if one.name.startswith("drivetrain")]
    assert torch.equal(torch.get_rng_state(), state)
    assert tuned.trials
    outcomes = {one.outcome for one in tuned.trials}
    assert outcomes <= {"accepted", "dropped", "undecided", "failed", "not tried"}
    for one in tuned.trials:
        assert (one.ratio is None) == (one.outcome in ("failed", "not tried")), one
    before, after = (one.fit(epochs=1, progress=False) for one in (pipeline, tuned.pipeline))
    assert after.history.epochs[0].loss == pytest.approx(before.history.epochs[0].loss, abs=1e-5)
    saved = json.loads((tmp_path / "tuned.json").read_text())
    assert [one["name"] for one in saved["trials"]] == [one.name for one in tuned.trials]
    pytest.importorskip("matplotlib")
    tuned.save(tmp_path / "tuned.png")
    with pytest.raises(PlanError, match=r"must end in \.yaml"):
        tuned.save(tmp_path / "tuned.txt")


@pytest.mark.slow
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
    thread = threading.Timer(1, signal.raise_signal, [signal.SIGINT])
    thread.start()
    slow = pipeline_of(toy).replace(model=Sleepy, model_options={"seconds": 0.1})
    with pytest.raises(TuneInterrupted, match="after") as raised:
        slow.tune(seconds=50, out=tmp_path / "tuned.json", progress=False)
    thread.join()
    assert raised.value.tuned.stopped == "Interrupted."
    assert (tmp_path / "tuned.json").exists()


def test_what_cannot_be_tuned_is_refused(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="cannot be a folder"):
        pipeline_of(toy).tune(seconds=5, out=Path(toy.train) / "tuned.json")
    end = call("tune", "cifar10-quickstart", *toy_values(toy), "--out", str(toy.train))
    assert (end.code, "cannot be a folder" in end.err) == (1, True)
    end = call("tune", "cifar10-quickstart", *toy_values(toy), "--out", str(tmp_path / "new"), "--allow", "bach_size")
    assert (end.code, "batch_size" in end.err, (tmp_path / "new").exists()) == (1, True, False)
    with pytest.raises(PlanError, match="must be positive and finite"):
        pipeline_of(toy).tune(seconds=0)
    with pytest.raises(PlanError, match=r"must end in \.json"):
        pipeline_of(toy).tune(seconds=5, out=tmp_path / "tuned.yaml")
    with pytest.raises(PlanError, match="Build it with num_classes"):
        pipeline_of(toy).replace(model_options={"classes": 7}).tune(seconds=20, progress=False)


def test_the_command_prints_its_result_also_when_it_is_quiet(toy: Toy) -> None:
    end = call("tune", "cifar10-quickstart", *toy_values(toy), "--seconds", "0.4", "--quiet")
    assert (end.code, end.err) == (0, "")
    assert "changes accepted" in end.out


@pytest.mark.long
def test_the_command_writes_a_recipe_that_trains(toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    end = call("tune", "cifar10-quickstart", *toy_values(toy), "out=first", "--out", str(out), "--seconds", "2.5")
    assert (end.code, end.err) == (0, "")
    assert "changes accepted" in end.out
    recipe = yaml.safe_load((out / "tuned.yaml").read_text())
    assert recipe.get("out") is None  # training it shall not replace the run of the first recipe
    assert Pipeline.from_recipe(recipe).plan().steps
    assert call("train", str(out / "tuned.yaml"), "epochs=1").code == 0


def test_what_was_accepted_is_recalled_without_a_trial(toy: Toy, tmp_path: Path) -> None:
    pipeline, file = pipeline_of(toy), tmp_path / "tuned.json"
    assert recalled(pipeline, file) is pipeline
    facts = facts_of(resolve(pipeline)) | {"allow": [], "target": None, "epochs": None}
    trials = [
        Tried("ChannelsLast", "step", "accepted", 1.2, 1.1, 1.3, 4),
        Tried("compile=True", "step", "dropped", 0.8, 0.7, 0.9, 4),
        Tried("workers=77", "data", "undecided", 1.1, 1.0, 1.2, 4),
    ]
    Tuned(pipeline, trials, facts=facts).save(file)
    assert resolve(recalled(pipeline, file)).steps == resolve(pipeline.transform(ChannelsLast())).steps
    with pytest.raises(LedgerError, match="is of another seed:"):
        recalled(pipeline.replace(seed=1), file)


def test_it_is_recalled_on_other_devices_and_with_data_elsewhere(toy: Toy, tmp_path: Path) -> None:
    """As a run resumes; "auto" stays, for the precision of the checkpoint."""
    pipeline, file = pipeline_of(toy).distribute("single", precision="bf16"), tmp_path / "tuned.json"
    facts = facts_of(resolve(pipeline)) | {"allow": [], "target": None, "epochs": None}
    Tuned(pipeline, [Tried("ChannelsLast", "step", "accepted", 1.2, 1.1, 1.3, 4)], facts=facts).save(file)
    for each in Path(toy.train).parent.glob("train.beton*"):
        shutil.copyfile(each, tmp_path / each.name)  # with another date
    data: dict[str, Any] = {"batch_size": 16, "image_size": 8, "workers": 2, "verify": True}
    here = Pipeline(plain_model).load(tmp_path / "train.beton", toy.val, **data)
    here = here.optimize("sgd", lr=0.05).distribute("ddp", devices=2, device="cpu", precision="auto")
    found = recalled(here, file)
    assert found.transforms == (ChannelsLast(),)
    assert found.distribution == here.distribution


@pytest.mark.long
def test_a_run_that_resumes_is_not_tuned_again(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that is accepted only now may be another training, which the checkpoint does not fit."""
    command = ["train", "cifar10-quickstart", *toy_values(toy), "--tune", "0.4", "--out", str(tmp_path), "--quiet"]
    first = call(*command)
    assert (first.code, first.err, (tmp_path / "tuned.json").exists()) == (0, "", True)

    def search(_: Tuner) -> None:
        raise AssertionError("it was tuned again")

    monkeypatch.setattr(Tuner, "run", search)
    again = call(*command, "--resume")
    assert (again.code, again.out, again.err) == (0, first.out, "")


@pytest.mark.slow
def test_lack_of_memory_on_one_rank_is_answered_on_all_by_smaller_microbatches(toy: Toy) -> None:
    """The allocator of rank 1 refuses; rank 0 waits for it in a collective."""
    pipeline = pipeline_of(toy).replace(model=Hungry, model_options={"most": 2, "rank": 1})
    spec = pipeline.distribute("ddp", devices=2, device="cpu")
    tuner = Tuner(spec, Arena(perf_counter() + 120, 0.1), [], fitting(resolve(spec)), {})
    tuner._best = tuner._first()  # without the limits, for which ranks would be started four times more
    tuner.close()
    tuned = tuner.result()
    assert [(one.name, one.outcome) for one in tuned.trials] == [
        ("accumulate=2", "failed"), ("accumulate=4", "accepted"),
    ]  # fmt: skip
    assert "memory" in tuned.trials[0].reason
    assert tuned.pipeline.distributed.accumulate == 4
    assert 0 < collective_seconds(resolve(spec), perf_counter() + 60) < 10


@pytest.mark.slow
@pytest.mark.long
def test_a_process_that_the_system_kills_is_another_one(toy: Toy) -> None:
    """On a CPU, lack of memory is no error but a kill: it hits the process in which the pipeline is tried first."""
    pipeline = pipeline_of(toy).replace(model=Hungry, model_options={"most": 4, "killed": True})
    arena = Arena(perf_counter() + 60, 0.1, probe=True)
    with pytest.raises(Failed, match=r"out of memory: the system killed its process \(SIGKILL\)"):
        arena.open("as given", pipeline)
    arena.open("accumulate=4", pipeline.distribute("single", accumulate=4, device="cpu")).close()


@pytest.mark.slow
def test_processes_of_their_own_have_variables_and_leave_nothing(toy: Toy) -> None:
    arena = Arena(perf_counter() + 60, 0.1)
    pipeline = pipeline_of(toy).replace(model=Informed, model_options={"variable": "DRIVETRAIN_TEST"})
    with pytest.raises((Failed, PlanError), match="DRIVETRAIN_TEST is not set"):
        arena.open("without", pipeline, {})
    contender = arena.open("with", pipeline, {"DRIVETRAIN_TEST": "1"})
    here = arena.open("here", pipeline_of(toy))
    assert all(speed > 0 for speed in arena.round(1, [contender, here]))  # on the same samples, or it raises
    (child,) = running_children("measuring.runner")
    contender.close()
    here.close()
    assert not wait_until_ended([child], 5)
    assert "DRIVETRAIN_TEST" not in os.environ


def test_a_process_of_its_own_has_texts_as_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after `sys.path.append(Path(…))`, which Python ignores: of its program, what precedes the imports."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    exec(_boot(0).partition("from drivetrain")[0], {})
    assert sys.path[-1] == str(tmp_path)


def test_what_cannot_be_sent_to_a_process_of_its_own_is_refused(toy: Toy) -> None:
    lock = threading.Lock()

    def model() -> torch.nn.Module:
        with lock:
            return plain_model()

    words = r"cannot be sent to a process of its own.*cannot pickle '_thread\.lock' object.*the model's factory"
    with pytest.raises(PlanError, match=words):
        Arena(perf_counter() + 60, 0.1).open("as given", pipeline_of(toy).replace(model=model), {})
    assert not running_children("measuring.runner")


@pytest.fixture
def noted_images(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The contender and the images of each real trial of training, but for the rounds of number 0."""
    images: list[tuple[str, int]] = []
    trials = Contender.trials

    def noted(self: Contender, number: int, batches: int, *others: VariantId) -> dict[VariantId, Trial]:
        found = trials(self, number, batches, *others)
        images.extend((name.stage, one.images) for name, one in found.items() if number and name == self.id)
        return found

    monkeypatch.setattr(Contender, "trials", noted)
    return images


@pytest.mark.long
def test_trials_of_a_larger_batch_take_as_many_images(toy: Toy, noted_images: list[tuple[str, int]]) -> None:
    """Also those that look for the bottleneck, after a larger batch is accepted."""
    arena = Arena(perf_counter() + 60, 1e-9)
    arena._batches, arena._batch_size = 16, 4  # what the speed of the pipeline as given would set
    for size in (16, 4):  # the larger one first: after a smaller one, it would be tried in a process of its own
        with closing(arena.open("one", pipeline_of(toy, batch_size=size))) as one:
            arena.limits(one)
            arena.round(1, [one])
    assert noted_images == [("one", 64)] * 6  # of 128: two rounds but the first, and one in turns


@pytest.mark.long
def test_a_larger_batch_is_timed_on_several_of_them(toy: Toy, noted_images: list[tuple[str, int]]) -> None:
    """With a single one, filling the loader's queue would count as training. The others of its round have as many
    images, while those of the pipeline as given may have two batches, where a step takes seconds."""
    arena = Arena(perf_counter() + 60, 1e-9)
    with (
        closing(arena.open("small", pipeline_of(toy, batch_size=4))) as small,
        closing(arena.open("large", pipeline_of(toy, batch_size=24))) as large,
    ):
        arena.round(1, [small])
        arena.round(2, [small, large])
        arena.limits(large)
    assert noted_images == [("small", 8), ("small", 96), ("large", 96), *2 * [("large", 96)]]


@pytest.mark.long
def test_a_process_of_its_own_keeps_to_the_deadline(toy: Toy) -> None:
    slow = pipeline_of(toy).replace(model=Sleepy, model_options={"seconds": 60})
    start = perf_counter()
    with pytest.raises(OutOfTime):
        Arena(start + 2, 0.1).open("slow", slow, {})
    assert perf_counter() - start < 4
    assert not running_children("measuring.runner")


def test_no_short_training_begins_after_the_budget(toy: Toy) -> None:
    """Outside the main thread, nothing would interrupt it."""
    with pytest.raises(OutOfTime):
        Arena(perf_counter(), 0.1).accuracy(pipeline_of(toy), seed=0)


@pytest.mark.slow
def test_a_change_of_numbers_is_weighed_by_real_trainings(toy: Toy, tmp_path: Path) -> None:
    """Its speed is given here: only the accuracy is measured, in three trainings each, from the same seeds."""
    arena = Arena(perf_counter() + 120, 0.1, epochs=2)
    pipeline = pipeline_of(toy)
    same = [arena.accuracy(pipeline, seed) for seed in (0, 0, 1)]
    assert same[0] == same[1]
    assert same[0] == pipeline.fit(epochs=2, progress=False).history.monitored
    result = pipeline.tune(seconds=20, allow=("resolution", "batch_size"), out=tmp_path / "tuned.json", progress=False)
    rows = {one.name: one for one in result.trials}
    assert {"ProgressiveResizing", "image_size=6", "batch_size=32", "batch_size=64"} <= rows.keys()
    for one in result.trials:
        assert (one.seeds > 0) <= (one.outcome in ("accepted", "trade"))


def test_what_cannot_be_allowed_is_refused_before_any_trial(toy: Toy) -> None:
    with pytest.raises(PlanError, match=r"must be a sequence of names: allow=\('precision',\)"):
        pipeline_of(toy).tune(allow="precision")
    with pytest.raises(PlanError, match="needs validation data"):
        Pipeline(plain_model).load(toy.train, batch_size=16, image_size=8).tune(allow=("precision",))
    with pytest.raises(PlanError, match="epochs=0"):
        pipeline_of(toy).tune(allow=("precision",), epochs=0)
    with pytest.raises(PlanError, match=r"is of each short training of allow=.*leave epochs out"):
        pipeline_of(toy).tune(epochs=3)


def test_a_file_of_other_options_is_refused(toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    plan = resolve(pipeline_of(toy))
    facts = facts_of(plan) | {"allow": [], "target": None, "epochs": None}
    Tuned(pipeline_of(toy), [], facts=facts).save(file)
    for other, name in (
        (pipeline_of(toy).distribute("single", precision="bf16"), "precision"),
        (pipeline_of(toy).transform(LabelSmoothing(0.1)), "transforms"),
        (pipeline_of(toy).optimize("sgd", lr=0.06), "optimizer's options"),
        (pipeline_of(toy, flip=False), "settings"),
        (pipeline_of(toy).replace(seed=1), "seed"),
    ):
        with pytest.raises(LedgerError, match=f"is of another {name}:"):
            other.tune(seconds=5, out=file, progress=False)


def test_another_order_of_the_samples_is_compared(toy: Toy) -> None:
    pipeline = pipeline_of(toy)
    arena = Arena(perf_counter() + 60, 1e-9)
    with (
        closing(arena.open("random", pipeline)) as given,
        closing(arena.open("quasi-random", with_data(pipeline, order="quasi_random"))) as other,
    ):
        assert all(speed > 0 for speed in arena.round(1, [other, given]))
