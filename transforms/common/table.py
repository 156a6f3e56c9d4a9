"""`catalogue()`: all transforms in one table, from the facts each one declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...common.table import Table
from ..base import CHANGES_MODEL, Transform

HEADS = ("transform", "kind", "defaults", "renames", "compiles", "ddp", "fsdp", "deepspeed", "source")


@dataclass(frozen=True)
class CatalogueRow:
    """One transform.

    Attributes:
        transform: class name, which is also its name in a recipe.
        kind: what it changes; see `base.Kind`.
        defaults: its fields.
        renames: whether parameter names or shapes in the state dict change (`to_plain` restores them).
        compiles: whether the changed model compiles with fullgraph=True; empty if the model does not change.
        ddp, fsdp, deepspeed: whether it works with that family of strategies, or what it needs there.
        source: the publication.
    """

    transform: str
    kind: str
    defaults: str
    renames: str
    compiles: str
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
        return Table(HEADS, list(map(dataclasses.astuple, self)), title="Transforms")

    def __repr__(self) -> str:
        return self._table().text(160)

    def _repr_html_(self) -> str:
        return self._table().html()

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows in plain JSON types."""
        return [dataclasses.asdict(row) for row in self]


def make_catalogue(transforms: Iterable[type[Transform]]) -> Catalogue:
    """Return the table of these classes, sorted by kind and name."""
    return Catalogue(sorted(map(_row, transforms), key=lambda row: (row.kind, row.transform)))


def _row(cls: type[Transform]) -> CatalogueRow:
    defaults = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(cls))
    changes = cls.kind in CHANGES_MODEL
    return CatalogueRow(
        transform=cls.__name__,
        kind=cls.kind,
        defaults=defaults,
        renames="yes" if cls.renames else "no",
        compiles=("yes" if cls.compile_safe else "no") if changes else "",
        ddp=_works(cls, "ddp"),
        fsdp=_works(cls, "fsdp"),
        deepspeed=_works(cls, "deepspeed"),
        source=cls.source,
    )


def _works(cls: type[Transform], family: str) -> str:
    if family in cls.unsafe_with:
        return "no"
    if family == "deepspeed" and "deepspeed_stage_3" in cls.unsafe_with:
        return "stages 1, 2"
    return "find_unused_parameters" if family == "ddp" and cls.unused_parameters else "yes"
