"""Write checkpoints while training continues: each rank its part, under a temporary name until all are complete."""

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ....common.errors import CheckpointError
from ....common.signals import interrupts_held
from ....common.storage.files import appears
from ....common.threads import wait
from ....strategies import Engine
from ...training.agreement import broadcast_text
from .directory import CheckpointDir, Checkpoints
from .format import CheckpointContent, Part, finish, note_path, write_part
from .remote import CHECKPOINTS, STATE, shown

_ROUND = 0.02  # seconds between polls for files of other ranks
_REMOTE_ROUND = 0.5  # the same at an address, where each poll is a request
_PATIENCE = 3.0  # seconds that a failing run waits for a checkpoint in progress
UPLOAD_PATIENCE = 120.0  # the same after Ctrl-C for an upload; a second Ctrl-C ends it


class CheckpointWriter:
    """Writes the checkpoints of one run to a folder that all ranks share: each writes its files and then a note; rank 0
    waits for all notes, adds `state.json`, and renames the folder. Background threads only access files: collectives
    run in `save`. At an address, each rank uploads its files and then its note; rank 0 fetches the notes, and uploads
    `state.json` last."""

    def __init__(self, engine: Engine, store: CheckpointDir, options: Checkpoints, run: str) -> None:
        self._engine, self._store, self._options, self._run = engine, store, options, run
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._pending: Path | None = None
        self._remote = store.remote
        self._attempt = "" if self._remote is None else broadcast_text(engine, uuid.uuid4().hex[:8])
        self._deadline = 0.0  # until when to wait for other ranks after the run has given up
        self._written, self._given_up = threading.Event(), threading.Event()

    def save(self, part: Part, content: CheckpointContent) -> None:
        """Save this rank's `part`, and rank 0's `content`. A failure, also of the previous one, is every rank's."""
        self.settle()
        temporary = self._store.temporary(content.step)
        if self._engine.rank == 0:
            self._record_failure(self._make, temporary, content.step)
        self._agree()
        if self._pending != temporary:
            self._clean()
        self._record_failure(self._find, temporary)
        self._agree()
        self._pending = temporary
        if self._options.background:
            job, name = (temporary, part, content), "drivetrain-checkpoint"
            with interrupts_held():
                self._written.clear()
                self._thread = threading.Thread(target=self._in_background, args=job, name=name, daemon=True)
                self._thread.start()
        else:
            self._record_failure(self._write, temporary, part, content)
            self._agree()
            self._record_failure(self._complete, temporary, content)
            self._agree()

    def close(self) -> None:
        self.settle()
        self._agree()
        self._clean()

    def wait_a_moment(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while self._pending is not None and self._pending.exists() and time.monotonic() < deadline:
            time.sleep(_ROUND)

    def give_up(self, *, interrupted: bool = False) -> None:
        """Stop without the other ranks; the checkpoint in progress may stay incomplete. `interrupted`: by Ctrl-C."""
        patience = _PATIENCE
        if interrupted and self._remote is not None:
            patience = UPLOAD_PATIENCE
            self._deadline = time.monotonic() + patience
        with interrupts_held():
            self._given_up.set()
        if self._thread is not None:
            self._thread.join(patience)
        if self._remote is not None:
            self._remote.files.close()

    def _make(self, temporary: Path, step: int) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if self._remote is not None and self._store.path(step).exists():  # of an earlier run
            self._remote.discard(self._store.path(step).name)

    def _find(self, temporary: Path) -> None:
        if self._remote is not None:
            temporary.mkdir(parents=True, exist_ok=True)  # on other machines than that of rank 0
        elif not appears(temporary, _PATIENCE):
            raise CheckpointError(
                f"Rank {self._engine.rank} does not see {temporary}, which rank 0 has created. Pass a folder (out=…) "
                f"on a file system that all ranks share."
            )

    def _clean(self) -> None:
        """Remove what this machine has uploaded, once rank 0 is ready; on its machine, it has renamed the folder."""
        if self._remote is not None and self._pending is not None and self._engine.rank != 0:
            shutil.rmtree(self._pending, ignore_errors=True)

    def _in_background(self, temporary: Path, part: Part, content: CheckpointContent) -> None:
        self._record_failure(self._write, temporary, part, content)
        self._written.set()
        if self._failure is None:
            self._record_failure(self._complete, temporary, content)

    def _write(self, temporary: Path, part: Part, content: CheckpointContent) -> None:
        rank, ranks = self._engine.rank, self._engine.world_size
        write_part(temporary, part, rank, ranks)
        if self._remote is not None:
            note, step = note_path(temporary, rank), self._store.path(content.step).name
            paths = {name: temporary / name for name in json.loads(note.read_text())["files"]}
            with self._kept_here(temporary, content):
                self._remote.send(step, paths | ({self._note(rank): note} if ranks > 1 else {}))

    def _complete(self, temporary: Path, content: CheckpointContent) -> None:
        if self._engine.rank != 0:
            return
        target, remote = self._store.path(content.step), self._remote
        if remote is None:
            if self._wait_for(lambda: self._are_written(temporary), _ROUND):
                finish(temporary, target, content, self._engine.world_size)
                self._store.prune(self._run, content.step, self._options)
            return
        ranks = self._engine.world_size
        notes = {self._note(rank): note_path(temporary, rank) for rank in range(ranks) if ranks > 1}
        with self._kept_here(temporary, content):
            if not self._wait_for(lambda: not notes or remote.receive(target.name, notes), _REMOTE_ROUND):
                self._keep(temporary, content)
                return
        finish(temporary, target, content, ranks)
        with self._kept_here(temporary, content):
            remote.send(target.name, {STATE: target / STATE})
        remote.files.remove([f"{CHECKPOINTS}/{target.name}/{name}" for name in notes])
        self._store.prune(self._run, content.step, self._options)

    def _note(self, rank: int) -> str:
        """Return the name of a rank's note at the address, where notes of an attempt that was killed may be left."""
        return f"note-{rank:05d}-{self._attempt}.json"

    def _wait_for(self, done: Callable[[], bool], pause: float) -> bool:
        """Return whether it is done before the run has given up."""
        while not done():
            if self._given_up.wait(pause):
                if time.monotonic() > self._deadline:
                    return False
                time.sleep(pause)
        return True

    def _are_written(self, temporary: Path) -> bool:
        return all(note_path(temporary, rank).exists() for rank in range(self._engine.world_size))

    @contextmanager
    def _kept_here(self, temporary: Path, content: CheckpointContent) -> Iterator[None]:
        """Keep a checkpoint whose upload in the block fails, and complete the error with where it is."""
        try:
            yield
        except CheckpointError as error:
            others = (one for one in self._store.of_run(self._run) if one.content.step != content.step)
            last = next((f" The last complete checkpoint is {one.place}." for one in others), "")
            raise CheckpointError(
                f"{error}{last} What could not be uploaded is kept in {self._keep(temporary, content)}; the same "
                "command with --resume (resume='auto') on this machine uploads a checkpoint that is complete here."
            ) from error

    def _keep(self, temporary: Path, content: CheckpointContent) -> Path:
        """Complete a checkpoint on this machine, if all ranks have written here, and return where it is."""
        target = self._store.path(content.step)
        deadline = time.monotonic() + _PATIENCE
        while self._engine.rank == 0 and temporary.exists() and time.monotonic() < deadline:
            if self._are_written(temporary):
                finish(temporary, target, content, self._engine.world_size)
            else:
                time.sleep(_ROUND)
        return temporary if temporary.exists() else target

    def settle(self) -> None:
        """Wait until the checkpoint in progress is written. All ranks synchronize before each joins its thread, because
        rank 0's waits for files of the others."""
        if self._thread is None:
            return
        wait(self._written.wait)
        self._agree()
        self._thread.join()
        self._thread = None

    def _record_failure(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # `_agree` raises it on all ranks together
            self._failure = error

    def _agree(self) -> None:
        """Wait for all ranks, and raise on every rank, with the reason, if any has failed."""
        failed = torch.zeros(self._engine.world_size)
        failed[self._engine.rank] = 0.0 if self._failure is None else 1.0
        by_rank = self._engine.reduce(failed, "sum").tolist()
        if not any(by_rank):
            return
        failure, self._failure = self._failure, None
        reason, rank = "" if failure is None else str(failure), by_rank.index(1.0)
        if failure is not None and not isinstance(failure, CheckpointError):
            reason = f"A checkpoint in {shown(self._store.folder)} failed: {failure}."
        first = broadcast_text(self._engine, reason, rank)
        if isinstance(failure, CheckpointError):
            raise failure
        raise CheckpointError(reason or f"Rank {rank} could not write a checkpoint: {first}") from failure
