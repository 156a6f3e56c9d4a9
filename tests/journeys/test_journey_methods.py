"""Job 12: four methods at once, each with its reason in the plan; what does not fit together is refused."""

import pytest
import torch
from drivetrain import PlanError, Segmentation
from drivetrain.pipeline import load_run
from drivetrain.transforms import EMA, BlurPool, CutMix, LabelSmoothing, MixUp, SqueezeExcite
from journey_models import photos
from torchvision.models import resnet18


@pytest.mark.long
def test_four_methods() -> None:
    methods = EMA(half_life=4), MixUp(0.2), LabelSmoothing(0.1), SqueezeExcite(min_channels=16)
    pipeline = photos("cifar_resnet").transform(*methods)
    steps = {step.what.split("(")[0]: step for step in pipeline.plan().steps}
    order = list(steps)
    assert order.index("SqueezeExcite") < order.index("wrap with single") < order.index("MixUp")
    for name in ("EMA", "MixUp", "LabelSmoothing", "SqueezeExcite"):
        assert steps[name].why
        assert "as step" not in steps[name].why
    result = pipeline.fit(epochs=3, out="runs/four", progress=False)
    # The averages are what is evaluated, saved and opened again.
    opened = load_run("runs/four")
    torch.testing.assert_close(opened.model.state_dict(), result.model.state_dict(), rtol=0, atol=0)
    assert opened.evaluate() == pytest.approx(result.metrics, abs=1e-6)


def test_what_does_not_fit_together() -> None:
    pipeline = photos(resnet18)
    with pytest.raises(PlanError, match="MixUp needs targets .* Leave it out"):
        pipeline.transform(MixUp(0.2)).task(Segmentation(3)).plan()
    both = pipeline.transform(MixUp(0.2), CutMix(1.0), BlurPool())
    plan = " ".join(str(both.plan()).split())
    assert "MixUp" in plan
    assert "CutMix" in plan
