"""A signal asks a run to stop: all ranks save after a step, leave, and resume bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kill_server import Losses
from cluster_jobs import Signals, SignalsWhileLoaded, Slow
from command_line import call
from drivetrain import Callback, Pipeline, PlanError, RunView
from drivetrain.common.signals import handled
from drivetrain.pipeline import Checkpoints, TrainingInterrupted, TrainingPreempted
from drivetrain.pipeline.runs.checkpoints.directory import CheckpointDir
from drivetrain.pipeline.runs.checkpoints.weights import load_model
from drivetrain.pipeline.telemetry.history import read_history
from drivetrain.pipeline.training import agreement
from drivetrain.strategies.launching.launcher import launch
from drivetrain.transforms import EMA, MixUp, ProgressiveResizing
from pipeline_data import Toy, batch_norm_model
from places import SUPPORT
from process_state import wait_until
from same_runs import assert_same_run

STEPS = 4  # in an epoch of the toy data


def preempted(pipeline: Pipeline, epochs: int, out: Path, *callbacks: Callback, **options: Any) -> TrainingPreempted:
    """The exception of a run that SIGUSR1 ends."""
    options = {"progress": False, "stop_on": ["SIGUSR1"], **options}
    with pytest.raises(TrainingPreempted) as ended:
        pipeline.fit(epochs=epochs, out=out, callbacks=callbacks, **options)
    assert ended.value.checkpoint is not None
    return ended.value


def kill_at(step: int, out: Path, number: signal.Signals) -> threading.Thread:
    """A thread that sends this process a signal once the checkpoint of a step is there."""

    def send() -> None:
        while not (out / f"checkpoints/step-{step:08d}").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("step", [1, 3, 4, 5, 7])
def test_one_process(toy: Toy, tmp_path: Path, step: int) -> None:
    """Also in the last step of an epoch, before its evaluation, in the first of the next, and in the last of all."""
    pipeline = toy.pipeline()
    before = signal.getsignal(signal.SIGUSR1)
    ended = preempted(pipeline, 2, tmp_path, Signals(step))
    assert signal.getsignal(signal.SIGUSR1) is before
    assert (ended.code, ended.signal) == (75, "SIGUSR1")
    assert ended.checkpoint == (tmp_path / "checkpoints" / f"step-{step + 1:08d}").resolve()
    finished = json.loads((tmp_path / "history.json").read_text())["epochs"] if step > STEPS - 1 else []
    assert len(finished) == step // STEPS
    resumed = pipeline.fit(epochs=2, out=tmp_path, progress=False, resume="auto")
    assert_same_run(resumed, pipeline.fit(epochs=2, progress=False))


class Interrupts(Callback):
    """Presses Ctrl-C after step `step`, so often."""

    def __init__(self, step: int, times: int = 1) -> None:
        self.step, self.times = step, times

    def on_step_end(self, view: RunView) -> None:
        for _ in range(self.times if view.step == self.step else 0):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", [1, 5])
def test_ctrl_c_saves(toy: Toy, tmp_path: Path, capfd: pytest.CaptureFixture[str], step: int) -> None:
    """As SIGTERM does, also within the first epoch; a second one does not wait, nor does one without checkpoints."""
    pipeline = toy.pipeline()
    with pytest.raises(TrainingInterrupted) as ended:
        pipeline.fit(epochs=2, out=tmp_path, callbacks=[Interrupts(step)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "Press it again to stop at once" in capfd.readouterr().err
    saved = (tmp_path / "checkpoints" / f"step-{step + 1:08d}").resolve()
    assert ended.value.checkpoint == saved
    assert str(ended.value).endswith(f"; fit(resume='auto') continues from {saved}")
    assert (ended.value.result is None) == (step < STEPS)
    whole = pipeline.fit(epochs=2, progress=False)
    assert_same_run(pipeline.fit(epochs=2, out=tmp_path, progress=False, resume="auto"), whole)

    for options in ({"out": tmp_path, "callbacks": [Interrupts(1, times=2)]}, {"callbacks": [Interrupts(1)]}):
        with pytest.raises(TrainingInterrupted) as at_once:
            pipeline.fit(epochs=2, progress=False, **options)
        assert at_once.value.checkpoint is None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_last_evaluation_is_not_lost(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted) as ended:
        toy.pipeline().fit(epochs=2, out=tmp_path, progress=False, callbacks=[Interrupts(2 * STEPS)])
    assert ended.value.result is not None
    assert ended.value.epochs == 2


@pytest.mark.process
@pytest.mark.long
def test_ctrl_c_saves_on_ranks(toy: Toy, tmp_path: Path) -> None:
    """This process receives it; the ranks agree on the step, also if only one of them hears of it in time."""
    pipeline = toy.pipeline().distribute("ddp", devices=2)
    thread = kill_at(1, tmp_path, signal.SIGINT)
    options: dict[str, Any] = {"epochs": 3, "out": tmp_path, "progress": False}
    with pytest.raises(TrainingInterrupted) as ended:
        pipeline.fit(checkpoints=Checkpoints(every_steps=1, keep=20), callbacks=[Slow()], **options)
    thread.join()
    assert ended.value.checkpoint is not None
    assert_same_run(pipeline.fit(**options, resume="auto"), pipeline.fit(epochs=3, progress=False))


def test_before_an_evaluation_with_everything_that_happens_there(toy: Toy, tmp_path: Path) -> None:
    """Averages, statistics, callbacks and a schedule of the images' size."""
    pipeline = toy.pipeline(batch_norm_model()).transform(EMA(half_life=2), MixUp(0.2), ProgressiveResizing())
    every = Checkpoints(every_steps=2)
    options: dict[str, Any] = {"progress": False, "eval_every_steps": 2, "checkpoints": every}
    ended = preempted(pipeline, 3, tmp_path, Signals(7), Losses(), **options)
    assert Path(str(ended.checkpoint)).name == "step-00000008"
    resumed = pipeline.fit(epochs=3, out=tmp_path, resume="auto", callbacks=[again := Losses()], **options)
    whole = pipeline.fit(epochs=3, out=tmp_path / "whole", callbacks=[expected := Losses()], **options)
    assert_same_run(resumed, whole)
    assert resumed.history.evaluations == whole.history.evaluations
    assert again.losses == expected.losses


