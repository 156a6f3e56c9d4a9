"""`drivetrain doctor`: what is installed, in which version, what is missing and how to install it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass

import torch

from ....common import machine
from ....common.errors import DrivetrainError, MissingExtra
from ....common.table import Table
from ...telemetry.provenance import version

CORE = (
    "torch", "torchvision", "torchmetrics", "numpy", "safetensors", "pillow", "tqdm", "click", "cloudpickle",
    "msgspec", "psutil", "pyyaml",
)  # fmt: skip
EXTRAS = {
    "ffcv": (("ffcv", "numba"), "run FFCV's own operations and loader on .beton files"),
    "deepspeed": (("deepspeed",), "train with the strategies deepspeed_stage_1 to 3"),
    "fairscale": (("fairscale",), "train with the strategies fairscale_oss and fairscale_sharded_ddp"),
    "plot": (("matplotlib",), "draw the ledger, and the curves of a training"),
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
    """One line of the report; if `good`, it has no remedy."""

    what: str
    found: str
    good: bool
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.good:
            object.__setattr__(self, "remedy", "")


def examine() -> tuple[bool, str]:
    """Return whether the core requirements are met, and a report: a table, and lines with remedies, which stay whole so
    that commands can be copied."""
    core = _core()
    findings = [*core, *_extras(), *_native(), *_devices()]
    rows = [("ok" if one.good else "missing", one.what, one.found) for one in findings]
    table = Table(("", "what", "found"), rows, title="drivetrain doctor")
    remedies = [f"  {one.what.partition(':')[0]}: {one.remedy}" for one in findings if not one.good]
    lines = ["What is missing:", *remedies] if remedies else []
    return all(finding.good for finding in core), "\n".join([str(table), *lines])


def _core() -> list[Finding]:
    python, good = platform.python_version(), sys.version_info >= (3, 11)
    return [
        Finding("python ≥ 3.11", python, good, "install Python 3.11 or newer"),
        *(
            Finding(name, found or "-", bool(found), f"pip install {name}")
            for name in CORE
            for found in [version(name)]
        ),
        _native_core(),
    ]


def _extras() -> list[Finding]:
    findings = []
    for extra, (packages, purpose) in EXTRAS.items():
        found = {name: version(name) for name in packages}
        versions = ", ".join(f"{name} {there or 'missing'}" for name, there in found.items())
        good = all(found.values())
        remedy = f"pip install 'drivetrain[{extra}]'"
        if extra == "ffcv" and good:
            good, remedy = _ffcv_loads()
        findings.append(Finding(f"extra {extra}: {purpose}", versions, good, remedy))
    return findings


def _ffcv_loads() -> tuple[bool, str]:
    """Return whether FFCV can be imported, and the error: an installed package alone does not prove it."""
    from ....loaders.decode.ffcv_modules import ffcv_module

    try:
        ffcv_module("ffcv.libffcv")
    except (MissingExtra, OSError, ImportError) as error:
        return False, str(error)
    return True, ""


def _native_core() -> Finding:
    """Return whether Drivetrain's native library loads."""
    from ....loaders.native.library import jpeg_version

    try:
        return Finding("native library", f"libjpeg-turbo: {jpeg_version()}", True)
    except DrivetrainError as error:
        return Finding("native library", "-", False, str(error))


def _native() -> list[Finding]:
    """Return the tools and libraries required to build FFCV."""
    tool, compiler = shutil.which("pkg-config"), shutil.which("g++")
    required = {"pkg-config": (tool, "pkg-config"), "C++ compiler": (compiler, "g++")}
    for library, package in NATIVE.items():
        command = [tool or "", "--modversion", library]
        done = subprocess.run(command, capture_output=True, text=True, check=False) if tool else None
        required[library] = (done.stdout.strip() if done else "", package)
    return [
        Finding(f"{name}, to build FFCV", what or "-", bool(what), f"apt-get install {package}")
        for name, (what, package) in required.items()
    ]


def _devices() -> list[Finding]:
    from .... import strategies

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    findings = [
        _machine(),
        reachable_host(),
        Finding("GPU", ", ".join(names) or "none: training runs on the CPU", True),
    ]
    if not names and platform.libc_ver()[0] == "glibc":
        findings.append(memory_kept())
    for row in strategies.available():
        why = row.why_not.removeprefix(f"strategy {row.name!r}: ")
        findings.append(Finding(f"strategy {row.name}", row.summary, row.runs_here, why))
    return findings


def reachable_host() -> Finding:
    """Return whether this machine's name leads to an address that others can reach."""
    address, remedy = host_address(), ""
    interface = "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface, e.g. eth0"
    if address is None:
        remedy = f"for several machines, set {interface}"
    elif address.startswith("127."):
        remedy = f"other machines cannot reach {address}. For several machines, set {interface}"
    found = f"{platform.node()}: {address or 'no address'}"
    return Finding("host name, for several machines", found, not remedy, remedy)


def host_address() -> str | None:
    """Return the address to which this machine's name leads; None if it leads to none."""
    try:
        return socket.gethostbyname(platform.node())
    except OSError:
        return None


def _machine() -> Finding:
    """Return the CPU cores and memory available to this process, with its container's limits."""
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
