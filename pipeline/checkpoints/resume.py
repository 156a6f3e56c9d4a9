"""Going on from a checkpoint: which one, whether it is of this run, and putting everything back."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointError, DrivetrainError
from ...strategies import Engine
from ...strategies.common.optimizer_state import Entry, OptimizerState
from ..telemetry.history import Epoch, History
from ..training.build import Built
from .capture import AVERAGE
from .directory import CheckpointDir, find
from .format import OWN, Checkpoint, Tensors


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
        goes_on = found is not None and store.run == found.state["run"]
    elif resume is not None:
        found = find(Path(resume))
        if store is not None and store.holds(found.path):
            _refuse_to_lose(store, found)
            goes_on = True
    if found is None:
        return {"path": None, "run": uuid.uuid4().hex, "goes_on": False}
    run = found.state["run"] if goes_on else uuid.uuid4().hex
    return {"path": str(found.path), "run": run, "goes_on": goes_on}


def _refuse_to_lose(store: CheckpointDir, found: Checkpoint) -> None:
    """Raises CheckpointError if a run that resumes from `found` would replace other work in the same folder."""
    ahead = store.beyond(found)
    if not ahead:
        return
    newest, names = ahead[0], ", ".join(checkpoint.path.name for checkpoint in ahead)
    other = "" if newest.state["run"] == found.state["run"] else ", of another run"
    raise CheckpointError(
        f"{found.path} is not the newest checkpoint in {store.folder}: {names} would be replaced (the newest is after "
        f"{newest.state['epoch']} epochs and {newest.state['step_in_epoch']} steps{other}). Continue the newest with "
        f"resume='auto' (--resume), give this run a folder of its own (out=…, --out), or move {names} away first."
    )


def _told(engine: Engine, text: str) -> str:
    """Rank 0's text, on every rank."""
    data = list(text.encode()) if engine.rank == 0 else []
    length = int(engine.reduce(torch.tensor(len(data)), "sum").item())
    values = torch.tensor(data or [0] * length)
    return bytes(engine.reduce(values, "sum").tolist()).decode()


def load_engine(checkpoint: Checkpoint, engine: Engine) -> None:
    """Gives the engine the weights and the optimizer's state.

    Raises:
        CheckpointError: if they are those of another model or optimizer.
    """
    with restoring(checkpoint):
        engine.import_state(checkpoint.tensors("model"))
        numbers = {name: entry for own in checkpoint.state["ranks"] for name, entry in own["numbers"].items()}
        entries = Entries(checkpoint.tensors("optimizer"), numbers)
        plain = checkpoint.state["optimizer"]
        engine.import_optimizer(OptimizerState(plain["groups"], entries, plain["loss_scale"]))


def load_methods(checkpoint: Checkpoint, built: Built) -> None:
    """Gives the methods what they have kept, and this rank the buffers of its own, after `TrainingHooks.begin`.

    Raises:
        CheckpointError: if the checkpoint does not hold them.
    """
    engine = built.engine
    with restoring(checkpoint):
        own: Mapping[str, torch.Tensor] = own_tensors(checkpoint, engine) or {}
        values = with_averages(checkpoint.state["methods"], checkpoint.tensors("methods"), own)
        built.hooks.load_state_dict(engine, values)
        with torch.no_grad():
            for name, buffer in engine.plain_model.named_buffers():
                if f"buffer{AVERAGE}{name}" in own:
                    buffer.copy_(own[f"buffer{AVERAGE}{name}"])


def load_position(checkpoint: Checkpoint, built: Built) -> None:
    """Continue at the checkpoint's position, after `TrainingHooks.begin`."""
    engine = built.engine
    with restoring(checkpoint):
        own = own_tensors(checkpoint, engine)
        total = torch.tensor(float(checkpoint.state["meter"]["total"])) if own is None else own["loss"]
        built.hooks.state.load_state_dict(checkpoint.state, total.to(engine.device))


