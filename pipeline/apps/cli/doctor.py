"""`drivetrain doctor`: what is installed and what is missing; with `--ranks`, what the ranks of a job are."""

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ....common import machine
from ....common.errors import DrivetrainError, StrategyError
from ....common.table import Table, lines_of
from ....common.version import __version__
from ....strategies.devices import rank_device
from ....strategies.launching.group import AllReduce, all_reduce_speed, join_group
from ....strategies.launching.health import Health, bandwidths, examine_health, slow
from ....strategies.launching.launcher import blocked_growth, killed_with_agent
from ....strategies.launching.meeting import Meeting, lost_ranks_named, meet, under_torchrun
from ...telemetry.provenance import version

EXTRAS = {
    "ffcv": (("ffcv", "numba"), "run FFCV's own operations and loader on .beton files"),
    "deepspeed": (("deepspeed",), "train with the strategies deepspeed_stage_1 to 3"),
    "fairscale": (("fairscale",), "train with the strategies fairscale_oss and fairscale_sharded_ddp"),
    "plot": (("matplotlib",), "draw the ledger, and the curves of a training"),
    "parquet": (("pyarrow",), "write predictions as Parquet"),
    "serve": (("starlette", "uvicorn"), "serve a trained model over HTTP"),
    "optuna": (("optuna",), "search with Optuna"),
    "wandb": (("wandb",), "log to Weights & Biases"),
    "mlflow": (("mlflow-skinny",), "log to MLflow"),
    "otel": (("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"), "log to OpenTelemetry"),
    "tensorboard": (("tensorboard",), "write files for TensorBoard"),
    "lightning": (("lightning",), "hand a pipeline over to Lightning"),
    "timm": (("timm",), "build timm's models by name"),
    "hf": (("transformers",), "build Hugging Face's image models by name"),
    "onnx": (("onnx", "onnxruntime", "onnxscript"), "export to ONNX"),
    "remote": (("fsspec", "aiohttp", "s3fs"), "read data at an address"),
    "ray": (("ray",), "train in Ray's process group (drivetrain job ray)"),
    "notebook": (("ipykernel", "ipywidgets"), "run the notebooks, with live progress bars"),
}
NATIVE = {"opencv4": "libopencv-dev", "libturbojpeg": "libturbojpeg0-dev"}


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    good: bool
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.good:
            object.__setattr__(self, "remedy", "")


def examine() -> tuple[bool, str]:
    """Return whether the core requirements are met, and a report, whose remedies stay whole lines, to be copied."""
    core = _core()
    others = [*_extras(), *_native(), *_devices()]
    healthy = all(one.good for one in core)
    lines = ["All that Drivetrain requires is here." if healthy else "Drivetrain does not run here; it requires:"]
    lines += _remedies(core)
    if missing := _remedies(others):
        lines += ["", "Optional, and not here:", *missing]
    there = [(one.what, one.found) for one in (*core, *others) if one.good]
    return healthy, "\n".join([*lines, "", "Here:", lines_of(there)])


def _remedies(findings: Sequence[Finding]) -> list[str]:
    return [f"  {one.what}: {one.remedy}" for one in findings if not one.good]


def _core() -> list[Finding]:
    findings = [Finding("python ≥ 3.11", platform.python_version(), True)]  # which pip has checked
    for name in required_packages():
        found = version(name)
        findings.append(Finding(name, found or "-", bool(found), f"pip install {name}"))
    return [*findings, _native_core()]


def required_packages() -> list[str]:
    try:
        required = importlib.metadata.requires("drivetrain") or ()
    except importlib.metadata.PackageNotFoundError:
        return ["drivetrain"]
    return [re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in required if "extra ==" not in one]


def _extras() -> list[Finding]:
    findings = []
    for extra, (packages, purpose) in EXTRAS.items():
        found = {name: version(name) for name in packages}
        versions = ", ".join(f"{name} {there or 'missing'}" for name, there in found.items())
        good = all(found.values())
        remedy = f"pip install 'drivetrain[{extra}]'  # {purpose}"
        if extra == "ffcv" and good:
            good, remedy = _ffcv_loads()  # an installed package alone does not prove it
        findings.append(Finding(f"extra {extra}", versions, good, remedy))
    return findings


