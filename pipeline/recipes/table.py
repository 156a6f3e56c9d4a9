"""Recipes as tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .files import is_file_name, read_recipe
from .presets import RECIPES, complete
from .schema import DEFAULTS, KEYS

PROSE = {"description": "", "source": "Source: ", "published": "Published: ", "measured": "Measured: "}
"""The keys that tell, and do not set anything, with what is written before them."""


def recipes_table() -> Table:
    """Every recipe with what it is for, what its source has reached, and what we have."""
    table = Table(
        "recipe", "what it is for, what its source has published, what we have measured", show_lines=True
    )
    table.columns[0].no_wrap = True
    for name, recipe in RECIPES.items():
        told = [f"{before}{recipe[key]}" for key, before in PROSE.items() if key != "source"]
        table.add_row(name, escape("\n".join(told)))
    return table


def recipe_table(recipe: str) -> Group:
    """One recipe, by name or file: what it tells, then a table of each key, its value, the value's meaning, and where
    the value is from."""
    table = Table("key", "value", "meaning (and where the value is from)", show_lines=True)
    table.columns[0].no_wrap = True
    full = complete(recipe)
    given: Mapping[str, Any] = read_recipe(recipe)[0] if is_file_name(recipe) else RECIPES[recipe]
    for key, meaning in KEYS.items():
        if key not in ("notes", *PROSE):  # notes are in the last column
            origin = _origin(key, full, given)
            table.add_row(key, _text(full[key]), escape(f"{meaning}\n({origin})" if origin else meaning))
    told = [f"{before}{full[key]}" for key, before in PROSE.items() if full[key]]
    return Group(f"[bold]{escape(recipe)}[/]", *map(escape, told), table)


def _origin(key: str, full: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The notes on a key and what is in it; else what is true of all that have none."""
    notes: Mapping[str, str] = full["notes"]
    inner = [
        f"{name.partition('.')[2]}: {note}" for name, note in notes.items() if name.startswith(f"{key}.")
    ]
    found = ([notes[key]] if key in notes else []) + inner
    if found:
        return "\n".join(found)
    if key not in given:
        return "default"
    if key in ("train", "val"):
        return ""
    return "the source" if full["source"] else "the recipe"


def keys_table() -> Table:
    """Every key with its default and its meaning."""
    table = Table("key", "default", "meaning", show_lines=True)
    for key, meaning in KEYS.items():
        table.add_row(key, _text(DEFAULTS[key]) if key in DEFAULTS else "(must be given)", meaning)
    return table


def _text(value: Any) -> str:
    """A value as JSON; of a dict or a list of dicts, one entry a line."""
    if isinstance(value, str):
        return escape(value)
    lines = [_json(value)]
    if isinstance(value, Mapping) and value:
        lines = [f"{key}: {_json(each)}" for key, each in value.items()]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        lines = [", ".join(f"{key}={_json(v)}" for key, v in each.items()) for each in value]
    return escape("\n".join(lines))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
