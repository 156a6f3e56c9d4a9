"""Writing checkpoints while training goes on: every rank its part, none under its name before it is whole."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...strategies import Engine
from .content import CheckpointContent
from .directory import CheckpointDir, Checkpoints
from .format import Part, finish, note_path, write_part

_ROUND = 0.02  # seconds between two looks at whether the other ranks have written
_PATIENCE = 3.0  # seconds that a run which fails waits for what is being written


class CheckpointWriter:
    """Writes the checkpoints of one run; each rank has one, and all make the same calls.

    The ranks write to one folder, which must be the same for all: a shared file system where there are
    several machines. Each writes its files and then a note; rank 0 waits for all notes, adds `state.json`,
    and renames the folder. Threads write files only: whatever ranks must agree on, they do in `save`.

    Args:
        engine: for this rank's number and its agreement with the others.
        store: where to write.
        options: which checkpoints stay, and whether a thread writes.
        run: the name of the run.
    """

    def __init__(self, engine: Engine, store: CheckpointDir, options: Checkpoints, run: str) -> None:
        self._engine, self._store, self._options, self._run = engine, store, options, run
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._pending: Path | None = None
        self._written, self._given_up = threading.Event(), threading.Event()

    def save(self, part: Part, content: CheckpointContent) -> None:
        """Saves this rank's `part`, and rank 0's `content`; in the background if asked.

        Raises:
            CheckpointError: if this one, or the one before, cannot be written; on all ranks.
        """
        self._settle()
        temporary = self._store.temporary(content.step)
        if self._engine.rank == 0:
            self._caught(self._make, temporary)
        self._agree()
        if not self._sees(temporary):
            raise CheckpointError(
                f"Rank {self._engine.rank} does not see {temporary}, which rank 0 has made: checkpoints need a "
                f"folder that all ranks share."
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
            self._caught(self._write, temporary, part)
            self._agree()
            self._caught(self._complete, temporary, content)
            self._agree()

    def close(self) -> None:
        """Waits for what is being written.

        Raises:
            CheckpointError: if it failed; on all ranks.
        """
        self._settle()
        self._agree()

    def wait_a_moment(self) -> None:
        """Waits for the checkpoint that is being written, without the other ranks, and not for long."""
        deadline = time.monotonic() + _PATIENCE
        while self._pending is not None and self._pending.exists() and time.monotonic() < deadline:
            time.sleep(_ROUND)

    def give_up(self) -> None:
        """Ends without the other ranks: after an error, or Ctrl-C. What is being written may stay unfinished."""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _sees(self, temporary: Path) -> bool:
        """Whether the folder that rank 0 has made is here; a network's file system may be a moment late."""
        deadline = time.monotonic() + _PATIENCE
        while not (seen := temporary.is_dir()) and time.monotonic() < deadline:
            time.sleep(_ROUND)
        return seen

    def _make(self, temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def _in_background(self, temporary: Path, part: Part, content: CheckpointContent) -> None:
        self._caught(self._write, temporary, part)
        self._written.set()
        if self._failure is None:
            self._caught(self._complete, temporary, content)

    def _write(self, temporary: Path, part: Part) -> None:
        write_part(temporary, part, self._engine.rank, self._engine.world_size)

    def _complete(self, temporary: Path, content: CheckpointContent) -> None:
        """Rank 0 alone: gives the checkpoint its name when all ranks have written."""
        if self._engine.rank != 0:
            return
        waiting = list(range(self._engine.world_size))
        while waiting := [rank for rank in waiting if not note_path(temporary, rank).exists()]:
            if self._given_up.wait(_ROUND):
                return
        finish(temporary, self._store.path(content.step), content, self._engine.world_size)
        self._store.prune(self._run, self._options)

    def _settle(self) -> None:
        """Returns when the thread has ended. Ranks agree first: rank 0's waits for files of the others."""
        if self._thread is None:
            return
        self._written.wait()
        self._agree()
        self._thread.join()
        self._thread = None

    def _caught(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # raised by `_agree`, on all ranks together
            self._failure = error

    def _agree(self) -> None:
        """Raises on every rank if a rank has failed; returns when all have come here."""
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
