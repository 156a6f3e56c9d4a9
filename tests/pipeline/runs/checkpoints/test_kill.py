"""After `kill -9` of any rank at any moment, `resume="auto"` reaches the weights of an uninterrupted run."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoint_kill_server import STOPS_AT
from pipeline_data import Toy
from places import SUPPORT
from process_state import start_server, wait_until_ended
from safetensors.torch import load_file
from task_jobs import numbers_of, vectors, write

pytestmark = pytest.mark.process

PATIENCE = 100.0  # seconds that one training may take


class Server:
    """Starts trainings in processes that can be killed; see `checkpoint_kill_server.py`."""

    def __init__(self, toy: Toy) -> None:
        self.files = {"Classification": (toy.train, toy.val)}
        self.process = start_server("checkpoint_kill_server.py")
        assert self._answer() == "ready"

    def start(self, out: Path, run: dict[str, Any], attempt: int = 0) -> list[int]:
        train, val = self.files[run["task"]]
        rendezvous = str(out.with_name(f"{out.name}-{attempt}.rendezvous"))
        files = {"out": str(out), "train": train, "val": val, "rendezvous": rendezvous}
        order = run | files | {"every_steps": 1}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return list(self._answer())

    def statuses(self) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        watchdog = threading.Timer(PATIENCE, self.kill)
        watchdog.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, "the server was killed: a training did not end"
        return json.loads(line)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(toy: Toy) -> Iterator[Server]:
    server = Server(toy)
    yield server
    server.kill()
    server.process.communicate()


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def newest(out: Path) -> int:
    """The step of the newest checkpoint, complete or not."""
    names = [path.name for path in (out / "checkpoints").glob("*")]
    found = [re.fullmatch(r"\.?step-(\d+)(\.partial)?", name) for name in names]
    return max((int(match[1]) for match in found if match), default=0)


def wait_for_step(step: int, out: Path, pid: int) -> None:
    """Return when a checkpoint of that step is there, or the process has ended."""
    deadline = time.monotonic() + PATIENCE
    while newest(out) < step and psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.001)


def numbers(out: Path) -> list[tuple[float, float, float]]:
    epochs = json.loads((out / "history.json").read_text())["epochs"]
    return [(epoch["loss"], epoch["val_loss"], epoch["metrics"]) for epoch in epochs]


def of_callbacks(out: Path) -> tuple[Any, ...]:
    history = json.loads((out / "history.json").read_text())
    content = json.loads((out / f"checkpoints/step-{newest(out):08d}/state.json").read_text())
    kept = [rank["callbacks"] for rank in content["ranks"]]
    return history.get("stopped"), history.get("evaluations"), kept


def ends_the_same(
    server: Server, folder: Path, strategy: str, ranks: int, kills: int, seed: int, **options: Any
) -> None:
    """Kill runs until their number is reached, resuming each from the last; compare every run that ends."""
    dice, whole = random.Random(seed), folder / "whole"
    run = {"strategy": strategy, "ranks": ranks, "callbacks": False, "task": "Classification", **options}
    server.start(whole, run)
    assert server.statuses() == [0] * ranks, Path(f"{whole}.stderr").read_text()
    weights = load_file(whole / "model.safetensors")
    done, runs, attempt, while_saving, steps = 0, 0, 0, 0, set[int]()
    out = folder / "run 0"
    while True:
        attempt += 1
        pids = server.start(out, run, attempt)
        victims = pids if dice.random() < 0.5 else [dice.choice(pids)]
        if done < kills:
            wait_for_step(newest(out) + dice.choice([0, 1, 2, 3, 5, 8]), out, pids[0])
            time.sleep(dice.uniform(0, 0.05))
            while_saving += bool(list((out / "checkpoints").glob(".step-*.partial")))
            steps.add(newest(out))
            kill(victims)
            time.sleep(dice.choice([0.0, 0.1]))
            kill(pids)  # what a launcher does with the ranks that are left
        statuses = server.statuses()
        done += any(status == -signal.SIGKILL for status in statuses)
        if statuses == [0] * ranks:
            found = load_file(out / "model.safetensors")
            torch.testing.assert_close(found, weights, rtol=0, atol=0)
            assert numbers(out) == numbers(whole)
            assert of_callbacks(out) == of_callbacks(whole)
            runs += 1
            if done >= kills:
                break
            out = folder / f"run {runs}"
        assert attempt < 5 * kills + 5, Path(f"{out}.stderr").read_text()
    print(f"{done} kills, {while_saving} while saving, {runs} runs compared, at steps {sorted(steps)}")


@pytest.mark.slow  # test_checkpoint_shards.py kills ranks of ddp and fsdp, forked by a process that is there
@pytest.mark.parametrize(("strategy", "ranks", "kills", "seed"), [("single", 1, 4, 1), ("ddp", 2, 1, 11)])
def test_a_few(strategy: str, ranks: int, kills: int, seed: int, server: Server, tmp_path: Path) -> None:
    ends_the_same(server, tmp_path, strategy, ranks, kills, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategy", "ranks"),
    [("MultiLabel", "single", 1), ("Regression", "ddp", 2)],
)
def test_a_few_of_other_tasks(task: str, strategy: str, ranks: int, server: Server, tmp_path: Path) -> None:
    """Their metrics in the history are those of the uninterrupted run, too."""
    server.files[task] = write(tmp_path, {"MultiLabel": vectors, "Regression": numbers_of}[task])
    ends_the_same(server, tmp_path, strategy, ranks, kills=2, seed=6, task=task)
    names = {"MultiLabel": {"map", "f1", "auroc"}, "Regression": {"mae", "r2"}}[task]
    assert all(set(metrics) == names for *_, metrics in numbers(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "kills"), [("single", 1, 3), ("ddp", 2, 2)])
def test_a_few_with_callbacks_and_early_stopping(
    strategy: str, ranks: int, kills: int, server: Server, tmp_path: Path
) -> None:
    """They keep their states, and the run stops after the same step of an epoch, for the same reason."""
    ends_the_same(server, tmp_path, strategy, ranks, kills, seed=5, callbacks=True)
    stopped, evaluations, kept = of_callbacks(tmp_path / "whole")
    assert stopped["step"] == STOPS_AT
    assert stopped["reason"].startswith("EarlyStopping: val_loss has not improved")
    assert [each["step"] for each in evaluations] == [3, 6, 9]
    assert [len(states["Losses"]["losses"]) for states in kept] == [STOPS_AT] * ranks
    assert len({str(states) for states in kept}) == ranks  # each rank's own losses


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "kills"), [("single", 1, 20), ("ddp", 2, 10), ("fsdp", 2, 10)])
def test_many(strategy: str, ranks: int, kills: int, server: Server, tmp_path: Path) -> None:
    ends_the_same(server, tmp_path, strategy, ranks=ranks, kills=kills, seed=3)


SCRIPT = """
import sys
from checkpoint_kill_server import EPOCHS, pipeline_of
from drivetrain.pipeline import Checkpoints

