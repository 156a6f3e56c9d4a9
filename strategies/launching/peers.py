"""Which ranks of a torchrun job are still there, so that an error can say which one was lost.

Every rank counts up a heartbeat in the store in which torchrun's ranks met. A rank whose collective fails looks whose
heartbeat has stopped, or who left an error there.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from ...common.errors import StrategyError
from .meeting import connect, place

BEAT = 1.0  # seconds between two heartbeats
_MISSED = 3.5  # seconds without a heartbeat after which a rank counts as lost
_ANSWER = 5.0  # seconds that the store has for an answer


class LostRankError(StrategyError):
    """Another rank of the job failed, was lost, or did not take part in a collective in time."""


def is_echo(error: BaseException, text: str) -> bool:
    """Return whether an error, with the traceback `text`, only reports that another rank has ended or does not answer."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return "gloo/transport" in text  # gloo's errors are RuntimeErrors that begin with their C++ file


class Peers:
    """The heartbeats of the ranks of one start, with its `name`: an earlier one's are in the same store."""

    def __init__(self, rank: int, ranks: int, name: str) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._rank, self._ranks = rank, ranks
        self._done = threading.Event()
        self._answers = True  # the store does, as far as is known
        # A connection of its own: another call through torch's may wait for minutes.
        self._store = PrefixStore(f"drivetrain/peers/{name}", connect(timedelta(seconds=_ANSWER)))
        self._post("who", f"{socket.gethostname()}, process {os.getpid()}")
        self._thread = threading.Thread(target=self._beat, name="drivetrain-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join(_ANSWER if self._answers else 0)

    def fail(self, error: BaseException) -> None:
        """Leave this rank's own error for the others."""
        with suppress(Exception):
            self._post("error", f"{type(error).__name__}: {error}")

    def report(self, timeout: float) -> str:
        """Return, after a few seconds, which ranks failed or are lost, as a sentence.

        Not every call of torch's store has a time limit: when a network is silent, some wait until the system gives up
        the connection, a quarter of an hour. They are made in a thread that may be left behind.
        """
        found: list[str] = []
        asking = threading.Thread(target=lambda: found.append(self._report(timeout)), daemon=True)
        asking.start()
        asking.join(_MISSED + _ANSWER)
        self._answers = bool(found)
        return found[0] if found else _no_answer()

    def _report(self, timeout: float) -> str:
        try:
            before = self._all("beat")
            for _ in range(round(_MISSED / 0.5)):
                errors = [(self._name(rank), text) for rank, text in self._all("error").items() if text]
                if errors:
                    return " ".join(f"{name} failed: {text}" for name, text in errors)
                time.sleep(0.5)
            after = self._all("beat")
            lost = [self._name(rank) for rank in before if after[rank] == before[rank] and rank != self._rank]
        except Exception:
            return _no_answer()
        if lost:
            return f"{', '.join(lost)} does not answer: its process, its host or the network is lost."
        return (
            f"no rank is lost, but one did not take part in a collective within {timeout:g} s. If it was busy, e.g. "
            "with slow data, pass distribute(timeout=…)."
        )

    def _beat(self) -> None:
        count = 0
        while not self._done.wait(BEAT if count else 0):
            count += 1
            with suppress(Exception):  # the store ends with the job
                self._post("beat", str(count))

    def _all(self, what: str) -> dict[int, str]:
        return {rank: self._get(what, rank) for rank in range(self._ranks)}

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._get('who', rank)})"

    def _post(self, what: str, value: str) -> None:
        self._store.set(f"{what}/{self._rank}", value)

    def _get(self, what: str, rank: int) -> str:
        key = f"{what}/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


def _no_answer() -> str:
    return f"the host of rank 0 does not answer at {place()}: it, or the network to it, is lost."


@contextmanager
def lost_ranks_named(rank: int, ranks: int, timeout: float, name: str) -> Iterator[None]:
    """Inside the block, post heartbeats; turn the failure of a collective into a `LostRankError` that names the rank.
    `timeout` is that of the collectives, for the message."""
    try:
        peers = Peers(rank, ranks, name)
    except Exception:  # a launcher whose store is not torch's
        yield
        return
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        if not is_echo(error, text):
            peers.fail(error)
            raise
        said = peers.report(timeout)
        raise LostRankError(
            f"Rank {rank} of {ranks} ({socket.gethostname()}) stops, because {said}"
        ) from error
    except BaseException as error:
        peers.fail(error)
        raise
    finally:
        peers.close()
