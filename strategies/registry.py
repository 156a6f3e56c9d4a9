"""The strategies by name: `get` makes one, `available` lists them all."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from ..errors import MissingExtra, StrategyError, suggest
from .base import Strategy

# name -> (file, class), and arguments of the class that the name stands for. Its others are the strategy's options.
STRATEGIES: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]] = {
    "single": ("single", "Single"),
    "ddp": ("ddp", "DDP"),
    "fsdp": ("fsdp", "FSDP"),
    "fsdp_grad_op": ("fsdp", "FSDPGradOp"),
    "fsdp_cpu_offload": ("fsdp", "FSDPCPUOffload"),
    "hsdp": ("fsdp", "HSDP"),
    "deepspeed": ("deepspeed", "DeepSpeed"),
    "deepspeed_stage_1": ("deepspeed", "DeepSpeed", {"stage": 1}),
    "deepspeed_stage_1_offload": ("deepspeed", "DeepSpeed", {"stage": 1, "offload": "cpu"}),
    "deepspeed_stage_2": ("deepspeed", "DeepSpeed", {"stage": 2}),
    "deepspeed_stage_2_offload": ("deepspeed", "DeepSpeed", {"stage": 2, "offload": "cpu"}),
    "deepspeed_stage_3": ("deepspeed", "DeepSpeed", {"stage": 3}),
    "deepspeed_stage_3_offload": ("deepspeed", "DeepSpeed", {"stage": 3, "offload": "cpu"}),
    "deepspeed_stage_3_offload_nvme": ("deepspeed", "DeepSpeed", {"stage": 3, "offload": "nvme"}),
}


def get(strategy: str | Strategy, **options: Any) -> Strategy:
    """A strategy by its name, or the given strategy object itself.

    Args:
        strategy: a name of `available()`, or an object with a strategy's `check` and `prepare`.
        options: the strategy's own options, for a name only: `get("ddp", device="cpu")`.

    Raises:
        StrategyError: for an unknown name or option, or something that is no strategy.
    """
    if isinstance(strategy, str):
        return _make(strategy, options)
    if isinstance(strategy, type):
        raise StrategyError(
            f"strategies.get: {strategy.__name__} is a class; pass an object, {strategy.__name__}(...)."
        )
    missing = [part for part in ("name", "summary", "check", "prepare") if not hasattr(strategy, part)]
    if missing:
        raise StrategyError(
            f"strategies.get: a {type(strategy).__name__} is no strategy, it has no {', '.join(missing)}. "
            f"Pass a Strategy object or a name.{suggest('', STRATEGIES)}"
        )
    if options:
        raise StrategyError(
            f"strategies.get: options {sorted(options)} were given beside a finished {strategy.name!r} "
            f"strategy; give them to its constructor, or pass the name {strategy.name!r}."
        )
    return strategy


def _make(name: str, options: dict[str, Any]) -> Strategy:
    if name not in STRATEGIES:
        raise StrategyError(f"strategies.get: unknown strategy {name!r}.{suggest(name, STRATEGIES)}")
    file, class_name, *presets = STRATEGIES[name]
    preset: dict[str, Any] = presets[0] if presets else {}
    kind = getattr(importlib.import_module(f".{file}", __package__), class_name)
    known = inspect.signature(kind).parameters.keys() - preset.keys()
    for option in options:
        if option not in known:
            raise StrategyError(
                f"strategies.get: strategy {name!r} has no option {option!r}.{suggest(option, known)}"
            )
    return cast(Strategy, kind(**preset, **options))


@dataclass(frozen=True)
class StrategyRow:
    """One line of `available()`."""

    name: str
    summary: str
    runs_here: bool
    """Whether it can run in this installation and on this machine, on at least one device."""
    why_not: str
    """The reason and remedy if it cannot run here, else empty."""


class StrategyTable(list[StrategyRow]):
    """The rows of `available()`, which print as an aligned table."""

    def __init__(self, rows: Iterable[StrategyRow]) -> None:
        super().__init__(rows)

    def __repr__(self) -> str:
        width = max((len(row.name) for row in self), default=0)
        return "\n".join(
            f"{row.name:<{width}}  {'yes' if row.runs_here else 'no '}  {row.summary}"
            + ("" if row.runs_here else f"  [{row.why_not}]")
            for row in self
        )


def available() -> StrategyTable:
    """Every strategy by name, with whether it can run here and why not. Prints as a table."""
    return StrategyTable(_row(name) for name in STRATEGIES)


def _row(name: str) -> StrategyRow:
    strategy = get(name)
    try:
        strategy.check(devices=1)
    except (StrategyError, MissingExtra) as error:
        return StrategyRow(name, strategy.summary, False, str(error))
    return StrategyRow(name, strategy.summary, True, "")
