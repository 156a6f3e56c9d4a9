"""Requests to a run from outside: a signal asks it to save and stop, the clock of rank 0 asks for a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import monotonic

from ...common.signals import handled

STOP, SAVE, INTERRUPT = 1, 2, 4
_AGAIN = b"\nCtrl-C: the run saves a checkpoint after this step, and stops. Press it again to stop at once.\n"


class Requests:
    """What this rank has been asked to do, and what all ranks have agreed on.

    The agreement travels with the losses that `NonFiniteGuard` exchanges at every step.

    Args:
        every_minutes: minutes between two checkpoints, by this rank's clock; None: none. Only for rank 0.

    Attributes:
        stop: whether the ranks have agreed to stop after this step.
        save: whether they have agreed to save after this step.
        interrupted: whether they stop because of Ctrl-C.
        signal: the name of the signal that asked this rank to stop; "" if none did.
    """

    def __init__(self, every_minutes: float | None = None) -> None:
        self.stop = self.save = self.interrupted = False
        self.signal = ""
        self._interval = None if every_minutes is None else 60 * every_minutes
        self._due = monotonic() + (self._interval or 0)

    def flags(self) -> int:
        """Return what this rank asks for, as `STOP`, `SAVE` and `INTERRUPT` bits."""
        due = self._interval is not None and monotonic() >= self._due
        return STOP * bool(self.signal) | SAVE * due | INTERRUPT * (self.signal == "SIGINT")

    def agree(self, flags: Collection[float]) -> None:
        """Note what any rank asks for; `flags` are those of all ranks."""
        self.stop = self.stop or any(int(each) & STOP for each in flags)
        self.save = self.save or any(int(each) & SAVE for each in flags)
        self.interrupted = self.interrupted or any(int(each) & INTERRUPT for each in flags)

    def saved(self) -> None:
        """Start counting the minutes to the next checkpoint."""
        self.save = False
        self._due = monotonic() + (self._interval or 0)

    @contextmanager
    def noted(self, names: Collection[str]) -> Iterator[None]:
        """Note the signals with these names inside the block, instead of their usual effect, in the main thread."""

        def note(number: int, _: object) -> None:
            self.signal = self.signal or signal.Signals(number).name

        with handled([signal.Signals[name] for name in names], note):
            yield

    @contextmanager
    def interruptible(self, *, reports: bool) -> Iterator[None]:
        """Note the first Ctrl-C inside the block; the second one raises KeyboardInterrupt, as usual.

        Python's own handler must be set, as in scripts and notebooks; others are left alone, and so are other threads.

        Args:
            reports: write to standard error that the run will stop, and how to stop it at once.

        Raises:
            KeyboardInterrupt: at the end, if the block did not stop because it had finished.
        """
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
