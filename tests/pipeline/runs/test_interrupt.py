"""Ctrl-C: training saves and stops, leaves no process running, and keeps the finished epochs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from drivetrain.common.signals import interrupts_held
from drivetrain.loaders import TorchLoader
from drivetrain.pipeline import Ledger, LedgerInterrupted, TrainingInterrupted
from PIL import Image
from pipeline_data import BATCH, CLASSES, RUN_FILES, SIDE, TRAIN, Sleepy, Toy, evaluated, left_in, plain_model
from places import SUPPORT
from process_state import wait_until, wait_until_ended
from safetensors.torch import load_file

pytestmark = pytest.mark.process

PATIENCE = 15.0  # seconds that a script may take to end
KEPT = [name for name in RUN_FILES if name != "curves.png"]  # drawing them would take a second

SCRIPT = """
import sys, threading
import psutil
from drivetrain import Pipeline
from drivetrain.pipeline import TrainingInterrupted
from pipeline_data import Sleepy

train, val, out, how = sys.argv[1:]
pipeline = Pipeline(Sleepy, seconds=0.15).load(
    train, val, batch_size=32, image_size=16, workers=1, loader="torch" if how == "torch" else "ffcv"
).optimize("sgd", lr=0.1)
if how == "ddp":
    pipeline = pipeline.distribute("ddp", devices=2)
try:
    pipeline.fit(epochs=100, out=out)
except TrainingInterrupted as interrupt:
    result = interrupt.result
    print("kept", len(result.history.epochs), result.accuracy, flush=True)
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
    children = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    children = [child for child in children if "resource_tracker" not in str(child)]
    print("left", threads, children, flush=True)
    raise
"""


def start(started: list[subprocess.Popen[str]], command: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
    )  # fmt: skip
    started.append(process)
    return process


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send SIGINT as a terminal does, to the whole process group; return the output when all of it has ended."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    begin = time.monotonic()
    output = process.communicate(timeout=PATIENCE)
    assert not wait_until_ended(family[1:], PATIENCE - (time.monotonic() - begin))
    return output


def test_scripts_that_are_interrupted(toy: Toy, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """On one device, on two ranks, and with the worker processes of PyTorch's loader; all at the same time."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    running = {
        tmp_path / how: start(started, [sys.executable, str(script), toy.train, toy.val, str(tmp_path / how), how])
        for how in ("single", "ddp", "torch")
    }
    while running:
        for out in [out for out in running if (out / "history.json").exists()]:
            assert_keeps_the_first_epoch(running.pop(out), out, toy.val)
        for process in running.values():
            assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def assert_keeps_the_first_epoch(process: subprocess.Popen[str], out: Path, val: str) -> None:
    time.sleep(0.3)  # into epoch 2: 4 steps of 0.15 s, then the evaluation
    output, errors = interrupt(process)
    assert process.returncode not in (0, None)
    kept, left = output.splitlines()[-2:]
    history = json.loads((out / "history.json").read_text())
    assert left_in(out) == KEPT
    assert kept == f"kept {len(history['epochs'])} {history['epochs'][-1]['metrics']['top1']}"
    model = Sleepy(0)
    model.load_state_dict(load_file(out / "model.safetensors"))
    last = history["epochs"][-1]
    # 1e-3: the two loaders resize a little differently.
    assert evaluated(model, val) == pytest.approx((last["val_loss"], last["metrics"]["top1"]), abs=1e-3)
    assert left == "left ['MainThread'] []"
    assert errors.count("Traceback") == 1, errors  # the script's own, of what it raised again


def interrupted_when(path: Path) -> None:
    while not path.exists():
        pass
    signal.raise_signal(signal.SIGINT)


def test_the_exception_carries_what_was_finished(toy: Toy, tmp_path: Path) -> None:
    """Also if Ctrl-C comes between the writing of the weights and that of the history."""
    pipeline = toy.pipeline(Sleepy(0.05))
    handler = signal.getsignal(signal.SIGINT)
    threading.Thread(target=interrupted_when, args=(tmp_path / "model.safetensors",), daemon=True).start()
    with pytest.raises(TrainingInterrupted) as caught:
        pipeline.fit(epochs=1000, out=tmp_path, progress=False)
    result = caught.value.result
    assert result is not None
    written = json.loads((tmp_path / "history.json").read_text())
    assert f"after epoch {len(written['epochs'])}; this exception's result" in str(caught.value)
    assert [epoch["epoch"] for epoch in written["epochs"]] == [e.epoch for e in result.history.epochs]
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert (result.model.state_dict()[name] == value).all()
    assert signal.getsignal(signal.SIGINT) is handler
    assert not [t for t in threading.enumerate() if t.name.startswith("drivetrain")]


def test_before_the_first_epoch_there_is_no_result(toy: Toy, tmp_path: Path) -> None:
    def factory() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(TrainingInterrupted) as caught:
        toy.pipeline(factory).fit(epochs=1, out=tmp_path, progress=False)
    assert caught.value.result is None
    assert str(caught.value) == "training was interrupted before its first epoch finished"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_ledger_keeps_no_frames(toy: Toy) -> None:
    """Of the measurement, which hold models and loaders: a notebook keeps the last traceback."""

    def factory() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(LedgerInterrupted, match="the ledger was interrupted") as caught:
        toy.pipeline(factory, loader="torch", workers=0).ledger(progress=False)
    assert caught.traceback[-1].name == "_measured"
    assert caught.value.ledger is None
    assert caught.value.__context__ is None


