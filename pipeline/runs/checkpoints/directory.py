"""The folder of a run's checkpoints: when to save, which is the newest complete one, which to keep or to resume."""

from __future__ import annotations

import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar, cast, get_args

import torch

from ....common.checks import check_flag, check_number, check_whole, make_plain
from ....common.errors import CheckpointError, DrivetrainError, PlanError
from ....common.storage.addresses import is_address
from ....common.storage.files import write_file
from ....common.storage.json_files import read
from ....strategies import Engine, Precision
from ...training.agreement import broadcast_text
from .format import Checkpoint, remove
from .remote import CHECKPOINTS, RUN, STATE, STEP, RemoteRun, UnreachedError, is_of_run, opened, shown

T = TypeVar("T")
_VERIFY = "verify"  # in rank 0's answer: a checkpoint whose files the ranks are to verify
Verify = Callable[[Checkpoint], None]
"""Raises CheckpointError if a file is missing or damaged."""


@dataclass(frozen=True)
class Checkpoints:
    """When to save checkpoints, and which to keep.

    Attributes:
        every_steps: save after every this many optimizer steps, in addition to the end of each epoch. None, the
            default: only at the end of each epoch.
        every_minutes: save after the first step that ends this many minutes after the last checkpoint, by the clock of
            rank 0. None, the default: not by time.
        keep: number of newest checkpoints to keep. Integer ≥ 1. Default 2: if one is damaged, the other remains.
        keep_best: also keep the checkpoint with the best monitored metric, of those whose weights were evaluated;
            of equal ones the first. Default True.
        background: write the files in a thread while training continues. The values are copied to the CPU first,
            which takes the memory of one checkpoint there; of sharded parameters, of the rank's shard. Default True.

    Raises:
        PlanError: if a value is invalid.

    Example::

        >>> kept = Checkpoints(keep=1, keep_best=False)
        >>> result = pipeline.fit(epochs=2, out="runs/kept", checkpoints=kept, progress=False)
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    keep: int = 2
    keep_best: bool = True
    background: bool = True

    def __post_init__(self) -> None:
        make_plain(self)
        if self.every_steps is not None:
            check_whole("Checkpoints: every_steps", self.every_steps, PlanError, 1, also=", or None")
        if self.every_minutes is not None:
            check_number("Checkpoints: every_minutes", self.every_minutes, PlanError, "(0, 1e6]", also=", or None")
        check_whole("Checkpoints: keep", self.keep, PlanError, 1)
        check_flag("Checkpoints: keep_best", self.keep_best, PlanError)
        check_flag("Checkpoints: background", self.background, PlanError)


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped because it is damaged, or is resumed with other validation data."""


class _Run(TypedDict):
    run: str
    continues: NotRequired[str | None]