train, val, strategy, out = sys.argv[1:]
pipeline_of(train, val).distribute(strategy, devices=2).fit(
    epochs=EPOCHS, out=out, progress=False, resume="auto", checkpoints=Checkpoints(every_steps=1)
)
"""


@pytest.fixture
def launched(toy: Toy, tmp_path: Path) -> Iterator[Callable[[str, Path], subprocess.Popen[str]]]:
    """Start a script whose `fit` starts two ranks."""
    started: list[subprocess.Popen[str]] = []

    def launch(strategy: str, out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, toy.train, toy.val, strategy, str(out)]
        environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "TMPDIR": str(tmp_path)}
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_process_that_started_the_ranks(
    strategy: str, launched: Callable[[str, Path], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """If the program is killed, its ranks exit; if a rank is killed, it reports that. The next start resumes."""
    dice, whole, out = random.Random(4), tmp_path / "whole", tmp_path / "out"
    assert launched(strategy, whole).wait(PATIENCE) == 0
    for victim in ("parent", "rank", "parent"):
        step, process = newest(out) + dice.choice([1, 2, 4]), launched(strategy, out)
        wait_for_step(step, out, process.pid)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        (process if victim == "parent" else ranks[1]).kill()
        told = process.communicate(timeout=30)[1]
        assert not wait_until_ended(ranks, 30)
        assert victim == "parent" or "rank 1 of 2 was killed by SIGKILL" in told, told
    process = launched(strategy, out)
    assert process.wait(PATIENCE) == 0, process.communicate()[1]
    found, expected = (load_file(folder / "model.safetensors") for folder in (out, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert numbers(out) == numbers(whole)
