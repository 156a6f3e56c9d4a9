"""Job 2: a model, a loss, a metric, an optimizer and a schedule of one's own; a model of timm."""

import importlib
import json
from pathlib import Path

import pytest
import timm
import torch
from command_line import done
from drivetrain import Classification
from drivetrain.pipeline import load_run
from journey_models import photos
from safetensors.torch import load_file

pytestmark = pytest.mark.long

PARTS = """
import torch.nn.functional as F
from net import Net
from torchmetrics import MeanMetric


def focal(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


class Confidence(MeanMetric):
    higher_is_better, unit = True, "fraction"

    def update(self, outputs, targets):
        super().update(outputs.softmax(1).max(1).values)


def fading(progress):
    return (1 - progress) ** 0.9
"""


def test_everything_of_ones_own_is_in_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("parts.py").write_text(PARTS)
    parts = importlib.import_module("parts")
    metrics = {"top1": "top1", "confidence": parts.Confidence}
    task = Classification(loss=parts.focal, metrics=metrics, monitor="confidence")
    adam = torch.optim.NAdam
    pipeline = photos(parts.Net).task(task).optimize(adam, lr=0.01, betas=(0.8, 0.99), schedule=parts.fading)
    result = pipeline.fit(epochs=3, out="runs/own")
    assert sorted(result.metrics) == ["confidence", "top1", "val_loss"]
    assert 1 / 3 < result.metrics["confidence"] < 1
    assert f"confidence {100 * result.metrics['confidence']:.2f}" in capsys.readouterr().out
    # Three steps an epoch: the last one of the first is at 2/9 of the training.
    assert result.history.epochs[0].lr == pytest.approx(0.01 * (1 - 2 / 9) ** 0.9)
    assert load_run("runs/own").evaluate() == pytest.approx(result.metrics, abs=1e-6)

    values = ["model=net:Net", 'model_options={"num_classes": 3}', "schedule=parts:fading", "epochs=3"]
    values.append('optimizer={"name": "torch.optim:NAdam", "lr": 0.01, "betas": [0.8, 0.99]}')
    named = {"metrics": {"top1": "top1", "confidence": "parts:Confidence"}, "loss": "parts:focal"}
    values.append(f"task={json.dumps({'name': 'Classification', 'monitor': 'confidence', **named})}")
    done("train", "mine.yaml", "--out", "runs/recipe", *values)
    assert load_run("runs/recipe").metrics == pytest.approx(result.metrics, abs=1e-6)


def test_a_model_of_timm_trains_and_goes_back() -> None:
    pipeline = photos("timm:mobilenetv3_small_050", image_size=64)
    result = pipeline.fit(epochs=1, out="runs/timm", progress=False)
    done("export", "runs/timm", "timm.safetensors")
    model = timm.create_model("mobilenetv3_small_050", num_classes=3)
    model.load_state_dict(load_file("timm.safetensors"))
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.eval()(images), result.model(images))
