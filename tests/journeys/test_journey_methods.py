"""Job 12: four methods at once, each with its reason in the plan; what does not fit together is refused."""

import pytest
import torch
from drivetrain import PlanError, Segmentation
from drivetrain.pipeline import load_run
from drivetrain.transforms import EMA, BlurPool, CutMix, LabelSmoothing, MixUp, SqueezeExcite
from journey_models import photos


@pytest.mark.long
def test_four_methods() -> None:
    methods = EMA(half_life=4), MixUp(0.2), LabelSmoothing(0.1), SqueezeExcite(min_channels=16)
    pipeline = photos("cifar_resnet").replace(seed=1).transform(*methods)
    why = {step.what.split("(")[0]: step.why for step in pipeline.plan().steps}
    order = list(why)
    assert order.index("SqueezeExcite") < order.index("wrap with single") < order.index("MixUp")
    assert all("as step" not in why[type(method).__name__] for method in methods)
    result = pipeline.fit(epochs=3, out="runs/four", progress=False)
    # The averages are what is evaluated, saved and opened again.
    opened = load_run("runs/four")
    torch.testing.assert_close(opened.model.state_dict(), result.model.state_dict(), rtol=0, atol=0)
    assert opened.evaluate() == pytest.approx(result.metrics, abs=1e-6)
    without = photos("cifar_resnet").replace(seed=1).transform(*methods[1:]).fit(epochs=3, progress=False)
    assert without.history.epochs[-1].loss == pytest.approx(result.history.epochs[-1].loss, rel=1e-3)
    assert without.metrics["val_loss"] != pytest.approx(result.metrics["val_loss"], rel=1e-3)


def test_what_does_not_fit_together() -> None:
    with pytest.raises(PlanError, match=r"MixUp needs targets .* Leave it out"):
        photos("resnet18").transform(MixUp(0.2)).task(Segmentation(3)).plan()
    both = photos("resnet18").transform(MixUp(0.2), CutMix(1.0), BlurPool()).plan()
    (why,) = [step.why for step in both.steps if step.what.startswith("CutMix")]
    assert "MixUp" in why
