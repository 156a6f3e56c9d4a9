"""Immutable transforms of images, batches, the model, the loss and the loop, each of which does one thing.

report = BlurPool().apply(model)                  # lists the changed modules, and the skipped ones with reasons
loss = LabelSmoothing(0.1).loss(F.cross_entropy)
images, targets = MixUp(0.2).batch(images, targets, BatchContext(generator, classes=10))
averages = EMA(half_life=100).session(model)      # after_step(), evaluating(), finish()
ChannelsLast() == get("ChannelsLast")             # by name, as a recipe does
get(**to_dict(BlurPool(min_channels=32)))         # there and back
catalogue()                                       # the table of all
from_composer(composer.algorithms.MixUp(0.2))     # an algorithm of MosaicML Composer's
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..common.checks import check_fields
from ..common.errors import PlanError, suggest
from ..common.names import name_of, unnamed
from .base import CHANGES_MODEL as CHANGES_MODEL
from .base import BatchContext as BatchContext
from .base import Kind as Kind
from .base import Loop as Loop
from .base import Loss as Loss
from .base import NothingChanged as NothingChanged
from .base import OptimizerFactory as OptimizerFactory
from .base import Report as Report
from .base import Session as Session
from .base import State as State
from .base import Transform as Transform
from .base import declares_length as declares_length
from .base import follows_length as follows_length
from .common.table import Catalogue as Catalogue
from .common.table import make_catalogue
from .composer.transform import ComposerTransform as _ComposerTransform
from .composer.transform import algorithm_of as _algorithm_of
from .composer.transform import from_composer as from_composer
from .composer.transform import imported_class as _imported_class

# isort: split
# The table of transforms, one line each: whatever subclass of Transform is imported here has a name.
from .alibi import ALiBi as ALiBi
from .binary_cross_entropy import BinaryCrossEntropy as BinaryCrossEntropy
from .blurpool import BlurPool as BlurPool
from .channels_last import ChannelsLast as ChannelsLast
from .colout import ColOut as ColOut
from .cutmix import CutMix as CutMix
from .cutout import CutOut as CutOut
from .efficient_train import EfficientTrain as EfficientTrain
from .ema import EMA as EMA
from .factorize import Factorize as Factorize
from .flip_evaluation import TestTimeFlip as TestTimeFlip
from .gated_linear_units import GatedLinearUnits as GatedLinearUnits
from .ghost_batch_norm import GhostBatchNorm as GhostBatchNorm
from .gradient_clipping import GradientClipping as GradientClipping
from .gyro_dropout import GyroDropout as GyroDropout
from .infobatch import InfoBatch as InfoBatch
from .label_smoothing import LabelSmoothing as LabelSmoothing
from .layer_freezing import LayerFreezing as LayerFreezing
from .lookahead import Lookahead as Lookahead
from .low_precision_norms import LowPrecisionGroupNorm as LowPrecisionGroupNorm
from .low_precision_norms import LowPrecisionLayerNorm as LowPrecisionLayerNorm
from .mixup import MixUp as MixUp
from .no_weight_decay import NoWeightDecay as NoWeightDecay
from .patch_dropout import PatchDropout as PatchDropout
from .policies import AugMix as AugMix
from .policies import RandAugment as RandAugment
from .policies import ThreeAugment as ThreeAugment
from .policies import TrivialAugment as TrivialAugment
from .progressive_resizing import ProgressiveResizing as ProgressiveResizing
from .sam import SAM as SAM
from .selective_backprop import SelectiveBackprop as SelectiveBackprop
from .seq_length_warmup import SeqLengthWarmup as SeqLengthWarmup
from .squeeze_excite import SqueezeExcite as SqueezeExcite
from .stochastic_depth import StochasticDepth as StochasticDepth
from .swa import SWA as SWA
from .weight_standardization import WeightStandardization as WeightStandardization

TRANSFORMS: dict[str, type[Transform]] = {
    name: value
    for name, value in sorted(vars().items())
    if isinstance(value, type) and issubclass(value, Transform) and not name.startswith("_")
    if value is not Transform
}
"""The known transforms by class name, which is also their name in a recipe."""


def get(name: str, **options: Any) -> Transform:
    """Return the transform of that name; fields of the class that are not among the options keep their defaults.

    The name is that of the class, e.g. `"BlurPool"`; or `"package.module:Class"` of a custom transform, or of an
    algorithm of Composer's, for `from_composer`. Importing a module runs its code.

    Raises:
        PlanError: if the name or an option is unknown, or a value is invalid.

    Example::

        >>> get("LabelSmoothing", smoothing=0.2)
        LabelSmoothing(smoothing=0.2)
    """
    if isinstance(name, str) and ":" in name:
        kind = _imported_class(name)
        if not (isinstance(kind, type) and issubclass(kind, Transform)):
            return _algorithm_of(kind, name, options)
    elif name in TRANSFORMS:
        kind = TRANSFORMS[name]
    else:
        raise PlanError(
            f"No transform is named {name!r}.{suggest(str(name), TRANSFORMS)} A custom one is named "
            "package.module:Class."
        )
    check_fields(name, kind, options, PlanError)
    return kind(**options)


def catalogue() -> Catalogue:
    """Return all transforms with kind, defaults, source and compatibility. The result prints as a table.

    Example::

        >>> [row.transform for row in catalogue() if row.kind == "loss"]
        ['BinaryCrossEntropy', 'LabelSmoothing']
    """
    return make_catalogue(TRANSFORMS.values())


def to_dict(transform: Transform) -> dict[str, Any]:
    """Return `{"name": class name, ...every option}` in JSON types; `get(**to_dict(t))` equals `t`.

    A custom transform is named `"package.module:Class"`; a class that cannot be imported by name raises `PlanError`.

    Example::

        >>> to_dict(LabelSmoothing(0.2))
        {'name': 'LabelSmoothing', 'smoothing': 0.2}
    """
    if isinstance(transform, _ComposerTransform):
        return transform.to_dict()
    kind = type(transform)
    name = kind.__name__ if TRANSFORMS.get(kind.__name__) is kind else name_of(kind)
    if name is None:
        raise PlanError(
            f"The transform {kind.__qualname__} cannot be imported by name, so a recipe cannot name it. {unnamed(kind)}"
        )
    fields = dataclasses.asdict(transform).items()
    return {"name": name, **{key: [*value] if isinstance(value, tuple) else value for key, value in fields}}
