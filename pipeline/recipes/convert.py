"""Build a pipeline from a recipe, and write a pipeline as one."""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ... import strategies, transforms
from ...common.errors import DataError, PlanError, RecipeError, StrategyError
from ...common.names import name_of, title, unnamed
from ...common.options.config import Config, options_of
from ...loaders.sources import Files
from .. import tasks
from ..describe.config import DataConfig, DistributedConfig, FitOptions
from ..describe.pipeline_spec import PipelineSpec
from ..models.factories import name_of_factory
from ..optim.config import OptimizerConfig
from .presets import Completed, completed
from .schema import Origin, keys_of

P = TypeVar("P", bound=PipelineSpec)


def build_pipeline(
    recipe: str | Path | Mapping[str, Any] | Completed, overrides: Mapping[str, Any], kind: type[P]
) -> P:
    if isinstance(recipe, Completed) and overrides:
        given = ", ".join(f"{key}=" for key in overrides)
        raise RecipeError(f"Recipe {recipe.origin.name} is completed, and takes no {given} any more. Pass all at once.")
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
                where = f"{origin.at(head)}: {head}.{key}"
                raise RecipeError(f"{where} is a key of the recipe itself. Set {key}=….")


def _arguments(config: type[Config], full: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {option.name: full[key] for key, option in keys_of(config).items()}
    extra: Mapping[str, Any] = arguments.pop(config.EXTRA, {})
    return {**arguments, **extra}


def to_recipe(pipeline: PipelineSpec) -> dict[str, Any]:
    data, optimization, distribution = pipeline.data, pipeline.optimization, pipeline.distribution
    if data is None:
        raise RecipeError("The pipeline has no data, but a recipe needs some. Add .load('train.beton', …).")
    recipe: dict[str, Any] = {} if pipeline.recipe is None else {"name": pipeline.recipe}
    recipe |= {"model": _model(pipeline), "model_options": _plain("model_options", pipeline.model_options)}
    recipe |= _values(data, val=None if data.held_out else data.val)
    try:
        task = None if pipeline.goal is None else tasks.to_dict(pipeline.goal)
        entries = [transforms.to_dict(transform) for transform in pipeline.transforms]
    except PlanError as error:
        raise RecipeError(str(error)) from error
    if task is not None:
        recipe["task"] = {key: _plain(f"task: {key}", value) for key, value in task.items()}
    recipe["transforms"] = [_plain(f"transforms: {entry['name']}", entry) for entry in entries]
    if optimization is not None:
        remedy = "Or pass .optimize() the name of an optimizer, such as 'sgd', and its options."
        named = {"name": _name("optimizer", optimization.optimizer, remedy), **optimization.options}
        remedy = "Its name in a recipe is package.module:function, and its arguments are schedule_options."
        recipe |= _values(optimization, optimizer=named, schedule=_name("schedule", optimization.schedule, remedy))
    if distribution is not None:
        if callable(distribution.activation_checkpointing):
            raise RecipeError(
                "distribute(activation_checkpointing=…) is a function, which a recipe cannot contain. Pass the names "
                "of module classes, or True for the model's blocks."
            )
        options = _strategy_options(distribution)
        recipe |= _values(distribution, strategy=distribution.name, strategy_options=options)
    if pipeline.fit_options is not None:
        recipe |= _values(pipeline.fit_options)
    return recipe | {"epochs": pipeline.epochs, "seed": pipeline.seed}


def _values(config: Config, **replaced: Any) -> dict[str, Any]:
    values = {key: getattr(config, option.name) for key, option in keys_of(type(config)).items()} | replaced
    return {key: _plain(key, value) for key, value in values.items()}


def _model(pipeline: PipelineSpec) -> str:
    if isinstance(pipeline.model, nn.Module):
        raise RecipeError(
            f"The model is a {type(pipeline.model).__name__} that is already built, but a recipe names a factory. "
            "Pass the factory and its arguments to Pipeline()."
        )
    remedy = "In a recipe, it is named package.module:factory."
    return _name("model's factory", pipeline.model, remedy, name_of_factory)


def _name(role: str, target: Any, remedy: str, known: Callable[[Any], str | None] = name_of) -> str:
    name = target if isinstance(target, str) else known(target)
    if name is None:
        raise RecipeError(f"The {role} {title(target)} cannot be imported by name. {unnamed(target)} {remedy}")
    return name


def _strategy_options(how: DistributedConfig) -> Mapping[str, Any]:
    if isinstance(how.strategy, str):
        return how.options
    given: Any = how.strategy
    options: dict[str, Any] = {}
    try:
        if dataclasses.is_dataclass(given):
            plain = strategies.get(how.name)
            options = {
                field.name: getattr(given, field.name)
                for field in dataclasses.fields(given)
                if getattr(given, field.name) != getattr(plain, field.name, None)
            }
        known = strategies.get(how.name, **options) == given
    except StrategyError:
        known = False
    if not known:
        raise RecipeError(
            f"drivetrain.strategies.get({how.name!r}) cannot create the strategy {given!r:.80}, so a recipe cannot "
            "name it. Use one of drivetrain.strategies.available()."
        )
    return options


def _plain(where: str, value: Any) -> Any:
    """Return JSON types: tuples become lists, torchvision's weights their names."""
    if isinstance(value, Files):
        return value.source
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{where}.{key}", each) for key, each in value.items()}
    if isinstance(value, enum.Enum) and type(value).__name__.endswith("_Weights"):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{number}]", each) for number, each in enumerate(value)]
    finite = not isinstance(value, float) or math.isfinite(value)
    if finite and (value is None or type(value) in (bool, int, float, str)):
        return value
    raise RecipeError(
        f"{where} is {value!r:.80}, a {type(value).__name__}, which a recipe cannot contain. Use numbers, strings, "
        "true, false, null, or lists and dicts of them; or set it in a custom factory."
    )
