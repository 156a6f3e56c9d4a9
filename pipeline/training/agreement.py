"""What ranks tell each other, through any engine."""

from __future__ import annotations

from time import monotonic, sleep

import torch
import torch.distributed as dist

from ...strategies import Engine


class Exchange:
    """One number of each rank, exchanged without waiting for the others.

    Args:
        group: a group of all ranks that reduces tensors on the CPU.
        number: this rank's.
    """

    def __init__(self, group: dist.ProcessGroup, number: float) -> None:
        self._numbers = torch.zeros(group.size())
        self._numbers[group.rank()] = number
        self._work = dist.all_reduce(self._numbers, group=group, async_op=True)

    def arrives_within(self, seconds: float) -> bool:
        """Wait until all ranks have sent theirs, at most this long, and return whether they have."""
        end = monotonic() + seconds
        while not self._work.is_completed():
            if monotonic() > end:
                return False
            sleep(0.005)
        return True

    def values(self) -> list[float]:
        """Wait for the numbers of all ranks, and return them in order."""
        self._work.wait()
        numbers: list[float] = self._numbers.tolist()
        return numbers


def broadcast_text(engine: Engine, text: str, source: int = 0) -> str:
    """Return the text of rank `source`; every rank must call it, with the same `source`.

    Args:
        engine: reduces a length and then the bytes, on the CPU's or the device's process group.
        text: ignored on the other ranks.
        source: the rank that has it.
    """
    data = list(text.encode()) if engine.rank == source else []
    length = int(engine.reduce(torch.tensor(len(data)), "sum").item())
    values = torch.tensor(data or [0] * length, dtype=torch.int64)
    return bytes(engine.reduce(values, "sum").tolist()).decode()
