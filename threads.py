"""Work in threads that Ctrl-C cannot harm.

Python raises KeyboardInterrupt between any two instructions of the main thread, also inside `Event`, `Future` and
`ThreadPoolExecutor`. One of their locks may then stay taken, and other threads and the end of the process wait for it,
for ever. So the main thread calls them while interrupts are held, and waits a fraction of a second at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from .signals import interrupts_held

T = TypeVar("T")
R = TypeVar("R")

_SLICE = 0.1  # seconds that Ctrl-C waits at most


def wait(done: Callable[[float], object]) -> None:
    """Call `done(seconds)`, which waits at most that long, until it returns something true."""
    finished: object = None
    while not finished:
        with interrupts_held():
            finished = done(_SLICE)


def result(future: Future[R]) -> R:
    """Wait for a future; return its result, or raise its exception."""

    def done(seconds: float) -> bool:
        with suppress(TimeoutError):  # `exception` returns that of the future
            future.exception(seconds)
        return future.done()

    wait(done)
    with interrupts_held():
        return future.result()


def submit(pool: ThreadPoolExecutor, function: Callable[..., R], *arguments: object) -> Future[R]:
    """Call `function(*arguments)` in a thread of the pool."""
    with interrupts_held():
        return pool.submit(function, *arguments)


def end(pool: ThreadPoolExecutor) -> None:
    """Drop what has not begun, and wait for the threads."""
    with interrupts_held():
        pool.shutdown(wait=False, cancel_futures=True)
    pool.shutdown()


def in_order(
    function: Callable[[T], R], items: Iterable[T], threads: int, name: str, ahead: int = 8
) -> Generator[R, None, None]:
    """Yield `function(item)` of each item, in their order, computed in threads.

    Args:
        function: what to compute.
        items: its arguments.
        threads: their number.
        name: what the names of the threads begin with.
        ahead: how many items for each thread are in preparation: enough that none waits for a slow neighbour.
    """
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    try:
        for item in items:
            waiting.append(submit(pool, function, item))
            if len(waiting) > ahead * threads:
                yield result(waiting.popleft())
        while waiting:
            yield result(waiting.popleft())
    finally:
        end(pool)
