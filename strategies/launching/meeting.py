"""Where the ranks of a torchrun job find each other: a store of this start alone, also after a restart.

torchrun starts workers again when one fails, or when a machine comes or goes. torch 2.15 gives them the store of the
start before, in which the addresses of the ranks that have ended are still written, and whose counters differ between
the ranks. `TORCHELASTIC_RESTART_COUNT` does not name a start either: every agent counts its own. Therefore rank 0 draws
a name, and waits until each rank has answered to it.

A rank that fails before the ranks train together leaves its error in the store. Without it the others would wait until
their time is up for a rank that has ended, e.g. because its machine lacks the data. Afterwards, every rank counts up a
heartbeat in the store. A rank whose collective fails looks whose heartbeat has stopped, or who left an error there.
"""

import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from ...common.errors import StrategyError
from ...common.terminal import Wait
from .stacks import append, note, written_at_sigquit

_ATTEMPT = 5.0  # seconds that one attempt to connect may take
_LOOKS = (0.02, 0.08, 0.15, 0.25)  # seconds between two looks for a key
_HOLD = 9.0  # seconds that a rank which has failed stays, so that the others hear of it: its end may end the store
_ROUND = 0.1  # seconds between two looks whether they have
_SHOWN = 2000  # characters of an error
_NAME = "drivetrain/meeting"  # the key under which rank 0 leaves the name
_PAUSE = 0.02  # seconds before the answer to another start is looked at again
BEAT = 1.0  # seconds between two heartbeats
_MISSED = 3.5  # seconds without a heartbeat after which a rank counts as lost
_ANSWER = 5.0  # seconds that the store has for an answer
_WANTED, _WRITTEN = "stacks/wanted", "stacks/written"  # keys: who collects stacks, and the sentence about their file
_STACK = 20_000  # characters of a rank's stacks
_meetings = 0  # of this process, whether or not the others came
Told = tuple[str, tuple[Mapping[str, Any], ...]]  # the name of a meeting, and what each rank has told


class FailedRankError(StrategyError):
    """Another rank of the job failed before the ranks began to train together."""


def under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def own_name() -> str:
    return f"Rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} ({socket.gethostname()})"


def listed(ranks: Sequence[object]) -> str:
    return f"rank(s) {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"


def connect(patience: timedelta, *, host: bool = False) -> Any:
    """Return a new connection to the job's store, which waits so long for answers; a `host` serves it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=host, timeout=patience,
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip


def connect_to_job(wait: Wait) -> Any:
    """Return a connection to the store, once it can be reached; raise torch's RuntimeError at the end of the wait."""
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
    """Whether a key is in the store, or arrives within half a second. (Its own `wait` warns when the time is up.)"""
    for pause in _LOOKS:
        if store.check([key]):
            return True
        time.sleep(pause)
    return bool(store.check([key]))


@dataclass(frozen=True)
class Meeting:
    name: str  # the same on all ranks, and new at every restart
    store: Any  # torch's, whose keys only these ranks see
    ranks: tuple[Mapping[str, Any], ...]  # what each rank has told about itself, in order; always its `host`


def meet(timeout: float, about: Mapping[str, Any] | None = None) -> Meeting:
    """Wait for the other ranks, and send them `about`, JSON values by name; join no process group. Raise
    `StrategyError` on every rank if one has failed before, with its error, or has not arrived in time."""
    import torch.distributed as dist

    global _meetings
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = {"host": socket.gethostname(), **(about or {}), "nonce": uuid.uuid4().hex}
    wait = Wait(timeout)
    try:
        store = connect_to_job(wait)
        name, told = (_gather if rank == 0 else _arrive)(store, rank, ranks, mine, wait)
    except RuntimeError as error:
        if isinstance(error, StrategyError):
            raise
        raise StrategyError(
            f"{own_name()} did not meet rank 0 at {place()} within {timeout:g} s. Look at the output of rank 0, "
            f"whether its machine can be reached from here, and whether WORLD_SIZE is the number of ranks that were "
            f"started. ({str(error).strip().partition(chr(10))[0] or type(error).__name__})"
        ) from error
    finally:
        _meetings += 1
    return Meeting(name, dist.PrefixStore(f"drivetrain/{name}", store), told)  # type: ignore[attr-defined]


