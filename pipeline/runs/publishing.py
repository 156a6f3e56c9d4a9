"""Results at an address: taken up when a run begins, uploaded while it trains and when it ends."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...common.errors import CheckpointError
from ...common.signals import interrupts_held
from ...strategies.launching.group import is_main_process
from ..checkpoints.directory import CheckpointDir
from ..checkpoints.remote import CHECKPOINTS, RemoteRun
from ..telemetry.history import Epoch, Evaluation
from ..telemetry.loggers import METRICS
from ..telemetry.observer import Observer
from ..telemetry.state import TrainState
from .folder import HISTORY, MODEL, UNLISTED

_PATIENCE = 3.0  # seconds that a failing run waits for an upload


def taken_up(folder: Path | None, resume: str | Path | None) -> str:
    """On rank 0, make the local copy of a run what is at its address, before the run begins; leave any other folder as
    it is. Return a note for the user, or "".

    Raises:
        CheckpointError: if the address cannot be read.
    """
    remote = RemoteRun.at(folder) if is_main_process() else None
    if folder is None or remote is None:
        return ""
    note = "" if resume is None else CheckpointDir(folder / CHECKPOINTS).catch_up()
    remote.pull([HISTORY] if resume is None else [HISTORY, MODEL, UNLISTED, METRICS])
    return note


@contextmanager
def published(folder: Path | None) -> Iterator[None]:
    """On rank 0, upload what the block leaves in the local copy of a run, and then remove the copy. After an error, try
    to, and keep the copy.

    Raises:
        CheckpointError: if the address cannot be written.
    """
    remote = RemoteRun.at(folder) if is_main_process() else None
    if folder is None or remote is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            remote.files.close()  # an error should not wait for a store that does not answer
        try:
            remote.push()
        except CheckpointError as reason:
            error.add_note(f"Not all results could be uploaded; they are in {folder}. {reason}")
        raise
    try:
        remote.push()
    except CheckpointError as error:
        raise CheckpointError(f"{error} The results are kept in {folder}.") from error
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def uploading_from(address: str) -> Iterator[Path]:
    """Yield a temporary folder, whose files are uploaded to `address` after the block, also after an error.

    Raises:
        CheckpointError: before the block, if the address cannot be written; after it, if the upload fails.
    """
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as name:
        remote = RemoteRun(Path(name), address)
        remote.files.probe()
        try:
            yield remote.folder
        finally:
            remote.push()


class PublishResults(Observer):
    """Upload the files of a run in a thread, after each evaluation and epoch; a failure is left to the next time."""

    def __init__(self, remote: RemoteRun) -> None:
        self._remote = remote
        self._thread: threading.Thread | None = None

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:  # noqa: ARG002
        """Begin to upload."""
        self._begin()

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:  # noqa: ARG002
        """Begin to upload."""
        self._begin()

    def on_end(self, *, failed: bool) -> None:
        """Wait for the upload in progress; after a failure, only briefly. `published` uploads the rest."""
        if self._thread is not None:
            if failed:
                self._remote.files.close()
            self._thread.join(_PATIENCE if failed else None)

    def _begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            with interrupts_held():
                self._thread = threading.Thread(target=self._push, name="drivetrain-upload", daemon=True)
                self._thread.start()

    def _push(self) -> None:
        with suppress(CheckpointError, OSError):  # e.g. a file that was replaced; the next time
            self._remote.push()
