"""Recipes as tables for the terminal."""

import json
from collections.abc import Mapping
from typing import Any

from ...common.table import Table, lines_of
from .files import is_file_name, read_recipe
from .presets import RECIPES, completed, keys_set
from .schema import DEFAULTS, KEYS

PROSE = {"description": "", "source": "Source: ", "published": "Published: ", "measured": "Measured: "}
"""The keys that only describe a recipe, with the prefix of each."""


def recipes_list() -> str:
    """Return one line for each recipe, those without a measurement of ours apart; `recipe_table` has the rest."""
    ours, theirs = list[tuple[str, str]](), list[tuple[str, str]]()
    for name, recipe in RECIPES.items():
        purpose = recipe["description"].partition(". ")[0].rstrip(".")
        (theirs if recipe["measured"].startswith("not measured") else ours).append((name, purpose))
    return "\n".join([
        "Measured here:", lines_of(ours), "", "Not measured here; most need a GPU or larger data:",
        lines_of(theirs), "", "drivetrain recipes NAME shows all of one.",
    ])  # fmt: skip


def recipe_table(recipe: str) -> Table:
    full = completed(recipe).values
    given: Mapping[str, Any] = read_recipe(recipe)[0] if is_file_name(recipe) else RECIPES[recipe]
    rows = []
    for key, meaning in KEYS.items():
        if key not in ("notes", *PROSE):  # notes are in the last column
            origin = _origin(key, full, given)
            rows.append((key, _text(full[key]), f"{meaning}\n({origin})" if origin else meaning))
    lines = [recipe, *(f"{prefix}{full[key]}" for key, prefix in PROSE.items() if full[key])]
    heads = ("key", "value", "meaning (and source of the value)")
    return Table(heads, rows, title="\n".join(lines), spaced=True, stacks=True)


def _origin(key: str, full: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the notes on a key and its entries; without notes, the source of its value."""
    notes: Mapping[str, str] = full["notes"]
    inner = [f"{name.partition('.')[2]}: {note}" for name, note in notes.items() if name.startswith(f"{key}.")]
    lines = ([notes[key]] if key in notes else []) + inner
    if lines:
        return "\n".join(lines)
    if key not in keys_set(given):
        return "default"
    if key in ("train", "val"):
        return ""
    return "the source" if full["source"] else "the recipe"


def keys_table() -> Table:
    rows = [(key, _text(DEFAULTS[key]) if key in DEFAULTS else "(required)", meaning) for key, meaning in KEYS.items()]
    return Table(("key", "default", "meaning"), rows, spaced=True, stacks=True)


def _text(value: Any) -> str:
    """Dicts and lists of dicts have one entry per line."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value:
        return "\n".join(f"{key}: {_json(each)}" for key, each in value.items())
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "\n".join(", ".join(f"{key}={_json(v)}" for key, v in each.items()) for each in value)
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
