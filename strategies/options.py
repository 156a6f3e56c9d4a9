"""Options of a training step, shared by all strategies. torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypedDict

from ..common.checks import is_number
from ..common.errors import DrivetrainError, StrategyError, suggest
from ..common.options.config import FLAG, IN_WORDS, TEXT, TEXTS, Check, Config, Kind, Positive, Within

if TYPE_CHECKING:
    import torch

    from .common.blocks import ModuleFilter

REGIONS = "regions"
FRACTION = Kind(lambda value: is_number(value, "(0, 1)"), "a fraction in (0, 1)")
Precision = Literal["fp32", "bf16", "fp16"]


def half_dtype(precision: Precision) -> torch.dtype:
    import torch

    return torch.bfloat16 if precision == "bf16" else torch.float16


def _check_mode(_: str, value: bool | str) -> None:
    if isinstance(value, str):
        import torch

        modes = [REGIONS, *torch._inductor.list_mode_options()]
        if value not in modes:
            raise StrategyError(f"compile has no mode {value!r}.{suggest(value, modes)}")


@dataclass(frozen=True, kw_only=True)
class StepOptions(Config):
    """What `Pipeline.distribute` and `Strategy.prepare` share."""

    error: ClassVar[type[DrivetrainError]] = StrategyError

    accumulate: Annotated[Positive, IN_WORDS] = 1
    """Microbatches per step and rank."""
    clip_norm: Annotated[float | None, Within("(0, inf)")] = None
    """Maximum norm of all gradients together; None: no clipping."""
    activation_checkpointing: Annotated[
        ModuleFilter | float,
        FLAG,
        Kind(TEXTS.fits, "a list of class names"),
        FRACTION,
        Kind(callable, "a function of name and module", json=False),
        IN_WORDS,
    ] = False
    """Modules that recompute their activations in the backward pass: True for the model's blocks, or a list of class
    names. Or a function of name and module. They keep only their input, and run forward again in the backward. Or, with
    `compile`, a fraction in (0, 1): the part of the activations' memory that the compiler may use. It recomputes what
    costs least until they fit: near 1, what it recomputes anyway; near 0, nearly all (torch's
    `activation_memory_budget`)."""
    compile: Annotated[bool | str, FLAG, Kind(TEXT.fits, "the name of a mode"), Check(_check_mode), IN_WORDS] = False
    """Whether to compile the model in place with torch.compile; or the name of a mode. Names do not change. Or
    `"regions"`: compile each of the model's repeated blocks, so that equal ones share one compilation; what is outside
    of them is not compiled. That suits deep models of equal blocks, such as vision transformers. Blocks that differ, as
    in most CNNs, are compiled one by one, and of one class torch compiles 8 at most: use True there. Default False,
    because the first step then takes a minute or more."""
    sync_batchnorm: Annotated[bool, IN_WORDS] = False
    """Whether BatchNorm layers compute their statistics over the global batch, on all ranks, as on one device;
    otherwise over a rank's microbatch. Numbers and running statistics are then those of one device, on CPUs and GPUs,
    up to the order of sums, at the cost of two small messages per layer and step. Not with `accumulate`, because a
    layer would need its inputs from all microbatches at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_budget is not None and not self.compile:
            raise self.error(
                f"activation_checkpointing={self.activation_checkpointing} is a memory budget, which only the compiler "
                "keeps. Add compile=True, or pass activation_checkpointing=True."
            )
        if self.sync_batchnorm and self.accumulate > 1:
            raise StrategyError(
                f"sync_batchnorm=True cannot be combined with accumulate={self.accumulate}: the statistics of a step "
                f"need every layer's inputs from all of its microbatches at once, and so the memory that accumulate "
                f"saves. Use accumulate=1 with activation_checkpointing=True, which saves memory too, or more ranks; "
                f"or GroupNorm, which does not depend on the batch."
            )

    @property
    def memory_budget(self) -> float | None:
        """The fraction of the activations' memory that the compiler may use; None: as torch is set."""
        given = self.activation_checkpointing
        return float(given) if is_number(given) else None


@dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """Options of one optimizer step; see each field.

    Raises:
        StrategyError: for an invalid value.

    Example::

        >>> Options(precision="bf16", accumulate=4).accumulate
        4
    """

    place: ClassVar[str] = "prepare()"

    precision: Precision = "fp32"
    """`"fp32"`; or `"bf16"` or `"fp16"`: autocast over fp32 weights. For fp16 with a dynamic loss scale
    (`torch.amp.GradScaler`), which skips steps whose gradients overflow."""


class PrepareOptions(TypedDict, total=False):
    """Keyword arguments of `Strategy.prepare`; `Options` documents and checks them."""

    # keywords of StepOptions
    accumulate: int
    clip_norm: float | None
    activation_checkpointing: ModuleFilter | float
    compile: bool | str
    sync_batchnorm: bool
    # end
    # keywords of Options
    precision: Precision
    # end
