"""Where the ranks of a job find each other: a store of this start alone, also after torchrun has restarted them.

torchrun starts workers again when one fails, or when a machine comes or goes. torch 2.15 gives them the store of the
start before, in which the addresses of the ranks that have ended are still written, and whose counters differ between
the ranks. `TORCHELASTIC_RESTART_COUNT` does not name a start either: every agent counts its own. Therefore rank 0 draws
a name, and waits until each rank has answered to it.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ...errors import StrategyError

_NAME = "drivetrain/meeting"  # the key under which rank 0 leaves the name
_ROUND = 0.5  # seconds between two looks whether rank 0 has been replaced
_PAUSE = 0.02  # seconds before the answer to another start is looked at again


@dataclass(frozen=True)
class Meeting:
    """The ranks of one start.

    Attributes:
        name: of this start, the same on all ranks, and new at every restart.
        store: torch's, whose keys only these ranks see.
        ranks: what each rank has told about itself, in order; always its `host`.
    """

    name: str
    store: Any
    ranks: tuple[Mapping[str, Any], ...]


def meet(timeout: float, about: Mapping[str, Any] | None = None) -> Meeting:
    """Wait for the other ranks, which RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe. Join no process group.

    Args:
        timeout: seconds to wait.
        about: what the others are told about this rank: JSON values by name.

    Raises:
        StrategyError: on every rank, if one has not arrived in time. Rank 0 names it.
    """
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = {"host": socket.gethostname(), **(about or {}), "nonce": uuid.uuid4().hex}
    deadline = time.monotonic() + timeout
    try:
        store = _connect(rank, timeout)
        answer = _gather if rank == 0 else _arrive
        name, told = answer(store, rank, ranks, mine, deadline)
    except RuntimeError as error:
        if isinstance(error, StrategyError):
            raise
        raise StrategyError(
            f"Rank {rank} of {ranks} ({mine['host']}) did not meet rank 0 at {place()} within {timeout:g} s. Look at "
            "the output of rank 0, whether its machine can be reached from here, and whether WORLD_SIZE is the number "
            f"of ranks that were started. ({_first_line(error)})"
        ) from error
    return Meeting(name, dist.PrefixStore(f"drivetrain/{name}", store), told)  # type: ignore[attr-defined]


def place() -> str:
    """Return where the ranks meet, as text."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


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


def _connect(rank: int, timeout: float) -> Any:
    """Return the store, which torchrun's agent serves, or rank 0."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = connect(timedelta(seconds=timeout / 2), host=rank == 0 and not served)  # torch tries it twice
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _gather(
    store: Any, rank: int, ranks: int, mine: dict[str, Any], deadline: float
) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """On rank 0: draw a name, wait for all answers to it, and confirm them."""
    name = uuid.uuid4().hex
    store.set(f"{_NAME}/{name}/{rank}", json.dumps(mine))
    store.set(_NAME, name)
    keys = [f"{_NAME}/{name}/{each}" for each in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
    except RuntimeError as error:
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        here = {json.loads(store.get(key))["host"] for each, key in enumerate(keys) if each not in missing}
        if not missing:
            raise
        raise StrategyError(
            f"Rank(s) {', '.join(map(str, missing))} of {ranks} did not arrive at {place()} in time; the others are on "
            f"{', '.join(sorted(here))}. Look at the output of the missing ones, whether their machines reach this "
            "one, and whether WORLD_SIZE is the number of ranks that were started."
        ) from error
    told = [json.loads(store.get(key)) for key in keys]
    store.set(f"{_NAME}/{name}/all", json.dumps(told))
    return name, tuple(told)


def _arrive(
    store: Any, rank: int, ranks: int, mine: dict[str, Any], deadline: float
) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """On the other ranks: answer to the name in the store until rank 0 confirms it. The name of an earlier start is
    there until rank 0 has replaced it, and so is its confirmation, without this rank's nonce."""
    while True:
        left = deadline - time.monotonic()
        store.wait([_NAME], timedelta(seconds=max(left, 1.0)))
        name = store.get(_NAME).decode()
        store.set(f"{_NAME}/{name}/{rank}", json.dumps(mine))
        try:
            store.wait([f"{_NAME}/{name}/all"], timedelta(seconds=_ROUND))
        except RuntimeError:
            if left <= 0:
                raise
            continue
        told = json.loads(store.get(f"{_NAME}/{name}/all"))
        if len(told) == ranks and told[rank]["nonce"] == mine["nonce"]:
            return name, tuple(told)
        if left <= 0:
            raise RuntimeError(f"rank 0 has not confirmed rank {rank}")
        time.sleep(_PAUSE)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
