"""timm's models by name: in a pipeline, in a recipe, and with weights of a file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import Pipeline, PlanError, RecipeError
from pipeline_data import CLASSES, Toy
from safetensors.torch import save_file

NAME = "timm:resnet10t"


def test_it_trains_and_goes_into_a_recipe(toy: Toy, tmp_path: Path) -> None:
    pipeline = Pipeline(NAME, num_classes=CLASSES).load(
        toy.train, toy.val, batch_size=32, image_size=32, workers=1
    )
    result = pipeline.fit(epochs=1, out=tmp_path, progress=False)
    assert result.accuracy is not None
    again = Pipeline.from_recipe(tmp_path / "recipe.yaml")
    assert again.model == pipeline.model
    assert again.to_recipe()["model"] == NAME
    assert repr(pipeline).startswith(f"Pipeline({NAME}, num_classes={CLASSES})")
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline


def test_weights_of_a_file(tmp_path: Path) -> None:
    factory = Pipeline(NAME).model
    model = factory(num_classes=5)  # type: ignore[operator]
    path = tmp_path / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    same = factory(num_classes=5, pretrained=path)  # type: ignore[operator]
    torch.testing.assert_close(same.state_dict(), model.state_dict(), rtol=0, atol=0)
    other = factory(num_classes=3, pretrained=str(path))  # type: ignore[operator]
    assert other.get_classifier().out_features == 3
    assert torch.equal(other.conv1[0].weight, model.conv1[0].weight)


def test_refused(tmp_path: Path, toy: Toy) -> None:
    with pytest.raises(RecipeError, match=r"timm has no model 'resnet10'. Did you mean 'resnet1"):
        Pipeline("timm:resnet10")

    def build(**options: Any) -> None:
        Pipeline(NAME, **options).load(toy.train, batch_size=32, image_size=32, workers=1).build()

    wrong = tmp_path / "wrong.safetensors"
    save_file({"weight": torch.zeros(2)}, wrong)
    for options, words in (
        ({"pretrained": "nothing.pth"}, r"weights nothing.pth of timm:resnet10t are not a file"),
        ({"classes": CLASSES}, "timm:resnet10t.* does not take {'classes': 4}"),
        (
            {"pretrained": str(wrong)},
            r"wrong.safetensors cannot be loaded into timm:resnet10t: '.*' is missing",
        ),
        ({"pretrained": str(toy.train)}, r"cannot be loaded into timm:resnet10t|cannot be built"),
    ):
        with pytest.raises(PlanError, match=words):
            build(**options)
