"""Job 14: a transform and a strategy of one's own, in Python, in a recipe, and in the run that opens again."""

import importlib
from pathlib import Path

import pytest
import torch
from command_line import call
from drivetrain import PlanError, strategies
from drivetrain.pipeline import load_run
from journey_models import photos

OWN = '''
from dataclasses import dataclass

import torch
from drivetrain import strategies
from drivetrain.transforms import Transform


@dataclass(frozen=True)
class GaussianNoise(Transform):
    std: float = 0.1
    kind = "batch"
    source = "our own"
    depends_on_length = False

    def batch(self, images, targets, context):
        noise = torch.randn(images.shape, generator=context.generator)
        return images + self.std * noise.to(images), targets


@dataclass(frozen=True)
class Wordy(Transform):
    """A surgery that returns text in the place of its report."""

    kind = "surgery"
    source = "our own"

    def apply(self, model):
        return "done"


class Frozen:
    name, summary = "frozen", "one device; freezes the parameters with a prefix"

    def __init__(self, prefix, device=None):
        self.prefix, self.base = prefix, strategies.Single(device)

    def check(self, devices):
        self.base.check(devices)

    def prepare(self, model, optimizer_factory, **options):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.prefix))
        return self.base.prepare(model, optimizer_factory, **options)


strategies.register("frozen", Frozen)
'''
pytestmark = pytest.mark.usefixtures("nothing_registered")


@pytest.mark.long
def test_a_transform_of_ones_own() -> None:
    Path("own.py").write_text(OWN)
    own = importlib.import_module("own")
    pipeline = photos()
    noisy = pipeline.transform(own.GaussianNoise(0.5))
    assert "GaussianNoise(std=0.5)" in str(noisy.plan())
    result = noisy.fit(epochs=1, out="runs/noisy", progress=False)
    assert result.history.epochs[0].loss != pipeline.fit(epochs=1, progress=False).history.epochs[0].loss
    assert load_run("runs/noisy").evaluate() == pytest.approx(result.metrics, abs=1e-6)
    assert "own:GaussianNoise" in Path("runs/noisy/recipe.yaml").read_text()
    with pytest.raises(PlanError, match=r"Wordy.*Report"):
        pipeline.transform(own.Wordy()).fit(epochs=1, progress=False)


@pytest.mark.long
def test_a_strategy_of_ones_own() -> None:
    Path("own.py").write_text(OWN)
    importlib.import_module("own")
    assert "frozen" in str(strategies.available())
    pipeline = photos()
    first = pipeline.fit(epochs=1, progress=False)
    second = pipeline.distribute("frozen", prefix="body.").fit(epochs=2, progress=False)
    with pipeline.build() as built:
        begun = {name: value.clone() for name, value in built.engine.model.state_dict().items()}
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, begun[name]) is name.startswith("body."), name
    assert not torch.equal(first.model.state_dict()["body.0.weight"], begun["body.0.weight"])


def test_both_in_a_recipe() -> None:
    """The module of the model registers the strategy, as extending.md has it."""
    Path("own.py").write_text(f"{OWN}\nfrom net import Net\n")
    text = Path("mine.yaml").read_text().replace("cifar_resnet", "own:Net").replace(", width: 8", "")
    Path("own.yaml").write_text(
        f'{text}transforms: [{{name: "own:GaussianNoise", std: 0.05}}]\n'
        "strategy: frozen\nstrategy_options: {prefix: body.}\n"
    )
    end = call("train", "own.yaml", "--out", "runs/both")
    assert end.code == 0, end
    assert "GaussianNoise" in Path("runs/both/plan.txt").read_text()
