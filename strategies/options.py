"""What `Strategy.prepare` is told about a training step: the same options, with the same meaning, everywhere."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypedDict, get_args

import torch

from ..checks import check_number, check_whole, make_plain
from ..errors import StrategyError, suggest
from .common.module_filter import Policy, check_policy

Precision = Literal["fp32", "bf16", "fp16"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The type that is computed in, for each precision below fp32."""


class PrepareOptions(TypedDict, total=False):
    """Keyword arguments of `Strategy.prepare`; `Options` documents and checks them."""

    precision: Precision
    clip_norm: float | None
    accumulate: int
    activation_checkpointing: Policy
    compile: bool | str


@dataclass(frozen=True)
class Options:
    """What one optimizer step does; see each field.

    Raises:
        StrategyError: for a value that means nothing.
    """

    precision: Precision = "fp32"
    """`"fp32"`; or `"bf16"` or `"fp16"`: autocast over fp32 weights, for fp16 with a loss scale that finds itself
    (`torch.amp.GradScaler`): a step whose gradients overflow is left out."""
    clip_norm: float | None = None
    """Largest 2-norm of all gradients together; None leaves them alone."""
    accumulate: int = 1
    """Microbatches per optimizer step."""
    activation_checkpointing: Policy = False
    """Modules that keep their input only and run forward again in the backward; see `policy.Policy`."""
    compile: bool | str = False
    """Whether `torch.compile` compiles the model, in place: no name changes. A string is its `mode`, such as
    `"max-autotune"`. False, because the first step then takes a minute or more."""

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
        make_plain(self)
        if self.precision not in get_args(Precision):
            known = suggest(str(self.precision), get_args(Precision))
            raise StrategyError(f"precision={self.precision!r} is not known.{known}")
        norm: Any = self.clip_norm
        if norm is not None:
            check_number(
                "clip_norm", norm, StrategyError, "(0, inf)", also=", or None to leave gradients alone"
            )
        check_whole("accumulate", self.accumulate, StrategyError, 1, also=" of microbatches")
        if not isinstance(self.compile, bool | str):
            raise StrategyError(f"compile={self.compile!r} must be True, False, or the name of a mode.")
        modes = torch._inductor.list_mode_options() if isinstance(self.compile, str) else {}
        if isinstance(self.compile, str) and self.compile not in modes:
            raise StrategyError(f"compile has no mode {self.compile!r}.{suggest(self.compile, modes)}")
        check_policy(self.activation_checkpointing, "activation_checkpointing")
