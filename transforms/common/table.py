"""The table of all transforms, from the facts that each one declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...common.table import Table
from ..base import CHANGES_MODEL, Transform


@dataclass(frozen=True)
class CatalogueRow:
    transform: str  # its name in recipes
    kind: str
    defaults: str
    renames: str
    """Whether names or shapes in the state dict change (`to_plain` restores them)."""
    compiles: str
    """Whether the changed model compiles with fullgraph=True; empty if the model does not change."""
    ddp: str
    fsdp: str
    deepspeed: str
    source: str


class Catalogue(list[CatalogueRow]):
    """The rows of `catalogue()`, which print as a table; as an HTML table in a notebook.

    Example::

        >>> catalogue().to_dict()[0]["transform"]
        'ColOut'
    """

    def _table(self) -> Table:
        heads = [field.name for field in dataclasses.fields(CatalogueRow)]
        return Table(heads, list(map(dataclasses.astuple, self)), title="Transforms")

    def __repr__(self) -> str:
        return self._table().text(160)

    def _repr_html_(self) -> str:
        return self._table().html()

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows in plain JSON types."""
        return [dataclasses.asdict(row) for row in self]


def make_catalogue(transforms: Iterable[type[Transform]]) -> Catalogue:
    return Catalogue(sorted(map(_row, transforms), key=lambda row: (row.kind, row.transform)))


def _row(cls: type[Transform]) -> CatalogueRow:
    defaults = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(cls))
    compiles = ("no", "yes")[cls.compile_safe] if cls.kind in CHANGES_MODEL else ""
    ddp, fsdp, deepspeed = (_works(cls, family) for family in ("ddp", "fsdp", "deepspeed"))
    renames = ("no", "yes")[cls.renames]
    return CatalogueRow(cls.__name__, cls.kind, defaults, renames, compiles, ddp, fsdp, deepspeed, cls.source)


def _works(cls: type[Transform], family: str) -> str:
    if family in cls.unsafe_with:
        return "no"
    if family == "deepspeed" and "deepspeed_stage_3" in cls.unsafe_with:
        return "stages 1, 2"
    return "find_unused_parameters" if family == "ddp" and cls.unused_parameters else "yes"
