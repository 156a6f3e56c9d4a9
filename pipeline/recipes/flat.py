"""A recipe as one level of dotted keys, as overrides, tables and loggers have them."""

from collections.abc import Mapping
from typing import Any

PROSE = ("name", "description", "source", "published", "measured", "notes", "trained")
"""What a recipe says about itself, which changes no training."""


def flattened(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe by dotted key, without `PROSE`: `optimizer.lr`, `transforms.EMA.decay`. A transform
    without options is True; other lists stay whole."""
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        if key not in PROSE:
            _put(found, key, value)
    return found


def _put(found: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, list | tuple) and value and all(_is_entry(each) for each in value):
        for entry in value:
            name, again = f"{key}.{entry['name']}", 2
            while name in found or any(each.startswith(f"{name}.") for each in found):
                name, again = f"{key}.{entry['name']}#{again}", again + 1
            options = {inner: each for inner, each in entry.items() if inner != "name"}
            _put(found, name, options or True)
    elif isinstance(value, Mapping) and value:
        for inner, each in value.items():
            _put(found, f"{key}.{inner}", each)
    else:
        found[key] = value


def _is_entry(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("name"), str)