def _gather(store: Any, rank: int, ranks: int, mine: dict[str, Any], wait: Wait) -> Told:
    name = uuid.uuid4().hex
    store.set(f"{_NAME}/{name}/{rank}", json.dumps(mine))
    store.set(_NAME, name)
    told: list[Mapping[str, Any]] = []
    while len(told) < ranks:
        key = f"{_NAME}/{name}/{len(told)}"
        if arrives(store, key):
            told.append(json.loads(store.get(key)))
            continue
        raise_posted(store, _before_meeting())
        if wait.left <= 0:
            missing = _missing(store, name, ranks)
            there = [n for n in range(ranks) if n not in missing]
            here = {json.loads(store.get(f"{_NAME}/{name}/{n}"))["host"] for n in there}
            raise StrategyError(
                f"{listed(missing).capitalize()} of {ranks} did not arrive at {place()} in time; the others are on "
                f"{', '.join(sorted(here))}. Look at the output of the missing ones, whether their machines reach this "
                "one, and whether WORLD_SIZE is the number of ranks that were started."
            )
        _report(wait, store, name, ranks)
    store.set(f"{_NAME}/{name}/all", json.dumps(told))
    return name, tuple(told)


def _arrive(store: Any, rank: int, ranks: int, mine: dict[str, Any], wait: Wait) -> Told:
    """On the other ranks: answer to the name in the store until rank 0 confirms it. The name of an earlier start is
    there until rank 0 has replaced it, and so is its confirmation, without this rank's nonce."""
    while True:
        raise_posted(store, _before_meeting())
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
    return [rank for rank in range(ranks) if not store.check([f"{_NAME}/{name}/{rank}"])]


def _report(wait: Wait, store: Any, name: str, ranks: int) -> None:
    wait.report(
        lambda: (
            f"{own_name()} waits for {listed(_missing(store, name, ranks) or [0])}, which did not arrive at {place()} "
            "yet: a slow start, a slow file system, or a rank that was not started"
        )
    )


def _before_meeting() -> str:
    """Return the key of the failures before the next meeting: the same on ranks that run the same program."""
    return f"drivetrain/failed/{_meetings}"


def post(store: Any, key: str, error: BaseException) -> None:
    """Leave this rank's error under `key`, and stay until the others know, at most nine seconds. Only the first error
    is kept: further ones are its consequences, or of the same kind."""
    own = f"{own_name().replace('Rank', 'rank')} failed: {type(error).__name__}: {error}"[:_SHOWN]
    ranks, wait = int(os.environ["WORLD_SIZE"]), Wait(_HOLD)
    with suppress(RuntimeError):  # the store ends with the ranks
        store.compare_set(f"{key}/first", "", json.dumps({"rank": os.environ["RANK"], "said": own}))
        store.add(f"{key}/heard", 1)
        while store.add(f"{key}/heard", 0) < ranks and wait.left > 0:
            time.sleep(_ROUND)


def raise_posted(store: Any, key: str) -> None:
    if not store.check([f"{key}/first"]):
        return
    first = json.loads(store.get(f"{key}/first"))
    if first["rank"] != os.environ["RANK"]:
        store.add(f"{key}/heard", 1)
        raise FailedRankError(f"{own_name()} stops, because {first['said']}")


@contextmanager
def failures_posted() -> Iterator[None]:
    """Inside the block, let the other ranks of the job know of an error before they have met this one. Nothing is
    posted if no rank waits: without torchrun, in a process group, after the meeting, and before a restart."""
    global _meetings
    begun = _meetings
    try:
        yield
    except Exception as error:
        if _meetings == begun and _others_wait():
            with suppress(RuntimeError, OSError, ValueError):  # nobody serves a store at that address
                post(connect_to_job(Wait(_HOLD)), _before_meeting(), error)
            _meetings += 1
        raise


def _others_wait() -> bool:
    if not under_torchrun() or not os.environ["WORLD_SIZE"].isdecimal() or int(os.environ["WORLD_SIZE"]) < 2:
        return False
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return False
    starts = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    return not (all(map(str.isdecimal, starts)) and int(starts[0]) < int(starts[1]))


class LostRankError(StrategyError):
    """Another rank of the job failed, was lost, or did not take part in a collective in time. `signal` names the
    forwarded signal that has ended it, because it could not note it yet, or no longer; else it is empty."""

    signal = ""


def is_echo(error: BaseException, text: str) -> bool:
    """Return whether an error, with the traceback `text`, only reports that another rank ended or does not answer."""
    distributed = sys.modules.get("torch.distributed")
    # Gloo's errors are RuntimeErrors that begin with their C++ file.
    return (distributed is not None and isinstance(error, distributed.DistError)) or "gloo/transport" in text