class OfWeights(Callback):
    """Keeps after how many epochs the results in a folder are, 0 if its history and its weights do not fit."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.epochs = folder, list[int]()

    def on_evaluation_end(self, view: RunView) -> None:  # noqa: ARG002
        history = read_history(self.folder)
        fits = history is not None and load_model(self.folder / "model.safetensors", epochs=history.moment)
        self.epochs.append(len(history.epochs) if history is not None and fits else 0)


def test_results_of_an_epoch_whose_checkpoint_is_missing_stay_until_it_ends_again(toy: Toy, tmp_path: Path) -> None:
    """As after a kill between the two. Evaluations within the epoch do not replace its history, which names the moment
    of the weights."""
    every = Checkpoints(every_steps=1, keep=2 * STEPS)
    options: dict[str, Any] = {"epochs": 2, "out": tmp_path, "progress": False, "eval_every_steps": 1}
    toy.pipeline().fit(checkpoints=every, **options)
    for step in (2 * STEPS - 1, 2 * STEPS):
        shutil.rmtree(tmp_path / f"checkpoints/step-{step:08d}")
    seen = OfWeights(tmp_path)
    resumed = toy.pipeline().fit(checkpoints=every, resume="auto", callbacks=[seen], **options)
    assert seen.epochs == [2, 2]
    saved = read_history(tmp_path)
    assert saved is not None
    assert (saved.epochs, saved.evaluations) == (resumed.history.epochs, resumed.history.evaluations)


def test_after_the_last_step_the_run_is_finished(toy: Toy, tmp_path: Path) -> None:
    signals = Signals(2 * STEPS)
    result = toy.pipeline().fit(epochs=2, out=tmp_path, progress=False, stop_on=["SIGUSR1"], callbacks=[signals])
    assert len(result.history.epochs) == 2


def test_the_folds_of_the_command_continue_by_the_same_command(toy: Toy, tmp_path: Path) -> None:
    """Stopped after the first steps of each fold; `drivetrain folds` has no --resume."""
    recipe = toy.named().load(toy.train, batch_size=16, image_size=16, workers=1).replace(epochs=2).to_recipe()
    recipe |= {"out": f"{tmp_path / 'cv'}", "callbacks": [{"name": "cluster_jobs:Signals", "step": 1}]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    with handled([signal.SIGUSR1], lambda *_: None):  # whose usual effect is the end of the process
        ends = [call("folds", f"{tmp_path / 'recipe.json'}", "--folds", "2", *how) for how in ((), ("--quiet",), ())]
    assert [end.code for end in ends] == [75, 75, 0], ends
    for fold, end in enumerate(ends[:2]):
        assert f"fold-{fold}/checkpoints/step-00000002. Run the same command again to continue." in end.out + end.err


def test_without_a_folder_nothing_is_saved(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingPreempted) as ended:
        toy.pipeline().fit(epochs=2, stop_on=("SIGUSR1",), callbacks=[Signals(1)])
    assert ended.value.checkpoint is None
    assert "Stopped by SIGUSR1 after step 2; nothing was saved" in "".join(capsys.readouterr())
    assert ended.value.message.startswith("Stopped by SIGUSR1 after step 2; nothing was saved")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("SIGTERM", "must be a list"), (["SIGTER"], "'SIGTER' is not known. Known: SIGHUP, SIGTERM"),
        (["SIGKILL"], "'SIGKILL' is not known"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_signals_is_refused(toy: Toy, value: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        toy.pipeline().fit(epochs=1, stop_on=value)


@pytest.mark.process
def test_a_signal_before_ranks_can_save_is_no_failure(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As while they import torch. This process ignores it until it passes it on."""
    pipeline, callbacks = toy.pipeline().distribute("ddp", devices=2), [SignalsWhileLoaded()]
    with handled([signal.SIGUSR1], lambda *_: None), pytest.raises(TrainingPreempted) as ended:
        pipeline.fit(epochs=1, out=tmp_path, stop_on=["SIGUSR1"], callbacks=callbacks)
    assert (ended.value.code, ended.value.signal, ended.value.checkpoint) == (75, "SIGUSR1", None)
    text = "Stopped by SIGUSR1 while not every rank could save. There is no complete checkpoint"
    assert text in "".join(capsys.readouterr())
    assert ended.value.message.startswith(text)