class CheckpointDir:
    """The checkpoints of one run, `out/checkpoints`; `run.json` there names the run, a new one for a run that starts
    from scratch. The earlier ones stay until the first of the new run is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.remote = folder, RemoteRun.at(folder.absolute().parent)
        self.resumed: Path | None = None

    def path(self, step: int) -> Path:
        """Where the run saves. A run that was left after the last step of an epoch saves this step again, evaluated:
        under another name, with one more zero, so that the checkpoint that it resumed from stays until then."""
        path = self.folder / f"step-{step:08d}"
        if self.resumed is not None and int(self.resumed.name[5:]) == step:
            return path.with_name(f"step-0{self.resumed.name[5:]}")
        return path

    def place(self, step: int) -> str | Path:
        path = self.path(step)
        return path if self.remote is None else self.remote.shown(path)

    def temporary(self, step: int) -> Path:
        return self.folder / f".step-{step:08d}.partial"

    def checkpoints(self) -> list[Path]:
        paths = [path for path in self.folder.glob("step-*") if STEP.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (int(path.name[5:]), len(path.name)), reverse=True)

    def begin(self, run: str, origin: Path | None) -> None:
        """Record the run that writes here from now on, and what it continues; remove unfinished checkpoints."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
        about: _Run = {"run": run, "continues": None if origin is None else shown(origin.resolve())}
        if about != self._about():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_file(self.folder / RUN, json.dumps(about))
            except OSError as error:
                raise CheckpointError(
                    f"{self.folder} cannot be the folder of the checkpoints: {error.strerror}. Remove it, or pass "
                    f"another folder: out=… (--out)."
                ) from None
        if self.remote is not None:
            self.remote.begin()

    def catch_up(self) -> str:
        """Upload the newest checkpoint if the address lacks it, and the files of the run, which belong to it; return a
        note for the user, or ""."""
        run = self.run
        if self.remote is None or run is None or not is_of_run(self.remote.files.read(f"{CHECKPOINTS}/{RUN}"), run):
            return ""
        newest = next(self.of_run(run), None)
        there = self.remote.newest_step(run)
        if newest is None or newest.content.step <= there:
            if newest is not None and newest.content.step == there:
                self.remote.push()  # as below: the last upload of the files may have failed
            return ""
        try:
            newest.verify()
        except UnreachedError:  # it may be complete; what follows here would remove it
            raise
        except CheckpointError:
            return ""  # another machine has the other files
        self.remote.discard(newest.path.name)
        paths = {name: newest.path / name for name in (*newest.content.files, STATE)}
        self.remote.send(newest.path.name, paths)
        self.remote.push()  # else `pull` would replace them by those of an earlier upload
        return f"Uploaded {newest.place}, which was only on this machine."

    def local(self, place: str | Path) -> Path:
        inside = None
        if self.remote is not None and is_address(place):
            inside = self.remote.local(str(place))
        return opened(place) if inside is None else inside

    def holds(self, place: Path) -> bool:
        return place.resolve().parent == self.folder.resolve() and STEP.fullmatch(place.name) is not None

    def beyond(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Return what resuming from `checkpoint` would delete, the newest first: later, or of another run."""
        here, name = checkpoint.content, checkpoint.path.name
        others = [other for other in self.of_run(None) if other.path.name != name]
        ahead = [o for o in others if o.content.step > here.step or o.content.run != here.run]
        return [other for other in ahead if _load_complete(other.path) is not None]

    def clear(self) -> None:
        for path in self.checkpoints():
            self._remove(path)

    @property
    def run(self) -> str | None:
        about = self._about()
        return None if about is None else about["run"]

    def newest(self, verify: Verify = Checkpoint.verify) -> Checkpoint | None:
        """Return the newest complete one of the run, else the one that it continues; warn of each damaged one."""
        about = self._about()
        for path in self.checkpoints():
            checkpoint = _load_complete(path, None if about is None else about["run"], verify)
            if checkpoint is not None:
                return checkpoint
        origin = None if about is None else about.get("continues")
        return None if origin is None else _load_complete(self.local(origin), None, verify)

    def of_run(self, run: str | None) -> Iterator[Checkpoint]:
        """Yield the checkpoints of `run` (None: of any), the newest first; skip those with a damaged `state.json`."""
        for path in self.checkpoints():
            try:
                checkpoint = Checkpoint(path)
            except CheckpointError:
                continue
            if run is None or checkpoint.content.run == run:
                yield checkpoint

    def last(self, run: str) -> Path | None:
        """For messages: its files are not verified."""
        return next((checkpoint.path for checkpoint in self.of_run(run)), None)

    def prune(self, run: str, step: int, options: Checkpoints) -> None:
        """Remove the checkpoints that `options` does not keep. Call it once that of `step` is complete: later ones of
        the run are damaged, because it resumed from an older one, and would take the places of those that follow."""
        until = [c for c in self.of_run(run) if c.content.step <= step]
        own = list({c.content.step: c for c in reversed(until)}.values())[::-1]  # see `path`
        kept = {checkpoint.path for checkpoint in own[: options.keep]}
        best = best_of(own)
        if options.keep_best and best is not None:
            kept.add(best.path)
        for path in self.checkpoints():
            if path not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        if self.remote is not None:
            self.remote.discard(path.name)
        remove(path)

    def _about(self) -> _Run | None:
        try:
            return read(self.folder / RUN, _Run, CheckpointError, "Remove the file.")
        except (FileNotFoundError, NotADirectoryError):
            return None


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    rated = [(c.score, -c.content.step, c) for c in checkpoints if c.score is not None]
    return max(rated, key=lambda entry: entry[:2])[2] if rated else None


def find(place: Path, verify: Verify = Checkpoint.verify) -> Checkpoint:
    """Return and verify the checkpoint at `place`, or the newest complete one if `place` is the folder of a run."""
    if (place / STATE).exists() or STEP.fullmatch(place.name):
        checkpoint = Checkpoint(place)
        verify(checkpoint)
        return checkpoint
    store = CheckpointDir(place / "checkpoints")
    if (newest := store.newest(verify)) is not None:
        return newest
    why = " Its run stopped before its first checkpoint, or saved none."
    if others := store.checkpoints():
        why = (
            f" {others[0].name} there is of an earlier run, or damaged: the run that was to replace it stopped "
            f"before its first checkpoint. Pass {others[0]} to use it."
        )
    raise CheckpointError(f"{shown(place)} is not a checkpoint, and has no complete one in {shown(store.folder)}.{why}")


def _load_complete(path: Path, run: str | None = None, verify: Verify = Checkpoint.verify) -> Checkpoint | None:
    """Return the checkpoint if it is complete and of `run` (None: of any); otherwise warn, and return None."""
    try:
        checkpoint = Checkpoint(path)
        if run is not None and checkpoint.content.run != run:
            return None
        verify(checkpoint)
    except UnreachedError:  # an older one would take its place, or a run from scratch, which removes it
        raise
    except CheckpointError as error:
        warnings.warn(f"{error} Skipping it; looking for an older one.", CheckpointWarning, stacklevel=3)
        return None
    return checkpoint


@dataclass
class ResumePoint:
    checkpoint: Checkpoint | None
    run: str
    goes_on: bool


def choose_start(engine: Engine, resume: str | Path | None, store: CheckpointDir | None) -> ResumePoint:
    """Return where a run starts, the same on all ranks, which verify the checkpoint together, and change no file."""
    answer = _on_rank_0(engine, lambda: _look(resume, store, partial(_verify_together, engine)))
    place, checkpoint = answer["place"], None
    if place is not None:
        checkpoint = _on_all_ranks(engine, lambda: _opened(place, store, verified=engine.rank == 0))
    if store is not None and checkpoint is not None and answer["goes_on"]:
        store.resumed = checkpoint.path
    return ResumePoint(checkpoint, answer["run"], answer["goes_on"])


def kept_precision(resume: str | Path | None, folder: Path | None) -> Precision | None:
    """Return the precision of the checkpoint to resume, whose `state.json` alone is read: of a run at an address from
    there, because other machines than rank 0's have no copy of it yet."""
    store = None if folder is None else CheckpointDir(folder.resolve() / CHECKPOINTS)
    stores = [store]
    if resume is not None and store is not None and store.remote is not None:
        stores.insert(0, CheckpointDir(opened(store.remote.address) / CHECKPOINTS))
    for each in stores:
        place = None if resume is None else _look(resume, each, lambda _: None)["place"]
        if place is not None:
            path = opened(place) if each is None else each.local(place)
            kept: Precision | None = Checkpoint(path).content.facts.get("precision")
            return kept if kept in get_args(Precision) else None
    return None


def begin_run(
    engine: Engine, choice: ResumePoint, store: CheckpointDir | None, clear: Callable[[], None], *, saves: bool
) -> None:
    """Claim the folder for the run, and `clear` it, on rank 0; if that fails, every rank raises the error. Call it
    last, when only training itself can still fail."""
    origin = None if choice.goes_on or choice.checkpoint is None else choice.checkpoint.path

    def claim() -> dict[str, Any]:
        # Without `begin`, the name of an earlier run would be taken for that of this run.
        if store is not None and (saves or store.run is not None):
            store.begin(choice.run, origin)
        if store is not None and not saves and not choice.goes_on:
            store.clear()  # a run that saves removes them when its first checkpoint is complete
        clear()
        return {}

    _on_rank_0(engine, claim)


def _opened(place: str, store: CheckpointDir | None, verified: bool) -> Checkpoint:
    """From an address, download it first."""
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
    """Return what `work` returns on rank 0. The others wait for that, and verify their share of files on request."""
    answer: dict[str, Any] = {}
    if engine.rank == 0:
        try:
            answer = work()
        except (DrivetrainError, OSError) as error:
            answer = {"error": str(error)}
    answer = json.loads(broadcast_text(engine, json.dumps(answer)))
    while _VERIFY in answer:
        with suppress(CheckpointError):  # rank 0 decides what follows
            _verify_share(engine, Path(answer[_VERIFY]))
        answer = json.loads(broadcast_text(engine, ""))
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return answer


def _verify_together(engine: Engine, checkpoint: Checkpoint) -> None:
    """Verify a checkpoint, each rank some of its files. Rank 0 calls it while the others are in `_on_rank_0`."""
    if engine.world_size == 1 or checkpoint.remote is not None:
        checkpoint.verify()
        return
    broadcast_text(engine, json.dumps({_VERIFY: str(checkpoint.path.absolute())}))
    _verify_share(engine, checkpoint.path)


def _verify_share(engine: Engine, path: Path) -> None:
    _on_all_ranks(engine, lambda: Checkpoint(path).verify(engine.rank, engine.world_size))


def _on_all_ranks(engine: Engine, work: Callable[[], T]) -> T:
    """Return what `work` returns on this rank. If it fails on any, raise the same CheckpointError on every rank: else
    the others would wait for that one."""
    error, failed = "", torch.zeros(engine.world_size)
    result: T | None = None
    try:
        result = work()
    except (DrivetrainError, OSError) as reason:
        unreached = isinstance(reason, UnreachedError | OSError)
        error, failed[engine.rank] = str(reason), 2.0 if unreached else 1.0
    by_rank = engine.reduce(failed, "sum").tolist()
    worst = max(by_rank)
    if worst:
        message = broadcast_text(engine, error, source=by_rank.index(worst))
        raise UnreachedError(message) if worst > 1 else CheckpointError(message)
    return cast(T, result)


def _look(resume: str | Path | None, store: CheckpointDir | None, verify: Verify) -> dict[str, Any]:
    checkpoint, goes_on = None, False
    if resume == "auto":
        assert store is not None  # fit has checked
        checkpoint = store.newest(verify)
        goes_on = checkpoint is not None and store.run == checkpoint.content.run
    elif resume is not None:
        checkpoint = find(opened(resume) if store is None else store.local(resume), verify)
        if store is not None and store.holds(checkpoint.path):
            _check_newest(store, checkpoint)
            goes_on = True
    if checkpoint is None:
        return {"place": None, "run": uuid.uuid4().hex, "goes_on": False}
    run = checkpoint.content.run if goes_on else uuid.uuid4().hex
    return {"place": checkpoint.place, "run": run, "goes_on": goes_on}


def _check_newest(store: CheckpointDir, checkpoint: Checkpoint) -> None:
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
