"""Machines with networks of their own, whose cables are cut: namespaces of this machine (see `support/machines.py`).
`benchmarks/faults.py` publishes the seconds that these tests record."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agents import SAMPLES, Job, losses_in, recipe
from drivetrain import Pipeline
from drivetrain.pipeline.runs.result import FitResult
from machines import Cluster
from pipeline_data import Toy
from places import SUPPORT
from process_state import wait_until_ended
from safetensors.torch import load_file

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(500)]
Started = list[subprocess.Popen[str]]
STEPS = 4  # in an epoch
TIMEOUT = 10  # seconds of a collective
SLACK = 20.0  # seconds in which a rank finds out who is lost, and ends


def undisturbed(recipe: str, out: Path, **overrides: Any) -> FitResult:
    """A run on ranks of one machine, unless the overrides change that."""
    plain = {"model": "pipeline_data:Sleepy", "model_options": {"seconds": 0}, "devices": 2}
    return Pipeline.from_recipe(recipe, **plain | overrides).fit(out=out, progress=False)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_machines_train_as_one(cluster: Cluster, toy: Toy, tmp_path: Path, started: Started, strategy: str) -> None:
    job = Job(tmp_path, started)
    path = recipe(toy, tmp_path / "toy.json", epochs=2, strategy=strategy)
    for machine in cluster.machines:
        job.start("train", path, "--out", str(job.out), on=machine)
    assert [agent.end() for agent in job.agents] == [0, 0], job.agents[0].output
    assert [ranks for ranks, _ in job.starts()] == [2]
    expected = undisturbed(path, tmp_path / "one machine").model.state_dict()
    assert losses_in(job.out) == losses_in(tmp_path / "one machine")
    state = load_file(job.out / "model.safetensors")
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_doctor_shows_both(cluster: Cluster, tmp_path: Path, started: Started) -> None:
    job = Job(tmp_path, started)
    for machine in cluster.machines:
        job.start("doctor", "--ranks", on=machine)
    assert [agent.end() for agent in job.agents] == [0, 0], job.agents[0].output
    output = "".join(agent.output for agent in job.agents)
    for machine in cluster.machines:
        assert machine.name in output
        assert machine.address in output


def test_host_names_that_lead_to_loopback(
    cluster: Cluster, toy: Toy, tmp_path: Path, started: Started, record_property: Any
) -> None:
    """As Debian's installer writes them: gloo offers an address that nobody else reaches. Who knows first ends
    both."""
    job, started_at = Job(tmp_path, started), time.monotonic()
    path = recipe(toy, tmp_path / "toy.json", epochs=2, timeout=40)
    for number, machine in enumerate(cluster.machines):
        hosts = tmp_path / f"hosts-{machine.name}"
        other = cluster.machines[1 - number]
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {machine.name}\n{other.address} {other.name}\n")
        machine.run("mount", "--bind", str(hosts), "/etc/hosts")
        job.start("train", path, "--out", str(job.out), on=machine)
    job.wait(lambda: any("cannot exchange tensors" in agent.output for agent in job.agents), "the cause")
    begin = time.monotonic()
    assert [agent.end() for agent in job.agents] == [1, 1]
    assert time.monotonic() - begin < SLACK
    record_property("127.0.1.1 in the hosts files, timeout=40: until both end", time.monotonic() - started_at)
    for agent in job.agents:
        errors = [line for line in agent.output.splitlines() if "Error: Rank" in line]
        assert any("cannot exchange tensors" in line and "GLOO_SOCKET_IFNAME" in line for line in errors), agent.output


def test_a_cable_that_is_cut_for_ten_seconds(
    cluster: Cluster, toy: Toy, tmp_path: Path, started: Started, record_property: Any
) -> None:
    """Less than `timeout`: the same ranks go on."""
    job = Job(tmp_path, started)
    path = recipe(toy, tmp_path / "toy.json", epochs=30, timeout=60)
    for machine in cluster.machines:
        job.start("train", path, "--out", str(job.out), on=machine)
    job.wait(lambda: job.steps() >= 7, "training")
    cluster.machines[1].unplug()
    time.sleep(10)
    at, begin = job.steps(), time.monotonic()
    cluster.machines[1].plug()
    job.wait(lambda: job.steps() > at, "training again")
    record_property("a cable is cut for 10 s: from its return until the next step", time.monotonic() - begin)
    assert at < 30 * STEPS - 1, "it went on without the network"
    assert [agent.end() for agent in job.agents] == [0, 0], job.agents[0].output
    assert [ranks for ranks, _ in job.starts()] == [2]
    undisturbed(path, tmp_path / "undisturbed")
    assert losses_in(job.out) == losses_in(tmp_path / "undisturbed")


STORE = """
import sys
from pathlib import Path
from range_server import RangeServer

