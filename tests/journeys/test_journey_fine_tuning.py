"""Job 3: begin with a file of weights, freeze layers, and let learning rates decay by layer."""

import pytest
import torch
from command_line import done
from drivetrain.pipeline import layerwise_decay
from journey_models import photos
from torch import nn
from torchvision.models import resnet18

FROZEN = ("conv1.", "bn1.", "layer1.")


def frozen(num_classes: int) -> nn.Module:
    model = resnet18(num_classes=num_classes)
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.long
def test_weights_of_a_file_and_frozen_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """The file is of ten classes; one as a training script saves it is read, too."""
    weights = resnet18(num_classes=10).state_dict()
    torch.save(weights, "weights.pth")
    torch.save({"state_dict": weights, "epoch": 3}, "checkpoint.pth")
    pipeline = photos(frozen, image_size=64)
    assert "Frozen: conv1, bn1, layer1 (5 BatchNorm layers" in str(pipeline.summary())
    result = pipeline.fit(epochs=1, init_from="weights.pth")
    printed = capsys.readouterr().out
    assert "conv1, bn1, layer1" in printed
    assert "fc.weight" in printed
    for name, value in result.model.state_dict().items():
        kept = name.startswith(FROZEN)
        assert name.startswith("fc.") or torch.equal(value, weights[name]) is kept, name

    values = ["model_options.num_classes=3", "model_options.name=resnet18", "batch_size=8", "epochs=1"]
    values += ["model_options.weights=checkpoint.pth", "image_size=64", "precision=fp32"]
    data = ["--train", "train.beton", "--val", "val.beton"]
    done("train", "finetune-pretrained", *data, "--out", "runs/fine", *values)
    assert done("predict", "runs/fine", "photos/val", "--json").count("probabilities") == 12


def test_learning_rates_decay_by_layer() -> None:
    model = resnet18(num_classes=3)
    pipeline = photos(model).optimize("adamw", lr=1e-3, groups=layerwise_decay(model, 1e-3, factor=0.5))
    assert "layer4.1." in str(pipeline.plan())
    with pipeline.build() as built:
        groups = built.engine.optimizer.param_groups
        rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
        lr = {name: rates[id(parameter)] for name, parameter in built.engine.model.named_parameters()}
    assert lr["fc.weight"] == 1e-3
    assert lr["layer4.1.conv1.weight"] == 2 * lr["layer4.0.conv1.weight"] < lr["fc.weight"]
