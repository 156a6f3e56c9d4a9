"""The table of transforms: names, options, conversion to recipes and back, and what all of them share."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
import yaml
from drivetrain import Callback, Pipeline, PlanError, RunView
from drivetrain import transforms as t
from drivetrain.common.errors import CheckpointError
from drivetrain.pipeline import load_run
from drivetrain.pipeline.runs.checkpoints.fingerprint import rebuild_spec
from own_transforms import FadingDropout, GaussianNoise, SignMomentum, Smooth, Upside
from PIL import Image
from pipeline_data import Toy, numbers
from safetensors.torch import load_file
from torch import nn

SAMPLES = [
    *(cls() for cls in t.TRANSFORMS.values()),
    t.BlurPool(replace_maxpools=False, min_channels=3), t.Factorize(latent_channels=64, factorize_linears=False),
    t.LabelSmoothing(0.2), t.LayerFreezing(0.0, 0.5), t.RandAugment(magnitude=12), t.TrivialAugment(9),
    t.AugMix(width=2, alpha=0.5), t.StochasticDepth("sample", 0.1, "uniform"),
    t.MixUp(0.4), t.CutOut(2, 0.25), t.ColOut(0.1, 0), t.ProgressiveResizing(delay=0.4),
    t.EfficientTrain((96, 160, 192, 224), (0.2, 0.4, 0.2, 0.2), 32),
    t.SelectiveBackprop(keep=0.3), t.SeqLengthWarmup(truncate=False), t.EMA(None, 0.99, 20), t.SWA(0.5, 1.0, 10),
    t.SAM(0.5, 10), t.InfoBatch(0.3, 0.25), t.GradientClipping("adaptive", 0.01),
]  # fmt: skip


@pytest.mark.parametrize("transform", [*SAMPLES, GaussianNoise(0.05)], ids=repr)
def test_there_and_back_through_json(transform: t.Transform) -> None:
    text = json.dumps(t.to_dict(transform))
    assert t.get(**json.loads(text)) == transform
    assert pickle.loads(pickle.dumps(transform)) == transform
    assert hash(transform) == hash(t.get(**json.loads(text)))


def test_every_transform_file_is_in_the_table() -> None:
    """A file that defines a Transform, but that `__init__.py` does not import, could not be named."""
    texts = [path.read_text() for path in Path(t.__file__).parent.rglob("*.py")]
    classes = r"^class ([A-Z]\w*)\((?:Transform|_Policy)\)"
    defined = {name for text in texts for name in re.findall(classes, text, re.MULTILINE)}
    assert defined == set(t.TRANSFORMS)


@pytest.mark.parametrize("cls", t.TRANSFORMS.values(), ids=t.TRANSFORMS)
def test_each_declares_itself(cls: type[t.Transform]) -> None:
    assert cls.kind in get_args(t.Kind)
    assert cls.source
    assert "Source: " in cls.__doc__
    assert set(cls.after) <= set(t.TRANSFORMS)
    assert set(cls.unsafe_with) <= {"ddp", "fsdp", "deepspeed", "deepspeed_stage_3", "fairscale"}
    translates = cls.from_plain is not t.Transform.from_plain
    assert translates or not cls.renames, f"{cls.__name__} renames and cannot translate"
    for field in dataclasses.fields(cls):
        assert f"{field.name}: " in cls.__doc__, f"{cls.__name__}.{field.name} is not documented"
        assert field.default is not dataclasses.MISSING
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        cls().anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "near"), [
    ("blurpool", "BlurPool"), ("BlurPol", "BlurPool"), ("channels_last", "ChannelsLast"),
    ("labelsmoothing", "LabelSmoothing"),
])  # fmt: skip
def test_unknown_name(name: str, near: str) -> None:
    with pytest.raises(PlanError, match=f"No transform is named '{name}'. Did you mean '{near}'") as caught:
        t.get(name)
    assert f"Known: {', '.join(sorted(t.TRANSFORMS))}." in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("BlurPool", {"min_chanels": 3}, r"BlurPool has no option 'min_chanels'\. Did you mean 'min_ch"),
        ("ChannelsLast", {"kind": "loss"}, r"ChannelsLast has no option 'kind'\. It has no options"),
        (3, {}, "No transform is named 3"),
        ("LabelSmoothing", {"smoothing": 2}, "smoothing=2"),
        ("own_transforms:GaussianNoise", {"sdt": 0.1}, "sdt"),
        ("GaussianNoise", {}, r"A custom one is named package\.module:Class"),
    ],
)
def test_unknown_option(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        t.get(name, **options)


def test_the_declared_order_has_no_circle() -> None:
    waiting, placed = dict(t.TRANSFORMS), set[str]()
    while waiting:
        ready = [name for name, cls in waiting.items() if set(cls.after) <= placed]
        assert ready, f"{sorted(waiting)} must each follow another"
        placed.update(ready)
        waiting = {name: cls for name, cls in waiting.items() if name not in ready}


def test_declared_facts() -> None:
    """The values that a plan relies on; their proofs are in test_surgery.py and its neighbours."""
    assert {n for n, cls in t.TRANSFORMS.items() if not cls.compile_safe} == {"GyroDropout"}
    renaming = {n for n, cls in t.TRANSFORMS.items() if cls.renames}
    assert renaming == {"Factorize", "GatedLinearUnits", "SqueezeExcite"}
    assert {n for n, cls in t.TRANSFORMS.items() if cls.unused_parameters} == {"LayerFreezing"}
    assert {n: cls.unsafe_with for n, cls in t.TRANSFORMS.items() if cls.unsafe_with} == {
        "EMA": ("deepspeed_stage_3",), "GradientClipping": ("deepspeed", "fairscale"),
        "LayerFreezing": t.LayerFreezing.unsafe_with, "Lookahead": ("deepspeed",),
        "SAM": ("deepspeed", "fairscale"), "StochasticDepth": ("fairscale",), "SWA": ("deepspeed",),
    }  # fmt: skip


def test_the_catalogue_lists_all_and_what_each_declares() -> None:
    rows = {row.transform: row for row in t.catalogue()}
    assert set(rows) == set(t.TRANSFORMS)
    for name, row in rows.items():
        cls = t.TRANSFORMS[name]
        assert (row.kind, row.source) == (cls.kind, cls.source)
        assert (row.renames == "yes") == cls.renames
        assert row.fsdp == ("no" if "fsdp" in cls.unsafe_with else "yes")
        finer = "stages 1, 2" if "deepspeed_stage_3" in cls.unsafe_with else "yes"
        assert row.deepspeed == ("no" if "deepspeed" in cls.unsafe_with else finer)
    assert rows["GyroDropout"].compiles == "no"
    assert rows["BlurPool"].compiles == "yes"
    assert rows["MixUp"].compiles == ""
    assert rows["LayerFreezing"].ddp == "find_unused_parameters"
    assert rows["LayerFreezing"].deepspeed == "no"
    assert "smoothing=0.1" in rows["LabelSmoothing"].defaults
    assert json.loads(json.dumps(t.catalogue().to_dict()))[0]["transform"] in t.TRANSFORMS
    assert "WeightStandardization" in repr(t.catalogue())
    assert t.catalogue()._repr_html_().count("<tr>") == len(t.TRANSFORMS) + 1


# ---- Custom transforms: by name in recipes and runs, and never imported from a checkpoint ----

MODEL = "pipeline_data:plain_model"


def test_the_form_in_a_recipe() -> None:
    assert t.to_dict(t.LabelSmoothing(0.08)) == {"name": "LabelSmoothing", "smoothing": 0.08}
    assert t.get("ChannelsLast") == t.ChannelsLast()
    assert t.to_dict(GaussianNoise(0.05)) == {"name": "own_transforms:GaussianNoise", "std": 0.05}


def test_what_has_no_name_is_refused() -> None:
    @dataclass(frozen=True)
    class Inner(t.Transform):
        kind = "batch"
        source = "custom"

    with pytest.raises(PlanError, match=r"Inner cannot be imported by name.*Define it at the top level of"):
        t.to_dict(Inner())


@pytest.mark.long
def test_a_run_is_a_recipe_and_predicts(toy: Toy, tmp_path: Path) -> None:
    """It is named in the recipe of the run, from which predictions build the model."""
    pipeline = Pipeline(MODEL, classes=4).load(toy.train, toy.val, batch_size=16, image_size=8, workers=1)
    pipeline = pipeline.transform(GaussianNoise(0.05), Smooth(), t.LabelSmoothing(0.1))
    result = pipeline.fit(epochs=1, out=tmp_path / "run", progress=False)
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert {"name": "own_transforms:GaussianNoise", "std": 0.05} in recipe["transforms"]
    assert set(Pipeline.from_recipe(recipe).transforms) == set(pipeline.transforms)
    Image.new("RGB", (8, 8), (200, 30, 40)).save(tmp_path / "a.png")
    (here,) = result.predict([tmp_path / "a.png"])
    (there,) = load_run(tmp_path / "run").predict([tmp_path / "a.png"])
    assert here["probabilities"] == pytest.approx(there["probabilities"], abs=1e-6)
    resumed = pipeline.fit(epochs=1, out=tmp_path / "run", resume=True, progress=False)
    assert resumed.history.epochs[-1].loss == result.history.epochs[-1].loss


def test_a_checkpoint_imports_no_transform() -> None:
    saved = {"model": "resnet18", "model_options": {}, "seed": 0}
    with pytest.raises(CheckpointError, match="'own_transforms:Smooth', which would have to be imported"):
        rebuild_spec(saved | {"transforms": [{"name": "own_transforms:Smooth"}]})


class StopsAfterAnEpoch(Callback):
    def on_epoch_end(self, view: RunView) -> None:
        if view.epoch == 1:
            view.stop("half of the epochs")


def dropout_model(classes: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, classes),
    )  # fmt: skip


@pytest.mark.parametrize("transform", [FadingDropout(), Upside(), SignMomentum()], ids=repr)
def test_a_schedule_an_evaluation_and_a_gradient_method_are_one_class(
    transform: t.Transform, toy: Toy, tmp_path: Path
) -> None:
    """The loop calls them without knowing them, and a run that resumes continues exactly."""
    plain = toy.pipeline(dropout_model)
    pipeline = plain.transform(transform)
    whole = pipeline.fit(epochs=2, progress=False)
    without = plain.fit(epochs=2, progress=False)
    assert numbers(whole) != numbers(without)
    losses, others = ([epoch.loss for epoch in run.history.epochs] for run in (whole, without))
    assert (losses == others) is isinstance(transform, Upside)  # which changes the evaluation alone
    stopped = pipeline.fit(epochs=2, progress=False, out=tmp_path, callbacks=[StopsAfterAnEpoch()])
    assert numbers(stopped) == numbers(whole)[:1]
    resumed = pipeline.fit(epochs=2, progress=False, out=tmp_path, resume=True, continue_stopped=True)
    assert numbers(resumed) == numbers(whole)
    again = pipeline.fit(epochs=2, progress=False, out=tmp_path, resume=True)  # nothing is left to train
    expected, written = whole.model.state_dict(), load_file(tmp_path / "model.safetensors")
    for state in (resumed.model.state_dict(), again.model.state_dict(), written):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


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
    t.InfoBatch: {"ratio": [0, 1, *NO_NUMBERS], "anneal": [1, *NO_NUMBERS]},
    t.EfficientTrain: {
        "bandwidths": [(), (96, 96), (224, 96), (9.5, 224), (0, 224), 224, None],
        "compute": [(), (0.5, 0.5), (0.2, 0.4, 0.5), (0.0, 0.5, 0.5), None], "size_increment": [0, 4.0, *NO_NUMBERS],
    },
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
    transform = cls()
    images, targets = torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])
    if cls.kind != "batch":
        context = t.BatchContext(generator=torch.Generator())
        assert transform.batch(images, targets, context) == (images, targets)
    if cls.kind != "loss":
        assert transform.loss(F.cross_entropy) is F.cross_entropy
    if cls is not t.NoWeightDecay:
        assert transform.optimizer(torch.optim.SGD) is torch.optim.SGD
    own_session = (t.EfficientTrain, t.GyroDropout, t.ProgressiveResizing)
    if cls.kind not in ("loop", "schedule", "optimizer") and cls not in own_session:
        assert type(transform.session(nn.Linear(1, 1))) is t.Session
    if cls.kind not in ("surgery", "memory_format"):
        with pytest.raises(TypeError, match="does not change the model"):
            transform.apply(nn.Linear(1, 1))


def test_mixing_follows_selection_and_selection_follows_resizing() -> None:
    for cls in (t.MixUp, t.CutMix, t.CutOut, t.ColOut):
        assert cls.after == ("EfficientTrain", "SelectiveBackprop")
    assert t.SelectiveBackprop.after == ("ProgressiveResizing", "EfficientTrain")
    assert t.LabelSmoothing.kind == "loss", "and is called after any mixing"
