"""Custom transforms: by name in recipes and runs, and never imported from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from drivetrain import Callback, Pipeline, PlanError, RunView
from drivetrain.common.errors import CheckpointError
from drivetrain.pipeline import load_run
from drivetrain.pipeline.checkpoints.fingerprint import rebuild_spec
from drivetrain.transforms import LabelSmoothing, Transform, get, to_dict
from own_transforms import FadingDropout, GaussianNoise, SignMomentum, Smooth, Upside
from PIL import Image
from pipeline_data import Toy, numbers
from torch import nn

MODEL = "pipeline_data:plain_model"


def test_there_and_back() -> None:
    entry = to_dict(GaussianNoise(0.05))
    assert entry == {"name": "own_transforms:GaussianNoise", "std": 0.05}
    assert get(**json.loads(json.dumps(entry))) == GaussianNoise(0.05)


def test_what_has_no_name_is_refused() -> None:
    @dataclass(frozen=True)
    class Inner(Transform):
        kind = "batch"
        source = "custom"

    with pytest.raises(PlanError, match="Define it at the top level of a module"):
        to_dict(Inner())
    with pytest.raises(PlanError, match="sdt"):
        get("own_transforms:GaussianNoise", sdt=0.1)
    with pytest.raises(PlanError, match=r"A custom one is named package\.module:Class"):
        get("GaussianNoise")


@pytest.mark.long
def test_a_run_is_a_recipe_and_predicts(toy: Toy, tmp_path: Path) -> None:
    """It is named in the recipe of the run, from which predictions build the model."""
    pipeline = Pipeline(MODEL, classes=4).load(toy.train, toy.val, batch_size=16, image_size=8, workers=1)
    pipeline = pipeline.transform(GaussianNoise(0.05), Smooth(), LabelSmoothing(0.1))
    result = pipeline.fit(epochs=1, out=tmp_path / "run", progress=False)
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert {"name": "own_transforms:GaussianNoise", "std": 0.05} in recipe["transforms"]
    again = Pipeline.from_recipe(recipe)
    assert set(again.transforms) == set(pipeline.transforms)
    Image.new("RGB", (8, 8), (200, 30, 40)).save(tmp_path / "a.png")
    (here,) = result.predict([tmp_path / "a.png"])
    (there,) = load_run(tmp_path / "run").predict([tmp_path / "a.png"])
    assert here["probabilities"] == pytest.approx(there["probabilities"], abs=1e-6)
    resumed = pipeline.fit(epochs=1, out=tmp_path / "run", resume=True, progress=False)
    assert resumed.history.epochs[-1].loss == result.history.epochs[-1].loss


def test_a_checkpoint_imports_no_transform() -> None:
    saved = {
        "model": "resnet18",
        "model_options": {},
        "transforms": [{"name": "own_transforms:Smooth"}],
        "seed": 0,
    }
    with pytest.raises(CheckpointError, match="'own_transforms:Smooth', which would have to be imported"):
        rebuild_spec(saved)


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
    transform: Transform, toy: Toy, tmp_path: Path
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
    state, expected = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
