"""What is known of the algorithms that Composer has itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """What is known of an algorithm of Composer's own.

    Attributes:
        ours: Drivetrain's transform of the same method; "" if there is none.
        touches: what it changes: "model" (before wrapping), "batch" (and targets and loss), or "weights".
        compile_safe: whether the changed model compiles without graph breaks.
        depends_on_length: whether its steps depend on the length of training.
        targets, soft_targets: see `Transform`.
        after: names of algorithms of Composer's that must run before it.
        refused: returns why it cannot run here; "" if it can.
    """

    ours: str
    touches: str = "model"
    compile_safe: bool = True
    depends_on_length: bool = False
    targets: tuple[str, ...] | None = None
    soft_targets: bool = False
    after: tuple[str, ...] = ()
    refused: Callable[[Any], str] = lambda _: ""


def _always(why: str) -> Callable[[Any], str]:
    return lambda _: why


_SURGERY = ("BlurPool", "SqueezeExcite", "WeightStandardization", "Factorize", "StochasticDepth")
_FIRST = ("SelectiveBackprop",)
_MIXED = ("class indices", "labels")
_DATASET = _always(
    "It changes the data set of a torch.utils.data.DataLoader, which Drivetrain's loaders are not."
)
KNOWN: dict[str, Known] = {
    "BlurPool": Known("BlurPool()", compile_safe=False),
    "ChannelsLast": Known("ChannelsLast()", after=_SURGERY),  # new modules would be contiguous
    "SqueezeExcite": Known("SqueezeExcite()"),
    "GhostBatchNorm": Known(
        "GhostBatchNorm()", refused=_always("It rejects batches smaller than ghost_batch_size, in evaluation, too.")
    ),
    "WeightStandardization": Known("WeightStandardization()"),
    "Factorize": Known("Factorize()"),
    "StochasticDepth": Known("StochasticDepth()", compile_safe=False, depends_on_length=True),
    "MixUp": Known("MixUp()", "batch", targets=_MIXED, soft_targets=True, after=_FIRST),
    "CutMix": Known("CutMix()", "batch", targets=_MIXED, soft_targets=True, after=_FIRST),
    "CutOut": Known("CutOut()", "batch", after=_FIRST),
    "ColOut": Known("ColOut()", "batch", after=_FIRST, refused=lambda a: "" if a.batch else _DATASET(a)),
    # Before MixUp, it would leave the targets that are mixed in as they are.
    "LabelSmoothing": Known("LabelSmoothing()", "batch", targets=_MIXED, soft_targets=True, after=("MixUp", "CutMix")),
    "ProgressiveResizing": Known("ProgressiveResizing()", "batch", depends_on_length=True, after=_FIRST),
    "SelectiveBackprop": Known(
        "SelectiveBackprop()", "batch", depends_on_length=True, targets=("class indices",)
    ),
    "GradientClipping": Known("GradientClipping()", "weights"),
    "EMA": Known("EMA()", "weights", depends_on_length=True),
    "SWA": Known("SWA()", "weights", depends_on_length=True),
    "RandAugment": Known("RandAugment()", refused=_DATASET),
    "AugMix": Known("AugMix()", refused=_DATASET),
    "SAM": Known("SAM()", refused=_always("It replaces the optimizer by one whose step takes a closure.")),
    "LayerFreezing": Known(
        "LayerFreezing()", refused=_always("It removes parameters from the optimizer, which then cannot be resumed.")
    ),
    "GyroDropout": Known("GyroDropout()", refused=_always("Its masks are not in checkpoints.")),
    "LowPrecisionLayerNorm": Known(
        "LowPrecisionLayerNorm()", refused=_always("It reads the precision when the model is built.")
    ),
    "LowPrecisionGroupNorm": Known(
        "LowPrecisionGroupNorm()", refused=_always("It reads the precision when the model is built.")
    ),
    "NoOpModel": Known("", refused=_always("It replaces the model itself.")),
    "SeqLengthWarmup": Known("SeqLengthWarmup()", refused=_always("It truncates sequences of tokens.")),
}  # fmt: skip
"""Composer's own algorithms by class name."""


def known_of(algorithm: Any) -> Known | None:
    """Return what is known of an algorithm; None if its class is the user's, also if it is derived from Composer's."""
    own = type(algorithm).__module__.startswith("composer.algorithms.")
    return KNOWN.get(type(algorithm).__name__) if own else None


__all__ = ["KNOWN", "Known", "known_of"]
