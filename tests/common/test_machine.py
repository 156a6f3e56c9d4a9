"""CPU quotas and memory limits of cgroups: folders as the kernel presents them, versions 1 and 2, nested."""

import os
from pathlib import Path

import psutil
import pytest
import torch
from drivetrain.common import machine
from drivetrain.common.machine import Limits, container_limits
from drivetrain.strategies.auto import free_bytes

MB = 1 << 20
UNLIMITED = 9223372036854771712
V2 = "29 23 0:26 {shown} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "{number} 25 0:{number} {shown} /sys/fs/cgroup/{names} rw - cgroup cgroup rw,{names}\n"


Groups = dict[str, dict[str, str]]


def tree(root: Path, files: dict[str, str], groups: Groups | None = None) -> Path:
    """Write files, and those of control groups: folder below the mount to file name to content."""
    for folder, contents in (groups or {}).items():
        files |= {f"sys/fs/cgroup/{folder}/{name}": text for name, text in contents.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_2(root: Path, groups: Groups, *, group: str) -> Path:
    mounts = "1 0 8:1 / / rw - ext4 /dev/sda rw\n" + V2.format(shown="/", at="/sys/fs/cgroup")
    return tree(root, {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": mounts}, groups)


def version_1(root: Path, groups: Groups, *, group: str, shown: str = "/") -> Path:
    names = f"12:memory:{group}\n7:cpu,cpuacct:{group}\n3:cpuset:{group}\n0::/\n"
    controllers = {31: "memory", 32: "cpu,cpuacct", 33: "cpuset"}.items()
    mounts = "".join(V1.format(number=number, shown=shown, names=each) for number, each in controllers)
    return tree(root, {"proc/self/cgroup": names, "proc/self/mountinfo": mounts}, groups)


def test_version_2_the_smallest_of_nested_limits_counts(tmp_path: Path) -> None:
    groups = {
        "": {"cpu.max": "300000 100000\n"},
        "pod": {
            "cpu.max": "50000 100000\n",
            "memory.max": f"{900 * MB}\n",
            "memory.current": f"{800 * MB}\n",
            "memory.stat": f"anon 5\nfile 7\ninactive_file {300 * MB}\nactive_file {100 * MB}\n",
        },
        "pod/job": {
            "cpu.max": "max 100000\n",
            "memory.max": f"{500 * MB}\n",
            "memory.high": "max\n",
            "memory.current": f"{20 * MB}\n",
            "memory.stat": "inactive_file 0\n",
            "cpuset.cpus.effective": "0-2,5\n",
        },
    }
    limits = container_limits(version_2(tmp_path, groups, group="/pod/job"))
    assert limits == Limits(0.5, frozenset({0, 1, 2, 5}), 500 * MB, 400 * MB)  # free: 900 - (800 - 300)
    # Above it, the kernel slows a group down.
    tree(tmp_path, {"sys/fs/cgroup/pod/job/memory.high": str(120 * MB)})
    assert container_limits(tmp_path).free == 100 * MB


def test_version_1_the_smallest_of_nested_limits_counts(tmp_path: Path) -> None:
    groups = {
        "memory": {"memory.limit_in_bytes": f"{UNLIMITED}\n", "memory.usage_in_bytes": "999999999999\n"},
        "memory/docker": {
            "memory.limit_in_bytes": f"{64 * MB}\n",
            "memory.usage_in_bytes": f"{60 * MB}\n",
            "memory.stat": f"inactive_file {50 * MB}\ntotal_inactive_file {10 * MB}\n",
        },
        "memory/docker/x": {
            "memory.limit_in_bytes": f"{UNLIMITED}\n",
            "memory.usage_in_bytes": f"{60 * MB}\n",
        },
        "cpu,cpuacct/docker": {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"},
        "cpu,cpuacct/docker/x": {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
        "cpuset/docker/x": {"cpuset.cpus": "1\n"},
    }
    limits = container_limits(version_1(tmp_path, groups, group="/docker/x"))
    assert limits == Limits(2.5, frozenset({1}), 64 * MB, 14 * MB)


@pytest.mark.parametrize("group", ["/host/docker/x", "/host/docker/x/job", "/", "/../../elsewhere"])
def test_a_container_sees_the_lower_part_of_the_hosts_tree(tmp_path: Path, group: str) -> None:
    """The name is the host's; the mount begins at the container's own group."""
    limit = {"memory.limit_in_bytes": f"{64 * MB}\n", "memory.usage_in_bytes": f"{4 * MB}\n"}
    root = version_1(tmp_path, {"memory": limit}, group=group, shown="/host/docker/x")
    assert container_limits(root) == Limits(memory=64 * MB, free=60 * MB)


def test_both_versions_at_once(tmp_path: Path) -> None:
    root = version_1(tmp_path, {"memory": {"memory.limit_in_bytes": str(64 * MB)}, "unified": {}}, group="/")
    mounts = (root / "proc/self/mountinfo").read_text() + V2.format(shown="/", at="/a\\040folder")
    tree(root, {"proc/self/mountinfo": mounts, "a folder/cpu.max": "150000 100000"})
    assert container_limits(root) == Limits(cores=1.5, memory=64 * MB, free=64 * MB)


def test_without_mountinfo_the_usual_folders_are_read(tmp_path: Path) -> None:
    root = version_2(tmp_path, {"a": {"cpu.max": "200000 100000"}}, group="/a")
    (root / "proc/self/mountinfo").unlink()
    assert container_limits(root) == Limits(cores=2.0)


MALFORMED = [
    "", "\n", "max", "max max", "-5", "0", "50000", "50000 0", "1 2 3", "12.5 100000", "nan 100000", "9" * 5000,
    "٣ ٣", "\0\0", "0-", "5-2", "0-99999999999", ",,",
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED, ids=[repr(text[:12]) for text in MALFORMED])
def test_what_means_nothing_is_no_limit(tmp_path: Path, text: str) -> None:
    names = ("cpu.max", "memory.max", "memory.current", "memory.stat", "cpuset.cpus.effective")
    found = container_limits(version_2(tmp_path, {"": dict.fromkeys(names, text)}, group="/"))
    zero, one = text == "0", text == "50000"
    assert found == Limits(
        memory=0 if zero else 50000 if one else None,
        free=0 if zero or one else None,
        cpus=frozenset({int(text)}) if zero or one else None,
    )
    bad = tree(tmp_path / "names", {"proc/self/cgroup": text, "proc/self/mountinfo": f"{text} - {text}\n"})
    assert container_limits(bad) == Limits()


def test_without_any_files_there_is_no_limit(tmp_path: Path) -> None:
    assert container_limits(tmp_path) == Limits()
    assert container_limits(version_2(tmp_path, {}, group="/gone/away")) == Limits()


@pytest.mark.parametrize(
    ("limits", "cores", "share"),
    [
        (Limits(), 4, 2),
        (Limits(cores=0.5), 1, 1),
        (Limits(cores=2.5), 3, 1),
        (Limits(cores=64.0), 4, 2),
        (Limits(cpus=frozenset({0, 7})), 1, 1),
        (Limits(cpus=frozenset({1, 2, 9})), 2, 1),
        (Limits(cpus=frozenset({8, 9})), 4, 2),  # inconsistent: the process does run
    ],
)
def test_cores_are_the_affinity_and_the_quota(
    limits: Limits, cores: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "container_limits", lambda: limits)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (machine.cores(), machine.rank_cores()) == (cores, share)


def test_an_affinity_of_one_core_is_one_core() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine.cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_memory_is_the_containers_where_that_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "container_limits", lambda: Limits(memory=64 * MB, free=40 * MB))
    assert (machine.total_memory(), machine.free_memory()) == (64 * MB, 40 * MB)
    assert free_bytes(torch.device("cpu"), 4) == 10 * MB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_bytes(torch.device("cpu"), 4) == machine.rank_free_memory() == 20 * MB
    monkeypatch.setattr(machine, "container_limits", lambda: Limits(memory=UNLIMITED, free=UNLIMITED))
    assert machine.total_memory() == psutil.virtual_memory().total


@pytest.mark.parametrize("given", ["", "many", "-2", "0", "2.5"])
def test_a_launcher_that_sets_no_number_of_ranks(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    assert (machine.local_ranks(), machine.local_ranks(3)) == (1, 3)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", ""),
        ("flags\t\t: fpu avx512_bf16\n", "avx512_bf16"),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", "amx_bf16"),
        ("Features\t: fp asimd bf16 i8mm\n", "bf16"),
        ("Features\t: fp asimd\n", ""),
        ("processor\t: 0\n", None),
        ("", None),
    ],
)
def test_bf16_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str | None) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert machine.bf16_instructions(tree(tmp_path, {"proc/cpuinfo": text})) == name
    assert machine.bf16_instructions(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("limit", "name"),
    [("AVX512_CORE_VNNI", ""), ("avx2", ""), ("AVX512_CORE_BF16", "avx512_bf16"), ("ALL", "avx512_bf16")],
)
def test_onednn_may_be_told_to_leave_instructions_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, name: str
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert machine.bf16_instructions(tree(tmp_path, {"proc/cpuinfo": "flags\t: avx512_bf16\n"})) == name
