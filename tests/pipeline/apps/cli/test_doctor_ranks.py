"""`drivetrain doctor --ranks` prints one table on rank 0, and a missing rank is an error."""

import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from cluster_jobs import doctor_of_ranks
from command_line import ENVIRONMENT, call
from drivetrain import strategies


def test_without_ranks_it_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    line = call("doctor", "--ranks").line
    assert line.startswith("StrategyError: doctor --ranks examines the ranks of a job, and this process is none")
    assert line.endswith("torchrun --nproc-per-node=2 -m drivetrain doctor --ranks\n")


@pytest.mark.parametrize("options", [["--timeout", "5"], ["--ranks", "--timeout", "0"]])
def test_a_timeout_is_a_positive_number_for_ranks(options: list[str]) -> None:
    assert f"--timeout {options[-1]} limits" in call("doctor", *options).line


@pytest.mark.process
def test_two_ranks() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    first, second = strategies.launch(doctor_of_ranks, server.port, devices=2, device="cpu", timeout=120)
    assert all(printed == "" for _, printed in second.values())
    said = {name: end for name, (end, _) in first.items()}
    text = {name: " ".join(printed.replace("│", " ").replace("┃", " ").split()) for name, (_, printed) in first.items()}
    assert (said["alike"], second["alike"][0]) == (True, True)
    assert "2 rank(s) on 1 host(s)" in text["alike"]
    assert re.search(r"latency [\d,]+ µs \([\d,]+ to [\d,]+\)", text["alike"]), text
    assert re.search(r"all-reduce of 1 MiB, gloo on the CPUs [\d.]+ GB/s \([\d.]+ to [\d.]+ ms\)", text["alike"])
    assert (said["another torch"], second["another torch"][0]) == (False, False)
    assert "differs rank 1" in text["another torch"]
    assert "rank 0 has torch 2.15.0: pip install torch==2.15.0" in text["another torch"]
    assert said["another host"] is False
    assert "2 rank(s) on 2 host(s)" in text["another host"]
    assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on node1" in text["another host"]
    assert said["slow"] is False
    assert "rank 1 computes at less than half of the others' speed; leave this machine out" in text["slow"]
    assert first["slow"][1].endswith("\nLeave out: node1\n")
    assert "Leave out" not in text["alike"]
    for end in (said["no interface"], second["no interface"][0]):
        assert "cannot exchange tensors with all of them" in end
    assert "GLOO_SOCKET_IFNAME=nix0 is not an interface of" in text["no interface"], "the table shows why"
    assert said["missing"].startswith("StrategyError: Rank(s) 1 of 2 did not arrive at 127.0.0.1:")


@pytest.mark.process
@pytest.mark.slow
def test_under_torchrun() -> None:
    """An elastic job, whose store is shared: the table tells that no machine can join it later."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2",
               "--rdzv-conf=last_call_timeout=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
               "--local-addr=127.0.0.1", "-m", "drivetrain", "doctor", "--ranks"]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "600"}
    for shared, status in (("0", 1), ("1", 0)):
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = shared
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        assert (done.returncode != 0) == status, done.stderr
        assert done.stdout.count("drivetrain doctor --ranks: 2 rank(s)") == 1
        assert done.stdout.count("GB/s (") == 3
        assert done.stdout.count("torchrun --nnodes=1:2 shares its store") == 2 * status
