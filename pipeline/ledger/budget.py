"""The time budget of a ledger or a tuning: deadlines, the alarm that enforces them, and the progress bar."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter, sleep
from typing import Any, TypeVar

from ...signals import raising
from ...terminal import time_bar

T = TypeVar("T")

GRACE = 0.5
"""Seconds after the deadline in which a running batch may still complete its trial."""


class OutOfTime(Exception):
    """The budget ended during a trial, which is discarded."""


def until(deadline: float, batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches that start before the deadline (in `perf_counter` time).

    Raises:
        OutOfTime: instead of yielding a batch after the deadline.
    """
    for batch in batches:
        if perf_counter() > deadline:
            raise OutOfTime
        yield batch


class _Alarm(KeyboardInterrupt):
    """Raised by `alarm`. As a KeyboardInterrupt, it ends code as Ctrl-C does, and is not caught as an error."""


@contextmanager
def alarm(deadline: float) -> Iterator[None]:
    """Raise OutOfTime inside the block `GRACE` seconds after the deadline, as Ctrl-C raises KeyboardInterrupt.

    `until` checks the time only between batches, but a batch may take long to arrive (workers can take a minute to
    start), and a model long to build. This sends the main thread a real-time signal, so it works even if SIGINT is
    ignored (background jobs of a shell) or another timer is set. Outside the main thread it does nothing. A single call
    into native code, such as a backward, is not interrupted.

    Raises:
        OutOfTime: after the deadline.
        KeyboardInterrupt: on Ctrl-C.
    """
    main = threading.main_thread()
    number = _free_signal()
    if threading.current_thread() is not main or number is None:
        yield
        return
    lock = threading.Lock()
    sent: list[bool] = []
    over: list[bool] = []

    def send() -> None:
        with lock:
            if not over and main.ident is not None:
                sent.append(True)
                signal.pthread_kill(main.ident, number)

    def on_signal(*_: object) -> None:
        raise _Alarm

    timer = threading.Timer(max(deadline + GRACE - perf_counter(), 0.0), send)
    timer.daemon = True
    received = False
    with raising(number, on_signal):
        try:
            try:
                timer.start()
                yield
            finally:  # the signal may arrive here, too, while this waits for the lock
                with lock:
                    over.append(True)
                timer.cancel()
        except KeyboardInterrupt:
            if not sent:
                raise
            received = True
        finally:
            if sent and not received:  # it is pending: let it arrive here, not in the caller's code
                with suppress(_Alarm):
                    sleep(GRACE)
    if received:
        raise OutOfTime


def _free_signal() -> int | None:
    """Return a real-time signal without a handler in this process; None if the system has none (macOS)."""
    numbers = range(getattr(signal, "SIGRTMIN", 0) + 1, getattr(signal, "SIGRTMAX", 0))
    return next((number for number in numbers if signal.getsignal(number) is signal.SIG_DFL), None)


class Budget:
    """The time budget of a ledger or a tuning, and the progress bar of its use.

    Args:
        seconds: for everything: building, warm-up, rounds and peak memory.
        begin: start of the budget, in `perf_counter` time.
        progress: show the bar, in a terminal or a notebook.
        label: what the bar shows first.
    """

    def __init__(self, seconds: float, begin: float, progress: bool, label: str = "ledger") -> None:
        self._label = label
        self.seconds, self.begin, self.end = seconds, begin, begin + seconds
        self._bar: Any = time_bar(seconds, progress)

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self.begin

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self.end - perf_counter()

    def show(self, what: str) -> None:
        """Show the used time and the current activity in the bar."""
        self._bar.n = min(self.used, self.seconds)
        self._bar.set_description(f"{self._label}: {what}")

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def rounded_up(seconds: float) -> float:
    """Round up to two significant digits, for recommended seconds."""
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.ceil(seconds / step) * step:.3g}")
