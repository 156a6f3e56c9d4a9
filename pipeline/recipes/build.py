"""Build a pipeline from a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ... import transforms
from ...common.errors import DataError, PlanError, RecipeError, StrategyError
from ...common.options.config import Config, options_of
from ..describe.config import DataConfig, DistributedConfig, FitOptions
from ..describe.pipeline_spec import PipelineSpec
from ..optim.config import OptimizerConfig
from ..tasks import registry as tasks
from .presets import Completed, completed
from .schema import Origin, keys_of

P = TypeVar("P", bound=PipelineSpec)


def build_pipeline(
    recipe: str | Path | Mapping[str, Any] | Completed, overrides: Mapping[str, Any], kind: type[P]
) -> P:
    """See `Pipeline.from_recipe`; `kind` is its class."""
    made = recipe if isinstance(recipe, Completed) else completed(recipe, overrides)
    full, origin = made.values, made.origin
    _check_options(full, origin)
    try:
        pipeline = kind(full["model"], seed=full["seed"], **full["model_options"])
        pipeline = pipeline.load(**_arguments(DataConfig, full))
        if full["task"] is not None:
            task = full["task"]
            pipeline = pipeline.task(tasks.get(**({"name": task} if isinstance(task, str) else task)))
        pipeline = pipeline.transform(*(transforms.get(**entry) for entry in full["transforms"]))
        if made.sets(OptimizerConfig):
            arguments = _arguments(OptimizerConfig, full)
            pipeline = pipeline.optimize(arguments.pop("name"), **arguments)
        if made.sets(DistributedConfig):
            pipeline = pipeline.distribute(**_arguments(DistributedConfig, full))
        if made.sets(FitOptions):
            pipeline = pipeline.replace(fit_options=FitOptions(**_arguments(FitOptions, full)))
    except (PlanError, DataError, StrategyError, TypeError) as error:
        raise RecipeError(f"Recipe {origin.name}: {error}") from error
    return pipeline.replace(epochs=full["epochs"], recipe=full["name"])


def _check_options(full: Mapping[str, Any], origin: Origin) -> None:
    """Reject the recipe's own keys among the options of the model, the loader, the optimizer or the strategy."""
    own = {"model_options": {"model", "seed"}}
    for config in (DataConfig, OptimizerConfig, DistributedConfig):
        own[options_of(config)[config.EXTRA].key] = {*keys_of(config)}
    for head, keys in own.items():
        for key in keys - {head}:
            if key in full[head]:
                raise RecipeError(
                    f"{origin.at(head)}: {head}.{key} is a key of the recipe itself. Set {key}=…."
                )


def _arguments(config: type[Config], full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the method or class that makes this config."""
    arguments = {option.name: full[key] for key, option in keys_of(config).items()}
    extra: Mapping[str, Any] = arguments.pop(config.EXTRA, {})
    return {**arguments, **extra}
