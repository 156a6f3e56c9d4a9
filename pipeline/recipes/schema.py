"""The schema of recipes: meaning, default and types of every key, of most from the builder's configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any

from ...common.errors import RecipeError, suggest
from ...common.frozen import FrozenDict
from ...common.options.config import LIST, TEXT, Config, Kind, Natural, Option, Positive, options_of
from ...loaders.options import ImageOptions
from ..describe.config import DataConfig, DistributedConfig, FitOptions
from ..optim.config import OptimizerConfig
from ..tasks import TASKS

NOTES = Kind(
    lambda value: isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values()),
    "a dict of texts",
)


@dataclass(frozen=True, kw_only=True)
class _Head(Config):
    description: str = ""
    """What the recipe is for."""
    source: str = ""
    """The publication of its values."""
    published: str = ""
    """Results published by the source, with their hardware."""
    measured: str = ""
    """Results measured by Drivetrain's authors, with their hardware."""
    notes: Annotated[Mapping[str, str], NOTES] = field(default_factory=FrozenDict)
    """For single values: their source, or how they differ from it; {key: text}."""
    model: str
    """Name of a model of Drivetrain or torchvision, timm:NAME, hf:NAME, or package.module:factory."""
    model_options: Mapping[str, Any] = field(default_factory=FrozenDict)
    """Arguments of the model's factory; for another model, replace all of them: model_options={…}. num_classes: auto is
    the number of classes of the training data."""


@dataclass(frozen=True, kw_only=True)
class _Model(Config):
    task: str | Mapping[str, Any] | None = None
    """What it trains for: {tasks}, or package.module:Class; or {name, …arguments}; null: Classification."""
    transforms: Annotated[Sequence[Mapping[str, Any]], LIST] = ()
    """List of transforms, each {name, …options}; the name of an algorithm of Composer's is package.module:Class."""


@dataclass(frozen=True, kw_only=True)
class _Run(Config):
    epochs: Positive | None = None
    """Passes over the training data; null: set by fit(epochs=…)."""
    seed: Natural = 0
    """Seed of weights, sample order and augmentation."""
    trained: Mapping[str, Any] = field(default_factory=FrozenDict)
    """Written by a run into its recipe.yaml: its task, the preprocessing of its evaluation, and the names of its
    classes; training ignores it and writes that of its own data."""


def keys_of(config: type[Config]) -> dict[str, Option]:
    return {option.key: option for option in options_of(config).values() if option.key}


_CONFIGS = (_Head, DataConfig, _Model, OptimizerConfig, DistributedConfig, FitOptions, _Run)
SCHEMA = {key: option for config in _CONFIGS for key, option in keys_of(config).items()}
"""Every key of a recipe, which may also have a `name`. The configs check names and combinations."""

_OPTIMIZER = options_of(OptimizerConfig)["optimizer"]  # part of the key `optimizer`, as `name`


def _meaning(key: str, option: Option) -> str:
    text = option.help.replace("{tasks}", ", ".join(TASKS))
    if key == "optimizer":
        text = f"{{name: {_OPTIMIZER.help.removeprefix('the optimizer: ')}, {text}}}"
    return _in_json(text.replace("`", ""))


def _in_json(text: str) -> str:
    return text.replace("None", "null").replace("True", "true").replace("False", "false")


def _default(key: str, option: Option) -> Any:
    value = option.default
    if isinstance(value, Mapping):
        return ({"name": _OPTIMIZER.default} if key == "optimizer" else {}) | dict(value)
    return list(value) if isinstance(value, tuple) else value


WITHIN = {
    "learning_rate": "optimizer.lr", "num_classes": "model_options.num_classes",
    **{name: f"optimizer.{name}" for name in ("lr", "momentum", "weight_decay", "nesterov", "betas", "eps")},
    **{name: f"loading.{name}" for name in options_of(ImageOptions)},
}  # fmt: skip
"""Of what looks like a key, the key that has it as an entry."""

KEYS = {key: _meaning(key, option) for key, option in SCHEMA.items()}
DEFAULTS = {key: _default(key, option) for key, option in SCHEMA.items() if not option.required}


@dataclass(frozen=True)
class Origin:
    """For messages: the name or file of a recipe, and of a file the line number of each key."""

    name: str = "(dict)"
    lines: Mapping[str, int] = field(default_factory=dict)

    def at(self, key: str) -> str:
        line = self.lines.get(key.partition(".")[0])
        return f"Recipe {self.name}" + (f", line {line}" if line is not None else "")


def check_key(key: str, origin: Origin) -> None:
    """Of a dotted key, only the first part is checked."""
    head = key.partition(".")[0]
    if head in KEYS:
        return
    hint = f" Did you mean {WITHIN[head]!r}?" if head in WITHIN else suggest(head, KEYS)
    listed = "drivetrain recipes --keys lists all."
    raise RecipeError(f"{origin.at(head)}: a recipe has no key {head!r}.{hint} {listed}")


def check_values(full: Mapping[str, Any], origin: Origin) -> None:
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
            f"{origin.at('optimizer')}: optimizer={dict(full['optimizer'])} needs a name: {_OPTIMIZER.help}."
        )
    _check_entries(full, origin)
    _check_texts_that_are_numbers(full, origin)


def _check_entries(full: Mapping[str, Any], origin: Origin) -> None:
    if isinstance(full["task"], Mapping) and not isinstance(full["task"].get("name"), str):
        raise RecipeError(f"{origin.at('task')}: task={dict(full['task'])} needs a name: {KEYS['task']}.")
    for entry in full["transforms"]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            where = origin.at("transforms")
            raise RecipeError(f"{where}: the transform {entry!r:.200} must be a dict with a name.")


def _check_kind(key: str, value: object, origin: Origin) -> None:
    kinds = [kind for kind in SCHEMA[key].kinds if kind.json]
    if not any(kind.fits(value) for kind in kinds):
        if SCHEMA[key].choices and isinstance(value, str):
            raise RecipeError(f"{origin.at(key)}: {SCHEMA[key].rejection(value)}")
        allowed = _in_json(" or ".join(name for kind in kinds for name in kind.names))
        hint = "" if TEXT in kinds else _number_hint(value)
        raise RecipeError(f"{origin.at(key)}: {key}={value!r:.200} must be {allowed}: {KEYS[key]}.{hint}")


def _check_texts_that_are_numbers(full: Mapping[str, Any], origin: Origin) -> None:
    """Optimizer, loader or transforms: some would accept them silently."""
    inside = [(key, full[key]) for key in ("optimizer", "loading")]
    inside += [("transforms", entry) for entry in full["transforms"]]
    for key, options in inside:
        for name, value in options.items():
            if hint := _number_hint(value):
                raise RecipeError(f"{origin.at(key)}: {key}: {name}={value!r} is text.{hint}")


def _number_hint(value: object) -> str:
    if not isinstance(value, str):
        return ""
    number: float | None = None
    with suppress(ValueError):
        number = float(value)
        number = int(value)  # not of fractions, or of thousands of digits
    if value.strip().lower().lstrip("+-.") in ("nan", "inf", "infinity") or number in (inf, -inf):
        return " Numbers in a recipe must be finite."
    # As JSON and YAML have it: the text may be .5 or 1_000, without quotes, which only Python takes for a number.
    return "" if number is None else f" Write the number without quotes: {number}."
