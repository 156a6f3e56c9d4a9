"""Checkpoints by shard: each rank writes the rows, or elements, that it holds, and reads those that it needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from ....common.errors import CheckpointError
from ....common.model_state import ModelState
from ....common.rows import chunk, local_part, shard_of
from ....common.storage.tensors import Stored, Tensors, file_order, open_tensors
from ....strategies import Engine
from ....strategies.engine import copied

REMEDY = "Use another checkpoint, or start from scratch with resume=None."
_OPEN = 128  # files of one kind that are kept open, of perhaps thousands

Shapes = dict[str, Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]]


class Shards(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Into how many files of each kind the rows of tensors are sharded, as by `torch.chunk`, or, if `flat`, their
    elements, flattened; and the full shapes of these tensors by kind and key. The first file has the first shard of
    each, and all other tensors."""

    files: Annotated[int, Meta(ge=2)]
    shapes: dict[str, Shapes]
    flat: bool = False  # older versions do not know it


def own_share(engine: Engine, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Shapes]:
    """Return copies on the CPU of what this rank writes: its shards, and on rank 0 all other tensors; and the full
    shapes of the former. Of ranks with the same rows (HSDP), the first writes. Every rank must call it: a DTensor whose
    rows are not sharded is gathered."""
    own: dict[str, torch.Tensor] = {}
    shapes: Shapes = {}
    for key, value in tensors.items():
        shard = shard_of(value)
        if shard is None or shard[0] != engine.shards:
            full = engine.gather(value)
            if engine.rank == 0:
                own[key] = copied(full)
            continue
        part = local_part(value)
        shapes[key] = list(value.shape)
        if engine.rank < engine.shards and (engine.rank == 0 or len(part)):
            own[key] = copied(part)
    return own, shapes


@dataclass(frozen=True)
class _Held:
    """A tensor of a sharded model: calling it, which every rank must, gathers it on rank 0."""

    engine: Engine
    value: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> torch.dtype:
        return local_part(self.value).dtype

    def __call__(self) -> torch.Tensor:
        return self.engine.gather(self.value, 0).detach().cpu()


def gathered_one_by_one(engine: Engine, held: ModelState) -> ModelState:
    """Return the tensors of a sharded model, each gathered on rank 0 when it is accessed. Every rank must access all,
    in the order of `save_model`; those other than rank 0 do so here, and get an empty state."""
    weights, unlisted = (
        Tensors({name: _Held(engine, value) for name, value in each.items()}) for each in (held.weights, held.unlisted)
    )
    if engine.rank == 0:
        return ModelState(weights, unlisted)
    for each in (unlisted, weights):
        for name in file_order(each):
            each[name]
    return ModelState()


def open_shards(paths: Sequence[Path], shapes: Shapes, flat: bool = False) -> Tensors:
    """Return the tensors of a kind's files, in full, or by rows, for which only the files that have them are opened."""
    opened = lru_cache(_OPEN)(lambda number: open_tensors(paths[number]))
    first = opened(0).readers
    for key in sorted(shapes.keys() - first.keys()):
        raise CheckpointError(f"{paths[0]} does not have {key!r}, whose first shard should be there. {REMEDY}")
    sharded: dict[str, Any] = {}
    for key, shape in shapes.items():
        if flat:
            elements = _Sharded(opened, paths, key, (math.prod(shape),), "elements")
            sharded[key] = _Flattened(elements, tuple(shape))
        else:
            sharded[key] = _Sharded(opened, paths, key, tuple(shape))
    return Tensors({**first, **sharded})


@dataclass(frozen=True)
class _Sharded:
    """A tensor whose rows are in several files: calling it reads it, a slice of it reads these rows only."""

    opened: Callable[[int], Tensors]
    paths: Sequence[Path]
    key: str
    shape: tuple[int, ...]
    unit: str = "rows"

    @property
    def dtype(self) -> torch.dtype:
        return self._shard(0).dtype

    def __call__(self) -> torch.Tensor:
        return self[:]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        if start >= stop:
            return self._shard(0)[:0]
        each = -(-self.shape[0] // len(self.paths))
        found = []
        for number in range(start // each, -(-stop // each)):
            first, end = chunk(self.shape[0], len(self.paths), number)
            found.append(self._shard(number)[max(start, first) - first : min(stop, end) - first])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _shard(self, number: int) -> Stored:
        """Return what a file has of it; raise CheckpointError unless it is what should be there."""
        first, end = chunk(self.shape[0], len(self.paths), number)
        shape, dtype = (end - first, *self.shape[1:]), self.opened(0).readers[self.key].dtype
        own: Stored | None = self.opened(number).readers.get(self.key)
        if own is None or own.shape != shape or own.dtype != dtype:
            there = "nothing" if own is None else f"{own.dtype} of shape {own.shape}"
            raise CheckpointError(
                f"{self.paths[number]} has {there} of {self.key!r}, which should be its {self.unit} {first} to {end}, "
                f"{dtype} of shape {shape}. {REMEDY}"
            )
        return own


@dataclass(frozen=True)
class _Flattened:
    """A tensor whose `elements` are in several files: calling it reads it, a slice of it reads these rows only."""

    elements: _Sharded
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.elements.dtype

    def __call__(self) -> torch.Tensor:
        return self.elements().view(self.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        width = math.prod(self.shape[1:])
        return self.elements[start * width : stop * width].view(max(0, stop - start), *self.shape[1:])
