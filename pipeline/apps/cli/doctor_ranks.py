"""`drivetrain doctor --ranks`: what the ranks of a job are, and how fast they exchange tensors."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ....common.errors import StrategyError
from ....common.table import Table
from ....common.version import __version__
from ....strategies.devices import rank_device
from ....strategies.launching.group import AllReduce, all_reduce_speed, join_group
from ....strategies.launching.launcher import blocked_growth, killed_with_agent
from ....strategies.launching.meeting import Meeting, lost_ranks_named, meet, under_torchrun
from .doctor import Finding, host_address

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIZES = (1 << 20, 16 << 20, 64 << 20)
"""Bytes: about a bucket of gradients of a small model, of DDP (25 MiB), and a shard of a large one."""
_SAME = {"torch": "pip install torch=={}", "drivetrain": "pip install drivetrain=={}"}
"""What all ranks must have alike, and how to get it."""


def examine_ranks(timeout: float) -> bool:
    """Meet the other ranks, measure, and print the findings on rank 0.

    Args:
        timeout: seconds that the ranks wait for each other.

    Returns:
        Whether the ranks can train together; the same on all of them.

    Raises:
        StrategyError: if this process is not a rank, or another one is missing or lost.
    """
    if not under_torchrun():
        raise StrategyError(
            "doctor --ranks examines the ranks of a job, and this process is none: RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT are not set. Start it as the training is started, e.g.: torchrun --nproc-per-node=2 -m "
            "drivetrain doctor --ranks"
        )
    with killed_with_agent():
        meeting = meet(timeout, about_this_rank())
        findings = [_rank(number, info, meeting.ranks) for number, info in enumerate(meeting.ranks)]
        speeds: list[Finding] = []
        try:
            speeds = _speeds(meeting, timeout)
        finally:  # where the ranks cannot exchange tensors, their addresses show why
            if os.environ["RANK"] == "0":
                print(_table([*findings, *speeds], meeting), flush=True)
    return all(finding.good for finding in findings)


def about_this_rank() -> dict[str, Any]:
    """Return what the others are told about this rank."""
    return {
        "pid": os.getpid(),
        "device": _device_name(_device()),
        "torch": torch.__version__.partition("+")[0],
        "drivetrain": __version__,
        "address": own_address(),
        "growth": blocked_growth(),
        **{name: os.environ.get(name, "") for name in INTERFACES},
    }


def own_address() -> str:
    """Return the address at which gloo lets other ranks reach this one; "none" if there is none.

    It is that of the interface in GLOO_SOCKET_IFNAME, else that of the host's name.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        kinds = (socket.AF_INET, socket.AF_INET6)
        found = [each.address for each in psutil.net_if_addrs().get(name, ()) if each.family in kinds]
        return found[0] if found else "none"
    return host_address() or "none"


def _device() -> torch.device:
    """Return what this rank would train on: its GPU if it has one, else the CPU."""
    try:
        return rank_device(None, (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    except StrategyError:  # more ranks than GPUs
        return torch.device("cpu")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _speeds(meeting: Meeting, timeout: float) -> list[Finding]:
    """Join the process group, and return what an all-reduce takes."""
    ranks = len(meeting.ranks)
    gpus = all(info["device"] != "CPU" for info in meeting.ranks)  # on each rank the same
    join_group(device=None if gpus else "cpu", timeout=timeout, meeting=meeting)
    with lost_ranks_named(dist.get_rank(), ranks, timeout, meeting.name):
        device = _device() if gpus else torch.device("cpu")
        backend = "NCCL on the GPUs" if gpus else "gloo on the CPUs"
        measured = [all_reduce_speed(size, device) for size in (4, *SIZES) if ranks > 1]
    dist.destroy_process_group()
    if not measured:
        return [Finding("all-reduce", "not measured: there is only one rank", True)]
    latency, *others = measured
    return [
        Finding(
            f"all-reduce of 4 bytes, {backend}",
            f"latency {latency.median * 1e6:,.0f} µs ({_spread(latency, 1e6, ',.0f')})",
            True,
        ),
        *(
            Finding(
                f"all-reduce of {each.size >> 20} MiB, {backend}",
                f"{each.bandwidth / 1e9:.2f} GB/s ({_spread(each, 1e3, '.1f')} ms)",
                True,
            )
            for each in others
        ),
    ]


def _spread(measured: AllReduce, scale: float, form: str) -> str:
    """Return the range of the times."""
    lowest, highest = (format(each(measured.seconds) * scale, form) for each in (min, max))
    return f"{lowest} to {highest}"


def _rank(number: int, info: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Finding:
    """Return what a rank is, and whether it can train with the others."""
    versions = ", ".join(f"{name} {info[name]}" for name in _SAME)
    variables = ", ".join(f"{name}={info[name]}" for name in INTERFACES if info[name])
    found = f"{info['host']} ({info['address']}), process {info['pid']}: {info['device']}, {versions}"
    remedies = [
        f"rank 0 has {name} {ranks[0][name]}: {remedy.format(ranks[0][name])}"
        for name, remedy in _SAME.items()
        if info[name] != ranks[0][name]
    ]
    if (info["device"] == "CPU") != (ranks[0]["device"] == "CPU"):
        remedies.append(f"rank 0 has {ranks[0]['device']}: start as many ranks on a machine as it has GPUs")
    if info["address"] == "none" and (name := info["GLOO_SOCKET_IFNAME"]):
        remedies.append(f"GLOO_SOCKET_IFNAME={name} is not an interface of {info['host']}: see `ip address`")
    if info["growth"]:
        remedies.append(info["growth"])
    elsewhere = len({each["host"] for each in ranks}) > 1
    if elsewhere and (info["address"] == "none" or info["address"].startswith("127.")):
        remedies.append(
            f"other machines cannot reach {info['address']}: set {' and '.join(INTERFACES)} on {info['host']} to the "
            "network interface, e.g. eth0"
        )
    found += f", {variables}" if variables else ""
    return Finding(f"rank {number}", found, not remedies, "; ".join(remedies))


def _table(findings: Sequence[Finding], meeting: Meeting) -> Table:
    hosts = len({info["host"] for info in meeting.ranks})
    title = f"drivetrain doctor --ranks: {len(meeting.ranks)} rank(s) on {hosts} host(s)"
    caption = (
        "Times: median, fastest to slowest, each of the slowest rank. GB/s: what each rank sends in a ring."
    )
    rows = [("ok" if one.good else "differs", one.what, one.found, one.remedy) for one in findings]
    return Table(("", "what", "found", "remedy"), rows, title=title, caption=caption)
