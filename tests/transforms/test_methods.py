"""What all batch, optimizer, loop and evaluation methods share: values, pickling, and harmless defaults."""

from __future__ import annotations

import json
import math
import pickle
from typing import get_args

import pytest
import torch
from drivetrain.common.errors import PlanError
from drivetrain.transforms import (
    EMA,
    SAM,
    SWA,
    TRANSFORMS,
    BatchContext,
    ColOut,
    CutMix,
    CutOut,
    GradientClipping,
    GyroDropout,
    Kind,
    LabelSmoothing,
    MixUp,
    NoWeightDecay,
    ProgressiveResizing,
    SelectiveBackprop,
    SeqLengthWarmup,
    Session,
    TestTimeFlip,
    Transform,
    get,
    to_dict,
)
from torch import nn

METHODS = [
    MixUp(), MixUp(0.4), CutMix(), CutOut(2, 0.25), ColOut(0.1, 0), ProgressiveResizing(delay=0.4),
    SelectiveBackprop(keep=0.3), SeqLengthWarmup(truncate=False), EMA(), EMA(None, 0.99, 20), SWA(0.5, 1.0, 10),
    SAM(0.5, 10), GradientClipping("adaptive", 0.01), NoWeightDecay(), TestTimeFlip(),
]  # fmt: skip
NO_NUMBERS = [-0.1, math.nan, math.inf, "0.1", None, True]
BAD = {
    (MixUp, "alpha"): [0, *NO_NUMBERS],
    (CutMix, "alpha"): [0, *NO_NUMBERS],
    (CutOut, "holes"): [0, 1.0, *NO_NUMBERS],
    (CutOut, "length"): [0, 1.1, *NO_NUMBERS],
    (ColOut, "row"): [1, *NO_NUMBERS],
    (ColOut, "column"): [1, *NO_NUMBERS],
    (ProgressiveResizing, "initial_scale"): [0, 1.1, *NO_NUMBERS],
    (ProgressiveResizing, "delay"): [1.1, *NO_NUMBERS],
    (ProgressiveResizing, "finetune"): [1.1, *NO_NUMBERS],
    (ProgressiveResizing, "size_increment"): [0, 4.0, *NO_NUMBERS],
    (SelectiveBackprop, "start"): [0.95, 1.1, *NO_NUMBERS],
    (SelectiveBackprop, "end"): [0.4, 1.1, *NO_NUMBERS],
    (SelectiveBackprop, "keep"): [0, 1, *NO_NUMBERS],
    (SelectiveBackprop, "scale_factor"): [0, 1.1, *NO_NUMBERS],
    (SelectiveBackprop, "interrupt"): [1, 2.0, *NO_NUMBERS],
    (SeqLengthWarmup, "duration"): [1.1, *NO_NUMBERS],
    (SeqLengthWarmup, "min_seq_length"): [0, 2000, 8.0, *NO_NUMBERS],
    (SeqLengthWarmup, "max_seq_length"): [0, 4, *NO_NUMBERS],
    (SeqLengthWarmup, "step_size"): [0, *NO_NUMBERS],
    (SeqLengthWarmup, "truncate"): [0, "yes", None],
    (EMA, "half_life"): [0, *NO_NUMBERS],
    (EMA, "update_every"): [0, 1.0, *NO_NUMBERS],
    (SWA, "start"): [1, 0.98, *NO_NUMBERS],
    (SWA, "end"): [0.6, 1.1, *NO_NUMBERS],
    (SWA, "update_every"): [0, 1.0, *NO_NUMBERS],
    (SAM, "rho"): [0, *NO_NUMBERS],
    (SAM, "interval"): [0, 1.0, *NO_NUMBERS],
    (GradientClipping, "by"): ["Norm", None, 2],
    (GradientClipping, "threshold"): [0, *NO_NUMBERS],
}


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_there_and_back(method: Transform) -> None:
    text = json.dumps(to_dict(method))
    assert get(**json.loads(text)) == method
    assert pickle.loads(pickle.dumps(method)) == method
    assert hash(get(**json.loads(text))) == hash(method)


@pytest.mark.parametrize(("cls", "field"), BAD, ids=lambda value: getattr(value, "__name__", value))
def test_bad_values(cls: type[Transform], field: str) -> None:
    for value in BAD[cls, field]:
        with pytest.raises(PlanError, match=rf"{cls.__name__}\(.*{field}=") as caught:
            cls(**{field: value})
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("options", [
    {"smoothing": 0.9}, {"half_life": None}, {"half_life": None, "smoothing": 1.0},
    {"half_life": None, "smoothing": 0}, {"half_life": None, "smoothing": True},
])  # fmt: skip
def test_ema_takes_one_of_two(options: dict[str, float | None]) -> None:
    with pytest.raises(PlanError, match=r"EMA\(.*smoothing="):
        EMA(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", TRANSFORMS.values(), ids=TRANSFORMS)
def test_hooks_of_other_kinds_change_nothing(cls: type[Transform]) -> None:
    assert cls.kind in get_args(Kind)
    transform = cls()
    images, targets = torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])
    if cls.kind != "batch":
        context = BatchContext(generator=torch.Generator())
        assert transform.batch(images, targets, context) == (images, targets)
    if cls is not NoWeightDecay:
        assert transform.optimizer(torch.optim.SGD) is torch.optim.SGD
    if cls.kind not in ("loop", "schedule", "optimizer") and cls not in (GyroDropout, ProgressiveResizing):
        assert type(transform.session(nn.Linear(1, 1))) is Session
    if cls.kind not in ("surgery", "memory_format"):
        with pytest.raises(TypeError, match="does not change the model"):
            transform.apply(nn.Linear(1, 1))


def test_mixing_follows_selection_and_selection_follows_resizing() -> None:
    for cls in (MixUp, CutMix, CutOut, ColOut):
        assert cls.after == ("SelectiveBackprop",)
    assert SelectiveBackprop.after == ("ProgressiveResizing",)
    assert LabelSmoothing.kind == "loss", "and is called after any mixing"
