"""Job 15: how large the model is, what is trained, and why each step of the plan is there."""

import re

import pytest
from command_line import call
from drivetrain.transforms import BlurPool, ChannelsLast
from journey_models import photos
from torchvision.models import resnet18


def test_the_summary_has_the_numbers_of_the_model() -> None:
    model = resnet18(num_classes=3)
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    pipeline = photos(model, image_size=224)
    summary = pipeline.summary()
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert summary.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert summary.flops == pytest.approx(2 * 1.814e9, rel=0.01)  # torchvision's table has 1.81 GMACs
    assert summary.activation_bytes > 1e7
    assert "Frozen: conv1, bn1, layer1" in str(summary)
    (built,) = [step.why for step in pipeline.plan().steps if step.what.startswith("build")]
    assert "conv1, bn1, layer1 (5 BatchNorm layers" in built  # a module, not a factory
    assert next(model.parameters()).requires_grad is False


def test_the_plan_of_a_recipe() -> None:
    end = call("plan", "mine.yaml", "--summary", 'transforms=[{"name": "BlurPool"}]')
    assert end.code == 0, end
    assert re.search(r"total.*\d", end.out)
    plan = photos("resnet18").transform(ChannelsLast(), BlurPool()).plan()
    whats = [step.what.split("(")[0] for step in plan.steps]
    assert whats.index("BlurPool") < whats.index("wrap with single")
    assert all(step.why and step.asked_by for step in plan.steps)
    line = call("plan", "mine.yaml", "model=resnet81").line
    assert "resnet" in line
    assert len(line) < 400
