"""The error of a rank that fails before the ranks train together, left in the job's store, where the others find it.

Without it they would wait until their time is up for a rank that has ended, e.g. because its machine lacks the data.
Once the ranks train together, see `peers`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...common.errors import StrategyError
from ...common.waiting import Wait
from .store import connect_to_job, own_name, under_torchrun

_HOLD = 9.0  # seconds that a rank which has failed stays, so that the others hear of it: its end may end the store
_ROUND = 0.1  # seconds between two looks whether they have
_SHOWN = 2000  # characters of an error
_meetings = 0  # of this process, whether or not the others came


class FailedRankError(StrategyError):
    """Another rank of the job failed before the ranks began to train together."""


def count_meeting() -> None:
    """Note that a meeting is over: what fails from now on belongs to the next one."""
    global _meetings
    _meetings += 1


def before_meeting() -> str:
    """Return the key of the failures before the next meeting: the same on ranks that run the same program."""
    return f"drivetrain/failed/{_meetings}"


def post(store: Any, key: str, error: BaseException) -> None:
    """Leave this rank's error under `key`, and stay until the others know, at most nine seconds.

    Only the first error is kept: further ones are its consequences, or of the same kind.
    """
    own = f"{own_name().replace('Rank', 'rank')} failed: {type(error).__name__}: {error}"[:_SHOWN]
    ranks, wait = int(os.environ["WORLD_SIZE"]), Wait(_HOLD)
    with suppress(RuntimeError):  # the store ends with the ranks
        store.compare_set(f"{key}/first", "", json.dumps({"rank": os.environ["RANK"], "said": own}))
        store.add(f"{key}/heard", 1)
        while store.add(f"{key}/heard", 0) < ranks and wait.left > 0:
            time.sleep(_ROUND)


def raise_posted(store: Any, key: str) -> None:
    """Raise a FailedRankError if another rank has left an error under `key`."""
    if not store.check([f"{key}/first"]):
        return
    first = json.loads(store.get(f"{key}/first"))
    if first["rank"] != os.environ["RANK"]:
        store.add(f"{key}/heard", 1)
        raise FailedRankError(f"{own_name()} stops, because {first['said']}")


@contextmanager
def failures_posted() -> Iterator[None]:
    """Inside the block, let the other ranks of the job know of an error before they have met this one.

    Nothing is posted if no rank waits: without torchrun, in a process group, after the meeting, and if torchrun starts
    all ranks again.
    """
    begun = _meetings
    try:
        yield
    except Exception as error:
        if _meetings == begun and _others_wait():
            try:
                post(connect_to_job(Wait(_HOLD)), before_meeting(), error)
            except (RuntimeError, OSError, ValueError):  # nobody serves a store at that address
                pass
            finally:
                count_meeting()
        raise


def _others_wait() -> bool:
    if not under_torchrun() or not os.environ["WORLD_SIZE"].isdecimal() or int(os.environ["WORLD_SIZE"]) < 2:
        return False
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return False
    starts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    return not (all(map(str.isdecimal, starts)) and int(starts[0]) < int(starts[1]))
