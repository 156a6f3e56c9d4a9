"""The format of a checkpoint: a folder of safetensors files and one of JSON. Nothing is ever unpickled.

::

    step-00000123/
        state.json                  where the run stands, and the SHA-256 of every other file
        model.safetensors           by parameter name; in shards, model-00001-of-00002.safetensors and
                                    model.safetensors.index.json, Hugging Face's layout
        optimizer.safetensors       tensors named "<parameter>::<key>", in shards likewise
        methods.safetensors         averages (EMA, SWA), likewise
        rank-00001-of-00002.safetensors    each rank's own: random states, buffers of its own
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import CheckpointError
from ...files import atomic_file, sync
from .fields import REMEDY, fault_of

FORMAT = 1
STATE = "state.json"
SHARED = ("model", "optimizer", "methods")
"""The kinds of tensors that belong to the run as a whole; beside them each rank has its own."""
OWN = "rank"

_SHARD = r"-\d{5}-of-\d{5}"


@dataclass(frozen=True)
class Part:
    """What one rank writes.

    Attributes:
        tensors: by kind, then by name; on the CPU, contiguous. A rank that writes none of a kind leaves it out.
        own: this rank's JSON values.
        writers: number of ranks that write the kinds in `SHARED`.
    """

    tensors: dict[str, dict[str, torch.Tensor]]
    own: dict[str, Any] = field(default_factory=dict)
    writers: int = 1


def write_part(folder: Path, part: Part, rank: int, ranks: int) -> None:
    """Writes a rank's files into `folder`, and then a note of them, which says that they are whole.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    files: dict[str, Any] = {}
    try:
        for kind, tensors in part.tensors.items():
            path = folder / _file_name(kind, rank, ranks if kind == OWN else part.writers)
            save_file(tensors, path, metadata={"format": "pt"})  # without which Hugging Face refuses it
            sync(path)
            sizes = {name: value.numel() * value.element_size() for name, value in tensors.items()}
            files[path.name] = {**_measure(path), "tensors": sizes}
        with atomic_file(note_path(folder, rank)) as file:
            file.write(json.dumps({"files": files, "own": part.own}).encode())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint {folder} could not be written: {error}.") from error


def note_path(folder: Path, rank: int) -> Path:
    """Where a rank says that its files are whole."""
    return folder / f"note-{rank:05d}.json"


def finish(folder: Path, target: Path, state: Mapping[str, Any], ranks: int) -> None:
    """Makes of what all ranks have written a checkpoint under its own name; an older one there is replaced.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    try:
        notes = [json.loads(note_path(folder, rank).read_text()) for rank in range(ranks)]
        files = {name: about for note in notes for name, about in note["files"].items()}
        for kind in SHARED:
            _write_index(folder, kind, files)
        digests = {name: {key: about[key] for key in ("bytes", "sha256")} for name, about in files.items()}
        whole = {"format": FORMAT, **state, "files": digests, "ranks": [note["own"] for note in notes]}
        # Else nothing could read it, and the ones before would be removed for it.
        if fault := fault_of(json.loads(_canonical(whole))):
            raise CheckpointError(
                f"The checkpoint {target} could not be written: {fault}. The checkpoints before it are kept."
            )
        with atomic_file(folder / STATE) as file:
            file.write(_canonical({**whole, "sha256": _digest(whole)}))
        for rank in range(ranks):
            note_path(folder, rank).unlink()
        sync(folder)
        remove(target)
        folder.rename(target)
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {target} could not be written: {error}.") from error


def remove(folder: Path) -> None:
    """Removes a checkpoint; what is interrupted half-way is no longer under its name."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class Checkpoint:
    """A checkpoint opened for reading.

    Attributes:
        path: its folder.
        state: the content of `state.json`.

    Raises:
        CheckpointError: if `state.json` is missing, damaged or of another format. The other files are not
            looked at before `verify`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = _read_state(path)

    def verify(self) -> None:
        """Reads every file once and compares it with its digest.

        Raises:
            CheckpointError: for the first that is missing, or differs.
        """
        for name, about in self.state["files"].items():
            try:
                found = _measure(self.path / name)
            except OSError as error:
                raise CheckpointError(f"The checkpoint {self.path} is damaged: {name}: {error}.") from None
            if found != about:
                raise CheckpointError(
                    f"The checkpoint {self.path} is damaged: {name} has {found['bytes']} bytes of another content "
                    f"than the {about.get('bytes')} bytes that were written. Use an older checkpoint."
                )

    def tensors(self, kind: str, rank: int | None = None) -> Tensors:
        """The tensors of a kind of `SHARED`; those of one rank for `OWN`."""
        pattern = re.compile(rf"{kind}({_SHARD})?\.safetensors")
        if rank is not None:
            pattern = re.compile(re.escape(_file_name(kind, rank, len(self.state["ranks"]))))
        return Tensors([self.path / name for name in self.state["files"] if pattern.fullmatch(name)])

    @property
    def accuracy(self) -> float | None:
        """Top-1 of the epoch at whose end it was made; None in the middle of one, or without validation."""
        epochs = self.state["history"].get("epochs") or [{}]
        return None if self.state["step_in_epoch"] else epochs[-1].get("accuracy")


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of some safetensors files by name, each read from its file when it is asked for.

    Raises:
        CheckpointError: if a file is no safetensors file.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    @cached_property
    def _home(self) -> dict[str, Any]:
        home: dict[str, Any] = {}
        for path in self._paths:
            with _refused(path):
                opened: Any = safe_open(path, framework="pt")
                home |= dict.fromkeys(opened.keys(), (path, opened))
        return home

    def __getitem__(self, name: str) -> torch.Tensor:
        path, opened = self._home[name]
        with _refused(path):
            value: torch.Tensor = opened.get_tensor(name)
            return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """What safetensors says of a file that is none, as a CheckpointError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.") from error


