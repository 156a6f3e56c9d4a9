"""Peak memory on a CPU: of training in a process of its own, because one that holds all variants says nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ...strategies import launch
from ..spec.resolve import ResolvedPlan
from .runner import Loaders, build_variant

PEAK_SECONDS, PEAK_RESERVE = 100, 20
"""A ledger of fewer seconds leaves it out; of more, it keeps so many: starting two processes takes its time."""


def peak_bytes(plan: ResolvedPlan, batches: int, seconds: float) -> int | None:
    """Bytes of memory that a rank had at most while it trained for some batches; the largest over all ranks.

    Of the whole process: interpreter, torch, and what is mapped of the data file included, the loader's
    processes not. None where the system does not say (Linux does).

    Args:
        plan: what to train.
        batches: to train on, twice.
        seconds: that it may take.

    Raises:
        StrategyError: if it takes longer, or a process dies.
    """
    how = plan.distribution
    found = launch(
        _peak_of_rank,
        plan,
        batches,
        devices=how.devices,
        device=how.device,
        timeout=seconds,
        patience=0.0,
    )
    known = [peak for peak in found if peak is not None]
    return max(known, default=None)


def _peak_of_rank(plan: ResolvedPlan, batches: int) -> int | None:
    with ExitStack() as stack:
        build_variant(plan, Loaders(stack), stack, batches)
        return resident_peak()


def resident_peak() -> int | None:
    """This process's peak resident memory in bytes; None where /proc does not tell.

    Not getrusage's: Linux lets a new process start with its parent's peak in there.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else None