@pytest.mark.process
@pytest.mark.slow
def test_ranks_agree_whoever_is_signalled(toy: Toy, tmp_path: Path) -> None:
    """Rank 1 alone; then this process, which forwards the signal. Both save once, and the run ends as undisturbed."""
    pipeline = toy.pipeline().distribute("ddp", devices=2)
    ended = preempted(pipeline, 3, tmp_path, Signals(2, rank=1))
    assert Path(str(ended.checkpoint)).name == "step-00000003"
    thread, every = kill_at(4, tmp_path, signal.SIGUSR1), Checkpoints(every_steps=1, keep=20)
    forwarded = preempted(pipeline, 3, tmp_path, Slow(), checkpoints=every, resume="auto")
    thread.join()
    assert forwarded.signal == "SIGUSR1"
    resumed = pipeline.fit(epochs=3, out=tmp_path, progress=False, resume="auto", stop_on=["SIGUSR1"])
    assert_same_run(resumed, pipeline.fit(epochs=3, progress=False))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_leave_before_an_evaluation(toy: Toy, tmp_path: Path, strategy: str) -> None:
    pipeline = toy.pipeline(batch_norm_model()).transform(EMA(half_life=2)).distribute(strategy, devices=2)
    ended = preempted(pipeline, 2, tmp_path, Signals(3, rank=1))
    assert Path(str(ended.checkpoint)).name == f"step-{STEPS:08d}"
    assert not (tmp_path / "history.json").exists()
    resumed = pipeline.fit(epochs=2, out=tmp_path, progress=False, resume="auto")
    assert_same_run(resumed, pipeline.fit(epochs=2, progress=False))


@pytest.mark.slow
@pytest.mark.process
def test_checkpoints_by_the_clock_of_rank_0(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline().distribute("ddp", devices=2)
    pipeline.fit(epochs=1, out=tmp_path, progress=False, checkpoints=Checkpoints(every_minutes=1e-6, keep=20))
    assert len(CheckpointDir(tmp_path / "checkpoints").checkpoints()) == STEPS


def test_minutes_are_a_positive_number() -> None:
    for value in (0, -1, "5", float("nan"), True):
        with pytest.raises(PlanError, match="every_minutes="):
            Checkpoints(every_minutes=value)  # type: ignore[arg-type]


def test_minutes_are_counted_from_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(agreement, "monotonic", lambda: now)
    requests = agreement.Requests(every_minutes=2.0)
    for _ in range(2):
        now += 119.0
        assert requests.flags() == 0
        now += 1.0
        assert requests.flags() == agreement.SAVE
        requests.agree([requests.flags()])
        wanted = [requests.save]
        now += 30.0  # until it is saved
        requests.saved()
        assert [*wanted, requests.save] == [True, False]
    now += 1e6
    assert agreement.Requests().flags() == 0


@pytest.mark.process
def test_launch_restores_handlers() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    launch(os.getpid, devices=1, device="cpu", forward=[signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.process
@pytest.mark.long
@pytest.mark.slow
def test_the_command_ends_with_its_status(toy: Toy, tmp_path: Path) -> None:
    """SIGTERM by default, on a run of one process."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"model: pipeline_data:Sleepy\nmodel_options: {{seconds: 0.2}}\ntrain: {toy.train}\nbatch_size: 32\n"
        "image_size: 16\noptimizer: {name: sgd, lr: 0.1}\nepochs: 50\nstrategy_options: {device: cpu}\n"
    )
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "drivetrain", "train", str(recipe), "--out", str(out), "--every-steps", "1",
    ]  # fmt: skip
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        wait_until(lambda: list(tmp_path.glob("run/checkpoints/step-*")), process, seconds=100)
        process.terminate()
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, errors
    assert "Stopped by SIGTERM after step" in output + errors
    assert "--resume" in output + errors
