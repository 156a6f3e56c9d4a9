"""Which checkpoints are kept, and failures to write one."""

import json
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_jobs import Signals
from drivetrain import CheckpointError, Pipeline
from drivetrain.common.storage.addresses import RemoteFolder
from drivetrain.pipeline import Checkpoints, CheckpointWarning, TrainingInterrupted, TrainingPreempted
from drivetrain.pipeline.runs.checkpoints import directory
from drivetrain.pipeline.runs.checkpoints import state as states
from drivetrain.pipeline.runs.checkpoints import writer as saving
from drivetrain.pipeline.runs.checkpoints.directory import CheckpointDir
from drivetrain.pipeline.runs.checkpoints.format import Part, RankContent
from drivetrain.strategies import launch
from pipeline_data import BATCH, TRAIN, FailsAt, Sleepy, Toy, batch_norm_model, numbers, plain_model
from torch import nn

STEPS = TRAIN // BATCH


def fit(pipeline: Pipeline, epochs: int = 4, **arguments: Any) -> Any:
    return pipeline.fit(epochs=epochs, progress=False, **arguments)


def steps_in(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def _all_finite(values: torch.Tensor) -> bool:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(values, requires_grad=False))
    part = Part({"model": {name: each.detach() for name, each in model.named_parameters()}}, RankContent({}, {}, {}), 1)
    return states.all_finite(part, model)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2", "uint16"])
def test_weights_of_any_type_are_finite_or_not(name: str) -> None:
    """A part of the model that is not trained may have numbers of one byte, or whole ones."""
    dtype = getattr(torch, name)
    assert _all_finite(torch.arange(3.0).to(dtype))
    assert _all_finite(torch.zeros(0).to(dtype))
    if dtype.is_floating_point or dtype.is_complex:
        assert not _all_finite(torch.tensor([0, torch.nan, 1]).to(dtype))


def test_the_last_and_the_best_stay(toy: Toy, tmp_path: Path) -> None:
    """The best is the first of the highest accuracy; steps in the middle of an epoch have none."""
    pipeline = toy.pipeline(batch_norm_model)
    result = fit(pipeline, 6, out=tmp_path / "both", checkpoints=Checkpoints(every_steps=3, keep=2))
    accuracies = [epoch.accuracy for epoch in result.history.epochs]
    best = (accuracies.index(max(accuracies)) + 1) * STEPS
    assert best < 5 * STEPS  # else the last ones would be it
    assert steps_in(tmp_path / "both") == sorted({best, 6 * STEPS - 3, 6 * STEPS})
    fit(pipeline, 6, out=tmp_path / "last", checkpoints=Checkpoints(keep=1, keep_best=False))
    assert steps_in(tmp_path / "last") == [6 * STEPS]
    names = sorted(path.name for path in (tmp_path / "last" / "checkpoints").iterdir())
    assert names == ["run.json", "step-00000024"]


