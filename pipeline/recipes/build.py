"""Build a pipeline from a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ... import transforms
from ...common.errors import DataError, PlanError, RecipeError, StrategyError
from ...common.options.option import Config, options_of
from ..describe.config import DataConfig, DistributedConfig, OptimizerConfig
from ..describe.pipeline_spec import PipelineSpec
from ..tasks import registry as tasks
from .presets import completed
from .schema import keys_of

_OPTIONS = {"model_options": {"model", "seed"}} | {
    options_of(config)[config.EXTRA].recipe_key: {*keys_of(config)}
    for config in (DataConfig, OptimizerConfig, DistributedConfig)
}
"""For each key with options of the model, the loader, the optimizer or the strategy: the recipe's own keys for such
options."""

P = TypeVar("P", bound=PipelineSpec)


def build_pipeline(recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any], kind: type[P]) -> P:
    """See `Pipeline.from_recipe`; `kind` is its class."""
    full, given, origin = completed(recipe, overrides)
    for head, keys in _OPTIONS.items():
        for key in keys - {head}:
            if key in full[head]:
                raise RecipeError(
                    f"{origin.at(head)}: {head}.{key} is a key of the recipe itself. Set {key}=…."
                )
    try:
        pipeline = kind(full["model"], seed=full["seed"], **full["model_options"])
        pipeline = pipeline.load(**_arguments(DataConfig, full))
        if full["task"] is not None:
            task = full["task"]
            pipeline = pipeline.task(tasks.get(**({"name": task} if isinstance(task, str) else task)))
        pipeline = pipeline.transform(*(transforms.get(**entry) for entry in full["transforms"]))
        if given & keys_of(OptimizerConfig).keys():
            arguments = _arguments(OptimizerConfig, full)
            pipeline = pipeline.optimize(arguments.pop("name"), **arguments)
        if given & keys_of(DistributedConfig).keys():
            pipeline = pipeline.distribute(**_arguments(DistributedConfig, full))
    except (PlanError, DataError, StrategyError, TypeError) as error:
        raise RecipeError(f"Recipe {origin.name}: {error}") from error
    return pipeline.replace(epochs=full["epochs"], recipe=full["name"])


def _arguments(config: type[Config], full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the builder's method that creates this config."""
    arguments = {option.name: full[key] for key, option in keys_of(config).items()}
    extra = arguments.pop(config.EXTRA)
    return arguments | (extra if config is DistributedConfig else _tuples(extra))


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists to tuples, which settings and optimizers expect and JSON and YAML lack."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
