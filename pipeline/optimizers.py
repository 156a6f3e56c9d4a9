"""The optimizer and the learning-rate schedule as values; both are made when the strategy asks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ..errors import PlanError, suggest
from ..strategies import OptimizerFactory
from .sgdw import SGDW
from .stages import is_number

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgdw": SGDW,
    "adamw": torch.optim.AdamW,
}

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

    Raises:
        PlanError: naming the value that cannot be used.
    """

    optimizer: str | OptimizerFactory = "sgd"
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.1, "momentum": 0.9})
    schedule: str = "cosine"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
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
        if not is_number(self.warmup) or not 0 <= self.warmup < 1:
            raise PlanError(f"warmup={self.warmup!r} is a share of all steps; it must lie from 0 to below 1.")
        if isinstance(self.optimizer, str):
            self._try_options()

    def __reduce__(self) -> Any:  # a mapping proxy does not pickle
        return type(self), (self.optimizer, dict(self.options), self.schedule, self.warmup)

    def _try_options(self) -> None:
        for name, value in self.options.items():
            parts = value if isinstance(value, tuple | list) else (value,)
            if any(is_number(part) and not math.isfinite(part) for part in parts):  # torch takes them
                raise PlanError(f"optimize({self.optimizer!r}): {name}={value!r} must be finite.")
        known = list(inspect.signature(OPTIMIZERS[str(self.optimizer)]).parameters)[1:]
        for name in self.options:
            if name not in known:
                near = _ELSEWHERE.get(name, name)
                raise PlanError(f"optimize({self.optimizer!r}) has no option {name!r}.{suggest(near, known)}")
        try:
            self.factory([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"optimize({self.optimizer!r}) cannot use {dict(self.options)}: {error}. Give numbers as "
                f"{OPTIMIZERS[str(self.optimizer)].__name__} takes them."
            ) from None

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


class Schedule:
    """Sets the learning rate of each step of a run.

    Args:
        optimization: with the shape of the schedule.
        optimizer: whose groups' learning rates, as built, are the peak.
        steps: optimizer steps of the whole run.
    """

    def __init__(self, optimization: Optimization, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._optimization, self._optimizer, self._steps = optimization, optimizer, steps
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self.step = 0
        """The rates that were set so far."""

    @property
    def lr(self) -> float:
        """Of the first parameter group, now."""
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Sets the rate for the step that is about to be taken."""
        factor = self._optimization.lr_factor(self.step, self._steps)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        self.step += 1
