"""The folder of a run's checkpoints: when they are made, which is the newest that is whole, which are kept."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checks import check_flag, check_whole, make_plain
from ...errors import CheckpointError, PlanError
from ...files import atomic_file
from .content import STATE
from .format import Checkpoint, remove

RUN = "run.json"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are made, and which are kept.

    Attributes:
        every_steps: also after every so many optimizer steps; None, the default: at the end of each epoch only.
            An epoch's end always makes one, because only there is an accuracy known.
        keep: so many of the newest stay. Whole number ≥ 1. Default 2: one that is damaged leaves another.
        keep_best: the one with the highest accuracy stays, too; of equal ones the first. Default True.
        background: a thread writes the files while training goes on; the values are copied to the CPU at once,
            which takes the memory of one checkpoint there. Default True.

    Raises:
        PlanError: naming the value that cannot be used.
    """

    every_steps: int | None = None
    keep: int = 2
    keep_best: bool = True
    background: bool = True

    def __post_init__(self) -> None:
        make_plain(self)
        if self.every_steps is not None:
            check_whole("Checkpoints: every_steps", self.every_steps, PlanError, 1, also=", or None")
        check_whole("Checkpoints: keep", self.keep, PlanError, 1)
        check_flag("Checkpoints: keep_best", self.keep_best, PlanError)
        check_flag("Checkpoints: background", self.background, PlanError)


class CheckpointWarning(UserWarning):
    """A checkpoint that was passed over because it is damaged."""


class CheckpointDir:
    """The checkpoints of one run, `out/checkpoints`.

    `run.json` in it names the run they belong to. A run that starts anew in a folder with checkpoints of an
    earlier one gets another name: the earlier ones stay until its own first is complete, and are not mistaken
    for its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Where the checkpoint after so many steps stands."""
        return self.folder / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        """Where it is written."""
        return self.folder / f".step-{step:08d}.partial"

    def checkpoints(self) -> list[Path]:
        """All that are complete by their name, the newest first."""
        found = [path for path in self.folder.glob("step-*") if _STEP.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def begin(self, run: str, origin: Path | None) -> None:
        """Names the run whose checkpoints are written from now on, and what it continues, if anything.

        What an earlier process has left unfinished is removed.
        """
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
        about = {"run": run, "continues": None if origin is None else str(origin.resolve())}
        if about != self._about():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"{self.folder} cannot be the folder of the checkpoints: {error.strerror}. Remove it, or give "
                    f"another folder: out=… (--out)."
                ) from None
            with atomic_file(self.folder / RUN) as file:
                file.write(json.dumps(about).encode())

    def holds(self, place: Path) -> bool:
        """Whether `place` is a checkpoint in this folder, by its name."""
        return place.resolve().parent == self.folder.resolve() and _STEP.fullmatch(place.name) is not None

    def beyond(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Those that are whole and that the run of `checkpoint` would lose by resuming from it: later ones of the
        same run, and any of another. The newest first."""
        here, name = checkpoint.content, checkpoint.path.name
        others = [other for other in self.of_run(None) if other.path.name != name]
        ahead = [o for o in others if o.content.step > here.step or o.content.run != here.run]
        return [other for other in ahead if _whole(other.path) is not None]

    def clear(self) -> None:
        """Removes every checkpoint."""
        for path in self.checkpoints():
            remove(path)

    @property
    def run(self) -> str | None:
        """The run whose checkpoints are written; None before there are any."""
        return self._about().get("run")

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint of the run that is whole, or the one that the run continues; None without any.

        Warns (`CheckpointWarning`) of each damaged one that is passed over.
        """
        about = self._about()
        for path in self.checkpoints():
            found = _whole(path, about.get("run"))
            if found is not None:
                return found
        return _whole(Path(about["continues"])) if about.get("continues") else None

    def of_run(self, run: str | None) -> Iterator[Checkpoint]:
        """Those of the run (None: of any), the newest first; without those whose `state.json` is damaged."""
        for path in self.checkpoints():
            try:
                checkpoint = Checkpoint(path)
            except CheckpointError:
                continue
            if run is None or checkpoint.content.run == run:
                yield checkpoint

    def last(self, run: str) -> Path | None:
        """The newest checkpoint of the run, for people: its files are not verified."""
        return next((checkpoint.path for checkpoint in self.of_run(run)), None)

    def prune(self, run: str, options: Checkpoints) -> None:
        """Removes what need not stay, once a checkpoint of the run is complete."""
        own = list(self.of_run(run))
        kept = {checkpoint.path for checkpoint in own[: options.keep]}
        best = best_of(own)
        if options.keep_best and best is not None:
            kept.add(best.path)
        for path in self.checkpoints():
            if path not in kept:
                remove(path)

    def _about(self) -> dict[str, Any]:
        try:
            about = json.loads((self.folder / RUN).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / RUN} cannot be read ({error}); remove it.") from None
        if not isinstance(about, dict):
            raise CheckpointError(f"{self.folder / RUN} names no run; remove it.")
        for key in ("run", "continues"):
            value = about.get(key)
            if not isinstance(value, str) and (key == "run" or value is not None):
                raise CheckpointError(
                    f"{self.folder / RUN} has {key}={value!r:.80}, which is not "
                    f"{'the name of a run' if key == 'run' else 'the path of a checkpoint, or null'}; remove the file."
                )
        return about


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """That of the highest accuracy, of equal ones the first; None if none has one."""
    rated = [(c.accuracy, -c.content.step, c) for c in checkpoints if c.accuracy is not None]
    return max(rated, key=lambda entry: entry[:2])[2] if rated else None


def find(place: Path) -> Checkpoint:
    """The checkpoint at `place`, or the newest whole one of the run whose folder it is. Its files are verified.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    if (place / STATE).exists() or _STEP.fullmatch(place.name):
        checkpoint = Checkpoint(place)
        checkpoint.verify()
        return checkpoint
    store = CheckpointDir(place / "checkpoints")
    found = store.newest()
    if found is None:
        others = store.checkpoints()
        why = (
            f" {others[0].name} there is of an earlier run, or damaged: the run that was to replace it was not far "
            f"enough for a checkpoint of its own. Give {others[0]} to use it."
            if others
            else " Its run was not far enough for one, or was told to make none."
        )
        raise CheckpointError(f"{place} is no checkpoint, and has no complete one in {store.folder}.{why}")
    return found


def _whole(path: Path, run: str | None = None) -> Checkpoint | None:
    """The checkpoint, if it is whole and of that run (None: of any)."""
    try:
        checkpoint = Checkpoint(path)
        if run is not None and checkpoint.content.run != run:
            return None
        checkpoint.verify()
    except CheckpointError as error:
        warnings.warn(f"{error} An older one is looked for.", CheckpointWarning, stacklevel=3)
        return None
    return checkpoint
