"""Two machines, each an agent of torchrun: differences, signals and losses; one that comes and goes has no influence on
what is learned. `benchmarks/faults.py` publishes the seconds that these tests record."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from agents import SAMPLES, Job, losses_in, recipe
from drivetrain import Pipeline
from machines import Machine
from pipeline_data import Toy
from process_state import wait_until_ended

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(200)]
Started = list[subprocess.Popen[str]]
Hosts = list[Machine | None]
STEPS = 4  # in an epoch
NET = """
from pipeline_data import plain_model
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.layers, self.drop = plain_model(classes), nn.Dropout(0.1)

    def forward(self, images):
        return self.drop(functional.relu(self.layers(images)))
"""


@pytest.mark.slow
def test_machines_with_different_recipes_fail_together(
    toy: Toy, tmp_path: Path, started: Started, hosts: Hosts, record_property: Any
) -> None:
    job, begin = Job(tmp_path, started), time.monotonic()
    for number, host in enumerate(hosts):
        path = recipe(toy, tmp_path / f"{number}.json", epochs=2, optimizer={"name": "sgd", "lr": 0.1 + number})
        job.start("train", path, "--out", str(job.out), on=host)
    assert [agent.end() for agent in job.agents] == [1, 1]
    record_property("another learning rate on one machine: until both end", time.monotonic() - begin)
    for agent in job.agents:
        (line,) = [line for line in agent.output.splitlines() if line.startswith("StrategyError")]
        assert "The ranks do not train the same: rank 1 (" in line
        assert all(f"({each.host})" in line for each in job.agents)
        assert "optimizer.lr = " in line
    assert job.steps() == 0


@pytest.mark.slow
def test_machines_with_different_models_fail_together(
    toy: Toy, tmp_path: Path, started: Started, hosts: Hosts, record_property: Any
) -> None:
    """Each has its own `net.py`, with equal names and shapes."""
    job, begin = Job(tmp_path, started), time.monotonic()
    path = recipe(toy, tmp_path / "net.json", epochs=1, model="net:Net", model_options={})
    for number, text in enumerate((NET, NET.replace("relu", "gelu").replace("0.1", "0.2"))):
        code = tmp_path / f"code {number}"
        code.mkdir()
        (code / "net.py").write_text(f"# on machine {number}\n{text}")
        job.start("train", path, "--out", str(job.out), code=code, on=hosts[number])
    assert [agent.end() for agent in job.agents] == [1, 1]
    record_property("another net.py on one machine: until both end", time.monotonic() - begin)
    first, second = (f"rank {number} ({agent.host})" for number, agent in enumerate(job.agents))
    for agent in job.agents:
        (line,) = [line for line in agent.output.splitlines() if line.startswith("StrategyError")]
        assert "The ranks do not train the same model: " in line
        assert f"code of net.Net is not the same in {first} and {second}" in line
        settings = [f"model.drop is Dropout(p=0.{part}, inplace=False) in " for part in (1, 2)]
        assert sum(each in line for each in settings) == 1, line
    assert not (job.out / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("lacks", "what"), [(0, "recipe"), (1, "data")])
def test_a_machine_that_lacks_something_ends_all_at_once(
    toy: Toy, tmp_path: Path, started: Started, hosts: Hosts, record_property: Any, lacks: int, what: str
) -> None:
    """Long before the ranks give each other up."""
    job, started_at = Job(tmp_path, started), time.monotonic()
    for number, host in enumerate(hosts):
        path = recipe(toy, tmp_path / f"{number}.json", epochs=2, timeout=120)
        if number == lacks and what == "recipe":
            path = str(tmp_path / "gone.json")
        data = [f"train={tmp_path}/gone.beton"] if number == lacks and what == "data" else []
        job.start("train", path, *data, "--out", str(job.out), on=host)
    job.wait(lambda: any(agent.process.poll() is not None for agent in job.agents), "the end of one")
    begin = time.monotonic()
    assert [agent.end() for agent in job.agents] == [1, 1]
    assert time.monotonic() - begin < 10
    record_property(f"no {what} on one machine: until both end", time.monotonic() - started_at)
    error = {"recipe": "RecipeError: ", "data": "BetonError: "}[what]
    own, other = job.agents[lacks].output, job.agents[1 - lacks].output
    assert sum(line.startswith(error) for line in own.splitlines()) == 1, own
    (line,) = [line for line in other.splitlines() if line.startswith("FailedRankError: ")]
    ranks = [
        f"Rank {1 - lacks} of 2 ({job.agents[1 - lacks].host}) stops, because ",
        f"rank {lacks} of 2 ({job.agents[lacks].host}) failed: {error}",
        "gone",
    ]
    assert all(words in line for words in ranks), other
    assert job.steps() == 0


@pytest.mark.slow
def test_a_signal_to_one_machine_stops_both(
    toy: Toy, tmp_path: Path, started: Started, hosts: Hosts, record_property: Any
) -> None:
    """Both workers save, and end with the status 75; torchrun's own is 1."""
    job, begin = Job(tmp_path, started), time.monotonic()
    command = ["train", recipe(toy, tmp_path / "toy.json", epochs=200), "--out", str(job.out), "--quiet"]
    first, second = (job.start(*command, on=host) for host in hosts)
    job.wait(lambda: job.steps() >= 1, "training")
    record_property("a job starts: until the first step", time.monotonic() - begin)
    job.wait(lambda: job.steps() >= 3, "training")
    begin = time.monotonic()
    second.signal(signal.SIGTERM)
    assert [first.end(), second.end()] == [1, 1]
    record_property("SIGTERM to one machine: until both have saved and end", time.monotonic() - begin)
    lead, other = (first, second) if "Stopped" in first.output else (second, first)
    (line,) = [line for line in lead.output.splitlines() if line.startswith("Stopped")]
    (saved,) = (job.out / "checkpoints").glob("step-*")
    assert f"saved {saved.resolve()}. Run the same command with --resume" in line
    assert int(saved.name.removeprefix("step-")) == job.steps()
    assert "Stopped" not in other.output
    assert "exitcode  : 75" in first.output  # of the machine that got no signal
    assert "Error: " not in first.output.replace("ChildFailedError: ", "")


