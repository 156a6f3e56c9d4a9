"""The ranks of one start find each other in a store that is full of what earlier starts have left; what a worker learns
of torchrun's agent, which has started it."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from cluster_jobs import free_port, meet_repeatedly
from drivetrain import StrategyError, strategies
from drivetrain.strategies.launching.launcher import blocked_growth, nodes_of
from drivetrain.strategies.launching.meeting import meet


@pytest.mark.process
def test_every_start_has_its_own_name_and_keys() -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    names = strategies.launch(meet_repeatedly, agent.port, devices=3, device="cpu", timeout=120)
    assert names[0] == names[1] == names[2]
    assert len(set(names[0])) == len(names[0])


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ("0", r"Rank\(s\) 1, 2 of 3 did not arrive at 127.0.0.1:\d+ in time; the others are on "),
        ("1", r"Rank 1 of 3 \(.*\) did not meet rank 0 at 127.0.0.1:\d+ within 0.5 s"),
    ],
)
def test_a_rank_that_does_not_come(rank: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(StrategyError, match=words):
        meet(0.5)


@pytest.mark.parametrize(
    ("command", "nodes"),
    [
        ("torchrun --nnodes=1:4 --nproc-per-node=8 -m drivetrain train x", "1:4"),
        ("python -m torch.distributed.run --nproc-per-node 8 --nnodes 2 -m drivetrain train x", "2"),
        ("torchrun -m drivetrain train --nnodes=1:4", ""),
        ("torchrun --nnodes", ""),
        ("bash", ""),
    ],
)
def test_the_number_of_machines(command: str, nodes: str) -> None:
    assert nodes_of(command.split()) == nodes


@pytest.mark.parametrize(
    ("store", "nodes", "blocked"),
    [("True", "1:4", True), ("False", "1:4", False), ("True", "4:4", False), ("True", "2", False)],
)
def test_an_elastic_job_needs_stores_of_its_own(
    store: str, nodes: str, blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", store)
    monkeypatch.setenv("PET_NNODES", nodes)
    why = blocked_growth()
    assert bool(why) == blocked
    assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun" in why or not blocked
