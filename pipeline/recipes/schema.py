"""The one schema of recipes: every key with its meaning, its default, and the kind of value it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checks import is_flag, is_number, is_whole
from ...errors import RecipeError, suggest

KEYS = {
    "description": "what the recipe is for",
    "source": "the publication that its values are from",
    "published": "what the source has reached with them, on what",
    "measured": "what Drivetrain's authors have measured, on what",
    "notes": "for single values: where they are from, or how they differ from the source; {key: text}",
    "model": "name of the model: one of Drivetrain's or torchvision's, or package.module:factory",
    "model_options": "arguments of the model's factory; another model needs its own: model_options={…}",
    "train": "training data: a .beton file (its path is relative to the working directory, not to the recipe's file), "
    "or a data set by name (cifar10:train)",
    "val": "validation data, likewise; null: none",
    "loader": "ffcv, or torch for the plain PyTorch baseline",
    "workers": "loader threads (ffcv) or processes (torch) per rank; null: one per core",
    "batch_size": "global batch, in images",
    "image_size": "side of the square images, in pixels",
    "eval_image_size": "side of the images in evaluation, in pixels; null: image_size",
    "loading": "the loader's further settings: crop, scale, padding, eval_ratio, mean, std, …",
    "transforms": "list of transforms, each {name, …options}",
    "optimizer": "{name: sgd, sgdw or adamw, lr, momentum, weight_decay, …}",
    "schedule": "learning rate: cosine, linear or constant",
    "warmup": "share of all steps, 0 to 1, in which the learning rate rises",
    "base_batch_size": "global batch, in images, that optimizer.lr was chosen for; null: the recipe's own batch_size, "
    "before it is replaced",
    "scale_lr": "whether optimizer.lr is scaled from base_batch_size to batch_size: in proportion for sgd and sgdw, "
    "with the square root for adamw",
    "strategy": "how it is distributed: a name of drivetrain.strategies.available()",
    "strategy_options": "the strategy's own options, such as {device: cpu}",
    "devices": "number of ranks",
    "precision": "fp32, bf16 or fp16",
    "accumulate": "microbatches per step and rank",
    "clip_norm": "largest norm of all gradients together; null: no clipping",
    "activation_checkpointing": "true: the model's blocks forget their activations; or a list of class names",
    "compile": "whether torch.compile compiles the model; or the name of its mode",
    "cudnn_benchmark": "on GPUs: whether cuDNN measures its convolutions and takes the fastest; null: where images "
    "keep their size",
    "matmul_precision": "on GPUs: highest, high (TF32) or medium, of float32 matrix products; null: as torch has it",
    "epochs": "passes over the training data; null: fit(epochs=…) says it",
    "seed": "of weights, order and augmentation",
}
"""Every key of a recipe, with its meaning. A recipe may leave out those of `DEFAULTS`, and may have a `name`."""

DEFAULTS: dict[str, Any] = {
    "description": "",
    "source": "",
    "published": "",
    "measured": "",
    "notes": {},
    "model_options": {},
    "val": None,
    "loader": "ffcv",
    "workers": None,
    "eval_image_size": None,
    "loading": {},
    "transforms": [],
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "schedule": "cosine",
    "warmup": 0.0,
    "base_batch_size": None,
    "scale_lr": False,
    "strategy": "single",
    "strategy_options": {},
    "devices": 1,
    "precision": "fp32",
    "accumulate": 1,
    "clip_norm": None,
    "activation_checkpointing": False,
    "compile": False,
    "cudnn_benchmark": None,
    "matmul_precision": None,
    "epochs": None,
    "seed": 0,
}


@dataclass(frozen=True)
class Origin:
    """Where a recipe comes from, for messages.

    Attributes:
        name: of the recipe or its file.
        lines: of a file: the number of the line of each key.
    """

    name: str = "(dict)"
    lines: Mapping[str, int] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """The beginning of a message about a key."""
        line = self.lines.get(key.partition(".")[0])
        return f"Recipe {self.name}" + (f", line {line}" if line is not None else "")


def _text(value: object) -> bool:
    return isinstance(value, str)


def _path(value: object) -> bool:
    return isinstance(value, str | Path) and value != ""


def _mapping(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _notes(value: object) -> bool:
    return isinstance(value, Mapping) and _texts([*value, *value.values()])


def _list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _whole(value: object) -> bool:
    return is_whole(value, 0)


def _positive(value: object) -> bool:
    return is_whole(value, 1)


def _none(value: object) -> bool:
    return value is None


_NAMES: dict[Callable[[object], bool], str] = {
    _text: "text",
    _path: "text that is not empty",
    is_flag: "true or false",
    _mapping: "a dict",
    _notes: "a dict of texts",
    _texts: "a list of texts",
    _list: "a list",
    is_whole: "a whole number",
    _whole: "a whole number from 0 on",
    _positive: "a whole number from 1 on",
    is_number: "a number",
    _none: "null",
}
"""The kinds of values."""

_KINDS: dict[str, tuple[Callable[[object], bool], ...]] = {
    **dict.fromkeys(("description", "source", "published", "measured", "model"), (_text,)),
    **dict.fromkeys(("loader", "schedule", "strategy", "precision"), (_text,)),
    **dict.fromkeys(("model_options", "loading", "optimizer", "strategy_options"), (_mapping,)),
    **dict.fromkeys(("batch_size", "image_size", "devices", "accumulate"), (_positive,)),
    **dict.fromkeys(("eval_image_size", "epochs", "base_batch_size"), (_positive, _none)),
    "notes": (_notes,),
    "train": (_path,),
    "val": (_path, _none),
    "workers": (is_whole, _none),
    "transforms": (_list,),
    "warmup": (is_number,),
    "clip_norm": (is_number, _none),
    "activation_checkpointing": (is_flag, _texts),
    "compile": (is_flag, _text),
    "cudnn_benchmark": (is_flag, _none),
    "matmul_precision": (_text, _none),
    "scale_lr": (is_flag,),
    "seed": (_whole,),
}
"""What each key's value may be. Ranges, names and options are checked by the stages they go to."""


