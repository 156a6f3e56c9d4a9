"""Signal handlers replaced, or protected, for the length of a block; in the main thread only, in which Python runs
them."""

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


@contextmanager
def handled(numbers: Collection[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside the block, call `handler` for these signals instead of their usual effect."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def is_unhandled(number: signal.Signals) -> bool:
    """Whether a signal has its default effect or is ignored, as SIGQUIT is in what a shell script starts with
    `&`. Handlers in C count, too, such as faulthandler's (known on Linux)."""
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
        return False
    with suppress(OSError, StopIteration), Path("/proc/self/status").open() as lines:
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return not int(caught.split()[1], 16) >> (number - 1) & 1
    return True


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of Ctrl-C and SIGTERM after the block, in which e.g. importing Composer replaces them."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


_RAISING = [int(signal.SIGINT)]  # signals whose handlers raise an exception in the main thread


@contextmanager
def raising(number: int, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside the block, which is in the main thread, a signal without a handler raises what `handler` raises."""
    signal.signal(number, handler)
    _RAISING.append(number)
    try:
        yield
    finally:
        _RAISING.remove(number)
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Defer Ctrl-C, and signals of `raising`, to the end of the block, which belongs together; see `threads`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _held(tuple(_RAISING)):
        yield


@contextmanager
def _held(numbers: tuple[int, ...]) -> Iterator[None]:
    """Hold signals, one within the other: an exception that one raises at the end does not keep the next held."""
    before = signal.getsignal(numbers[0]) if numbers else None
    if before is None:  # there is no other, or its handler is not Python's
        yield
        return
    received: list[int] = []
    signal.signal(numbers[0], lambda number, _: received.append(number))
    try:
        with _held(numbers[1:]):
            yield
    finally:
        signal.signal(numbers[0], before)
        if received:
            signal.raise_signal(numbers[0])
