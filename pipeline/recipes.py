"""Recipes: plain, JSON-able dicts that name everything a pipeline needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import transforms
from ..errors import DataError, PlanError, RecipeError, StrategyError, suggest
from ..loaders.settings import IMAGENET_MEAN, IMAGENET_STD
from .builder import Pipeline
from .stages import is_whole

KEYS = {
    "description": "what the recipe is for, and what it has reached, where",
    "source": "where its values come from",
    "model": "name of the model: cifar_resnet, or any of torchvision's",
    "model_options": "arguments of the model's factory",
    "train": "training data: a .beton file, or a data set by name (cifar10:train)",
    "val": "validation data, likewise; null: none",
    "loader": "ffcv, or torch for the plain PyTorch baseline",
    "workers": "loader threads (ffcv) or processes (torch) per rank; null: one per core",
    "batch_size": "global batch, in images",
    "image_size": "side of the square images, in pixels",
    "loading": "the loader's further settings: crop, scale, padding, eval_ratio, mean, std, …",
    "transforms": "list of transforms, each {name, …options}",
    "optimizer": "{name: sgd or adamw, lr, momentum, weight_decay, …}",
    "schedule": "learning rate: cosine, linear or constant",
    "warmup": "share of all steps, 0 to 1, in which the learning rate rises",
    "strategy": "how it is distributed: single, ddp",
    "devices": "number of ranks",
    "precision": "fp32, bf16 or fp16",
    "accumulate": "microbatches per step and rank",
    "clip_norm": "largest norm of all gradients together; null: no clipping",
    "activation_checkpointing": "true: the model's blocks forget their activations; or a list of class names",
    "compile": "whether torch.compile compiles the model; or the name of its mode",
    "epochs": "passes over the training data",
    "seed": "of weights, order and augmentation",
}
"""Every key of a recipe, with its meaning. A recipe may leave out those of `DEFAULTS`."""

DEFAULTS: dict[str, Any] = {
    "description": "",
    "source": "",
    "model_options": {},
    "val": None,
    "loader": "ffcv",
    "workers": None,
    "loading": {},
    "transforms": [],
    "schedule": "cosine",
    "warmup": 0.0,
    "strategy": "single",
    "devices": 1,
    "precision": "fp32",
    "accumulate": 1,
    "clip_norm": None,
    "activation_checkpointing": False,
    "compile": False,
    "seed": 0,
}

_CIFAR_LOADING: dict[str, Any] = {
    "crop": "padded",
    "padding": 4,
    "eval_ratio": 1.0,
    "mean": [0.4914, 0.4822, 0.4465],
    "std": [0.247, 0.2435, 0.2616],
}

RECIPES: dict[str, dict[str, Any]] = {
    "baseline": {
        "description": "CIFAR-10 in plain PyTorch: torchvision data set, DataLoader, NCHW, fp32, no extras. "
        "What the other recipes are measured against.",
        "source": "the standard CIFAR augmentation (4 pixels of padding, flip) and SGD with momentum",
        "model": "cifar_resnet",
        "model_options": {"num_classes": 10, "width": 16},
        "train": "cifar10:train",
        "val": "cifar10:test",
        "loader": "torch",
        "batch_size": 256,
        "image_size": 32,
        "loading": copy.deepcopy(_CIFAR_LOADING),
        "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
        "schedule": "linear",
        "warmup": 0.25,
        "epochs": 5,
    },
    "cifar10-quickstart": {
        "description": "CIFAR-10 on two CPU cores or any GPU in a few minutes: every stage at work.",
        "source": "the baseline recipe; BlurPool arXiv:1904.11486, label smoothing arXiv:1512.00567; the "
        "triangular schedule after David Page, How to train your ResNet (2018)",
        "model": "cifar_resnet",
        "model_options": {"num_classes": 10, "width": 16},
        "train": "cifar10:train",
        "val": "cifar10:test",
        "batch_size": 256,
        "image_size": 32,
        "loading": copy.deepcopy(_CIFAR_LOADING),
        "transforms": [
            {"name": "BlurPool"},
            {"name": "ChannelsLast"},
            {"name": "LabelSmoothing", "smoothing": 0.1},
        ],
        "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
        "schedule": "linear",
        "warmup": 0.25,
        "precision": "bf16",
        "epochs": 5,
    },
    "resnet50-mild": {
        "description": "ResNet-50 on ImageNet for short runs, after Composer's 'mild' recipe, which reports "
        "75 to 78.1 % top-1 in under 60 epochs on 8 A100. Of its methods this recipe has BlurPool, "
        "channels-last, label smoothing and FFCV, not yet EMA, progressive resizing and decoupled weight "
        "decay. Give train= and val=. Not measured by us yet.",
        "source": "mosaicml/examples, blogs/resnet/recipes. Its decoupled weight decay of 5e-4 per step is, at "
        "peak, lr · wd / (1 - momentum) of coupled SGD: wd ≈ 3e-5",
        "model": "resnet50",
        "model_options": {"num_classes": 1000},
        "train": "train.beton",
        "val": "val.beton",
        "batch_size": 2048,
        "image_size": 176,
        "loading": {"scale": [0.25, 1.0], "mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)},
        "transforms": [
            {"name": "BlurPool"},
            {"name": "ChannelsLast"},
            {"name": "LabelSmoothing", "smoothing": 0.08},
        ],
        "optimizer": {"name": "sgd", "lr": 2.048, "momentum": 0.875, "weight_decay": 3e-5},
        "schedule": "cosine",
        "warmup": 0.22,
        "strategy": "ddp",
        "devices": 8,
        "precision": "bf16",
        "epochs": 36,
    },
}


def complete(recipe: str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A recipe with its overrides and every default written out.

    Raises:
        RecipeError: for an unknown name or key (with the nearest), or a key that is missing.
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise RecipeError(f"No recipe is named {recipe!r}.{suggest(recipe, RECIPES)}")
        given: dict[str, Any] = RECIPES[recipe] | {"name": recipe}
    elif isinstance(recipe, Mapping):
        given = dict(recipe)
    else:
        raise RecipeError(f"A recipe is a name or a dict, not {recipe!r:.80}.{suggest('', RECIPES)}")
    name = given.pop("name", None)
    full = dict(DEFAULTS)
    for key, value in (*given.items(), *(overrides or {}).items()):
        head, dot, inner = str(key).partition(".")
        if head not in KEYS:
            raise RecipeError(f"A recipe has no key {head!r}.{suggest(head, KEYS)}")
        if dot and not isinstance(full.get(head), Mapping):
            raise RecipeError(f"{key!r}: the recipe's {head} is not a dict; give {head}=….")
        full[head] = {**full[head], inner: value} if dot else value
    for key in KEYS:
        if key not in full:
            raise RecipeError(f"The recipe has no {key!r}: {KEYS[key]}.")
    return copy.deepcopy(full) | {"name": name}  # the table stays as it is, whatever becomes of this


def build_pipeline(recipe: str | Mapping[str, Any], overrides: Mapping[str, Any]) -> Pipeline:
    """See `Pipeline.from_recipe`."""
    full = complete(recipe, overrides)
    _check_types(full)
    loading = {key: tuple(v) if isinstance(v, list) else v for key, v in full["loading"].items()}
    optimizer = dict(full["optimizer"])
    try:
        pipeline = (
            Pipeline(full["model"], seed=full["seed"], **full["model_options"])
            .load(
                full["train"],
                full["val"],
                batch_size=full["batch_size"],
                image_size=full["image_size"],
                loader=full["loader"],
                workers=full["workers"],
                **loading,
            )
            .transform(*(transforms.get(**entry) for entry in full["transforms"]))
            .optimize(optimizer.pop("name"), schedule=full["schedule"], warmup=full["warmup"], **optimizer)
            .distribute(
                full["strategy"],
                devices=full["devices"],
                precision=full["precision"],
                accumulate=full["accumulate"],
                clip_norm=full["clip_norm"],
                activation_checkpointing=full["activation_checkpointing"],
                compile=full["compile"],
            )
        )
    except (PlanError, DataError, StrategyError, TypeError) as error:  # TypeError: an argument given twice
        raise RecipeError(f"Recipe {full['name'] or '(dict)'}: {error}") from error
    return pipeline._with(epochs=full["epochs"], recipe=full["name"])


# Numbers and names are checked by the stages that they go to; here only what decides how they get there.
_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "model_options": (Mapping,),
    "train": (str, Path),
    "val": (str, Path, type(None)),
    "strategy": (str,),
    "loading": (Mapping,),
    "transforms": (list,),
    "optimizer": (Mapping,),
}


def _check_types(full: Mapping[str, Any]) -> None:
    for key, kinds in _TYPES.items():
        if not isinstance(full[key], kinds):
            raise RecipeError(f"The recipe's {key}={full[key]!r} has the wrong type; it is: {KEYS[key]}.")
    if not is_whole(full["epochs"], 1):
        raise RecipeError(f"The recipe's epochs={full['epochs']!r} must be an integer from 1 on.")
    if "name" not in full["optimizer"]:
        raise RecipeError(f"The recipe's optimizer={dict(full['optimizer'])} needs a name: sgd or adamw.")
    for entry in full["transforms"]:
        if not isinstance(entry, Mapping) or "name" not in entry:
            raise RecipeError(f"The recipe's transform {entry!r} must be a dict with a name.")


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Overrides from the command line: `epochs=36`, `optimizer.lr=0.5`, `transforms=[]`.

    A dotted key reaches into a recipe's dict and is merged there. Values are read as JSON where they are
    JSON, else as text.

    Raises:
        RecipeError: for something that is not KEY=VALUE.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise RecipeError(f"{pair!r} is not KEY=VALUE, as in epochs=36.")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[key] = value
    return found