def load_history(checkpoint: Checkpoint) -> History:
    """The epochs that are finished, and the facts about the processes that trained them."""
    with restoring(checkpoint):
        saved = dict(checkpoint.state["history"])
        return History([Epoch(**epoch) for epoch in saved.pop("epochs")], saved)


def load_randomness(checkpoint: Checkpoint, engine: Engine, seed: int) -> None:
    """Sets the global random states of torch, numpy and Python: this rank's own; with another number of ranks,
    those that follow from (seed, step, rank)."""
    with restoring(checkpoint):
        own = own_tensors(checkpoint, engine)
        if own is None:
            key = np.random.SeedSequence([seed, checkpoint.state["step"], engine.rank])
            first, second, third = (int(word) for word in key.generate_state(3, np.uint32))
            torch.manual_seed(first)
            np.random.seed(second)  # noqa: NPY002 — the global one, which models may use
            random.seed(third)
            return
        torch.set_rng_state(own["random.cpu"])
        if engine.device.type == "cuda" and "random.cuda" in own:
            torch.cuda.set_rng_state(own["random.cuda"], engine.device)
        saved = checkpoint.state["ranks"][engine.rank]["random"]
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = saved["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def own_tensors(checkpoint: Checkpoint, engine: Engine) -> Tensors | None:
    """What this rank has saved of its own; None if the checkpoint is of another number of ranks."""
    if len(checkpoint.state["ranks"]) != engine.world_size:
        return None
    return checkpoint.tensors(OWN, engine.rank)


@contextmanager
def restoring(checkpoint: Checkpoint) -> Iterator[None]:
    """Whatever does not fit, or is not there, as a CheckpointError that names the checkpoint.

    A JSON value or a tensor that is missing shows as one of Python's own errors.
    """
    try:
        yield
    except CheckpointError:
        raise
    except DrivetrainError as error:
        raise CheckpointError(f"The checkpoint {checkpoint.path} is of another run: {error}") from error
    except (
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
        AttributeError,
        MemoryError,
    ) as error:
        raise CheckpointError(
            f"The checkpoint {checkpoint.path} does not hold what it must ({type(error).__name__}: {error}). Use "
            f"another, or start from scratch with resume=None."
        ) from error


@contextmanager
def global_randomness_kept() -> Iterator[None]:
    """The random states of numpy and Python are, after the block, as before."""
    before = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before[0])  # noqa: NPY002
        random.setstate(before[1])


class Entries(Mapping[str, Entry]):
    """An optimizer's entries by parameter; tensors are read when one is asked for."""

    def __init__(self, tensors: Tensors, numbers: Mapping[str, Mapping[str, float]]) -> None:
        self._tensors, self._numbers = tensors, numbers
        self._names: dict[str, list[str]] = {name: [] for name in numbers}
        for full in tensors:
            self._names.setdefault(full.rpartition(AVERAGE)[0], []).append(full)

    def __getitem__(self, name: str) -> Entry:
        found = {full.rpartition(AVERAGE)[2]: self._tensors[full] for full in self._names[name]}
        return {**found, **self._numbers.get(name, {})}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Averages(Mapping[str, torch.Tensor]):
    """What a method has kept, by parameter; read when it is asked for. What is this rank's own goes first."""

    def __init__(self, prefix: str, shared: Tensors, own: Mapping[str, torch.Tensor]) -> None:
        self._prefix, self._shared, self._own = prefix, shared, own
        self._names = [name.removeprefix(prefix) for name in shared if name.startswith(prefix)]

    def __getitem__(self, name: str) -> torch.Tensor:
        full = self._prefix + name
        return self._own[full] if full in self._own else self._shared[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def with_averages(
    values: Mapping[str, Any], shared: Tensors, own: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """The state of the methods, with averages where `{"tensors": prefix}` stands for them."""
    return {
        method: {
            key: Averages(value["tensors"], shared, own)
            if isinstance(value, dict) and "tensors" in value
            else value
            for key, value in state.items()
        }
        for method, state in values.items()
    }
