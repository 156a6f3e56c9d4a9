"""Where a run starts: from which checkpoint, if any, and under which name it writes its own."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ...common.errors import CheckpointError, DrivetrainError
from ...common.storage.addresses import is_address
from ...strategies import Engine, Precision
from ..training.agreement import broadcast_text
from .directory import CheckpointDir, find
from .format import Checkpoint
from .remote import opened, shown


@dataclass
class ResumePoint:
    checkpoint: Checkpoint | None
    run: str
    goes_on: bool


def choose(engine: Engine, resume: str | Path | None, store: CheckpointDir | None) -> ResumePoint:
    """Return where the run starts, the same on all ranks. Rank 0 finds and verifies the checkpoint, and changes no
    file; its errors are raised on every rank. `resume="auto"` searches `store`, which is None without a folder."""
    answer = _on_rank_0(engine, lambda: _look(resume, store))
    place = answer["place"]
    checkpoint = None if place is None else _opened(place, store, verified=engine.rank == 0)
    return ResumePoint(checkpoint, answer["run"], answer["goes_on"])


def kept_precision(resume: str | Path | None, folder: Path | None) -> Precision | None:
    store = None if folder is None else CheckpointDir(folder.resolve() / "checkpoints")
    place = None if resume is None else _look(resume, store)["place"]
    if place is None:
        return None
    kept: Precision | None = Checkpoint(opened(place)).content.facts.get("precision")
    return kept if kept in get_args(Precision) else None


def begin(engine: Engine, choice: ResumePoint, store: CheckpointDir | None, saves: bool) -> None:
    """Claim the folder for the run. Call it last, when only training itself can still fail."""
    origin = None if choice.goes_on or choice.checkpoint is None else choice.checkpoint.path

    def claim() -> dict[str, Any]:
        # Without `begin`, the name of an earlier run would be taken for that of this run.
        if store is not None and (saves or store.run is not None):
            store.begin(choice.run, origin)
        if store is not None and not saves and not choice.goes_on:
            store.clear()  # a run that saves removes them when its first checkpoint is complete
        return {}

    _on_rank_0(engine, claim)


def _opened(place: str, store: CheckpointDir | None, verified: bool) -> Checkpoint:
    """Return the checkpoint that rank 0 has chosen; from an address, once it is on this machine."""
    if not is_address(place):
        return Checkpoint(Path(place))
    remote = None if store is None else store.remote
    inside = None if remote is None else remote.local(place)
    path = opened(place) if remote is None or inside is None else remote.pull_checkpoint(inside.name)
    checkpoint = Checkpoint(path)
    if not verified:
        checkpoint.verify()
    return checkpoint


def _on_rank_0(engine: Engine, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if engine.rank == 0:
        try:
            answer = work()
        except DrivetrainError as error:
            answer = {"error": str(error)}
    answer = json.loads(broadcast_text(engine, json.dumps(answer)))
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer


def _look(resume: str | Path | None, store: CheckpointDir | None) -> dict[str, Any]:
    checkpoint, goes_on = None, False
    if resume == "auto":
        assert store is not None  # fit has checked
        checkpoint = store.newest()
        goes_on = checkpoint is not None and store.run == checkpoint.content.run
    elif resume is not None:
        checkpoint = find(opened(resume) if store is None else store.local(resume))
        if store is not None and store.holds(checkpoint.path):
            _check_newest(store, checkpoint)
            goes_on = True
    if checkpoint is None:
        return {"place": None, "run": uuid.uuid4().hex, "goes_on": False}
    run = checkpoint.content.run if goes_on else uuid.uuid4().hex
    return {"place": checkpoint.place, "run": run, "goes_on": goes_on}


def _check_newest(store: CheckpointDir, checkpoint: Checkpoint) -> None:
    """Raise if resuming from `checkpoint` would delete others in the same folder."""
    ahead = store.beyond(checkpoint)
    if not ahead:
        return
    newest, names = ahead[0].content, ", ".join(each.path.name for each in ahead)
    other = "" if newest.run == checkpoint.content.run else ", of another run"
    raise CheckpointError(
        f"{checkpoint.place} is not the newest checkpoint in {shown(store.folder)}: {names} would be deleted (the "
        f"newest is after {newest.epoch} epochs and {newest.step_in_epoch} steps{other}). Resume from the newest with "
        f"resume='auto' (--resume), pass another folder for this run (out=…, --out), or move {names} away first."
    )
