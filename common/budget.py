"""A time budget for measurements: deadlines, the alarm that enforces them, and the progress bar."""

import math
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter, sleep
from types import FrameType
from typing import Any, Self, TypeVar

from .signals import raising
from .terminal import time_bar

T = TypeVar("T")

GRACE = 0.5  # seconds after the deadline in which a running batch may still complete its trial
AGAIN = 0.02  # seconds after which the alarm looks again whether an import has ended


class OutOfTime(Exception):
    """The budget ended during a trial, which is discarded."""


class Budget:
    """A time budget, and the progress bar of its use, which closes with the block; `begin` is a `perf_counter`."""

    def __init__(self, seconds: float, begin: float, progress: bool, label: str) -> None:
        self._label, self.seconds, self.begin, self.end = label, seconds, begin, begin + seconds
        self._bar: Any = time_bar(seconds, progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def used(self) -> float:
        return perf_counter() - self.begin

    @property
    def left(self) -> float:
        return self.end - perf_counter()

    def show(self, what: str) -> None:
        self._bar.n = min(self.used, self.seconds)
        self._bar.set_description(f"{self._label}: {what}")


def until(deadline: float, batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches that start before the deadline (in `perf_counter` time); then raise OutOfTime."""
    for batch in batches:
        if perf_counter() > deadline:
            raise OutOfTime
        yield batch


@contextmanager
def alarm(deadline: float) -> Iterator[None]:
    """Raise OutOfTime inside the block `GRACE` seconds after the deadline, as Ctrl-C raises KeyboardInterrupt; outside
    the main thread do nothing."""
    # `until` looks only between batches, which may take long to arrive, and a model long to build. A real-time signal
    # works even if SIGINT is ignored (background jobs of a shell) or another timer is set; macOS has none. It does not
    # interrupt a single call into native code, nor an import, which would leave half a package in `sys.modules`.
    main = threading.main_thread()
    numbers = range(getattr(signal, "SIGRTMIN", 0) + 1, getattr(signal, "SIGRTMAX", 0))
    number = next((one for one in numbers if signal.getsignal(one) is signal.SIG_DFL), None)
    if threading.current_thread() is not main or number is None or main.ident is None:
        yield
        return
    sender = _Sender(number, main.ident, deadline + GRACE - perf_counter())
    received = False
    with raising(number, sender.handler), sender.unraisable():
        try:
            try:
                sender.timer.start()
                yield
            finally:  # the signal may arrive here, too, while this waits for the lock
                sender.end()
        except KeyboardInterrupt:
            if not sender.raised:
                raise
            received = True
        finally:
            if sender.pending:  # let it arrive here, not in the caller's code
                with suppress(_Alarm):
                    sleep(GRACE)
    if received:
        raise OutOfTime


class _Alarm(KeyboardInterrupt):
    """Raised by `alarm`. As a KeyboardInterrupt, it ends code as Ctrl-C does, and is not caught as an error."""


class _Sender:
    """Sends the main thread a signal after some seconds, and again for as long as its handler postpones it, or what it
    raises is lost."""

    def __init__(self, number: int, main: int, seconds: float) -> None:
        self._number, self._main = number, main
        self._lock = threading.Lock()
        self._sent, self._postponed, self._over = 0, 0, threading.Event()
        self._imports = _imports(sys._getframe())
        self.timer = threading.Timer(max(seconds, 0.0), self._send)
        self.timer.daemon = True
        self.raised = False  # whether the handler has raised _Alarm

    def _send(self) -> None:
        while True:
            with self._lock:
                if self._over.is_set():
                    return
                self._sent += 1
                signal.pthread_kill(self._main, self._number)
            while self._postponed < self._sent:
                if self._over.wait(AGAIN):
                    return

    def handler(self, _: int, frame: FrameType | None) -> None:
        if _imports(frame) > self._imports:  # inside an import: sent again until it has ended
            self._postponed += 1
            return
        self.raised = True
        raise _Alarm(self._number)

    @contextmanager
    def unraisable(self) -> Iterator[None]:
        """Notice that the exception was raised in a finalizer or a weak reference's callback, where Python prints and
        drops it: it is sent again."""
        before = sys.unraisablehook

        def noticed(lost: "sys.UnraisableHookArgs") -> None:
            if isinstance(lost.exc_value, _Alarm) and lost.exc_value.args == (self._number,):
                self.raised, self._postponed = False, self._sent
            else:
                before(lost)

        sys.unraisablehook = noticed
        try:
            yield
        finally:
            sys.unraisablehook = before

    def end(self) -> None:
        with self._lock:
            self._over.set()
        self.timer.cancel()

    @property
    def pending(self) -> bool:
        return self._sent > self._postponed and not self.raised


def _imports(frame: FrameType | None) -> int:
    """Return the number of the import system's frames that lead to this one."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return count


def rounded_up(seconds: float) -> float:
    """Round up to two significant digits, for recommended seconds."""
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.ceil(seconds / step) * step:.3g}")
