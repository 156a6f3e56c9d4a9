"""What `Strategy.prepare` is told about a training step: the same options, with the same meaning, everywhere."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypedDict, get_args

from ..errors import StrategyError, suggest

Precision = Literal["fp32", "bf16"]


class PrepareOptions(TypedDict, total=False):
    """Keyword arguments of `Strategy.prepare`; `Options` documents and checks them."""

    precision: Precision
    clip_norm: float | None
    accumulate: int


@dataclass(frozen=True)
class Options:
    """What one optimizer step does; see each field.

    Raises:
        StrategyError: for a value that means nothing.
    """

    precision: Precision = "fp32"
    """`"fp32"`, or `"bf16"`: autocast over fp32 weights."""
    clip_norm: float | None = None
    """Largest 2-norm of all gradients together; None leaves them alone."""
    accumulate: int = 1
    """Microbatches per optimizer step."""

    @classmethod
    def of(cls, given: dict[str, Any] | PrepareOptions) -> Self:
        """The options that `prepare` was given, checked.

        Raises:
            StrategyError: also for one that does not exist.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise StrategyError(f"prepare: there is no option {name!r}.{suggest(name, known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise StrategyError(
                f"prepare: precision={self.precision!r} is not known; use one of {get_args(Precision)}."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise StrategyError(
                f"prepare: clip_norm={self.clip_norm!r} must be above 0; use None to leave gradients alone."
            )
        if self.accumulate < 1:
            raise StrategyError(f"prepare: accumulate={self.accumulate!r} must be 1 or more microbatches.")
