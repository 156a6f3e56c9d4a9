"""Assignment of GPUs to ranks, without a GPU: torch's answers about GPUs are replaced, and are not under test."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain import StrategyError, strategies
from drivetrain.strategies import devices
from drivetrain.strategies.common import placement
from drivetrain.strategies.launching import group
from torch import nn

VARIABLES = (
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_LOCALID",
    "SLURM_NTASKS", "SLURM_NNODES", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "PMI_SIZE",
)  # fmt: skip


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that this process sees `count` GPUs; return the calls of `set_device`."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    calls: list[Any] = []

    def see(count: int) -> list[Any]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", calls.append)
        return calls

    return see


def in_group(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"LOCAL_RANK": "3"}, 3),
        ({"SLURM_LOCALID": "2", "SLURM_NTASKS": "8"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, 1),
        ({"MPI_LOCALRANKID": "2", "PMI_SIZE": "8"}, 2),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, 3),
        ({"SLURM_NNODES": "1"}, 6),
        ({"LOCAL_WORLD_SIZE": "8"}, 6),
        # A shell in a Slurm job, from which eight processes were started by hand.
        ({"SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_ranks_number_on_its_machine(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: int | None
) -> None:
    gpus(8)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    in_group(monkeypatch, 6, 8)
    if expected is None:
        with pytest.raises(StrategyError, match=r"one of several ranks and sees 8 GPUs.*Set LOCAL_RANK"):
            devices.rank_device("cuda")
    else:
        assert devices.rank_device("cuda") == torch.device("cuda", expected)
    assert devices.rank_device("cpu") == torch.device("cpu")


def test_without_ranks_the_first_gpu(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    assert devices.rank_device(None) == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "two")
    with pytest.raises(StrategyError, match="LOCAL_RANK='two' must be this process's local rank"):
        devices.rank_device("cuda")


def test_one_visible_gpu_for_each_rank(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's --gpus-per-task=1: rank 3 of 4 on a machine sees one, and it is cuda:0."""
    gpus(1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    in_group(monkeypatch, 3, 4)
    placement.check_ranks("ddp", "cuda", 4)
    assert devices.rank_device("cuda") == torch.device("cuda", 0)
    gpus(2)
    with pytest.raises(StrategyError, match="means CUDA device 3, but this process sees 2"):
        placement.check_ranks("ddp", "cuda", 4)


def test_before_the_ranks_are_started_all_need_a_gpu(gpus: Any) -> None:
    gpus(1)
    with pytest.raises(StrategyError, match="means CUDA device 1, but this process sees 1"):
        placement.check_ranks("ddp", None, 2)


def test_two_ranks_on_one_gpu_are_told_so_on_all(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    gpu, fingerprints = torch.device("cuda", 0), []
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    for rank, uuid in enumerate(("GPU-a", "GPU-b", "GPU-a")):
        in_group(monkeypatch, rank, 3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, uuid=uuid: SimpleNamespace(uuid=uuid))
        fingerprints.append(devices._fingerprint(gpu))
    monkeypatch.setattr(
        dist, "all_gather", lambda into, _: [a.fill_(b) for a, b in zip(into, fingerprints, strict=True)]
    )
    for rank in range(3):
        in_group(monkeypatch, rank, 3)
        with pytest.raises(StrategyError, match=r"Ranks 0 and 2 use the same GPU\."):
            devices.refuse_shared_gpu(gpu)
    fingerprints[2] += 1
    devices.refuse_shared_gpu(gpu)


@pytest.mark.parametrize(
    ("device", "backend", "current"),
    [("cpu", "gloo", []), ("cuda", "cpu:gloo,cuda:nccl", [1]), (None, "cpu:gloo,cuda:nccl", [1])],
)
def test_the_backend_follows_the_device(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str | None, backend: str, current: list[int]
) -> None:
    """A strategy on the CPU touches no GPU, on a machine that has some."""
    calls, joined = gpus(4), []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: joined.append(name))
    monkeypatch.setattr(group, "_wait_until_all_joined", lambda _: None)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    group.join_group(f"file://{tmp_path}/store", device=device)
    assert (joined, calls) == ([backend], current)


def test_a_rank_makes_its_gpu_the_current_one(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a group that somebody else has joined: NCCL and FSDP2 take the current one."""
    calls = gpus(4)
    in_group(monkeypatch, 2, 4)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "nccl")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert placement.enter(strategies.get("ddp"), nn.Linear(2, 2)) == torch.device("cuda", 2)
    assert calls == [torch.device("cuda", 2)]
