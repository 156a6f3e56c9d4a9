"""The CPU cores, their instructions and the memory of this process: the machine's, or the smallest limit of its control
group and all parent groups, in both versions (Linux: cgroups(7))."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

_USUAL_MOUNTS = {
    "": ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
    **{name: (f"/sys/fs/cgroup/{name}",) for name in ("cpu", "cpuset", "memory")},
}
"""Mount points by controller if `/proc/self/mountinfo` cannot be read; `""` is version 2."""

KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
"""Environment variables of glibc, in bytes: allocate large blocks on the heap, and do not return it to the system after
a step."""

_WITHOUT_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of `ONEDNN_MAX_CPU_ISA` below the first instructions that multiply bf16 (oneDNN: CPU dispatcher control)."""

_UNLIMITED = (1 << 63) - (1 << 16)
"""Version 1's value for no limit: the largest signed 64-bit integer, rounded down to pages."""


@dataclass(frozen=True)
class Limits:
    """The limits of a process's control groups; None means no limit."""

    cores: float | None = None  # CPU time per wall-clock time, e.g. 0.5 for half a core
    cpus: frozenset[int] | None = None  # indices of those that it may run on
    memory: int | None = None  # bytes; the smallest limit of all groups
    free: int | None = None  # bytes that it may still allocate; reclaimable file cache counts as free


def export_line(variables: Mapping[str, str]) -> str:
    return "export " + " ".join(f"{name}={value}" for name, value in variables.items())


def cores() -> int:
    """Return the number of CPU cores available to this process: its affinity and its container's quota, rounded up."""
    limits = container_limits()
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        count = len(allowed & (limits.cpus or allowed)) or len(allowed)
    else:
        count = os.cpu_count() or 1
    return count if limits.cores is None else max(min(count, math.ceil(limits.cores)), 1)


def rank_cores(ranks: int = 1) -> int:
    """Return this rank's share of `cores`; `ranks` is the local world size if no launcher has set it."""
    return max(cores() // local_ranks(ranks), 1)


def total_memory() -> int:
    """Return the memory of this machine, or of its container if that is less, in bytes."""
    total: int = psutil.virtual_memory().total
    limit = container_limits().memory
    return total if limit is None else min(total, limit)


def free_memory() -> int:
    """Return the memory that processes on this machine, or in its container, may still allocate, in bytes."""
    free: int = psutil.virtual_memory().available
    limit = container_limits().free
    return free if limit is None else min(free, limit)


def rank_free_memory(ranks: int = 1) -> int:
    """Return this rank's share of `free_memory`; `ranks` is the local world size if no launcher has set it."""
    return free_memory() // local_ranks(ranks)


def local_ranks(default: int = 1) -> int:
    """Return the number of ranks a launcher started on this machine (`LOCAL_WORLD_SIZE`), else `default`."""
    return max(_number(os.environ.get("LOCAL_WORLD_SIZE", "")) or default, 1)


def bf16_instructions(root: Path = Path("/")) -> str | None:
    """Return the name of the CPU's instructions for bf16, "" if there are none, None if this is not known (not Linux).
    Without them, bf16 is several times slower than fp32."""
    flags = _cpu_flags(root)
    if not flags:
        return None
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
    names = () if limit.upper() in _WITHOUT_BF16 else ("amx_bf16", "avx512_bf16", "bf16")
    return next((name for name in names if name in flags), "")


@cache
def _cpu_flags(root: Path) -> frozenset[str]:
    lines = _read(root / "proc/cpuinfo").splitlines()
    return frozenset(next((line for line in lines if line.lower().startswith(("flags", "features"))), "").split())


def container_limits(root: Path = Path("/")) -> Limits:
    """Return this process's limits; missing or invalid files, which most systems have, set none."""
    quotas = [
        *(_quota(folder, "cpu.max", None) for folder in control_groups("", root)),
        *(_quota(folder, "cpu.cfs_quota_us", "cpu.cfs_period_us") for folder in control_groups("cpu", root)),
    ]
    cpus = [
        *(_cpus(folder / "cpuset.cpus.effective") for folder in control_groups("", root)),
        *(_cpus(folder / "cpuset.cpus") for folder in control_groups("cpuset", root)),
    ]
    names = [("", limit, "memory.current", "inactive_file") for limit in ("memory.max", "memory.high")]
    names += [("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")]
    memory = [_memory(folder, *files) for group, *files in names for folder in control_groups(group, root)]
    return Limits(
        cores=min((quota for quota in quotas if quota is not None), default=None),
        cpus=min((allowed for allowed in cpus if allowed), key=len, default=None),
        memory=min((limit for limit, _ in filter(None, memory)), default=None),
        free=min((free for _, free in filter(None, memory)), default=None),
    )


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's group for a controller (`""`: version 2) and of all its parents."""
    group = _group_name(root, controller)
    if group is None:
        return
    for mounted, mount in _mounts(root, controller):
        # Inside a container the name may be the host's; the mount shows only its subtree.
        inside = group[len(mounted) :] if f"{group}/".startswith(f"{mounted.rstrip('/')}/") else ""
        names = [name for name in inside.split("/") if name not in ("", ".", "..")]
        for depth in range(len(names), -1, -1):
            yield mount.joinpath(*names[:depth])


def _group_name(root: Path, controller: str) -> str | None:
    for line in _read(root / "proc/self/cgroup").splitlines():  # NUMBER:CONTROLLERS:NAME
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            return parts[2]
    return None


def _mounts(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """Yield where a controller's groups are mounted: the root group of the mount, and its folder."""
    lines = _read(root / "proc/self/mountinfo").splitlines()
    if not lines:
        yield from (("/", root / usual.lstrip("/")) for usual in _USUAL_MOUNTS[controller])
    for line in lines:
        first, _, second = line.partition(" - ")
        mount, kind = first.split(" "), second.split(" ")
        if len(mount) < 5 or len(kind) < 3:
            continue
        if kind[0] == ("cgroup" if controller else "cgroup2") and (not controller or controller in kind[2].split(",")):
            yield _unescape(mount[3]), root / _unescape(mount[4]).lstrip("/")


def _unescape(path: str) -> str:
    """Decode the kernel's escapes in a path: `\\040` for a space; also tabs, newlines and backslashes."""
    for code in ("040", "011", "012", "134"):
        path = path.replace(f"\\{code}", chr(int(code, 8)))
    return path


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """Parse a non-negative integer; None for anything else, such as "max" and -1, which mean no limit."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _quota(folder: Path, quota: str, period: str | None) -> float | None:
    words = _read(folder / quota).split()
    words += _read(folder / period).split() if period else []
    if len(words) != 2:
        return None
    time, each = map(_number, words)
    return time / each if time and each else None


def _cpus(path: Path) -> frozenset[int] | None:
    cpus: set[int] = set()
    for part in _read(path).strip().split(","):  # such as 0-3,8
        low, dash, high = part.partition("-")
        first, last = _number(low), _number(high if dash else low)
        if first is None or last is None or last - first > 1 << 16:
            return None
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def _memory(folder: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    allowed, taken = _number(_read(folder / limit)), _number(_read(folder / used)) or 0
    if allowed is None or allowed >= _UNLIMITED:
        return None
    lines = (line.partition(" ") for line in _read(folder / "memory.stat").splitlines())
    statistics = {name: _number(value) or 0 for name, _, value in lines}
    return allowed, max(allowed - max(taken - statistics.get(cache, 0), 0), 0)