def _ffcv_loads() -> tuple[bool, str]:
    from ....loaders.decode.ffcv_modules import ffcv_module

    try:
        ffcv_module("ffcv.libffcv")
    except (OSError, ImportError) as error:
        return False, str(error)
    return True, ""


def _native_core() -> Finding:
    from ....loaders.native.library import jpeg_version

    try:
        return Finding("native library", f"libjpeg-turbo: {jpeg_version()}", True)
    except DrivetrainError as error:
        return Finding("native library", "-", False, str(error))


def _native() -> list[Finding]:
    tool, compiler = shutil.which("pkg-config"), shutil.which("g++")
    required = {"pkg-config": (tool, "pkg-config"), "C++ compiler": (compiler, "g++")}
    for library, package in NATIVE.items():
        command = [tool or "", "--modversion", library]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False) if tool else None
        required[library] = (done.stdout.strip() if done else "", package)
    return [
        Finding(f"{name}, to build FFCV", what or "-", bool(what), f"apt-get install {package}")
        for name, (what, package) in required.items()
    ]


def _devices() -> list[Finding]:
    from .... import strategies

    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    findings = [_machine(), reachable_host(), Finding("GPU", gpus or "none: training runs on the CPU", True)]
    if not gpus and platform.libc_ver()[0] == "glibc":
        findings.append(memory_kept())
    rows = strategies.available()
    findings.append(Finding("strategies", ", ".join(row.name for row in rows if row.runs_here), True))
    for row in rows:
        if not row.runs_here:
            why = row.why_not.removeprefix(f"strategy {row.name!r}: ")
            findings.append(Finding(f"strategy {row.name}", row.summary, False, why))
    return findings


def reachable_host() -> Finding:
    address, remedy = host_address(), ""
    interface = "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface, e.g. eth0"
    if address is None:
        remedy = f"for several machines, set {interface}"
    elif address.startswith("127."):
        remedy = f"other machines cannot reach {address}. For several machines, set {interface}"
    found = f"{platform.node()}: {address or 'no address'}"
    return Finding("host name, for several machines", found, not remedy, remedy)


def host_address() -> str | None:
    try:
        return socket.gethostbyname(platform.node())
    except (OSError, UnicodeError):  # UnicodeError: of a name with a part of more than 63 letters, or an empty one
        return None


def _machine() -> Finding:
    free, total = machine.free_memory() / 2**30, machine.total_memory() / 2**30
    found = f"{machine.cores()} CPU core(s), {free:.1f} of {total:.1f} GiB of memory free"
    limits = machine.container_limits()
    if limits.cores is not None:
        found += f"; the container's quota is {limits.cores:g} core(s)"
    if limits.memory is not None:
        found += f"; the container's limit is {limits.memory / 2**30:.1f} GiB"
    return Finding("this machine", found, True)


def memory_kept() -> Finding:
    """Return whether glibc keeps a step's memory for the next one; see docs/ledger.md, "On a CPU"."""
    given = {name: os.environ.get(name) for name in machine.KEEPS_MEMORY}
    values = ", ".join(f"{name}={value}" for name, value in given.items() if value)
    remedy = machine.export_line(machine.KEEPS_MEMORY)
    return Finding("memory kept between steps", values or "-", all(given.values()), remedy)


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Bytes: about a bucket of gradients of a small model, of DDP (25 MiB), and a shard of a large one.
SIZES = (1 << 20, 16 << 20, 64 << 20)
# What all ranks must have alike, and how to get it.
_SAME = {"torch": "pip install torch=={}", "drivetrain": "pip install drivetrain=={}"}


def examine_ranks(timeout: float) -> bool:
    """Meet the other ranks, measure, and print the findings on rank 0. Return whether they can train together."""
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
        slower: list[str] = []
        try:
            speeds, health = _speeds(meeting, timeout)
            healthy, slower = _healths(meeting.ranks, health)
            findings += healthy
        finally:  # where the ranks cannot exchange tensors, their addresses show why
            if os.environ["RANK"] == "0":
                print(_table([*findings, *speeds], meeting), flush=True)
                if slower:  # job files read this line
                    print(f"Leave out: {','.join(slower)}", flush=True)
    return all(finding.good for finding in findings)


