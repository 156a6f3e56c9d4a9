"""Job 2: a model, a loss, a metric, an optimizer and a schedule of one's own; a model of timm."""

import importlib
from pathlib import Path

import pytest
import timm
import torch
from command_line import call
from drivetrain import Classification
from drivetrain.pipeline import load_run
from journey_models import photos
from safetensors.torch import load_file

PARTS = '''
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric


def focal(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


class Weighted(nn.Module):
    """Class weights, with the denominator of their mean."""

    def __init__(self, weights):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, logits, targets):
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (self.weights[targets] * losses).sum() / self.denominator(targets)

    def denominator(self, targets):
        return self.weights[targets].sum()


class Confidence(MeanMetric):
    higher_is_better = True
    unit = "fraction"

    def update(self, outputs, targets):
        super().update(outputs.softmax(1).max(1).values)


def fading(progress):
    return (1 - progress) ** 0.9
'''


@pytest.mark.long
def test_everything_of_ones_own_is_in_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("parts.py").write_text(PARTS)
    net, parts = importlib.import_module("net"), importlib.import_module("parts")
    task = Classification(
        loss=parts.focal, metrics={"top1": "top1", "confidence": parts.Confidence}, monitor="confidence"
    )
    pipeline = (
        photos(net.Net)
        .task(task)
        .optimize(torch.optim.NAdam, lr=0.01, betas=(0.8, 0.99), schedule=parts.fading)
    )
    result = pipeline.fit(epochs=3, out="runs/own")
    assert sorted(result.metrics) == ["confidence", "top1", "val_loss"]
    assert 1 / 3 < result.metrics["confidence"] < 1
    assert f"confidence {100 * result.metrics['confidence']:.2f}" in capsys.readouterr().out
    # Three steps an epoch: the last one of the first is at 2/9 of the training.
    assert result.history.epochs[0].lr == pytest.approx(0.01 * (1 - 2 / 9) ** 0.9)
    assert load_run("runs/own").evaluate() == pytest.approx(result.metrics, abs=1e-6)


def test_a_loss_with_weights_does_not_depend_on_how_a_batch_is_split() -> None:
    Path("parts.py").write_text(PARTS)
    net, parts = importlib.import_module("net"), importlib.import_module("parts")
    task = Classification(loss=parts.Weighted([1.0, 4.0, 1.0]))
    pipeline = photos(net.Net, None).task(task)
    losses = [
        [epoch.loss for epoch in one.fit(epochs=2, progress=False).history.epochs]
        for one in (pipeline, pipeline.distribute("single", accumulate=4))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_same_in_a_recipe() -> None:
    Path("parts.py").write_text(PARTS)
    text = Path("mine.yaml").read_text()
    text = text.replace("model: cifar_resnet", "model: net:Net").replace(", width: 8", "")
    Path("own.yaml").write_text(
        text.replace("adamw", "torch.optim:NAdam") + "task: {name: Classification, loss: parts:focal}\n"
        "schedule: parts:fading\n"
    )
    end = call("train", "own.yaml", "--out", "runs/recipe")
    assert end.code == 0, end
    assert load_run("runs/recipe").history.epochs[-1].lr < 0.003


@pytest.mark.long
def test_a_model_of_timm_trains_and_goes_back() -> None:
    pipeline = photos("timm:mobilenetv3_small_050", image_size=64)
    result = pipeline.fit(epochs=1, out="runs/timm", progress=False)
    assert call("export", "runs/timm", "timm.safetensors").code == 0
    model = timm.create_model("mobilenetv3_small_050", num_classes=3)
    model.load_state_dict(load_file("timm.safetensors"))
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.eval()(images), result.model(images))
