"""Where a run begins: from which checkpoint, if any, and under which name it writes its own."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, DrivetrainError
from ...strategies import Engine
from .directory import CheckpointDir, find
from .format import Checkpoint


@dataclass
class ResumePoint:
    """Where a run begins: with which checkpoint (None: from scratch), under which name it writes its own, and
    whether that is the name of the run that the folder holds already."""

    checkpoint: Checkpoint | None
    run: str
    goes_on: bool


def choose(engine: Engine, resume: str | Path | None, store: CheckpointDir | None) -> ResumePoint:
    """Rank 0 looks, and verifies what it finds; all ranks get the same answer. Changes nothing.

    Args:
        engine: to tell them.
        resume: as in `Pipeline.fit`.
        store: of the run, where `resume="auto"` looks; None without a folder.

    Raises:
        CheckpointError: on all ranks, if `resume` is a path without a whole checkpoint, or of one in `store` that
            has newer ones, or the folder cannot be read.
    """
    answer = _on_rank_0(engine, lambda: _look(resume, store))
    path = answer["path"]
    return ResumePoint(None if path is None else Checkpoint(Path(path)), answer["run"], answer["goes_on"])


def begin(engine: Engine, choice: ResumePoint, store: CheckpointDir | None, saves: bool) -> None:
    """Gives the folder to the run, once nothing but the training is left to fail.

    Args:
        engine: to tell the other ranks of an error.
        choice: of this run.
        store: of the run; None without a folder.
        saves: whether the run will write to it.

    Raises:
        CheckpointError: on all ranks, if the folder cannot be written.
    """
    origin = None if choice.goes_on or choice.checkpoint is None else choice.checkpoint.path

    def claim() -> dict[str, Any]:
        if store is not None and (
            saves or store.run is not None
        ):  # which would be taken for that of this run
            store.begin(choice.run, origin)
        if store is not None and not saves and not choice.goes_on:
            store.clear()  # with `saves`, an earlier run's go when the first of this one is complete
        return {}

    _on_rank_0(engine, claim)


def _on_rank_0(engine: Engine, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it gives there, as JSON values, on every rank; its error, too."""
    answer: dict[str, Any] = {}
    if engine.rank == 0:
        try:
            answer = work()
        except DrivetrainError as error:
            answer = {"error": str(error)}
    answer = json.loads(_told(engine, json.dumps(answer)))
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer


def _look(resume: str | Path | None, store: CheckpointDir | None) -> dict[str, Any]:
    found, goes_on = None, False
    if resume == "auto":
        assert store is not None  # fit has checked
        found = store.newest()
        goes_on = found is not None and store.run == found.content.run
    elif resume is not None:
        found = find(Path(resume))
        if store is not None and store.holds(found.path):
            _refuse_to_lose(store, found)
            goes_on = True
    if found is None:
        return {"path": None, "run": uuid.uuid4().hex, "goes_on": False}
    run = found.content.run if goes_on else uuid.uuid4().hex
    return {"path": str(found.path), "run": run, "goes_on": goes_on}


def _refuse_to_lose(store: CheckpointDir, found: Checkpoint) -> None:
    """Raises CheckpointError if a run that resumes from `found` would replace other work in the same folder."""
    ahead = store.beyond(found)
    if not ahead:
        return
    newest, names = ahead[0].content, ", ".join(checkpoint.path.name for checkpoint in ahead)
    other = "" if newest.run == found.content.run else ", of another run"
    raise CheckpointError(
        f"{found.path} is not the newest checkpoint in {store.folder}: {names} would be replaced (the newest is after "
        f"{newest.epoch} epochs and {newest.step_in_epoch} steps{other}). Continue the newest with "
        f"resume='auto' (--resume), give this run a folder of its own (out=…, --out), or move {names} away first."
    )


def _told(engine: Engine, text: str) -> str:
    """Rank 0's text, on every rank."""
    data = list(text.encode()) if engine.rank == 0 else []
    length = int(engine.reduce(torch.tensor(len(data)), "sum").item())
    values = torch.tensor(data or [0] * length)
    return bytes(engine.reduce(values, "sum").tolist()).decode()
