"""The optimizer and the learning-rate schedule as values; both are made when the strategy asks."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...checks import is_number, is_whole
from ...errors import PlanError, suggest
from ...strategies import OptimizerFactory
from .config import Arguments, changed
from .frozen import FrozenDict
from .sgdw import SGDW

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgdw": SGDW,
    "adamw": torch.optim.AdamW,
}

ADAPTIVE = ("adamw",)
"""Those whose step does not grow with the gradient, and whose learning rate so follows the root of the batch size."""

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
"""The learning rate's factor by the progress after warm-up, from 0 to 1."""

_ELSEWHERE = {"learning_rate": "lr", "wd": "weight_decay"}
"""What other libraries call an option."""


@dataclass(frozen=True)
class Optimization:
    """Which optimizer, with which options, on which schedule.

    Attributes:
        optimizer: a name in `OPTIMIZERS`, or a factory `parameters -> Optimizer`.
        options: the optimizer's own arguments (`lr`, `momentum`, `weight_decay`, …).
        schedule: a name in `SCHEDULES`; the learning rate falls from its peak to the schedule's end.
        warmup: share of all steps, 0 to 1, in which the learning rate rises linearly to its peak.
        base_batch_size: the global batch, in images, that the learning rate was chosen for; None: the pipeline's.
        scale_lr: whether the learning rate is scaled from that batch to the pipeline's; see `scaling`.

    Raises:
        PlanError: naming the value that cannot be used.
    """

    optimizer: str | OptimizerFactory = "sgd"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1, "momentum": 0.9})
    schedule: str = "cosine"
    warmup: float = 0.0
    base_batch_size: int | None = None
    scale_lr: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", FrozenDict(self.options))
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise PlanError(
                "optimize() got an optimizer that is already built; surgery or sharding would leave it with "
                "stale parameters. Give its name, or a function: lambda params: SGD(params, lr=0.1)."
            )
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise PlanError(f"No optimizer is named {self.optimizer!r}.{suggest(self.optimizer, OPTIMIZERS)}")
        if not isinstance(self.optimizer, str) and not callable(self.optimizer):
            raise PlanError(
                f"optimize() takes the name of an optimizer or a function, not {self.optimizer!r:.80}."
            )
        if not isinstance(self.optimizer, str) and self.options:
            raise PlanError(
                f"optimize() got a factory and the options {dict(self.options)}; put them into it."
            )
        if not isinstance(self.schedule, str) or self.schedule not in SCHEDULES:
            raise PlanError(
                f"No schedule is named {self.schedule!r}.{suggest(str(self.schedule), SCHEDULES)}"
            )
        if not is_number(self.warmup, "[0, 1)"):
            raise PlanError(f"warmup={self.warmup!r} is a share of all steps; it must lie from 0 to below 1.")
        self._check_scaling()
        if isinstance(self.optimizer, str):
            self._try_options()

    def _check_scaling(self) -> None:
        if self.base_batch_size is not None and not is_whole(self.base_batch_size, 1):
            raise PlanError(
                f"base_batch_size={self.base_batch_size!r} must be a positive integer: the batch size, in images, that "
                "the learning rate was chosen for."
            )
        if not isinstance(self.scale_lr, bool):
            raise PlanError(
                f"scale_lr={self.scale_lr!r} must be True or False; the batch size to scale from is base_batch_size."
            )
        if self.scale_lr and self.base_batch_size is None:
            raise PlanError(
                "scale_lr=True needs the batch size that the learning rate was chosen for: give base_batch_size=…."
            )
        if self.scale_lr and not isinstance(self.optimizer, str):
            raise PlanError(
                "scale_lr=True needs an optimizer with a name, such as 'sgd'; scale lr in your factory."
            )

    def arguments(self) -> Arguments:
        """The arguments of `optimize()` that give this."""
        name = repr(self.optimizer) if isinstance(self.optimizer, str) else _name(self.optimizer)
        return [name], dict(self.options) | changed(self, "optimizer", "options")

    def _try_options(self) -> None:
        name = str(self.optimizer)
        known = dict([*inspect.signature(OPTIMIZERS[name]).parameters.items()][1:])
        for option, value in self.options.items():
            if option not in known:
                near = _ELSEWHERE.get(option, option)
                raise PlanError(f"optimize({name!r}) has no option {option!r}.{suggest(near, known)}")
            parts = value if isinstance(value, tuple | list) else (value,)
            if any(isinstance(part, float) and not math.isfinite(part) for part in parts):  # torch takes them
                raise PlanError(f"optimize({name!r}): {option}={value!r} must be finite.")
            allowed = _wrong_kind(value, known[option].default)
            if allowed:
                raise PlanError(f"optimize({name!r}): {option}={value!r} must be {allowed}.")
        try:
            self.factory([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError, RuntimeError) as error:
            raise PlanError(
                f"optimize({name!r}) cannot use {dict(self.options)}: {error}. Give numbers as "
                f"{OPTIMIZERS[name].__name__} takes them."
            ) from None

    @property
    def lr(self) -> float:
        """The peak of the learning rate as it was given, or the optimizer's default."""
        usual = inspect.signature(OPTIMIZERS[str(self.optimizer)]).parameters["lr"].default
        return float(self.options.get("lr", usual))

    @property
    def scaling(self) -> str:
        """How the learning rate follows the batch size: `"linear"` (SGD: Goyal et al. 2017, arXiv:1706.02677) or
        `"square root"` (Adam and its kind: Malladi et al. 2022, arXiv:2205.10287)."""
        return "square root" if self.optimizer in ADAPTIVE else "linear"

    def lr_for(self, batch_size: int) -> float:
        """The learning rate scaled from the base batch size to this one."""
        ratio = batch_size / (self.base_batch_size or batch_size)
        return self.lr * (math.sqrt(ratio) if self.optimizer in ADAPTIVE else ratio)

    def at(self, batch_size: int) -> Optimization:
        """What trains with batches of this size: the learning rate is scaled, if it is to be."""
        if not self.scale_lr:
            return self
        options = {**self.options, "lr": self.lr_for(batch_size)}
        return dataclasses.replace(self, options=options, base_batch_size=batch_size)

    def note(self, batch_size: int) -> str:
        """What the plan states about the learning rate and the batch size; "" where they were chosen together."""
        base = self.base_batch_size
        if base is None or not isinstance(self.optimizer, str) or (base == batch_size and not self.scale_lr):
            return ""
        given = f"lr={self.lr:g} is for batches of {base:,} images"
        scaled = f"{self.lr_for(batch_size):.4g}"
        if self.scale_lr:
            return f"{given}; scaled to {scaled} for {batch_size:,} ({self.scaling}, scale_lr)"
        ratio = base / batch_size
        per_image = f"{ratio:.3g} times" if ratio >= 1 else f"1/{1 / ratio:.3g} of"
        return (
            f"caution: {given}; with {batch_size:,} the learning rate per image is {per_image} that. "
            f"scale_lr=True makes it {scaled} ({self.scaling})"
        )

    def factory(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Builds the optimizer; strategies call it when the parameters are the final ones."""
        if isinstance(self.optimizer, str):
            return OPTIMIZERS[self.optimizer](parameters, **self.options)
        return self.optimizer(parameters)

    def lr_factor(self, step: int, steps: int) -> float:
        """The factor on the learning rate at step `step` of `steps`, both counted from 0."""
        warm = self.warmup * steps
        if step < warm:
            return (step + 1) / (warm + 1)
        return SCHEDULES[self.schedule]((step - warm) / max(steps - warm, 1))

    def describe(self) -> str:
        """The optimizer and its options in one line."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        name = self.optimizer if isinstance(self.optimizer, str) else "your factory"
        warm = f", warm-up {self.warmup:.0%} of all steps" if self.warmup else ""
        return (
            f"{name} ({options}), {self.schedule} schedule{warm}"
            if options
            else f"{name}, {self.schedule}{warm}"
        )


def _wrong_kind(value: object, usual: object) -> str:
    """What an option must be, by its default, where `value` is not; else ""."""
    if isinstance(usual, bool):
        return "" if isinstance(value, bool) else "True or False"
    if isinstance(usual, int | float):
        return "" if is_number(value) or isinstance(value, torch.Tensor) else "a number"
    if isinstance(usual, tuple):
        fits = isinstance(value, tuple | list) and len(value) == len(usual)
        fits = fits and not any(map(_wrong_kind, value, usual))  # type: ignore[call-overload]
        return "" if fits else f"{len(usual)} numbers"
    if usual is None:  # an implementation to choose, or torch's choice
        return "" if value is None or isinstance(value, bool) else "True, False or None"
    return ""


def _name(factory: object) -> str:
    return getattr(factory, "__qualname__", type(factory).__qualname__)
