"""The format of a checkpoint: a folder of safetensors files and one JSON file. Nothing is ever unpickled.

::

    step-00000123/
        state.json                  the position of the run, and the SHA-256 of every other file
        model.safetensors           by parameter name; if sharded, model-00001-of-00002.safetensors
        optimizer.safetensors       tensors named "<parameter>::<key>" (`key_of`); shards likewise
        unlisted.safetensors        what the model's state dict leaves out: non-persistent buffers. Only if there are
                                    any, and not in checkpoints of older versions; shards likewise
        methods.safetensors         averages (EMA, SWA); shards likewise
        rank-00001-of-00002.safetensors    state of one rank: random states, local buffers

If tensors are sharded by rows (FSDP), or by elements of the flattened tensors (DeepSpeed's third stage), each file has
those that its rank held, and `state.json` the full shapes (`shards.Shards`). In older versions each file could have
some of the tensors in full, which `model.safetensors.index.json` lists: Hugging Face's layout.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Self, TypedDict
from urllib.parse import quote, unquote

import torch
from msgspec import Meta, Struct, structs, to_builtins

from ....common.errors import CheckpointError, DrivetrainError
from ....common.storage.files import sha256, sync, write_file
from ....common.storage.json_files import ShapeError, convert
from ....common.storage.tensors import Tensors, open_tensors, save_weights
from ....common.version import __version__
from ...telemetry.history import History
from .remote import STATE, RemoteRun, UnreachedError, shown
from .shards import REMEDY, Shards, open_shards

UNLISTED, OWN = "unlisted", "rank"
SHARED = ("model", "optimizer", "methods", UNLISTED)  # by all ranks; the kind `OWN` is of one rank
_ELSEWHERE = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT}
"""Errors whose cause is not the file that cannot be read."""
TENSORS = {"tensors": True}  # in the state of a method, for averages, which are in `methods.safetensors`
OTHERS = {"tensors": True, "weights": False}  # likewise, for tensors that are not the weights to evaluate

Values = dict[str, Any]
Count = Annotated[int, Meta(ge=0)]
Number = bool | int | float  # as `float`, msgspec would convert an integer, such as an optimizer's count


class Meter(TypedDict):
    """`EpochMeter.state_dict()`."""

    total: float
    counted: Count
    skipped: Count
    overflowed: Count
    images: Count
    seconds: float
    data_wait_s: float
    evaluation_s: float
    weight: NotRequired[float | None]  # older versions, which counted each step once, lack it
    earlier_images: NotRequired[Count]  # older versions lack both
    earlier_seconds: NotRequired[float]
    replaced: NotRequired[Count]  # likewise


class FileFacts(TypedDict):
    bytes: int
    sha256: str


class OptimizerContent(Struct, frozen=True, forbid_unknown_fields=True):
    """An `OptimizerState` without its entries: each rank saves those that it holds."""

    groups: list[Values]
    loss_scale: Mapping[str, Number]


class RankContent(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's random states of Python and NumPy, optimizer numbers, and callbacks' states by class."""

    random: Values
    numbers: dict[str, dict[str, Number]]
    callbacks: dict[str, Values] = {}


class CheckpointContent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `state.json`; `TrainState` has the position, and `fingerprint` the facts and the description."""

    format: Literal[1] = 1
    drivetrain: str = __version__
    run: str
    epoch: Count
    step_in_epoch: Count
    step: Count
    strategy: str
    facts: Values
    description: Values | None
    optimizer: OptimizerContent
    methods: dict[str, Values]
    loader: Values
    meter: Meter
    history: History
    files: dict[str, FileFacts] = {}
    ranks: list[RankContent] = []
    shards: Shards | None = None

    def to_json(self) -> bytes:
        state = {**structs.asdict(self), "history": self.history.to_dict()}
        if self.shards is None:  # older versions do not know it
            del state["shards"]
        return _canonical({**state, "sha256": _digest(state)})

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parse a `state.json`; ShapeError names the first field that is missing, unknown, or of another type."""
        state = json.loads(text)
        if not isinstance(state, dict) or state.pop("sha256", None) != _digest(state):
            raise ShapeError(f"{STATE} was modified after it was written")
        if "history" in state:
            state["history"] = History.from_dict(state["history"])
        return convert(state, cls)


