"""What a worker learns of torchrun's agent, which has started it."""

from __future__ import annotations

import pytest
from drivetrain.strategies.launching.launcher import blocked_growth, nodes_of


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
