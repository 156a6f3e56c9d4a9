"""What ranks tell each other, and what they agree on: requests to save or stop from a signal or the clock."""

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import monotonic, sleep

import torch
import torch.distributed as dist

from ...common.signals import handled
from ...strategies import Engine

STOP, SAVE, INTERRUPT = 1, 2, 4
_AGAIN = b"\nCtrl-C: the run saves a checkpoint after this step, and stops. Press it again to stop at once.\n"


class Exchange:
    """One number of each rank, exchanged without waiting; `group` reduces tensors on the CPU."""

    def __init__(self, group: dist.ProcessGroup, number: float) -> None:
        self._numbers = torch.zeros(group.size())
        self._numbers[group.rank()] = number
        self._work = dist.all_reduce(self._numbers, group=group, async_op=True)

    def arrives_within(self, seconds: float) -> bool:
        end = monotonic() + seconds
        while not self._work.is_completed():
            if monotonic() > end:
                return False
            sleep(0.005)
        return True

    def values(self) -> list[float]:
        self._work.wait()
        numbers: list[float] = self._numbers.tolist()
        return numbers


def broadcast_text(engine: Engine, text: str, source: int = 0) -> str:
    """Every rank must call it."""
    data = list(text.encode()) if engine.rank == source else []
    length = int(engine.reduce(torch.tensor(len(data)), "sum").item())
    values = torch.tensor(data or [0] * length, dtype=torch.int64)
    return bytes(engine.reduce(values, "sum").tolist()).decode()


class Requests:
    """What this rank has been asked to do, and what all have agreed on, with the losses that `NonFiniteGuard`
    exchanges. `every_minutes` is by rank 0's clock; `signal` names the one that asked this rank to stop, or is ""."""

    def __init__(self, every_minutes: float | None = None) -> None:
        self.stop = self.save = self.interrupted = False
        self.signal = ""
        self._interval = None if every_minutes is None else 60 * every_minutes
        self._due = monotonic() + (self._interval or 0)

    def flags(self) -> int:
        due = self._interval is not None and monotonic() >= self._due
        return STOP * bool(self.signal) | SAVE * due | INTERRUPT * (self.signal == "SIGINT")

    def agree(self, flags: Collection[float]) -> None:
        for flag in map(int, flags):
            self.stop |= bool(flag & STOP)
            self.save |= bool(flag & SAVE)
            self.interrupted |= bool(flag & INTERRUPT)

    def saved(self) -> None:
        self.save = False
        self._due = monotonic() + (self._interval or 0)

    @contextmanager
    def noted(self, names: Collection[str]) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self.signal = self.signal or signal.Signals(number).name

        with handled([signal.Signals[name] for name in names], note):
            yield

    @contextmanager
    def interruptible(self, *, reports: bool) -> Iterator[None]:
        """Raise KeyboardInterrupt for Ctrl-C at the end of the block, for a second one at once. Other handlers than
        Python's own, and other threads, see no change."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        noted = False

        def note(number: int, _: object) -> None:
            nonlocal noted
            noted, self.signal = True, self.signal or signal.Signals(number).name
            signal.signal(number, signal.default_int_handler)
            if reports:
                os.write(2, _AGAIN)  # not print: the interrupted code may hold its lock

        with handled([signal.SIGINT], note):
            yield
        if noted:
            raise KeyboardInterrupt