def _canonical(state: Values) -> bytes:
    return json.dumps(state, sort_keys=True, separators=(",", ":"), default=to_builtins).encode()


def _digest(state: Values) -> str:
    return hashlib.sha256(_canonical(state)).hexdigest()


def key_of(owner: str, name: str) -> str:
    """Return a tensor's key; `owner` is a parameter with optimizer state, or a method with averages."""
    return f"{quote(owner)}::{name}"


@dataclass(frozen=True)
class Part:
    tensors: dict[str, dict[str, torch.Tensor]]
    own: RankContent
    writers: int


def write_part(folder: Path, part: Part, rank: int, ranks: int) -> None:
    """Write a rank's files into `folder`, and then a note, whose presence means that they are complete."""
    files: dict[str, Any] = {}
    try:
        for kind, tensors in part.tensors.items():
            path = folder / _file_name(kind, rank, ranks if kind == OWN else part.writers)
            save_weights(tensors, path, about={"format": "pt"})  # Hugging Face's loader requires the metadata
            files[path.name] = _measure(path)
        note = {"files": files, "own": structs.asdict(part.own)}
        write_file(note_path(folder, rank), json.dumps(note))
    except (OSError, DrivetrainError) as error:
        raise CheckpointError(f"The checkpoint {folder} could not be written: {str(error).rstrip('.')}.") from error


def note_path(folder: Path, rank: int) -> Path:
    return folder / f"note-{rank:05d}.json"


def finish(folder: Path, target: Path, content: CheckpointContent, ranks: int) -> None:
    """Turn the files of all ranks into a checkpoint, and rename it to `target`, replacing an older one."""
    try:
        notes = [json.loads(note_path(folder, rank).read_text()) for rank in range(ranks)]
        files = {name: about for note in notes for name, about in note["files"].items()}
        ranks_content = [convert(note["own"], RankContent) for note in notes]
        text = structs.replace(content, files=files, ranks=ranks_content).to_json()
        CheckpointContent.from_json(text)  # an unreadable checkpoint must not replace older ones
        write_file(folder / STATE, text)
        for rank in range(ranks):
            note_path(folder, rank).unlink()
        sync(folder)
        remove(target)
        folder.rename(target)
        sync(target.parent)
    except (OSError, ShapeError) as error:
        raise CheckpointError(
            f"The checkpoint {target} could not be written: {error}. The checkpoints before it are kept."
        ) from error


