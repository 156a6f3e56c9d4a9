"""Work on many samples in threads, with a progress bar, that ends at once when nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TypeVar

from tqdm.auto import tqdm

from ...common.exhaustion import exhaustion, is_exhaustion
from ...common.terminal import is_interactive
from ...common.threads import in_order
from .stop import Stop, stopped_by

T = TypeVar("T")
R = TypeVar("R")


def stoppable(
    function: Callable[[T], R],
    items: Sequence[T],
    threads: int,
    name: str,
    *,
    title: str,
    progress: bool,
    total: int,
    wanted: str,
) -> Generator[R, None, None]:
    """Yield the results of `function` in order, holding only a few at a time. Closing ends its native calls, too.
    `total` is the number of samples in all items; `wanted` is what the work takes, for the error if the system refuses
    it."""

    def work(item: T) -> R:
        with stopped_by(stop):
            return function(item)

    stop, each = Stop(), -(-total // len(items))
    hidden = not (progress and is_interactive())
    try:
        with (
            closing(in_order(work, items, threads, name, stop=stop.set)) as results,
            tqdm(total=total, desc=title, unit="img", disable=hidden, leave=False) as bar,
        ):
            for result in results:
                yield result
                bar.update(each)
    except Exception as error:
        if not is_exhaustion(error):
            raise
        raise exhaustion(error, wanted, "Use fewer workers.") from error