def _file_name(kind: str, rank: int, ranks: int) -> str:
    shard = "" if ranks == 1 else f"-{rank + 1:05d}-of-{ranks:05d}"
    return f"{kind}{shard}.safetensors"


def _write_index(folder: Path, kind: str, files: dict[str, Any]) -> None:
    """Says which shard holds which tensor, where there is more than one; adds itself to `files`."""
    shards = {n: about["tensors"] for n, about in files.items() if re.fullmatch(rf"{kind}{_SHARD}\.\w+", n)}
    if not shards:
        return
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in shards.values())},
        "weight_map": dict(sorted((name, shard) for shard, sizes in shards.items() for name in sizes)),
    }
    path = folder / f"{kind}.safetensors.index.json"
    with atomic_file(path) as file:
        file.write(json.dumps(index, indent=2).encode())
    files[path.name] = _measure(path)


def _measure(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _canonical(state: Mapping[str, Any]) -> bytes:
    return json.dumps(state, sort_keys=True, separators=(",", ":")).encode()


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(state)).hexdigest()


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {STATE}: {error}. {REMEDY}") from None
    if not isinstance(state, dict) or state.pop("sha256", None) != _digest(state):
        raise CheckpointError(f"{path} is damaged: {STATE} is not as it was written. {REMEDY}")
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} has the format {state.get('format')!r}; this version reads {FORMAT}.")
    if fault := fault_of(state):
        raise CheckpointError(f"{path} is damaged: {fault}. {REMEDY}")
    names = _file_names(state)
    for name in sorted(set(state["files"]) - names):  # it could lead out of the folder
        raise CheckpointError(
            f"{path} is damaged: it lists {name!r}, which is not a file that checkpoints have. {REMEDY}"
        )
    for name in sorted(names - set(state["files"])):  # what it holds would not be restored
        raise CheckpointError(f"{path} is damaged: {name!r} is not among its files. {REMEDY}")
    return state


def _file_names(state: Mapping[str, Any]) -> set[str]:
    """The files that a checkpoint of so many ranks has; each kind is in one, or in a shard for each rank."""
    ranks = len(state["ranks"])
    names = {_file_name(OWN, rank, ranks) for rank in range(ranks)}
    writers = 1 if "model.safetensors" in state["files"] else ranks
    for kind in SHARED:
        names |= {_file_name(kind, rank, writers) for rank in range(writers)}
        names |= {f"{kind}.safetensors.index.json"} if writers > 1 else set()
    return names