def remove(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that an interrupted removal leaves no partial checkpoint."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class Checkpoint:
    """Opening checks `state.json`; only `verify` checks the other files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.content = CheckpointContent.from_json((path / STATE).read_bytes())
            self._check_files()
        except ShapeError as error:
            raise CheckpointError(f"{path} is damaged: {error}. {REMEDY}") from None
        except (OSError, ValueError, RecursionError) as error:
            _raise_unreached(path, STATE, error)
            raise CheckpointError(f"{path} is not a complete checkpoint: {STATE}: {error}. {REMEDY}") from None

    @property
    def place(self) -> str:
        return shown(self.path)

    @property
    def remote(self) -> RemoteRun | None:
        return RemoteRun.at(self.path.absolute().parent.parent)

    def verify(self, number: int = 0, count: int = 1) -> None:
        """Compare the files with their digests: all, or this one's of `count` shares. In a copy, fetch those that are
        missing or differ from the address."""
        remote, files = self.remote, self.content.files
        largest = sorted(files, key=lambda name: (-files[name]["bytes"], name))
        own = {name: files[name] for name in largest[number::count]}
        if remote is not None:
            remote.fetch(self.path, own)
        for name, about in own.items():
            try:
                actual = _measure(self.path / name)
                if actual != about and remote is not None:
                    (self.path / name).unlink()
                    remote.fetch(self.path, {name: about})
                    actual = _measure(self.path / name)
            except OSError as error:
                _raise_unreached(self.place, name, error)
                raise CheckpointError(
                    f"The checkpoint {self.place} is damaged: {name}: {error}. Use an older checkpoint."
                ) from None
            if actual != about:
                raise CheckpointError(
                    f"The checkpoint {self.place} is damaged: {name} has {actual['bytes']} bytes that differ from "
                    f"the {about['bytes']} bytes that were written. Use an older checkpoint."
                )

    def check_length(self, steps: int, *, pruned: bool) -> None:
        """Check the position of a run with so many steps in an epoch; `pruned`: at most so many."""
        epoch, within, step = self.content.epoch, self.content.step_in_epoch, self.content.step
        most = epoch * steps + within
        fits = step == most or (pruned and step < most)
        if not fits or within > steps:  # all of them: the evaluation is left
            raise CheckpointError(
                f"{self.path} is damaged: its step is {step}, after {epoch} epochs and {within} steps of a run with "
                f"{steps} steps in an epoch. {REMEDY}"
            )

    def tensors(self, *kinds: str, rank: int | None = None) -> Tensors:
        """Return the tensors of these kinds in full; of the kind `OWN`, those of a rank."""
        opened: list[Tensors] = []
        for kind in kinds:
            paths = [self.path / name for name in self._names(kind)]
            if rank is not None:
                opened.append(open_tensors(paths[rank]))
            elif self.content.shards is None:
                opened += map(open_tensors, paths)
            elif paths:
                shards = self.content.shards
                opened.append(open_shards(paths, shards.shapes.get(kind, {}), shards.flat))
        return Tensors({name: reader for tensors in opened for name, reader in tensors.readers.items()})

    @property
    def score(self) -> float | None:
        """The monitored metric of its weights, negated if lower is better; None if they were not evaluated."""
        content, history = self.content, self.content.history
        if not content.step_in_epoch and history.epochs and history.epochs[-1].val_loss is not None:
            return history.monitor.score(history.epochs[-1])
        here = [each for each in history.evaluations if each.step == content.step]
        return history.monitor.score(here[-1]) if here else None

    def _names(self, kind: str) -> list[str]:
        count, shards = len(self.content.ranks), self.content.shards
        if kind == UNLISTED and not any(name.startswith(f"{UNLISTED}") for name in self.content.files):
            return []
        if kind != OWN and shards is not None:
            count = shards.files
        elif kind != OWN and "model.safetensors" in self.content.files:
            count = 1
        return [_file_name(kind, rank, count) for rank in range(count)]

    def _check_files(self) -> None:
        shards, ranks = self.content.shards, len(self.content.ranks)
        if shards is not None and shards.files > ranks:
            raise ShapeError(f"its shards.files: {shards.files} files of {ranks} ranks")
        names = {name for kind in (*SHARED, OWN) for name in self._names(kind)}
        if shards is None:
            names |= {f"{kind}.safetensors.index.json" for kind in SHARED if len(self._names(kind)) > 1}
        for name in sorted(self.content.files.keys() - names):  # it could point outside the folder
            raise ShapeError(f"it lists {name!r}, which is not a file that checkpoints have")
        for name in sorted(names - self.content.files.keys()):  # its tensors would not be restored
            raise ShapeError(f"{name!r} is not among its files")


def grouped(*several: Tensors) -> dict[str, Tensors]:
    """Return tensors by the owner and then the name in their keys; for equal keys the last one wins."""
    groups: dict[str, dict[str, Callable[[], torch.Tensor]]] = {}
    for tensors in several:
        for key, reader in tensors.readers.items():
            owner, _, name = key.partition("::")
            groups.setdefault(unquote(owner), {})[name] = reader
    return {owner: Tensors(readers) for owner, readers in groups.items()}


def _file_name(kind: str, rank: int, ranks: int) -> str:
    shard = "" if ranks == 1 else f"-{rank + 1:05d}-of-{ranks:05d}"
    return f"{kind}{shard}.safetensors"


def _raise_unreached(place: str | Path, name: str, error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in _ELSEWHERE:
        raise UnreachedError(f"The checkpoint {place} could not be read: {name}: {error}.") from None


def _measure(path: Path) -> FileFacts:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