def test_a_worker_that_starts_does_not_hear_ctrl_c(toy: Toy) -> None:
    """It imports for seconds first; a terminal, or a notebook, interrupts all processes of a group."""
    stop = threading.Event()

    def interrupt_all_workers() -> None:
        while not stop.wait(0.02):
            for child in psutil.Process().children():
                if os.getpgid(child.pid) == os.getpgrp():
                    child.send_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt_all_workers)
    thread.start()
    try:
        with TorchLoader(toy.train, batch_size=BATCH, image_size=SIDE, workers=1) as loader:
            assert len(list(loader)) == TRAIN // BATCH
    finally:
        stop.set()
        thread.join()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_is_heard_while_workers_turn_to_the_next_epoch(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """DataLoader waits for workers that run already, without a limit; one may hang."""
    kept, ended = [], []

    class Loads:
        _iterator: Any = None

        def __iter__(self) -> Any:
            kept.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
            if self._iterator is not None:
                raise KeyboardInterrupt
            self._iterator = self
            return iter(())

        def _shutdown_workers(self) -> None:
            ended.append(self)

    monkeypatch.setattr(TorchLoader, "_make_loader", lambda _: Loads())
    with TorchLoader(toy.train, batch_size=BATCH, image_size=SIDE, workers=1) as loader:
        assert list(loader) == []
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        assert len(ended) == 1
        assert list(loader) == []  # by new workers
    assert (kept, len(ended)) == ([True, False, True], 2)


def test_an_interrupt_waits_for_the_end_of_what_belongs_together() -> None:
    done = []

    def write() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.extend(["weights", "history"])

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["weights", "history"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_the_main_thread_training_works(toy: Toy) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(toy.pipeline(plain_model).fit(epochs=1, progress=False)))
    thread.start()
    thread.join(30)
    assert found[0].accuracy is not None


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("drivetrain")), *arguments]


def test_the_command_line_ends_with_a_line(toy: Toy, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """Training, the ledger and a conversion, at the same time."""
    values = ["batch_size=4", "image_size=16", "loading={}", "workers=1", "epochs=5000", "precision=fp32"]
    values += [f"model_options.num_classes={CLASSES}", "transforms=[]"]
    files = ["--train", toy.train, "--val", toy.val]
    run, measured, photos = tmp_path / "run", tmp_path / "ledger", tmp_path / "photos"
    (photos / "a").mkdir(parents=True)
    Image.effect_noise((3000, 3000), 80).save(photos / "a" / "first.ppm")
    for number in range(40):
        (photos / "a" / f"{number}.ppm").hardlink_to(photos / "a" / "first.ppm")
    train = start(started, command("train", "cifar10-quickstart", *values, *files, "--out", str(run)))
    ledger = start(
        started,
        command("ledger", "cifar10-quickstart", *values, *files, "--out", str(measured), "--seconds", "600"),
    )
    convert = start(started, command("convert", str(photos), str(tmp_path / "photos.beton")))
    wait_until(lambda: list(tmp_path.glob(".photos.beton*")), convert)
    _, errors = interrupt(convert)
    assert (convert.returncode, errors.count("Traceback")) == (130, 0), errors
    assert errors.splitlines()[-1].startswith("Interrupted: ")
    assert not list(tmp_path.glob("*photos.beton*"))

    wait_until((run / "history.json").exists, train)
    _, errors = interrupt(train)
    assert (train.returncode, errors.count("Traceback")) == (130, 0), errors
    told = errors.splitlines()[-1]
    assert "Saved " in told
    assert told.endswith(". Run the same command with --resume to continue from there.")
    assert {*left_in(run)} - {"curves.png"} == {*KEPT}  # drawn where many seconds have passed

    wait_until(measured.exists, ledger)
    time.sleep(2)
    output, errors = interrupt(ledger)
    assert (ledger.returncode, errors.count("Traceback")) == (130, 0), errors
    told = errors.splitlines()[-1]
    assert told.startswith("Interrupted: ")
    if "There is no ledger yet" in told:
        assert list(measured.iterdir()) == []
    else:  # a fast machine has had two trials by then
        assert sorted(path.name for path in measured.iterdir()) == ["ledger.json", "ledger.png"]
        assert f"is in {measured / 'ledger.json'}" in told
        assert Ledger.load(measured / "ledger.json").bound in " ".join(output.split())


HUNG_UP = """
import multiprocessing.connection as connection, multiprocessing.resource_sharer as sharer, sys, threading
from drivetrain.loaders import torch_loader
torch_loader._leave_interrupts_to_the_parent(0)
sharer.DupFd(0)  # starts the thread that hands a worker's batches over
address, _ = sharer._resource_sharer._address, print("hanging up", file=sys.stderr)
for _ in range(3):
    connection.SocketClient(address).close()
sharer.stop(timeout=10)
raise RuntimeError("anything else is told")
"""


def test_a_worker_says_nothing_of_a_parent_that_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", HUNG_UP], capture_output=True, text=True, timeout=60)
    assert done.stderr.startswith("hanging up\nTraceback")
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.endswith("RuntimeError: anything else is told\n")
