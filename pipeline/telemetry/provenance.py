"""The provenance of measurements: hardware, environment, versions, revision, command."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...common import errors, machine
from ...common.matmul import matmul_precision
from ...common.terminal import in_cell

PACKAGES = ("drivetrain", "torch", "torchvision", "numpy", "pillow", "ffcv", "numba")
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_",
    "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
"""Environment variables that affect speed."""
PATIENCE = 10.0  # seconds for git, which can be slow on network storage


def provenance() -> dict[str, Any]:
    """Return the provenance of a measurement taken now, as plain JSON types. Sizes are in GiB."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # The command line of a notebook's kernel is meaningless.
        "command": "a notebook" if in_cell() else _text(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "git_revision": _git_revision(),
        "hardware": {
            "processor": _processor(),
            "cores": machine.cores(),
            "torch_threads": torch.get_num_threads(),
            "memory_gib": round(machine.total_memory() / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        },
        **({"gpu_settings": _gpu_settings()} if cuda else {}),
        "environment": {name: _text(os.environ[name]) for name in ENVIRONMENT if name in os.environ},
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _text(value: str) -> str:
    """Escape bytes that are not UTF-8, such as of an old file name: no file of a run could be written with them."""
    return value.encode(errors="backslashreplace").decode()


def _gpu_settings() -> dict[str, Any]:
    return {
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": matmul_precision(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


@cache  # what has been imported stays, like the revision
def _versions() -> dict[str, str | None]:
    return {name: version(name) for name in PACKAGES}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@cache
def _git_revision() -> str | None:
    root = Path(errors.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() or None  # stderr need not be UTF-8, and is not read
