"""Machines of a cluster, on loopback or in namespaces: each is an agent of torchrun with one worker that runs
`drivetrain`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import psutil
from machines import Machine
from pipeline_data import TRAIN, Toy
from places import SUPPORT
from process_state import free_port

PATIENCE = 90.0  # seconds that anything may take
RDZV = "last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=6"


class Agent:
    """One machine of a job: on loopback, or on `machine`. Only it has the modules in the folder `code`."""

    def __init__(
        self, job: Job, number: int, arguments: Sequence[str], machine: Machine | None, code: Path | None
    ) -> None:
        self.log, self.machine = job.folder / f"agent {number}.log", machine
        host, conf, where = ("127.0.0.1" if machine is None else "node0"), RDZV, []
        if machine is None:  # several on one host cannot find out which of them is the one that is named
            conf += f",is_host={'true' if number == 0 else 'false'}"
            where = ["--local-addr=127.0.0.1"]
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={job.nodes}", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{job.port}", "--rdzv-id=test", f"--rdzv-conf={conf}",
            *where, f"--max-restarts={job.restarts}", "--shutdown-timeout=20", "-m", "drivetrain", *arguments,
        ]  # fmt: skip
        folders = [None if code is None else str(code), str(SUPPORT), os.environ.get("PYTHONPATH")]
        path = os.pathsep.join(filter(None, folders))
        environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SEEN_SAMPLES": str(job.seen),
            "SLOW": str(job.slow), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if job.grows else "0",
        } | ({"GLOO_SOCKET_IFNAME": "lo"} if machine is None else {})  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command if machine is None else machine.command(*command),
                stdout=log, stderr=subprocess.STDOUT, text=True, env=environment,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def host(self) -> str:
        return socket.gethostname() if self.machine is None else self.machine.name

    def _torchrun(self) -> psutil.Process:
        agent = psutil.Process(self.process.pid)
        if self.machine is not None:
            (agent,) = agent.children()  # of nsenter
        return agent

    def worker(self) -> psutil.Process:
        return self._torchrun().children()[0]

    def signal(self, number: signal.Signals) -> None:
        self._torchrun().send_signal(number)

    def end(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"an agent did not end:\n{self.output}") from None


class Job:
    """A job of several machines, to which more can be added later if it `grows`. `started` is the fixture, which kills
    what is left; for `seen` and `slow` see `Recording`."""

    def __init__(
        self,
        folder: Path,
        started: list[subprocess.Popen[str]],
        nodes: str = "2",
        restarts: int = 0,
        grows: bool = False,
    ) -> None:
        self.folder, self.nodes, self.restarts, self.grows = folder, nodes, restarts, grows
        self.seen, self.out, self.port = folder / "seen", folder / "run", free_port()
        self.slow = folder / "slow"
        self.seen.mkdir()
        self.agents: list[Agent] = []
        self._started = started

    def start(self, *arguments: str, on: Machine | None = None, code: Path | None = None) -> Agent:
        """Start another machine, with these arguments of `drivetrain`, and the modules in `code`; `on` one with
        namespaces of its own, which ends what runs there."""
        agent = Agent(self, len(self.agents), arguments, on, code)
        self.agents.append(agent)
        self._started.append(agent.process)
        return agent

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds; fail if all agents end before, or it takes too long."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = all(agent.process.poll() is not None for agent in self.agents)
            if ended or time.monotonic() > deadline:
                logs = "\n\n".join(agent.output for agent in self.agents)
                raise AssertionError(f"{what} did not happen:\n{logs}")
            time.sleep(0.02)

    def starts(self) -> list[tuple[int, dict[int, list[list[int]]]]]:
        """For each start of the workers, in order: the number of ranks, and the samples of each step by rank."""
        files = sorted(self.seen.iterdir())
        groups: dict[str, list[Path]] = defaultdict(list)
        for file in files:
            groups[file.name.partition("-")[0]].append(file)
        found = []
        for group in groups.values():
            steps: dict[int, list[list[int]]] = defaultdict(list)
            for file in group:
                for line in file.read_text().splitlines(keepends=True):
                    if line.endswith("\n"):  # else it was killed while writing
                        step, samples = json.loads(line)
                        steps[step].append(samples)
            found.append((int(group[0].name.rpartition("-")[2]), dict(steps)))
        return found

    def record(self, record_property: Callable[[str, float], None], *what: str) -> None:
        """Record of each start of the ranks but the first, for the reason `what`: the seconds from the last step before
        it to its first, and how many steps it has repeated."""
        began: dict[int, list[Path]] = defaultdict(list)  # by the time of the first step, in nanoseconds
        for file in self.seen.iterdir():
            began[int(file.name.partition("-")[0])].append(file)
        last = [max(file.stat().st_mtime_ns for file in began[start]) for start in sorted(began)]
        steps = [found for _, found in self.starts()]
        for number, reason in enumerate(what, 1):
            record_property(f"{reason}: until the next step", (sorted(began)[number] - last[number - 1]) / 1e9)
            record_property(f"{reason}: steps repeated", max(steps[number - 1]) + 1 - min(steps[number]))

    def steps(self) -> int:
        return max((step for _, steps in self.starts() for step in steps), default=0)

    def epochs(self, steps: int) -> list[list[int]]:
        """The samples of each epoch of `steps` steps, sorted: of each step, what was seen when it was last trained."""
        last: dict[int, list[int]] = {}
        for _, found in self.starts():
            last |= {step: sorted(chain(*ranks)) for step, ranks in found.items()}
        assert sorted(last) == list(range(1, max(last) + 1))
        return [
            sorted(chain(*(last[first + step] for step in range(steps)))) for first in range(1, max(last) + 1, steps)
        ]


def losses_in(out: Path) -> list[float]:
    epochs = json.loads((out / "history.json").read_text())["epochs"]
    return [value for epoch in epochs for value in (epoch["loss"], epoch["val_loss"])]


def recipe(toy: Toy, path: Path, *, epochs: int, **more: object) -> str:
    lines = {
        "model": "pipeline_data:Recording", "model_options": {"seconds": 0.05}, "train": toy.train,
        "val": toy.val, "loading": {"flip": False, "scale": [1, 1], "ratio": [1, 1]}, "batch_size": 32,
        "image_size": 16, "workers": 1, "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": epochs, "strategy": "ddp",
        "strategy_options": {"device": "cpu"}, "devices": "auto", "timeout": 30, "precision": "fp32",
    } | more  # fmt: skip
    path.write_text(json.dumps(lines))
    return str(path)


SAMPLES = TRAIN
