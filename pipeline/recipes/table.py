"""Recipes as tables for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...table import Table
from .files import is_file_name, read_recipe
from .presets import RECIPES, complete
from .schema import DEFAULTS, KEYS

PROSE = {"description": "", "source": "Source: ", "published": "Published: ", "measured": "Measured: "}
"""The keys that tell, and do not set anything, with what is written before them."""


def recipes_table() -> Table:
    """Return every recipe with what it is for, what its source has reached, and what we have."""
    heads = ("recipe", "what it is for, what its source has published, what we have measured")
    told = [
        "\n".join(f"{before}{recipe[key]}" for key, before in PROSE.items() if key != "source")
        for recipe in RECIPES.values()
    ]
    return Table(heads, list(zip(RECIPES, told, strict=True)), spaced=True)


def recipe_table(recipe: str) -> Table:
    """Return each key of a recipe, by name or file, with its value, the value's meaning and where it is from; what the
    recipe tells is the title."""
    full = complete(recipe)
    given: Mapping[str, Any] = read_recipe(recipe)[0] if is_file_name(recipe) else RECIPES[recipe]
    rows = []
    for key, meaning in KEYS.items():
        if key not in ("notes", *PROSE):  # notes are in the last column
            origin = _origin(key, full, given)
            rows.append((key, _text(full[key]), f"{meaning}\n({origin})" if origin else meaning))
    told = [recipe, *(f"{before}{full[key]}" for key, before in PROSE.items() if full[key])]
    heads = ("key", "value", "meaning (and where the value is from)")
    return Table(heads, rows, title="\n".join(told), spaced=True)


def _origin(key: str, full: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the notes on a key and what is in it; else what is true of all that have none."""
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
    """Return every key with its default and its meaning."""
    rows = [
        (key, _text(DEFAULTS[key]) if key in DEFAULTS else "(must be given)", meaning)
        for key, meaning in KEYS.items()
    ]
    return Table(("key", "default", "meaning"), rows, spaced=True)


def _text(value: Any) -> str:
    """Return a value as JSON; of a dict or a list of dicts, one entry a line."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value:
        return "\n".join(f"{key}: {_json(each)}" for key, each in value.items())
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "\n".join(", ".join(f"{key}={_json(v)}" for key, v in each.items()) for each in value)
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
