"""Options of a training step, shared by all strategies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypedDict, get_args

import torch

from ..common.checks import check_number, check_whole, make_plain
from ..common.errors import StrategyError, suggest
from .common.module_filter import ModuleFilter, check_filter

Precision = Literal["fp32", "bf16", "fp16"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of computation for each precision below fp32."""


def check_precision(value: object, *also: str) -> None:
    """Raise StrategyError unless `value` is a `Precision`, or one of the names in `also`."""
    known = (*get_args(Precision), *also)
    if value not in known:
        raise StrategyError(f"precision={value!r:.80} is unknown.{suggest(str(value), known)}")


class PrepareOptions(TypedDict, total=False):
    """Keyword arguments of `Strategy.prepare`; `Options` documents and checks them."""

    precision: Precision
    clip_norm: float | None
    accumulate: int
    activation_checkpointing: ModuleFilter
    compile: bool | str
    sync_batchnorm: bool


@dataclass(frozen=True)
class Options:
    """Options of one optimizer step; see each field.

    Raises:
        StrategyError: for an invalid value.

    Example::

        >>> Options(precision="bf16", accumulate=4).accumulate
        4
    """

    precision: Precision = "fp32"
    """`"fp32"`; or `"bf16"` or `"fp16"`: autocast over fp32 weights, for fp16 with a dynamic loss scale
    (`torch.amp.GradScaler`), which skips steps whose gradients overflow."""
    clip_norm: float | None = None
    """Maximum 2-norm of all gradients together. Default None: no clipping."""
    accumulate: int = 1
    """Number of microbatches per optimizer step."""
    activation_checkpointing: ModuleFilter = False
    """Modules that keep only their input and run forward again in the backward; see `module_filter.ModuleFilter`."""
    compile: bool | str = False
    """Whether to compile the model with `torch.compile`, in place: no name changes. A string is its `mode`, such as
    `"max-autotune"`. Default False, because the first step then takes a minute or more."""
    sync_batchnorm: bool = False
    """Whether BatchNorm layers compute their statistics over the global batch, on all ranks; see
    `sync_batch_norm.sync_batch_norms`. Default False: over this rank's microbatch, which needs no messages."""

    @classmethod
    def of(cls, given: dict[str, Any] | PrepareOptions) -> Self:
        """Return the checked options from the arguments of `prepare`.

        Raises:
            StrategyError: for an invalid or unknown option.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise StrategyError(f"prepare: unknown option {name!r}.{suggest(name, known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        make_plain(self)
        check_precision(self.precision)
        norm: Any = self.clip_norm
        if norm is not None:
            check_number("clip_norm", norm, StrategyError, "(0, inf)", also=", or None for no clipping")
        check_whole("accumulate", self.accumulate, StrategyError, 1, also=" of microbatches")
        if not isinstance(self.compile, bool | str):
            raise StrategyError(f"compile={self.compile!r} must be True, False, or the name of a mode.")
        modes = torch._inductor.list_mode_options() if isinstance(self.compile, str) else {}
        if isinstance(self.compile, str) and self.compile not in modes:
            raise StrategyError(f"compile has no mode {self.compile!r}.{suggest(self.compile, modes)}")
        check_filter(self.activation_checkpointing, "activation_checkpointing")
        self._check_sync_batchnorm()

    def _check_sync_batchnorm(self) -> None:
        if not isinstance(self.sync_batchnorm, bool):
            raise StrategyError(f"sync_batchnorm={self.sync_batchnorm!r} must be True or False.")
        if self.sync_batchnorm and self.accumulate > 1:
            raise StrategyError(
                f"sync_batchnorm=True cannot be combined with accumulate={self.accumulate}: the statistics of a step "
                f"need every layer's inputs from all of its microbatches at once, and so the memory that accumulate "
                f"saves. Use accumulate=1 with activation_checkpointing=True, which saves memory too, or more ranks; "
                f"or GroupNorm, which does not depend on the batch."
            )