class Peers:
    """The heartbeats of the ranks of one start, with its `name`: an earlier one's are in the same store. `stacks` is
    the file for what ranks are doing when one hangs, and `own` what this one writes its stacks to."""

    def __init__(self, rank: int, ranks: int, name: str, stacks: Path | None, own: IO[bytes]) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._rank, self._ranks, self._stacks, self._own = rank, ranks, stacks, own
        self._told = False  # its stacks have been posted
        self._size = self._read = 0  # bytes in `own` at the last look, and those that are known
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
        with suppress(Exception):
            self._post("error", f"{type(error).__name__}: {error}")

    def report(self, timeout: float, trace: str) -> str:
        """Return, after a few seconds, which ranks failed or are lost, as a sentence, and where their stacks are; this
        rank's is `trace`. A thread that may be left behind asks: when a network is silent, some calls of torch's store
        wait a quarter of an hour."""
        found: list[str] = []
        asking = threading.Thread(target=lambda: found.append(self._report(timeout, trace)), daemon=True)
        asking.start()
        asking.join(_MISSED + 2 * _ANSWER)
        self._answers = bool(found)
        return found[0] if found else _no_answer()

    def _report(self, timeout: float, trace: str) -> str:
        try:
            ranks = range(self._ranks)
            self._told = True
            self._post("stacks", trace[-_STACK:])
            collects = self._store.compare_set(_WANTED, "", str(self._rank)).decode() == str(self._rank)
            before = [self._get("beat", rank) for rank in ranks]
            for _ in range(round(_MISSED / 0.5)):
                errors = [(rank, text) for rank in ranks if (text := self._get("error", rank))]
                if errors:
                    return " ".join(f"{self._name(rank)} failed: {text}" for rank, text in errors)
                time.sleep(0.5)
            same = [rank for rank in ranks if self._get("beat", rank) == before[rank]]
            lost = [self._name(rank) for rank in same if rank != self._rank]
            at = "" if lost else self._stacks_of_all(timeout, collects=collects)
        except Exception:
            return _no_answer()
        if lost:
            return f"{', '.join(lost)} does not answer: its process, its host or the network is lost."
        return (
            f"no rank is lost, but one did not take part in a collective within {timeout:g} s. If it was busy, e.g. "
            f"with slow data, pass distribute(timeout=…).{at}"
        )

    def _stacks_of_all(self, timeout: float, *, collects: bool) -> str:
        """One of the ranks that have waited writes what all have posted; the others wait until it has."""
        wait, ranks, place = Wait(_ANSWER), range(self._ranks), ""
        if collects:
            while wait.left > 0 and not all(self._get("stacks", rank) for rank in ranks):
                time.sleep(0.2)
            texts = {self._name(rank): self._get("stacks", rank) or "No answer." for rank in ranks}
            path = append(self._stacks, f"no collective within {timeout:g} s", texts)
            place = f" The stacks of all ranks are in {path} ({socket.gethostname()})." if path else " "
            self._store.set(_WRITTEN, place)
        while not collects and wait.left > -1 and not place:
            time.sleep(0.2)
            place = self._store.get(_WRITTEN).decode() if self._store.check([_WRITTEN]) else ""
        return place.rstrip()

    def _keep_stacks(self) -> None:
        """Keep what SIGQUIT has written."""
        before, self._size = self._size, os.fstat(self._own.fileno()).st_size
        if self._read < self._size == before:  # it is complete
            text = self._written()
            note(append(self._stacks, "SIGQUIT", {f"rank {self._rank}, process {os.getpid()}": text}))

    def _post_stacks(self) -> None:
        """Post this rank's stacks if another one wants them."""
        if not self._told and self._store.check([_WANTED]):
            self._told = True
            faulthandler.dump_traceback(self._own, all_threads=True)
            self._post("stacks", self._written()[-_STACK:])

    def _written(self) -> str:
        begin, descriptor = self._read, self._own.fileno()
        self._read = self._size = os.fstat(descriptor).st_size
        return os.pread(descriptor, self._read - begin, begin).decode(errors="replace")

    def _beat(self) -> None:
        count = 0
        while not self._done.wait(BEAT if count else 0):
            count += 1
            with suppress(Exception):  # the store ends with the job
                self._post("beat", str(count))
                if count % 3 == 0:
                    self._post_stacks()
            with suppress(OSError, ValueError):  # the file is closed at the end
                self._keep_stacks()

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
def lost_ranks_named(rank: int, ranks: int, timeout: float, name: str, stacks: Path | None = None) -> Iterator[None]:
    """Inside the block, post heartbeats; turn the failure of a collective into a `LostRankError` that names the rank.
    `timeout` is that of the collectives, for the message. If a rank hangs, the stacks of all are appended to the file
    `stacks`, at SIGQUIT to this process its own."""
    with tempfile.TemporaryFile(buffering=0) as own, written_at_sigquit(own):
        try:
            peers = Peers(rank, ranks, name, stacks, own)
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
            said = peers.report(timeout, text)
            name = f"Rank {rank} of {ranks} ({socket.gethostname()})"
            raise LostRankError(f"{name} stops, because {said}") from error
        except BaseException as error:
            peers.fail(error)
            raise
        finally:
            peers.close()