server = RangeServer(Path(sys.argv[1]), "0.0.0.0")
server.fail = 10**6  # until there is a line
print(server.port, flush=True)
sys.stdin.readline()
server.fail = 0
sys.stdin.read()
"""


def test_a_store_that_does_not_answer_at_first(
    cluster: Cluster, toy: Toy, tmp_path: Path, started: Started, record_property: Any
) -> None:
    """Both machines get their data from it."""
    job, environment = Job(tmp_path, started), {**os.environ, "PYTHONPATH": str(SUPPORT)}
    folder = Path(toy.train).parent
    store = cluster.machines[0].start(
        sys.executable, "-c", STORE, str(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    started.append(store)
    port = store.stdout.readline().strip()
    data = {name: f"http://node0:{port}/{name}.beton" for name in ("train", "val")}
    path = recipe(toy, tmp_path / "toy.json", epochs=2, timeout=60)
    for number, machine in enumerate(cluster.machines):
        own = [f"{name}={address}" for name, address in data.items()] + [f"cache={tmp_path}/cache {number}"]
        job.start("train", path, *own, "--out", str(job.out), on=machine)
    job.wait(lambda: any("does not answer" in agent.output for agent in job.agents), "waiting for it")
    time.sleep(10)
    begin = time.monotonic()
    store.stdin.write("\n")
    store.stdin.flush()
    job.wait(lambda: job.steps() > 0, "training")
    away = "the store of the data is away for more than 10 s"
    record_property(f"{away}: from its return until the first step", time.monotonic() - begin)
    assert [agent.end() for agent in job.agents] == [0, 0], job.agents[0].output
    undisturbed(path, tmp_path / "undisturbed")
    assert losses_in(job.out) == losses_in(tmp_path / "undisturbed")


@pytest.mark.parametrize("where", ["switch", "node0"])
def test_a_link_goes_down(
    cluster: Cluster, toy: Toy, tmp_path: Path, started: Started, record_property: Any, where: str
) -> None:
    """The ranks on both of its ends stop, and continue when it is up again."""
    job = Job(tmp_path, started)
    path = recipe(toy, tmp_path / "toy.json", epochs=6, timeout=TIMEOUT)
    command = ["train", path, "--out", str(job.out), "--every-steps", "2", "--resume"]
    for machine in cluster.machines:
        job.start(*command, on=machine)
    job.wait(lambda: job.steps() >= 7, "training")
    workers = [agent.worker() for agent in job.agents]
    if where == "switch":
        cluster.machines[1].unplug()
    else:
        cluster.machines[int(where[-1])].run("ip", "link", "set", "eth0", "down")
    begin = time.monotonic()
    assert not wait_until_ended(workers, TIMEOUT + SLACK), "a rank does not end"
    assert time.monotonic() - begin > TIMEOUT / 2
    record_property(f"a cable is cut for good, timeout={TIMEOUT}: until the ranks end", time.monotonic() - begin)
    for rank, agent in enumerate(job.agents):
        (line,) = [line for line in agent.output.splitlines() if line.startswith("StrategyError")]
        assert line.startswith(f"StrategyError: Rank {rank} of 2 (node{rank}) stops, because ")
        assert ("rank 1 (node1, process " if rank == 0 else "the host of rank 0 does not answer at node0:") in line
        saved = max((job.out / "checkpoints").glob("step-*"))
        assert f"The last complete checkpoint is {saved}. Run the same command again" in agent.output
    if where == "switch":
        cluster.machines[1].plug()
    else:
        cluster.machines[int(where[-1])].run("ip", "link", "set", "eth0", "up")
    assert [agent.end() for agent in job.agents] == [1, 1]
    begin = time.monotonic()
    again = [job.start(*command, on=machine) for machine in cluster.machines]
    job.wait(lambda: len(job.starts()) == 2, "training again")
    record_property("the same job is started again: until the next step", time.monotonic() - begin)
    assert [agent.end() for agent in again] == [0, 0], again[0].output
    assert [ranks for ranks, _ in job.starts()] == [2, 2]
    assert min(job.starts()[1][1]) == int(saved.name.removeprefix("step-")) + 1
    undisturbed(path, tmp_path / "undisturbed")
    assert losses_in(job.out) == losses_in(tmp_path / "undisturbed")


def test_the_machine_with_the_rendezvous_goes_on_alone(
    cluster: Cluster, toy: Toy, tmp_path: Path, started: Started, record_property: Any
) -> None:
    """The other one comes back by itself when its link is up again."""
    job = Job(tmp_path, started, nodes="1:2", restarts=9, grows=True)
    path = recipe(toy, tmp_path / "toy.json", epochs=12, timeout=TIMEOUT)
    job.slow.touch()
    for machine in cluster.machines:
        job.start("train", path, "--out", str(job.out), "--every-steps", "1", "--resume", on=machine)
    job.wait(lambda: job.steps() >= 6, "training on two")
    worker = job.agents[1].worker()
    cluster.machines[1].unplug()
    job.wait(lambda: [ranks for ranks, _ in job.starts()] == [2, 1], "training on one")
    assert not wait_until_ended([worker], SLACK), "a rank does not end"
    cluster.machines[1].plug()
    job.wait(lambda: [ranks for ranks, _ in job.starts()] == [2, 1, 2], "training on two again")
    job.slow.unlink()
    assert [agent.end() for agent in job.agents] == [0, 0], job.agents[0].output
    begun, last = ([pick(steps) for _, steps in job.starts()] for pick in (min, max))
    assert begun[1] in (last[0], last[0] + 1), "what a cut link loses is one step at most"
    assert begun[2] == last[1] + 1, "a machine that joins loses none"
    job.record(record_property, f"a machine loses its network, timeout={TIMEOUT}", "its network is back")
    epochs = job.epochs(STEPS)
    assert len(epochs) == 12
    assert all(len(set(epoch)) == SAMPLES and epoch == epochs[0] for epoch in epochs)
    undisturbed(path, tmp_path / "undisturbed", devices=1, strategy="single")
    assert losses_in(job.out) == pytest.approx(losses_in(tmp_path / "undisturbed"), rel=0, abs=1e-6)


KILLED = """
import sys, time
from pathlib import Path
from machines import Cluster

cluster = Cluster(Path(sys.argv[1]), 2)
for machine in cluster.machines:
    machine.start("sleep", "1000")
while not all(machine.processes() for machine in cluster.machines):
    time.sleep(0.01)
print(*[one.pid for machine in cluster.machines for one in machine.processes()], flush=True)
time.sleep(1000)
"""


def test_machines_end_with_the_tests(cluster: Cluster, tmp_path: Path) -> None:
    """However these end."""
    kept = cluster.machines[0].start("sleep", "1000")
    environment = {"PYTHONPATH": str(SUPPORT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    (tmp_path / "other").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "other")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        assert other.stdout is not None
        there = [psutil.Process(int(pid)) for pid in other.stdout.readline().split()]
        assert len(there) == 2
        other.kill()
    assert not wait_until_ended(there, 10)
    cluster.close()
    assert kept.wait(10) != 0
    assert not any(machine.processes() for machine in cluster.machines)
