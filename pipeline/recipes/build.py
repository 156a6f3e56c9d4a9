"""From a recipe to a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ... import transforms
from ...errors import DataError, PlanError, RecipeError, StrategyError
from ..spec.pipeline_spec import PipelineSpec
from .presets import completed

_OPTIMIZED = ("schedule", "warmup", "base_batch_size", "scale_lr")
_DISTRIBUTED = (
    "devices", "precision", "accumulate", "clip_norm", "activation_checkpointing", "compile", "cudnn_benchmark",
    "matmul_precision",
)  # fmt: skip
_LOADED = ("batch_size", "image_size", "eval_image_size", "loader", "workers")
_KEYS_OF_THEIR_OWN = {
    "model_options": ("model", "seed"),
    "loading": ("train", "val", *_LOADED),
    "optimizer": _OPTIMIZED,
    "strategy_options": ("strategy", *_DISTRIBUTED),
}
"""What the options of a stage cannot hold, because the recipe itself has a key for it."""


P = TypeVar("P", bound=PipelineSpec)


def build_pipeline(recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any], kind: type[P]) -> P:
    """See `Pipeline.from_recipe`; `kind` is its class."""
    full, asked, origin = completed(recipe, overrides)
    for head, keys in _KEYS_OF_THEIR_OWN.items():
        for key in keys:
            if key in full[head]:
                raise RecipeError(
                    f"{origin.at(head)}: {head}.{key} is a key of the recipe itself; give {key}=…."
                )
    try:
        pipeline = _loaded(full, kind).transform(*(transforms.get(**entry) for entry in full["transforms"]))
        if asked & {"optimizer", *_OPTIMIZED}:
            options = _tuples(full["optimizer"])
            pipeline = pipeline.optimize(
                options.pop("name"), **{key: full[key] for key in _OPTIMIZED}, **options
            )
        if asked & {"strategy", "strategy_options", *_DISTRIBUTED}:
            pipeline = pipeline.distribute(
                full["strategy"], **{key: full[key] for key in _DISTRIBUTED}, **full["strategy_options"]
            )
    except (PlanError, DataError, StrategyError, TypeError) as error:
        raise RecipeError(f"Recipe {origin.name}: {error}") from error
    return pipeline.replace(epochs=full["epochs"], recipe=full["name"])


def _loaded(full: Mapping[str, Any], kind: type[P]) -> P:
    return kind(full["model"], seed=full["seed"], **full["model_options"]).load(
        full["train"], full["val"], **{key: full[key] for key in _LOADED}, **_tuples(full["loading"])
    )


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON and YAML know no tuples, which settings and optimizers want."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