@pytest.mark.slow
def test_a_rank_that_is_killed_starts_again(
    toy: Toy, tmp_path: Path, started: Started, hosts: Hosts, record_property: Any
) -> None:
    """In the store of torchrun's agent, where the addresses of the ranks before still are."""
    job = Job(tmp_path, started, restarts=1)
    command = ["train", recipe(toy, tmp_path / "toy.json", epochs=4), "--out", str(job.out), "--every-steps", "1",
               "--resume"]  # fmt: skip
    first, second = (job.start(*command, on=host) for host in hosts)
    job.wait(lambda: job.steps() >= 3, "training")
    second.worker().kill()
    assert [first.end(), second.end()] == [0, 0]
    assert [ranks for ranks, _ in job.starts()] == [2, 2]
    job.record(record_property, "a rank is killed, with --max-restarts")
    epochs = job.epochs(STEPS)
    assert len(epochs) == 4
    assert all(len(set(epoch)) == SAMPLES and epoch == epochs[0] for epoch in epochs)


@pytest.mark.slow
def test_without_restarts_the_loss_of_a_rank_ends_the_job(
    toy: Toy, tmp_path: Path, started: Started, hosts: Hosts, record_property: Any
) -> None:
    job = Job(tmp_path, started)
    command = [
        "train", recipe(toy, tmp_path / "toy.json", epochs=200), "--out", str(job.out), "--every-steps", "1",
    ]  # fmt: skip
    first, second = (job.start(*command, on=host) for host in hosts)
    job.wait(lambda: job.steps() >= 3, "training")
    worker, begin = second.worker(), time.monotonic()
    worker.kill()
    assert [first.end(), second.end()] == [1, 1]
    record_property("a rank is killed, without --max-restarts: until both end", time.monotonic() - begin)
    lines = [line for line in first.output.splitlines() if line.startswith("StrategyError: Rank ")]
    if lines:  # else its agent has ended it before
        assert f"({second.host}, process " in lines[0]
        assert "does not answer" in lines[0]
        assert "The last complete checkpoint is" in first.output


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_down_to_one_and_up_again(
    toy: Toy, tmp_path: Path, started: Started, hosts: Hosts, record_property: Any
) -> None:
    """A machine is killed, comes back, and is sent away by a signal, as spot instances are."""
    job = Job(tmp_path, started, nodes="1:2", restarts=9, grows=True)
    command = ["train", recipe(toy, tmp_path / "toy.json", epochs=8), "--out", str(job.out), "--every-steps", "1",
               "--resume"]  # fmt: skip
    job.slow.touch()
    first, second = (job.start(*command, on=host) for host in hosts)
    job.wait(lambda: job.steps() >= 6, "training on two")
    worker = second.worker()
    second.signal(signal.SIGKILL)
    assert not wait_until_ended([worker], 10), "its worker outlives it"
    job.wait(lambda: [ranks for ranks, _ in job.starts()] == [2, 1], "training on one")
    third = job.start(*command, on=hosts[1])
    job.wait(lambda: [ranks for ranks, _ in job.starts()] == [2, 1, 2], "training on two again")
    job.slow.unlink()
    job.wait(lambda: len(job.starts()[-1][1]) > 2, "some steps")
    third.signal(signal.SIGTERM)
    assert (third.end(), first.end()) == (1, 0), first.output
    assert [ranks for ranks, _ in job.starts()] == [2, 1, 2, 1]
    last = [max(steps) for _, steps in job.starts()]
    begun = [min(steps) for _, steps in job.starts()]
    # A step computes while the checkpoint of the one before is written; a kill may lose both.
    assert last[0] - 1 <= begun[1] <= last[0] + 1, "a kill loses at most two steps"
    assert begun[2:] == [last[1] + 1, last[2] + 1], "a machine that joins or is warned loses none"
    job.record(record_property, "a machine is killed", "a machine joins", "SIGTERM to a machine's agent")
    epochs = job.epochs(STEPS)
    assert len(epochs) == 8
    assert all(len(set(epoch)) == SAMPLES and epoch == epochs[0] for epoch in epochs)
    undisturbed = Pipeline.from_recipe(str(tmp_path / "toy.json"), devices=1, strategy="single")
    undisturbed.fit(out=tmp_path / "undisturbed", progress=False)
    assert losses_in(job.out) == pytest.approx(losses_in(tmp_path / "undisturbed"), rel=0, abs=1e-6)
