"""Recipes as tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from .recipe_files import is_file_name, read_recipe
from .recipe_schema import DEFAULTS, KEYS
from .recipes import RECIPES, complete


def recipes_table() -> Table:
    """Every recipe with what it is for, what its source has reached, and what we have."""
    table = Table(show_lines=True)
    table.add_column("recipe", no_wrap=True)
    for head in ("what it is for", "published", "measured"):
        table.add_column(head, overflow="fold")
    for name, recipe in RECIPES.items():
        table.add_row(
            *(escape(recipe[key]) if key else name for key in ("", "description", "published", "measured"))
        )
    return table


def recipe_table(recipe: str) -> Table:
    """One recipe, by name or file: each key, its value, the value's meaning, and where the value is from."""
    table = Table(title=recipe, title_justify="left", show_lines=True)
    table.add_column("key", no_wrap=True)
    for head in ("value", "meaning", "where it is from"):
        table.add_column(head, overflow="fold")
    full = complete(recipe)
    given: Mapping[str, Any] = read_recipe(recipe)[0] if is_file_name(recipe) else RECIPES[recipe]
    for key, meaning in KEYS.items():
        if key != "notes":  # the last column
            table.add_row(key, _text(full[key]), meaning, escape(_origin(key, full, given)))
    return table


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
    if key in ("description", "source", "published", "measured", "train", "val"):
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
