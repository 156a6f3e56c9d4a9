"""The optimizers by name, and the validation of their options."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...checks import is_number
from ...errors import PlanError, suggest
from .sgdw import SGDW

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgdw": SGDW,
    "adamw": torch.optim.AdamW,
}

_ELSEWHERE = {"learning_rate": "lr", "wd": "weight_decay"}
"""Names of options in other libraries."""


def default_lr(name: str) -> float:
    """Return an optimizer's default learning rate."""
    return float(inspect.signature(OPTIMIZERS[name]).parameters["lr"].default)


def check_optimizer(optimizer: object, options: Mapping[str, Any]) -> None:
    """Raise PlanError unless `optimizer` is the name of an optimizer, or a factory without options."""
    if isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            "optimize() got an optimizer that is already built; surgery or sharding would leave it with "
            "stale parameters. Pass its name, or a function: lambda params: SGD(params, lr=0.1)."
        )
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise PlanError(f"No optimizer is named {optimizer!r}.{suggest(optimizer, OPTIMIZERS)}")
        return
    if not callable(optimizer):
        raise PlanError(f"optimize() takes the name of an optimizer or a function, not {optimizer!r:.80}.")
    if options:
        raise PlanError(f"optimize() got a factory and the options {dict(options)}. Set them in the factory.")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise PlanError for an option that the optimizer does not have, or an invalid value."""
    known = dict([*inspect.signature(OPTIMIZERS[name]).parameters.items()][1:])
    for option, value in options.items():
        if option not in known:
            near = _ELSEWHERE.get(option, option)
            raise PlanError(f"optimize({name!r}) has no option {option!r}.{suggest(near, known)}")
        numbers = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(each, float) and not math.isfinite(each) for each in numbers):  # torch accepts them
            raise PlanError(f"optimize({name!r}): {option}={value!r} must be finite.")
        allowed = _wrong_kind(value, known[option].default)
        if allowed:
            raise PlanError(f"optimize({name!r}): {option}={value!r} must be {allowed}.")
    try:
        OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"optimize({name!r}) cannot use {dict(options)}: {error}. See the documentation of "
            f"{OPTIMIZERS[name].__name__}."
        ) from None


def _wrong_kind(value: object, usual: object) -> str:
    """Return what an option must be, derived from its default, if `value` is not; else ""."""
    if isinstance(usual, bool):
        return "" if isinstance(value, bool) else "True or False"
    if isinstance(usual, int | float):
        return "" if is_number(value) or isinstance(value, torch.Tensor) else "a number"
    if isinstance(usual, tuple):
        fits = isinstance(value, tuple | list) and len(value) == len(usual)
        fits = fits and not any(map(_wrong_kind, value, usual))  # type: ignore[call-overload]
        return "" if fits else f"{len(usual)} numbers"
    if usual is None:  # a choice of implementation; None: torch's
        return "" if value is None or isinstance(value, bool) else "True, False or None"
    return ""
