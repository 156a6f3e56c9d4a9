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
from typing import Any

from ...common.errors import StrategyError
from ...common.waiting import Wait
from .failures import before_meeting, count_meeting, raise_posted
from .store import arrives, connect_to_job, listed, own_name, place

_NAME = "drivetrain/meeting"  # the key under which rank 0 leaves the name
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
        StrategyError: on every rank, if one has failed before, with its error, or has not arrived in time; rank 0
            names it.
    """
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = {"host": socket.gethostname(), **(about or {}), "nonce": uuid.uuid4().hex}
    wait = Wait(timeout)
    try:
        store = connect_to_job(wait)
        answer = _gather if rank == 0 else _arrive
        name, told = answer(store, rank, ranks, mine, wait)
    except RuntimeError as error:
        if isinstance(error, StrategyError):
            raise
        raise StrategyError(
            f"{own_name()} did not meet rank 0 at {place()} within {timeout:g} s. Look at "
            "the output of rank 0, whether its machine can be reached from here, and whether WORLD_SIZE is the number "
            f"of ranks that were started. ({_first_line(error)})"
        ) from error
    finally:
        count_meeting()
    return Meeting(name, dist.PrefixStore(f"drivetrain/{name}", store), told)  # type: ignore[attr-defined]


def _gather(
    store: Any, rank: int, ranks: int, mine: dict[str, Any], wait: Wait
) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """On rank 0: draw a name, wait for all answers to it, and confirm them."""
    name = uuid.uuid4().hex
    store.set(f"{_NAME}/{name}/{rank}", json.dumps(mine))
    store.set(_NAME, name)
    told: list[Mapping[str, Any]] = []
    while len(told) < ranks:
        key = f"{_NAME}/{name}/{len(told)}"
        if arrives(store, key):
            told.append(json.loads(store.get(key)))
            continue
        raise_posted(store, before_meeting())
        if wait.left <= 0:
            missing = _missing(store, name, ranks)
            here = {
                json.loads(store.get(f"{_NAME}/{name}/{n}"))["host"] for n in range(ranks) if n not in missing
            }
            raise StrategyError(
                f"{listed(missing).capitalize()} of {ranks} did not arrive at {place()} in time; the others are on "
                f"{', '.join(sorted(here))}. Look at the output of the missing ones, whether their machines reach this "
                "one, and whether WORLD_SIZE is the number of ranks that were started."
            )
        _report(wait, store, name, ranks)
    store.set(f"{_NAME}/{name}/all", json.dumps(told))
    return name, tuple(told)


def _arrive(
    store: Any, rank: int, ranks: int, mine: dict[str, Any], wait: Wait
) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """On the other ranks: answer to the name in the store until rank 0 confirms it. The name of an earlier start is
    there until rank 0 has replaced it, and so is its confirmation, without this rank's nonce."""
    while True:
        raise_posted(store, before_meeting())
        if arrives(store, _NAME):
            name = store.get(_NAME).decode()
            store.set(f"{_NAME}/{name}/{rank}", json.dumps(mine))
            if arrives(store, f"{_NAME}/{name}/all"):
                told = json.loads(store.get(f"{_NAME}/{name}/all"))
                if len(told) == ranks and told[rank]["nonce"] == mine["nonce"]:
                    return name, tuple(told)
                time.sleep(_PAUSE)
            _report(wait, store, name, ranks)
        else:
            wait.report(lambda: f"{own_name()} waits for rank 0, which has not arrived at {place()} yet")
        if wait.left <= 0:
            raise RuntimeError(f"rank 0 has not confirmed rank {rank}")


def _missing(store: Any, name: str, ranks: int) -> list[int]:
    """Return the ranks that have not answered to a name."""
    return [rank for rank in range(ranks) if not store.check([f"{_NAME}/{name}/{rank}"])]


def _report(wait: Wait, store: Any, name: str, ranks: int) -> None:
    wait.report(
        lambda: (
            f"{own_name()} waits for {listed(_missing(store, name, ranks) or [0])}, which did not arrive at {place()} "
            "yet: a slow start, a slow file system, or a rank that was not started"
        )
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
