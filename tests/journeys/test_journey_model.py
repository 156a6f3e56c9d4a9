"""Job 15: how large the model is, what is trained, and why each step of the plan is there."""

import pytest
from command_line import call, done
from drivetrain.transforms import BlurPool, ChannelsLast
from journey_models import photos
from torchvision.models import resnet18


def test_the_summary_has_the_numbers_of_the_model() -> None:
    model = resnet18(num_classes=3)
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    pipeline = photos(model, image_size=224)
    summary, parameters = pipeline.summary(), list(model.parameters())
    assert summary.parameters == sum(each.numel() for each in parameters)
    assert summary.trained == sum(each.numel() for each in parameters if each.requires_grad)
    assert summary.flops == pytest.approx(2 * 1.814e9, rel=0.01)  # torchvision's table has 1.81 GMACs
    assert summary.activation_bytes > 1e7
    assert "Frozen: conv1, bn1, layer1" in str(summary)
    (built,) = [step.why for step in pipeline.plan().steps if step.what.startswith("build")]
    assert "conv1, bn1, layer1 (5 BatchNorm layers" in built  # a module, not a factory


def test_the_plan_of_a_recipe() -> None:
    assert "total" in done("plan", "mine.yaml", "--summary", 'transforms=[{"name": "BlurPool"}]')
    plan = photos("resnet18").transform(ChannelsLast(), BlurPool()).plan()
    order = [step.what.split("(")[0] for step in plan.steps]
    assert order.index("BlurPool") < order.index("wrap with single")
    assert all(step.why and step.asked_by for step in plan.steps)
    line = call("plan", "mine.yaml", "model=resnet81").line
    assert "Did you mean 'resnet18'" in line
    assert len(line) < 300
