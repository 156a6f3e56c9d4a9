"""The recipes by name, and their overrides."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.errors import RecipeError, suggest
from ...common.frozen import FrozenDict
from ...common.options.config import Config
from .files import RECIPE, is_file_name, json_or_text, read_recipe
from .named import RECIPES
from .schema import DEFAULTS, KEYS, Origin, check_key, check_values, keys_of

__all__ = ["DEFAULTS", "KEYS", "RECIPES", "Completed", "completed", "parse_overrides"]


@dataclass(frozen=True)
class Completed:
    """A checked recipe with its overrides and all defaults; `Pipeline.from_recipe` takes it, too."""

    values: dict[str, Any]  # by key; also `name`, None for a dict without one
    given: frozenset[str]  # the keys that the recipe or its overrides set
    origin: Origin

    def sets(self, config: type[Config]) -> bool:
        return not self.given.isdisjoint(keys_of(config))


def completed(recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] = FrozenDict()) -> Completed:
    given, origin = _find(recipe)
    name = given.pop("name", None)
    full = dict(DEFAULTS)
    replaced = {str(key).partition(".")[0] for key in overrides}
    lines = {key: line for key, line in origin.lines.items() if key not in replaced}
    origin = Origin(str(name) if isinstance(recipe, Mapping) and name else origin.name, lines)
    keys = _put(full, given, origin) | _put(full, overrides, origin)
    full["base_batch_size"] = _base_batch_size(full, given, overrides)
    check_values(full | {"name": name}, origin)
    # Copied, so that changes do not reach RECIPES.
    return Completed(copy.deepcopy(full) | {"name": name}, frozenset(keys), origin)


def _put(full: dict[str, Any], layer: Mapping[str, Any], origin: Origin) -> set[str]:
    """Set values, plain keys before dotted ones: a dict and an entry of it can both be given. Return the keys."""
    for key in sorted(map(str, layer), key=lambda key: "." in key):
        check_key(key, origin)
        head, dot, inner = key.partition(".")
        if dot and not isinstance(full.get(head), Mapping):
            raise RecipeError(f"{origin.at(head)}: {key!r}: its {head} is not a dict. Set {head}=….")
        if dot and head in layer and inner in layer[head]:
            raise RecipeError(
                f"{origin.at(head)}: {key}={layer[key]!r:.80} and {head}={layer[head]!r:.200} both set its "
                f"{inner}. Leave one of the two out."
            )
        full[head] = {**full[head], inner: layer[key]} if dot else layer[key]
    return keys_set(layer)


def keys_set(layer: Mapping[str, Any]) -> set[str]:
    """Return the keys that a recipe sets, also by an entry: `optimizer` by `optimizer.lr`."""
    return {str(key).partition(".")[0] for key in layer}


def _base_batch_size(full: Mapping[str, Any], given: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """None if the learning rate was tuned for the recipe's current one."""
    if full["base_batch_size"] is not None or "base_batch_size" in overrides:
        return full["base_batch_size"]
    own, used = given.get("batch_size", full.get("batch_size")), full.get("batch_size")
    if full["scale_lr"]:
        return own
    lr_is_the_recipes = "optimizer" in keys_set(given) and not overrides.keys() & {"optimizer", "optimizer.lr"}
    return own if lr_is_the_recipes and own != used else None


def _find(recipe: object) -> tuple[dict[str, Any], Origin]:
    if isinstance(recipe, str | Path) and is_file_name(recipe):
        given, origin = read_recipe(recipe)
        return {"name": Path(recipe).name} | given, origin
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            file = os.path.join(recipe, RECIPE)  # noqa: PTH118 - of a run's folder
            # pathlib would raise for what cannot be a path, such as the text of a recipe.
            hint = f" Did you mean {file!r}?" if os.path.isfile(file) else suggest(recipe, RECIPES)  # noqa: PTH113
            raise RecipeError(f"No recipe is named {recipe!r:.200}.{hint}")
        return RECIPES[recipe] | {"name": recipe}, Origin(recipe)
    if isinstance(recipe, Mapping):
        return dict(recipe), Origin()
    raise RecipeError(f"A recipe is a name, a file or a dict, not {recipe!r:.80}.{suggest('', RECIPES)}")


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """Of the command line: `epochs=36`, `optimizer.lr=0.5`, `transforms=[]`."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise RecipeError(f"{pair!r} is not KEY=VALUE, as in epochs=36.")
        if key in overrides:
            raise RecipeError(f"{key}= is given twice. Pass it once.")
        overrides[key] = json_or_text(key, text)
    return overrides
