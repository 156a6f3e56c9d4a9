"""The ranks of one start find each other in a store that is full of what earlier starts have left."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from cluster_jobs import free_port, meet_repeatedly
from drivetrain import StrategyError, strategies
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
        ("1", r"Rank 1 of 3 \(.*\) did not meet rank 0 at 127.0.0.1:\d+ within 1 s"),
    ],
)
def test_a_rank_that_does_not_come(rank: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(StrategyError, match=words):
        meet(1)
