"""Job 14: a transform and a strategy of one's own, in Python, in a recipe, and in the run that opens again."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from command_line import done
from drivetrain import PlanError, strategies
from drivetrain.pipeline import load_run
from journey_models import photos
from places import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
LINES = [line for block in (BLOCKS[0], BLOCKS[2]) for line in block.splitlines()]
WORDY = """
from net import Net

@dataclass(frozen=True)
class Wordy(Transform):
    kind = "surgery"
    source = "our own"

    def apply(self, model):
        return "done"
"""
OWN = "\n".join(line for line in LINES if not line.startswith(("pipeline", "print"))) + WORDY
"""The transform and the strategy of the page, and a surgery that returns text in the place of its report."""
pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def own(folder: Path, nothing_registered: None) -> None:  # noqa: ARG001
    (folder / "own.py").write_text(OWN)


def test_a_transform_of_ones_own() -> None:
    own = importlib.import_module("own")
    noisy = photos().transform(own.GaussianNoise(0.5))
    assert "GaussianNoise(std=0.5)" in str(noisy.plan())
    result = noisy.fit(epochs=1, out="runs/noisy", progress=False)
    assert result.history.epochs[0].loss != photos().fit(epochs=1, progress=False).history.epochs[0].loss
    assert "own:GaussianNoise" in Path("runs/noisy/recipe.yaml").read_text()
    with pytest.raises(PlanError, match=r"Wordy.*Report"):
        photos().transform(own.Wordy()).fit(epochs=1, progress=False)


def test_a_strategy_of_ones_own() -> None:
    importlib.import_module("own")
    assert "freezes the parameters with a prefix" in str(strategies.available())
    with photos().build() as built:
        begun = {name: value.clone() for name, value in built.engine.model.state_dict().items()}
    result = photos().distribute("frozen", prefix="body.").fit(epochs=1, progress=False)
    for name, value in result.model.state_dict().items():
        assert torch.equal(value, begun[name]) is name.startswith("body."), name


def test_both_in_a_recipe() -> None:
    """The module of the model registers the strategy, as extending.md has it."""
    values = ["model=own:Net", 'model_options={"num_classes": 3}', "strategy=frozen"]
    values += [
        'strategy_options={"prefix": "body."}',
        'transforms=[{"name": "own:GaussianNoise", "std": 0.05}]',
    ]
    done("train", "mine.yaml", "--out", "runs/both", *values)
    opened = load_run("runs/both")
    assert str(opened.transforms) == "(GaussianNoise(std=0.05),)"
    assert opened.evaluate() == pytest.approx(opened.metrics, abs=1e-6)
