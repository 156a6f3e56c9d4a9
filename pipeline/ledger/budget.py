"""The ledger's time: how much is left, what still fits, and the bar that shows it."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter, sleep
from typing import Any, TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")

GRACE = 0.5
"""Seconds after the end in which a batch that runs may still complete a trial."""


class OutOfTime(Exception):
    """The budget ended within a trial, which therefore does not count."""


def until(deadline: float, batches: Iterable[T]) -> Iterator[T]:
    """The batches, each only if it begins before the deadline (on `perf_counter`'s clock).

    Raises:
        OutOfTime: instead of a batch that would begin later.
    """
    for batch in batches:
        if perf_counter() > deadline:
            raise OutOfTime
        yield batch


class _Alarm(KeyboardInterrupt):
    """What `alarm` raises, so that whatever ends properly on Ctrl-C does so here, and nothing takes it for an error."""


@contextmanager
def alarm(deadline: float) -> Iterator[None]:
    """Within the block OutOfTime is raised `GRACE` seconds after the deadline, as Ctrl-C raises KeyboardInterrupt.

    `until` looks at the time between two batches only. A batch may never come (workers that take a minute to start),
    and a model may take long to build. This sends the main thread a signal of its own, so it works also where SIGINT is
    ignored (a shell's background jobs) or another timer is set; in another thread the block is left alone. One call
    into native code, such as a backward, is not interrupted.

    Raises:
        OutOfTime: see above.
        KeyboardInterrupt: if it was Ctrl-C.
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

    def come(*_: object) -> None:
        raise _Alarm

    timer = threading.Timer(max(deadline + GRACE - perf_counter(), 0.0), send)
    timer.daemon = True
    signal.signal(number, come)
    timer.start()
    came = False
    try:
        try:
            yield
        finally:  # it may arrive here, too, while this waits for the lock
            with lock:
                over.append(True)
            timer.cancel()
    except KeyboardInterrupt:
        if not sent:
            raise
        came = True
    finally:
        if sent and not came:  # it is under way: let it arrive here, and not in the caller's code
            with suppress(_Alarm):
                sleep(GRACE)
        signal.signal(number, signal.SIG_DFL)
    if came:
        raise OutOfTime


def _free_signal() -> int | None:
    """Return a real-time signal that nothing in this process handles; None where the system has none (macOS)."""
    numbers = range(getattr(signal, "SIGRTMIN", 0) + 1, getattr(signal, "SIGRTMAX", 0))
    return next((number for number in numbers if signal.getsignal(number) is signal.SIG_DFL), None)


class Budget:
    """The seconds that a ledger may take, from now on, and the bar of how many it has used.

    Args:
        seconds: all of it: building, warm-up, rounds and peak memory.
        begin: when it began, on `perf_counter`'s clock.
        progress: show the bar.
    """

    def __init__(self, seconds: float, begin: float, progress: bool) -> None:
        self.seconds, self.begin, self.end = seconds, begin, begin + seconds
        self._bar: Any = tqdm(
            total=seconds, disable=not progress, leave=False, dynamic_ncols=True,
            bar_format="{desc}{percentage:3.0f}% of " + f"{seconds:g} s |{{bar}}|",
        )  # fmt: skip

    @property
    def used(self) -> float:
        """Seconds since the beginning."""
        return perf_counter() - self.begin

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self.end - perf_counter()

    def show(self, what: str) -> None:
        """Puts the share that is used, and what is being done, on the bar."""
        self._bar.n = min(self.used, self.seconds)
        self._bar.set_description(f"ledger: {what}")

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()


def rounded_up(seconds: float) -> float:
    """To two digits, for a number of seconds that is recommended."""
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.ceil(seconds / step) * step:.3g}")
