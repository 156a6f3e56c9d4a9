"""Job 3: begin with a file of weights, freeze layers, and let learning rates decay by layer."""

import pytest
import torch
from command_line import call
from drivetrain.pipeline import layerwise_decay
from journey_models import photos
from torch import nn
from torchvision.models import resnet18

FROZEN = ("conv1.", "bn1.", "layer1.")


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """`weights.pth`, of ten classes."""
    model = resnet18(num_classes=10)
    torch.save(model.state_dict(), "weights.pth")
    return model.state_dict()


def frozen(num_classes: int) -> nn.Module:
    model = resnet18(num_classes=num_classes)
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    return model


@pytest.mark.long
def test_frozen_layers_keep_the_weights_of_the_file(
    weights: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = photos(frozen, image_size=64)
    assert "Frozen: conv1, bn1, layer1 (5 BatchNorm layers" in str(pipeline.summary())
    result = pipeline.fit(epochs=1, init_from="weights.pth")
    printed = capsys.readouterr().out
    assert "conv1, bn1, layer1" in printed
    assert "fc.weight" in printed
    for name, value in result.model.state_dict().items():
        kept = name.startswith(FROZEN)
        assert name.startswith("fc.") or torch.equal(value, weights[name]) is kept, name


@pytest.mark.long
def test_pretrained_with_a_file() -> None:
    torch.save({"state_dict": resnet18(num_classes=10).state_dict(), "epoch": 3}, "checkpoint.pth")
    values = ["model_options.num_classes=3", "model_options.name=resnet18", "batch_size=8", "epochs=1"]
    values += ["model_options.weights=checkpoint.pth", "image_size=64"]
    data = ["--train", "train.beton", "--val", "val.beton"]
    end = call("train", "finetune-pretrained", *data, "--out", "runs/fine", *values)
    assert end.code == 0, end
    assert call("predict", "runs/fine", "photos/val", "--json").out.count("probabilities") == 12


def test_learning_rates_decay_by_layer() -> None:
    model = resnet18(num_classes=3)
    pipeline = photos(model).optimize("adamw", lr=1e-3, groups=layerwise_decay(model, 1e-3, factor=0.5))
    assert "layer4.1." in str(pipeline.plan())
    with pipeline.build() as built:
        rates = {
            id(parameter): group["lr"]
            for group in built.engine.optimizer.param_groups
            for parameter in group["params"]
        }
        lr = {name: rates[id(parameter)] for name, parameter in built.engine.model.named_parameters()}
    assert lr["fc.weight"] == 1e-3
    assert lr["layer4.1.conv1.weight"] == 2 * lr["layer4.0.conv1.weight"] < lr["fc.weight"]
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 3))
    rates_of = [options["lr"] for options in layerwise_decay(plain, 0.1, factor=0.5).values()]
    assert sorted(rates_of) == pytest.approx([0.025, 0.05])  # the last layer's is that of optimize
