"""The job's store: whether this process is one of a job's ranks, and connections to what torchrun or rank 0 serves."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ...common.waiting import Wait

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ATTEMPT = 5.0  # seconds that one attempt to connect may take
_LOOKS = (0.02, 0.08, 0.15, 0.25)  # seconds between two looks for a key


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher that sets the same variables) started this process."""
    return all(name in os.environ for name in _TORCHRUN)


def place() -> str:
    """Return where the ranks meet, as text."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def own_name() -> str:
    """Return which rank this is, and its host, for the beginning of a sentence."""
    return f"Rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} ({socket.gethostname()})"


def listed(ranks: Sequence[object]) -> str:
    """Return the numbers of ranks as text: the first few of many."""
    return f"rank(s) {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"


def connect(patience: timedelta, *, host: bool = False) -> Any:
    """Return a connection of its own to the job's store.

    Args:
        patience: how long it waits for answers.
        host: whether this process is the store's server.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=host, timeout=patience,
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip


def connect_to_job(wait: Wait) -> Any:
    """Return a connection to the store, which torchrun's agent serves, or rank 0, once it can be reached.

    Raises:
        RuntimeError: torch's, at the end of the wait.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = os.environ["RANK"] == "0" and not served
    while True:
        last = wait.left <= 2 * _ATTEMPT  # torch tries it twice in one attempt
        try:
            seconds = max(wait.left / 2, 0.5) if last else _ATTEMPT
            store = connect(timedelta(seconds=seconds), host=host)
        except RuntimeError:
            if last or host:
                raise
            wait.report(
                lambda: (
                    f"{own_name()} waits for the store of the job at {place()}, which "
                    f"{'torchrun on that machine' if served else 'rank 0'} serves: it does not answer yet"
                )
            )
            continue
        store.set_timeout(timedelta(seconds=max(wait.left, 1.0)))
        return store


def arrives(store: Any, key: str) -> bool:
    """Return whether a key is in the store, or arrives there within half a second.

    The store's own `wait` prints a warning when the time is up.

    Raises:
        RuntimeError: torch's, if the store has been lost.
    """
    for pause in _LOOKS:
        if store.check([key]):
            return True
        time.sleep(pause)
    return bool(store.check([key]))