@pytest.mark.parametrize("out", ["{}/run", "file://{}/run"])
@pytest.mark.usefixtures("own_cache")
def test_a_run_left_after_the_last_step_of_an_epoch_keeps_its_checkpoint_until_it_has_a_newer_one(
    out: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, one = toy.pipeline(batch_norm_model), Checkpoints(keep=1, keep_best=False)
    own: dict[str, Any] = {"out": out.format(tmp_path), "checkpoints": one}

    def complete_steps() -> list[int]:
        return [int(path.parent.name[5:]) for path in tmp_path.glob("run/checkpoints/step-*/state.json")]

    with pytest.raises(TrainingPreempted):
        fit(pipeline, 2, **own, stop_on=["SIGUSR1"], callbacks=[Signals(STEPS - 1)])
    assert complete_steps() == [STEPS]
    complete: list[int] = []  # after each removal

    def watched(function: Any) -> Any:
        def remove(*arguments: Any, **options: Any) -> None:
            function(*arguments, **options)
            complete.append(len(complete_steps()))

        return remove

    monkeypatch.setattr(shutil, "rmtree", watched(shutil.rmtree))
    monkeypatch.setattr(RemoteFolder, "remove", watched(RemoteFolder.remove))
    resumed = fit(pipeline, 2, **own, resume="auto")
    assert complete
    assert min(complete) == 1
    assert complete_steps() == [2 * STEPS]
    assert numbers(resumed) == numbers(fit(pipeline, 2))


def test_ctrl_c_as_the_writing_begins_is_an_interrupt_like_any_other(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt within `Thread.start` leaves a thread that cannot be joined."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "drivetrain-checkpoint":
            signal.raise_signal(signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(TrainingInterrupted):
        fit(toy.pipeline(batch_norm_model), out=tmp_path)
    assert steps_in(tmp_path) == [STEPS, STEPS + 1]  # that of the epoch, and that of the interrupt


def test_a_run_that_starts_anew_keeps_the_earlier_one_until_it_has_its_own(toy: Toy, tmp_path: Path) -> None:
    """And `auto` never takes the earlier run's for its own."""
    pipeline = toy.pipeline(batch_norm_model)
    fit(pipeline, out=tmp_path)
    before = steps_in(tmp_path)

    with pytest.raises(TrainingInterrupted):
        fit(pipeline.replace(model=lambda: FailsAt(0, KeyboardInterrupt), seed=1), out=tmp_path)
    assert steps_in(tmp_path) == before
    resumed = fit(pipeline.replace(seed=1), out=tmp_path, resume="auto")  # from the start: it had none
    assert "resumed" not in resumed.history.facts
    assert numbers(resumed) == numbers(fit(pipeline.replace(seed=1)))
    assert steps_in(tmp_path)[-1] == 4 * STEPS


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_an_older_one_of_the_same_folder_loses_no_newer_one(toy: Toy, tmp_path: Path) -> None:
    """It is refused, and nothing has changed; the newest one, by its path, continues the run as `auto` does."""
    pipeline, how = toy.pipeline(lambda: Sleepy(0)), Checkpoints(keep=10)
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    whole = fit(pipeline, out=run, checkpoints=how)
    before = everything_in(run)
    words = r"not the newest.*step-00000016.*epochs.*resume='auto'.*--out"
    for out, place in ((run, folder / "step-00000008"), (run / ".." / "run", folder / "step-00000004")):
        with pytest.raises(CheckpointError, match=words):
            fit(pipeline, out=out, resume=place, checkpoints=how)
        assert everything_in(run) == before
    # In a folder of its own, it is the same run from there.
    branch = fit(pipeline, out=tmp_path / "branch", resume=folder / "step-00000008", checkpoints=how)
    assert numbers(branch) == numbers(whole)
    assert everything_in(run) == before
    assert steps_in(tmp_path / "branch") == [12, 16]
    # Moved away, the newer ones are no longer in danger.
    for step in (12, 16):
        (folder / f"step-{step:08d}").rename(tmp_path / f"step-{step:08d}")
    failing = toy.pipeline(lambda: FailsAt(2, ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        fit(failing, out=run, resume=folder / "step-00000008", checkpoints=how, changed_model=True)
    assert steps_in(run) == [4, 8]  # a crash before the first save, after which `auto` knows its run
    again = fit(pipeline, out=run, resume="auto", checkpoints=how)
    assert again.history.facts["resumed"][-1]["step"] == 8
    assert numbers(again) == numbers(whole)
    assert steps_in(run) == [4, 8, 12, 16]
    after = steps_in(run)
    assert numbers(fit(pipeline, out=run, resume=folder / "step-00000016", checkpoints=how)) == numbers(whole)
    assert steps_in(run) == after


def test_a_newer_one_that_is_damaged_is_no_reason_to_refuse(toy: Toy, tmp_path: Path) -> None:
    pipeline, folder = toy.pipeline(plain_model), tmp_path / "checkpoints"
    how: dict[str, Any] = {"out": tmp_path, "checkpoints": Checkpoints(keep=3)}
    whole = fit(pipeline, 3, **how)
    (folder / "step-00000012" / "model.safetensors").write_bytes(b"")
    with pytest.warns(CheckpointWarning, match="step-00000012"):
        resumed = fit(pipeline, 3, resume=folder / "step-00000008", **how)
    assert numbers(resumed) == numbers(whole)
    assert steps_in(tmp_path) == [4, 8, 12]


def test_a_newer_one_that_is_damaged_takes_no_place_of_those_that_follow(toy: Toy, tmp_path: Path) -> None:
    """Else `keep=1` would keep only the damaged one, and remove what the resumed run has just saved."""
    pipeline, one = toy.pipeline(plain_model), Checkpoints(keep=1, keep_best=False)
    whole = fit(pipeline, 2, out=tmp_path, checkpoints=Checkpoints(keep=2, keep_best=False))
    assert steps_in(tmp_path) == [STEPS, 2 * STEPS]
    (tmp_path / "checkpoints" / f"step-{2 * STEPS:08d}" / "model.safetensors").write_bytes(b"")
    own: dict[str, Any] = {"out": tmp_path, "checkpoints": one, "resume": "auto"}
    with pytest.warns(CheckpointWarning, match="is damaged"), pytest.raises(TrainingPreempted):
        fit(pipeline, 2, **own, stop_on=["SIGUSR1"], callbacks=[Signals(STEPS + 1)])
    (left,) = steps_in(tmp_path)
    assert STEPS < left < 2 * STEPS
    resumed = fit(pipeline, 2, **own)
    assert resumed.history.facts["resumed"][-1]["step"] == left
    assert numbers(resumed) == numbers(whole)


def test_a_crash_before_the_first_checkpoint_of_a_branch(toy: Toy, tmp_path: Path) -> None:
    """`auto` then begins where the branch began, and the run that it came from has all of its checkpoints."""
    pipeline, trunk, out = toy.pipeline(lambda: Sleepy(0)), tmp_path / "trunk", tmp_path / "branch"
    whole = fit(pipeline, out=trunk, checkpoints=Checkpoints(keep=9))
    before = everything_in(trunk)
    failing, place = toy.pipeline(lambda: FailsAt(1, ZeroDivisionError)), trunk / "checkpoints/step-00000008"
    with pytest.raises(ZeroDivisionError):
        fit(failing, out=out, resume=place, changed_model=True)
    assert steps_in(out) == []
    resumed = fit(pipeline, out=out, resume="auto")
    assert resumed.history.facts["resumed"][0]["step"] == 8
    assert numbers(resumed) == numbers(whole)
    assert everything_in(trunk) == before


@pytest.mark.long
def test_a_run_that_is_refused_leaves_the_folder_to_the_one_before(toy: Toy, tmp_path: Path) -> None:
    """`auto` still finds it: another run takes the folder when nothing but its training is left to fail."""
    pipeline = toy.pipeline(plain_model)
    fit(pipeline, 2, out=tmp_path / "other")
    whole = fit(pipeline.replace(seed=1), 2, out=tmp_path / "run")
    before = everything_in(tmp_path / "run")
    with pytest.raises(CheckpointError, match="seed = 0, and this one has 1"):
        fit(pipeline.replace(seed=1), 3, out=tmp_path / "run", resume=tmp_path / "other")
    assert everything_in(tmp_path / "run") == before
    assert numbers(fit(pipeline.replace(seed=1), 2, out=tmp_path / "run", resume="auto")) == numbers(whole)


@pytest.mark.parametrize("about", [
    {"run": 5, "continues": None}, {"run": "a", "continues": 5}, {"run": None}, {}, [], "run", {"run": ["a"]},
])  # fmt: skip
def test_a_damaged_name_of_the_run_is_named(about: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(about))
    words = r"run\.json is damaged: .*(`run`|run:|continues:|`object`).*Remove"
    for use in (lambda store: store.run, lambda store: store.newest()):
        with pytest.raises(CheckpointError, match=words):
            use(CheckpointDir(tmp_path))


def test_a_failure_in_the_background_is_raised(toy: Toy, tmp_path: Path, monkeypatch: Any) -> None:
    """At the next checkpoint, or at the end; not lost, and not twice."""
    for background in (True, False):
        out = tmp_path / str(background)
        (out / "checkpoints" / "step-00000004").mkdir(parents=True)
        # Renaming over a folder that cannot be removed: its place is taken by a file that is in use as a folder.
        blocked = out / "checkpoints" / ".step-00000004.removed"
        blocked.write_text("")
        with pytest.raises(CheckpointError, match=r"step-00000004 could not be written: .*Not a directory"):
            fit(toy.pipeline(plain_model), 1, out=out, checkpoints=Checkpoints(background=background))
    monkeypatch.setattr(CheckpointDir, "prune", lambda *_: 1 / 0)  # a mistake of our own is not lost either
    with pytest.raises(CheckpointError, match="division by zero"):
        fit(toy.pipeline(plain_model), 2, out=tmp_path / "mistake")
    assert not [t for t in threading.enumerate() if t.name == "drivetrain-checkpoint"]


def test_training_goes_on_while_it_is_written(toy: Toy, tmp_path: Path, monkeypatch: Any) -> None:
    """The values are those of the moment; the thread writes them when steps have moved on."""
    moved, original = threading.Event(), saving.write_part
    count = 0

    def late(*arguments: Any) -> None:
        assert moved.wait(30)
        original(*arguments)

    class Counting(Sleepy):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += self.training
            if count == 4 + 1:  # the check of the output, and steps 1 to 4: one after the checkpoint at 3
                moved.set()
            return super().forward(images)

    monkeypatch.setattr(saving, "write_part", late)
    how = Checkpoints(every_steps=3, keep=5)
    whole = fit(toy.pipeline(lambda: Counting(0)), 1, out=tmp_path, checkpoints=how)
    monkeypatch.undo()
    place = tmp_path / "checkpoints" / "step-00000003"
    resumed = fit(toy.pipeline(lambda: Sleepy(0)), 1, resume=place, changed_model=True)
    assert numbers(resumed) == numbers(whole)


def on_two_ranks(pipeline: Pipeline, out: Path, name: str) -> str:
    def failing(folder: Path, *arguments: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            return original(folder, *arguments)
        if name == "appears":
            return False
        raise OSError(28, "No space left on device")

    original = getattr(saving, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, name, failing)
        with pytest.raises(CheckpointError) as caught:
            fit(pipeline, 2, out=out)
    return str(caught.value)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "words"), [("write_part", "No space left on device"), ("appears", "Rank 1 does not see")]
)
def test_one_ranks_failure_is_every_ranks(name: str, words: str, toy: Toy, tmp_path: Path) -> None:
    """With its reason: whose error the process that started them raises, is chance. Rank 0 does not wait for files
    that will not come; and Ctrl-C afterwards finds no thread."""
    pipeline = toy.pipeline(plain_model).distribute("fsdp", devices=2)
    first, second = launch(on_two_ranks, pipeline, tmp_path, name, devices=2, timeout=60)
    assert first == f"Rank 1 could not write a checkpoint: {second}"
    assert words in second
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def from_an_address(pipeline: Pipeline, folder: Path) -> list[str]:
    """Rank 1, then rank 0, is like a machine with a cache folder that cannot be written."""
    errors = []
    for broken in (1, 0):
        cache = "file" if torch.distributed.get_rank() == broken else f"cache-of-the-other-than-{broken}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DRIVETRAIN_DATA", str(folder / cache))
            with pytest.raises(CheckpointError) as caught:
                fit(pipeline, 2, resume=f"file://{folder}/run")
        errors.append(str(caught.value))
    return errors


def test_a_folder_that_cannot_be_claimed(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "write_file", full)
    with pytest.raises(CheckpointError, match="checkpoints cannot be the folder of the checkpoints: No space left"):
        fit(toy.pipeline(plain_model), 1, out=tmp_path)


def test_what_is_in_the_way_of_results_is_every_ranks_error(toy: Toy, tmp_path: Path) -> None:
    """A CheckpointError, as all that rank 0 finds out about the folder while the others wait for it."""
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is in the way of this run's results"):
        fit(toy.pipeline(plain_model), 1, out=tmp_path)
    assert (tmp_path / "model.safetensors").is_dir()


@pytest.mark.process
def test_a_checkpoint_that_one_rank_cannot_fetch_is_every_ranks_error(toy: Toy, tmp_path: Path) -> None:
    fit(toy.pipeline(plain_model), 1, out=tmp_path / "run")
    (tmp_path / "file").write_text("")
    pipeline = toy.pipeline(plain_model).distribute("ddp", devices=2)
    first, second = launch(from_an_address, pipeline, tmp_path, devices=2, timeout=60)
    assert first == second
    assert all("Not a directory" in error for error in first)


@pytest.mark.long
def test_after_ctrl_c_the_run_goes_on(toy: Toy, tmp_path: Path) -> None:
    how = Checkpoints(every_steps=2)
    with pytest.raises(TrainingInterrupted) as caught:
        fit(toy.pipeline(lambda: FailsAt(6, KeyboardInterrupt)), out=tmp_path, checkpoints=how)
    assert caught.value.result is not None
    assert len(caught.value.result.history.epochs) == 1
    pipeline = toy.pipeline(lambda: Sleepy(0))
    resumed = fit(pipeline, out=tmp_path, checkpoints=how, resume="auto", changed_model=True)
    assert resumed.history.facts["resumed"][0]["step"] in (4, 6)
    assert numbers(resumed) == numbers(fit(pipeline))
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_values_are_copied_when_the_last_checkpoint_is_written(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies at once would take twice the memory of a checkpoint."""
    write, capture, writing = saving.write_part, states.capture_state, list[int]()

    def slow(*arguments: Any) -> None:
        time.sleep(0.1)
        write(*arguments)

    def copied(*arguments: Any, **about: Any) -> Any:
        writing.append(sum(one.name == "drivetrain-checkpoint" for one in threading.enumerate()))
        return capture(*arguments, **about)

    monkeypatch.setattr(saving, "write_part", slow)
    monkeypatch.setattr(states, "capture_state", copied)
    fit(toy.pipeline(plain_model), 1, out=tmp_path, checkpoints=Checkpoints(every_steps=1))
    assert writing == [0] * 4
