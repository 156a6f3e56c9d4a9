"""Work in threads that Ctrl-C cannot harm.

Python raises KeyboardInterrupt between any two instructions of the main thread, also inside `Event`, `Future` and
`ThreadPoolExecutor`. One of their locks may then stay taken, and other threads and the end of the process wait for it,
for ever. So the main thread calls them while interrupts are held, and waits a fraction of a second at a time.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
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


def results(futures: Sequence[Future[R]]) -> list[R]:
    """Wait for all futures; return their results, or raise the exception of the first that has one."""
    left = deque(futures)

    def done(seconds: float) -> bool:
        with suppress(TimeoutError):  # of the wait: `exception` returns that of the future
            while left:
                left[0].exception(seconds)
                left.popleft()
        return not left

    wait(done)
    with interrupts_held():
        return [future.result() for future in futures]


def end(pool: ThreadPoolExecutor, stop: Callable[[], object] = lambda: None) -> None:
    """Drop the work that has not begun, and wait for the threads; `stop`, which is called until they have ended, ends
    what they wait for."""
    with interrupts_held():
        pool.shutdown(wait=False, cancel_futures=True)
    threads = list(pool._threads)

    def done(seconds: float) -> bool:
        stop()
        threads[0].join(seconds)
        while threads and not threads[0].is_alive():
            threads.pop(0)
        return not threads

    if threads:
        wait(done)
    pool.shutdown()


def at_exit(function: Callable[[], object]) -> None:
    """Call the function before the interpreter waits for threads, which `atexit` is too late for."""
    # concurrent.futures registers in the same way that it waits for its own; the last one registered is called first.
    with suppress(RuntimeError):  # the process is already at its end
        threading._register_atexit(function)  # type: ignore[attr-defined]


def in_order(
    function: Callable[[T], R], items: Iterable[T], threads: int, name: str,
    ahead: int = 8,  # items for each thread in preparation: enough that none waits for a slow neighbor
    stop: Callable[[], object] = lambda: None,
) -> Generator[R, None, None]:  # fmt: skip
    """Yield `function(item)` of each item, in their order, computed in threads whose names begin with `name`. `stop`
    ends their work: it is called before they are waited for, unless all results were yielded."""
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    try:
        for item in items:
            with interrupts_held():
                waiting.append(pool.submit(function, item))
            if len(waiting) > ahead * threads:
                yield from results([waiting.popleft()])
        while waiting:
            yield from results([waiting.popleft()])
    except BaseException:
        stop()
        raise
    finally:
        end(pool)
