"""What all batch, optimizer, loop and evaluation methods share: values, pickling, and harmless defaults."""

import math
from typing import get_args

import pytest
import torch
from drivetrain import transforms as t
from drivetrain.common.errors import PlanError
from torch import nn

NO_NUMBERS = [-0.1, math.nan, math.inf, "0.1", None, True]
BAD: dict[type[t.Transform], dict[str, list[object]]] = {
    t.MixUp: {"alpha": [0, *NO_NUMBERS]},
    t.CutMix: {"alpha": [0, *NO_NUMBERS]},
    t.CutOut: {"holes": [0, 1.0, *NO_NUMBERS], "length": [0, 1.1, *NO_NUMBERS]},
    t.ColOut: {"row": [1, *NO_NUMBERS], "column": [1, *NO_NUMBERS]},
    t.ProgressiveResizing: {
        "initial_scale": [0, 1.1, *NO_NUMBERS], "delay": [1.1, *NO_NUMBERS], "finetune": [1.1, *NO_NUMBERS],
        "size_increment": [0, 4.0, *NO_NUMBERS],
    },
    t.SelectiveBackprop: {
        "start": [0.95, 1.1, *NO_NUMBERS], "end": [0.4, 1.1, *NO_NUMBERS], "keep": [0, 1, *NO_NUMBERS],
        "scale_factor": [0, 1.1, *NO_NUMBERS], "interrupt": [1, 2.0, *NO_NUMBERS],
    },
    t.SeqLengthWarmup: {
        "duration": [1.1, *NO_NUMBERS], "min_seq_length": [0, 2000, 8.0, *NO_NUMBERS],
        "max_seq_length": [0, 4, *NO_NUMBERS], "step_size": [0, *NO_NUMBERS], "truncate": [0, "yes", None],
    },
    t.EMA: {"half_life": [0, *NO_NUMBERS], "update_every": [0, 1.0, *NO_NUMBERS]},
    t.SWA: {
        "start": [1, 0.98, *NO_NUMBERS], "end": [0.6, 1.1, *NO_NUMBERS],
        "update_every": [0, 1.0, *NO_NUMBERS],
    },
    t.SAM: {"rho": [0, *NO_NUMBERS], "interval": [0, 1.0, *NO_NUMBERS]},
    t.GradientClipping: {"by": ["Norm", None, 2], "threshold": [0, *NO_NUMBERS]},
    t.LabelSmoothing: {"smoothing": [1, 1.0, 1.5, *NO_NUMBERS]},
    t.LayerFreezing: {"freeze_start": [1.0], "freeze_level": [1.5]},
    t.TestTimeFlip: {"shift": [-1]},
    t.BlurPool: {
        "replace_convs": [1], "replace_maxpools": ["yes"], "blur_first": [None],
        "min_channels": [-1, 16.0, True],
    },
    t.SqueezeExcite: {"latent_channels": [0, 2.5], "min_channels": [-1]},
    t.GhostBatchNorm: {"ghost_batch_size": [0]},
    t.WeightStandardization: {"n_last_layers_ignore": [True]},
    t.Factorize: {"latent_features": [-0.5], "factorize_convs": [1], "min_features": ["8"]},
    t.StochasticDepth: {"method": ["batch"], "drop_rate": [1.0], "distribution": ["even"]},
    t.GyroDropout: {"p": [1.0], "tau": [0], "total_steps": [0]},
    t.RandAugment: {"magnitude": [9.5]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [(cls, field, value) for cls, bad in BAD.items() for field, values in bad.items() for value in values],
)
def test_bad_values(cls: type[t.Transform], field: str, value: object) -> None:
    with pytest.raises(PlanError, match=rf"{cls.__name__}\(.*{field}=") as caught:
        cls(**{field: value})
    assert repr(value) in str(caught.value)


def test_the_message_has_the_place_the_value_and_the_remedy() -> None:
    for cls, options, message in [
        (t.RandAugment, {"num_ops": 0}, r"RandAugment\(num_ops=0\): pass an integer from 1 to 32"),
        (t.RandAugment, {"num_ops": True}, r"num_ops=True"),
        (t.RandAugment, {"magnitude": 31}, r"magnitude=31\): pass an integer from 0 to 30"),
        (t.TrivialAugment, {"num_magnitude_bins": 1}, r"num_magnitude_bins=1\): pass an integer from 2 to 1000"),
        (t.AugMix, {"severity": 11}, r"severity=11\): pass an integer from 1 to 10"),
        (t.AugMix, {"depth": 0}, r"depth=0\): pass an integer from 1 to 32 or -1"),
        (t.AugMix, {"alpha": 0}, r"alpha=0\): pass a finite number in \[0.01, 100\]"),
        (t.AugMix, {"alpha": float("nan")}, r"alpha=nan"),
        (t.BlurPool, {"replace_convs": False, "replace_maxpools": False}, "replace_convs=False, .* replaces nothing"),
    ]:  # fmt: skip
        with pytest.raises(PlanError, match=message):
            cls(**options)


@pytest.mark.parametrize("options", [
    {"smoothing": 0.9}, {"half_life": None}, {"half_life": None, "smoothing": 1.0},
    {"half_life": None, "smoothing": 0}, {"half_life": None, "smoothing": True},
])  # fmt: skip
def test_ema_takes_one_of_two(options: dict[str, float | None]) -> None:
    with pytest.raises(PlanError, match=r"EMA\(.*smoothing="):
        t.EMA(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", t.TRANSFORMS.values(), ids=t.TRANSFORMS)
def test_hooks_of_other_kinds_change_nothing(cls: type[t.Transform]) -> None:
    assert cls.kind in get_args(t.Kind)
    transform = cls()
    images, targets = torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])
    if cls.kind != "batch":
        context = t.BatchContext(generator=torch.Generator())
        assert transform.batch(images, targets, context) == (images, targets)
    if cls is not t.NoWeightDecay:
        assert transform.optimizer(torch.optim.SGD) is torch.optim.SGD
    if cls.kind not in ("loop", "schedule", "optimizer") and cls not in (
        t.GyroDropout,
        t.ProgressiveResizing,
    ):
        assert type(transform.session(nn.Linear(1, 1))) is t.Session
    if cls.kind not in ("surgery", "memory_format"):
        with pytest.raises(TypeError, match="does not change the model"):
            transform.apply(nn.Linear(1, 1))


def test_mixing_follows_selection_and_selection_follows_resizing() -> None:
    for cls in (t.MixUp, t.CutMix, t.CutOut, t.ColOut):
        assert cls.after == ("SelectiveBackprop",)
    assert t.SelectiveBackprop.after == ("ProgressiveResizing",)
    assert t.LabelSmoothing.kind == "loss", "and is called after any mixing"
