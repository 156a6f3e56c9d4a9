"""Recipes as tables for the terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from .recipes import DEFAULTS, KEYS, RECIPES, complete


def recipes_table() -> Table:
    """Every recipe with what it is for."""
    table = Table("recipe", "what it is for", show_lines=True)
    for name, recipe in RECIPES.items():
        table.add_row(escape(name), escape(recipe["description"]))
    return table


def recipe_table(name: str) -> Table:
    """One recipe: each key, its value, and the value's meaning."""
    table = Table("key", "value", "meaning", title=name, title_justify="left", show_lines=True)
    full = complete(name)
    for key, meaning in KEYS.items():
        table.add_row(key, _text(full[key]), meaning)
    return table


def keys_table() -> Table:
    """Every key with its default and its meaning."""
    table = Table("key", "default", "meaning", show_lines=True)
    for key, meaning in KEYS.items():
        table.add_row(key, _text(DEFAULTS[key]) if key in DEFAULTS else "(must be given)", meaning)
    return table


def _text(value: Any) -> str:
    return escape(value if isinstance(value, str) else json.dumps(value))