def about_this_rank() -> dict[str, Any]:
    device = _device()
    return {
        "pid": os.getpid(), "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__.partition("+")[0], "drivetrain": __version__, "address": own_address(),
        "growth": blocked_growth(), **{name: os.environ.get(name, "") for name in INTERFACES},
    }  # fmt: skip


def own_address() -> str:
    """Return the address at which gloo lets other ranks reach this one; "none" if it has none."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        kinds = (socket.AF_INET, socket.AF_INET6)
        found = [each.address for each in psutil.net_if_addrs().get(name, ()) if each.family in kinds]
        return found[0] if found else "none"
    return host_address() or "none"


def _device() -> torch.device:
    try:
        return rank_device(None, (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    except StrategyError:  # more ranks than GPUs
        return torch.device("cpu")


def _speeds(meeting: Meeting, timeout: float) -> tuple[list[Finding], list[Health]]:
    ranks = len(meeting.ranks)
    gpus = all(info["device"] != "CPU" for info in meeting.ranks)  # on each rank the same
    join_group(device=None if gpus else "cpu", timeout=timeout, meeting=meeting)
    with lost_ranks_named(dist.get_rank(), ranks, timeout, meeting.name):
        device = _device() if gpus else torch.device("cpu")
        backend = "NCCL on the GPUs" if gpus else "gloo on the CPUs"
        measured = [all_reduce_speed(size, device) for size in (4, *SIZES) if ranks > 1]
        health = examine_health([info["host"] for info in meeting.ranks], device)
    dist.destroy_process_group()
    if not measured:
        return [Finding("all-reduce", "not measured: there is only one rank", True)], health
    latency, *others = measured
    found = {"4 bytes": f"latency {latency.median * 1e6:,.0f} µs ({_spread(latency, 1e6, ',.0f')})"}
    for each in others:
        found[f"{each.size >> 20} MiB"] = f"{each.bandwidth / 1e9:.2f} GB/s ({_spread(each, 1e3, '.1f')} ms)"
    findings = [Finding(f"all-reduce of {size}, {backend}", text, True) for size, text in found.items()]
    return findings, health


def _healths(ranks: Sequence[Mapping[str, Any]], health: Sequence[Health]) -> tuple[list[Finding], list[str]]:
    """Return what is found of each machine's speed and memory, and the machines to leave out."""
    hosts = [info["host"] for info in ranks]
    computes: dict[str, dict[str, float]] = {}  # by device: of each rank
    for number, (info, each) in enumerate(zip(ranks, health, strict=True)):
        computes.setdefault(info["device"], {})[f"{number}"] = each.operations
    places = {f"{number}": host for number, host in enumerate(hosts)}
    slower = {int(number) for of_device in computes.values() for number in slow(of_device, places)}
    sends = bandwidths(hosts, health)
    apart = set(slow(sends))
    findings, bad = [], list[str]()
    for host in dict.fromkeys(hosts):
        own = [number for number, name in enumerate(hosts) if name == host]
        speeds = [health[number].operations / 1e9 for number in own]
        text = f"computes {min(speeds):,.0f} to {max(speeds):,.0f} GFLOP/s a rank (fp32)"
        text += f", sends {sends[host] / 1e9:.2f} GB/s to another machine" if host in sends else ""
        wrong = [f"rank {number} computes at less than half of the others' speed" for number in own if number in slower]
        wrong += [f"rank {number}: memory returned other values than were written" for number in own
                  if not health[number].sound]  # fmt: skip
        wrong += ["it sends at less than half of the others' speed"] if host in apart else []
        findings.append(Finding(host, text, not wrong, "; ".join(wrong) + "; leave this machine out" * bool(wrong)))
        bad += [host] * bool(wrong)
    return findings, bad


def _spread(measured: AllReduce, scale: float, form: str) -> str:
    lowest, highest = (format(each(measured.seconds) * scale, form) for each in (min, max))
    return f"{lowest} to {highest}"


def _rank(number: int, info: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Finding:
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
    caption = "Times: median, fastest to slowest, each of the slowest rank. GB/s: what each rank sends in a ring."
    rows = [("ok" if one.good else "differs", one.what, one.found, one.remedy) for one in findings]
    return Table(("", "what", "found", "remedy"), rows, title=title, caption=caption)
