"""A flag that ends calls of the native core, set by another thread; work in threads that ends with it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from ...common.errors import DataError
from ...common.exhaustion import exhaustion, is_exhaustion
from ...common.terminal import progress_bar
from ...common.threads import at_exit, in_order
from .library import MOST_MEMORY, STOPPED, Limits

T = TypeVar("T")
R = TypeVar("R")

_ALL: weakref.WeakSet[Stop] = weakref.WeakSet()
_LOCAL = threading.local()


class Stop:
    """Ends the native calls that have it among their limits, within a fraction of a second, once it is set. At the end
    of the process all are set: otherwise it would wait for the threads that load ahead."""

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)
        _ALL.add(self)

    def set(self) -> None:
        self._flag.value = 1

    @property
    def is_set(self) -> bool:
        return bool(self._flag.value)

    def limits(self, memory: int) -> Limits:
        """Return the limits of a call that this ends, if kept until then; `memory`: bytes for a JPEG's coefficients."""
        return Limits(ctypes.addressof(self._flag), memory)


class Stopped(DataError):
    """The work was stopped, because nobody waits for it any more."""


@contextmanager
def stopped_by(stop: Stop) -> Iterator[None]:
    """Inside the block, this thread's calls of the native core that have no limits of their own end when it is set."""
    before, _LOCAL.stop = getattr(_LOCAL, "stop", None), stop
    try:
        yield
    finally:
        _LOCAL.stop = before


def usual_limits(memory: int = MOST_MEMORY) -> Limits:
    """Return the limits of a call: the thread's `stopped_by`, and bytes for the coefficients of a JPEG."""
    stop: Stop | None = getattr(_LOCAL, "stop", None)
    return Limits(None, memory) if stop is None else stop.limits(memory)


def require_running(status: int) -> None:
    if status == STOPPED:
        raise Stopped("The work was stopped.")


def stoppable(
    function: Callable[[T], R], items: Sequence[T], threads: int, name: str,
    *, title: str, progress: bool, total: int, wanted: str,
) -> Generator[R, None, None]:  # fmt: skip
    """Yield the results of `function` in order, holding only a few at a time; closing ends its native calls, too.
    `total`: samples in all items; `wanted`: what the work takes, for the error if the system refuses it."""

    def work(item: T) -> R:
        with stopped_by(stop):
            return function(item)

    stop, each = Stop(), -(-total // len(items))
    try:
        with (
            closing(in_order(work, items, threads, name, stop=stop.set)) as results,
            progress_bar(total, progress, desc=title, unit="img") as bar,
        ):
            for result in results:
                yield result
                bar.update(min(each, total - bar.n))  # the last item may have fewer
    except Exception as error:
        if not is_exhaustion(error):
            raise
        raise exhaustion(error, wanted, "Use fewer workers.") from error


def _set_all() -> None:
    for stop in list(_ALL):
        stop.set()


at_exit(_set_all)