def check_key(key: str, origin: Origin) -> None:
    """Raises RecipeError for a key that no recipe has, with the nearest one. A dotted key is its first part's."""
    head = key.partition(".")[0]
    if head not in KEYS:
        raise RecipeError(f"{origin.at(head)}: a recipe has no key {head!r}.{suggest(head, KEYS)}")


def check_values(full: Mapping[str, Any], origin: Origin) -> None:
    """Holds a complete recipe to the schema.

    Raises:
        RecipeError: naming the key, its value, and what it may be.
    """
    for key in KEYS:
        if key in full:
            _check_kind(key, full[key], origin)
    for key, meaning in KEYS.items():
        if key not in full:
            raise RecipeError(f"Recipe {origin.name}: it has no {key!r}: {meaning}.")
    for note in full["notes"]:
        check_key(note, origin)
    name = full.get("name")
    if not (name is None or isinstance(name, str)):
        raise RecipeError(f"{origin.at('name')}: name={name!r:.200} must be text: what the recipe is called.")
    if not isinstance(full["optimizer"].get("name"), str):
        raise RecipeError(
            f"{origin.at('optimizer')}: optimizer={dict(full['optimizer'])} needs a name: sgd, sgdw or adamw."
        )
    for entry in full["transforms"]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise RecipeError(
                f"{origin.at('transforms')}: the transform {entry!r:.200} must be a dict with a name."
            )
    _check_texts_that_are_numbers(full, origin)


def _check_kind(key: str, value: object, origin: Origin) -> None:
    kinds = _KINDS[key]
    if not any(kind(value) for kind in kinds):
        allowed = " or ".join(_NAMES[kind] for kind in kinds)
        hint = "" if _text in kinds else _number_hint(value)
        raise RecipeError(f"{origin.at(key)}: {key}={value!r:.200} must be {allowed}: {KEYS[key]}.{hint}")


def _check_texts_that_are_numbers(full: Mapping[str, Any], origin: Origin) -> None:
    """No option of an optimizer, a loader or a transform is a number written as text; some would take it silently."""
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
        return " A recipe's numbers are finite."
    try:
        float(value)
    except ValueError:
        return ""
    return f" Write the number without quotes: {value.strip()}."
