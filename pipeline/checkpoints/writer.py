"""Write checkpoints while training continues: each rank its part, under a temporary name until all are complete."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...files import appears
from ...strategies import Engine
from .content import CheckpointContent
from .directory import CheckpointDir, Checkpoints
from .format import Part, finish, note_path, write_part

_ROUND = 0.02  # seconds between polls for files of other ranks
_PATIENCE = 3.0  # seconds that a failing run waits for a checkpoint in progress


class CheckpointWriter:
    """Writes the checkpoints of one run. Each rank has a writer, and all ranks make the same calls.

    All ranks write to the same folder; several machines need a shared file system. Each rank writes its files and
    then a note; rank 0 waits for all notes, adds `state.json`, and renames the folder. Background threads only
    access files: collectives run in `save`.

    Args:
        engine: this rank, and its communication with the others.
        store: where to write.
        options: which checkpoints to keep, and whether a thread writes them.
        run: the name of the run.
    """

    def __init__(self, engine: Engine, store: CheckpointDir, options: Checkpoints, run: str) -> None:
        self._engine, self._store, self._options, self._run = engine, store, options, run
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._pending: Path | None = None
        self._written, self._given_up = threading.Event(), threading.Event()

    def save(self, part: Part, content: CheckpointContent) -> None:
        """Save this rank's `part`, and rank 0's `content`; in a thread if `options.background`.

        Raises:
            CheckpointError: on all ranks, if this checkpoint or the previous one cannot be written.
        """
        self._settle()
        temporary = self._store.temporary(content.step)
        if self._engine.rank == 0:
            self._record_failure(self._make, temporary)
        self._agree()
        if not appears(temporary, _PATIENCE):
            raise CheckpointError(
                f"Rank {self._engine.rank} does not see {temporary}, which rank 0 has created. Pass a folder (out=…) "
                f"on a file system that all ranks share."
            )
        self._written.clear()
        self._pending = temporary
        if self._options.background:
            job = (temporary, part, content)
            self._thread = threading.Thread(
                target=self._in_background, args=job, name="drivetrain-checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._record_failure(self._write, temporary, part)
            self._agree()
            self._record_failure(self._complete, temporary, content)
            self._agree()

    def close(self) -> None:
        """Wait for the checkpoint in progress.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        self._settle()
        self._agree()

    def wait_a_moment(self) -> None:
        """Wait briefly for the checkpoint in progress, without the other ranks."""
        deadline = time.monotonic() + _PATIENCE
        while self._pending is not None and self._pending.exists() and time.monotonic() < deadline:
            time.sleep(_ROUND)

    def give_up(self) -> None:
        """Stop without the other ranks, after an error or Ctrl-C. The checkpoint in progress may stay incomplete."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _make(self, temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def _in_background(self, temporary: Path, part: Part, content: CheckpointContent) -> None:
        self._record_failure(self._write, temporary, part)
        self._written.set()
        if self._failure is None:
            self._record_failure(self._complete, temporary, content)

    def _write(self, temporary: Path, part: Part) -> None:
        write_part(temporary, part, self._engine.rank, self._engine.world_size)

    def _complete(self, temporary: Path, content: CheckpointContent) -> None:
        """On rank 0, wait until all ranks have written, then give the checkpoint its final name."""
        if self._engine.rank != 0:
            return
        waiting = list(range(self._engine.world_size))
        while waiting := [rank for rank in waiting if not note_path(temporary, rank).exists()]:
            if self._given_up.wait(_ROUND):
                return
        finish(temporary, self._store.path(content.step), content, self._engine.world_size)
        self._store.prune(self._run, self._options)

    def _settle(self) -> None:
        """Join the thread. All ranks synchronise first, because rank 0's thread waits for files of the others."""
        if self._thread is None:
            return
        self._written.wait()
        self._agree()
        self._thread.join()
        self._thread = None

    def _record_failure(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # `_agree` raises it on all ranks together
            self._failure = error

    def _agree(self) -> None:
        """Wait for all ranks, and raise on every rank if any has failed."""
        failed = torch.tensor(0.0 if self._failure is None else 1.0)
        failures = int(self._engine.reduce(failed, "sum").item())
        if not failures:
            return
        failure, self._failure = self._failure, None
        if isinstance(failure, CheckpointError):
            raise failure
        if failure is not None:
            raise CheckpointError(f"A checkpoint in {self._store.folder} failed: {failure}.") from failure
        raise CheckpointError(
            f"{failures} other rank(s) could not write a checkpoint in {self._store.folder}."
        )
