"""The schema of recipes: every key with its meaning, its default, and its types.

Keys of the builder's options derive from their configs; only the other keys are described here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

from ...common.errors import RecipeError, suggest
from ...common.options.option import (
    LIST,
    MAPPING,
    NATURAL,
    NOTES,
    NULL,
    POSITIVE,
    TEXT,
    Config,
    Option,
    options_of,
)
from ..describe.config import DataConfig, DistributedConfig, OptimizerConfig
from ..tasks.registry import TASKS

_BEFORE = {
    "description": Option("what the recipe is for", (TEXT,), default=""),
    "source": Option("the publication of its values", (TEXT,), default=""),
    "published": Option("results published by the source, with their hardware", (TEXT,), default=""),
    "measured": Option("results measured by Drivetrain's authors, with their hardware", (TEXT,), default=""),
    "notes": Option(
        "for single values: their source, or how they differ from it; {key: text}",
        (NOTES,),
        default={},
    ),
    "model": Option(
        "name of a model of Drivetrain or torchvision, timm:NAME, hf:NAME, or package.module:factory", (TEXT,)
    ),
    "model_options": Option(
        "arguments of the model's factory; for another model, replace all of them: model_options={…}",
        (MAPPING,),
        default={},
    ),
}
_TASK = {
    "task": Option(
        f"what it trains for: {', '.join(TASKS)}, or package.module:Class; or {{name, …arguments}}; "
        "null: Classification",
        (TEXT, MAPPING, NULL),
        default=None,
    )
}
_TRANSFORMS = {
    "transforms": Option(
        "list of transforms, each {name, …options}; the name of an algorithm of Composer's is package.module:Class",
        (LIST,),
        default=[],
    )
}
_AFTER = {
    "epochs": Option(
        "passes over the training data; null: set by fit(epochs=…)", (POSITIVE, NULL), default=None
    ),
    "seed": Option("seed of weights, sample order and augmentation", (NATURAL,), default=0),
    "trained": Option(
        "written by a run into its recipe.yaml: its task, the preprocessing of its evaluation, and the names of its "
        "classes; training ignores it and writes that of its own data",
        (MAPPING,),
        default={},
    ),
}


def keys_of(config: type[Config]) -> dict[str, Option]:
    """Return the options of a config by recipe key. The key `optimizer` combines two fields."""
    keys = {option.recipe_key: option for option in options_of(config).values() if option.recipe_key}
    for option in options_of(config).values():
        if isinstance(option.default, Mapping):
            keys[option.recipe_key] = dataclasses.replace(option, default=dict(option.default))
    if config is OptimizerConfig:
        name, rest = options_of(config)["optimizer"], keys["optimizer"]
        keys["optimizer"] = dataclasses.replace(
            rest,
            help=f"{{name: {name.help}, {rest.help}}}",
            default={"name": name.default, **rest.default},
        )
    return keys


SCHEMA = (
    _BEFORE
    | keys_of(DataConfig)
    | _TASK
    | _TRANSFORMS
    | keys_of(OptimizerConfig)
    | keys_of(DistributedConfig)
    | _AFTER
)
"""Every key of a recipe, which may also have a `name`. The configs check ranges, names and options."""

KEYS = {key: option.recipe_help for key, option in SCHEMA.items()}
"""The meaning of every key."""

DEFAULTS: dict[str, Any] = {
    key: option.default for key, option in SCHEMA.items() if option.default is not Parameter.empty
}
"""The optional keys with their defaults."""


@dataclass(frozen=True)
class Origin:
    """The origin of a recipe, for messages.

    Attributes:
        name: name of the recipe or its file.
        lines: for a file, the line number of each key.
    """

    name: str = "(dict)"
    lines: Mapping[str, int] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """Return the beginning of a message about a key."""
        line = self.lines.get(key.partition(".")[0])
        return f"Recipe {self.name}" + (f", line {line}" if line is not None else "")


def check_key(key: str, origin: Origin) -> None:
    """Raise RecipeError for an unknown key, with the closest one. Of a dotted key, only the first part is checked."""
    head = key.partition(".")[0]
    if head not in KEYS:
        raise RecipeError(f"{origin.at(head)}: a recipe has no key {head!r}.{suggest(head, KEYS)}")


def check_values(full: Mapping[str, Any], origin: Origin) -> None:
    """Check a complete recipe against the schema.

    Raises:
        RecipeError: naming the key, its value, and what is allowed.
    """
    for key in KEYS:
        if key in full:
            _check_kind(key, full[key], origin)
    for key, meaning in KEYS.items():
        if key not in full:
            raise RecipeError(f"Recipe {origin.name}: the key {key!r} is missing: {meaning}.")
    for note in full["notes"]:
        check_key(note, origin)
    name = full.get("name")
    if not (name is None or isinstance(name, str)):
        raise RecipeError(f"{origin.at('name')}: name={name!r:.200} must be text: the recipe's name.")
    if not isinstance(full["optimizer"].get("name"), str):
        raise RecipeError(
            f"{origin.at('optimizer')}: optimizer={dict(full['optimizer'])} needs a name: "
            f"{options_of(OptimizerConfig)['optimizer'].help}."
        )
    _check_entries(full, origin)
    _check_texts_that_are_numbers(full, origin)


def _check_entries(full: Mapping[str, Any], origin: Origin) -> None:
    if isinstance(full["task"], Mapping) and not isinstance(full["task"].get("name"), str):
        raise RecipeError(f"{origin.at('task')}: task={dict(full['task'])} needs a name: {KEYS['task']}.")
    for entry in full["transforms"]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise RecipeError(
                f"{origin.at('transforms')}: the transform {entry!r:.200} must be a dict with a name."
            )


def _check_kind(key: str, value: object, origin: Origin) -> None:
    kinds = SCHEMA[key].kinds
    if not any(kind.fits(value) for kind in kinds):
        allowed = " or ".join(kind.name for kind in kinds)
        hint = "" if TEXT in kinds else _number_hint(value)
        raise RecipeError(f"{origin.at(key)}: {key}={value!r:.200} must be {allowed}: {KEYS[key]}.{hint}")


def _check_texts_that_are_numbers(full: Mapping[str, Any], origin: Origin) -> None:
    """Reject numbers written as text in options of optimizer, loader or transforms; some would accept them silently."""
    inside = [(key, full[key]) for key in ("optimizer", "loading")]
    inside += [("transforms", entry) for entry in full["transforms"]]
    for key, options in inside:
        for name, value in options.items():
            if _number_hint(value):
                raise RecipeError(f"{origin.at(key)}: {key}: {name}={value!r} is text.{_number_hint(value)}")


def _number_hint(value: object) -> str:
    if not isinstance(value, str):
        return ""
    if value.strip().lower().lstrip("+-.") in ("nan", "inf", "infinity"):
        return " Numbers in a recipe must be finite."
    try:
        float(value)
    except ValueError:
        return ""
    return f" Write the number without quotes: {value.strip()}."
