"""activation_checkpointing=, compile= and fp16 in a pipeline."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from drivetrain import Pipeline, PlanError, RecipeError, StrategyError
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.variants import variants
from drivetrain.transforms import GyroDropout
from pipeline_data import CLASSES, Toy
from torch import nn


class Residual(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


def small(drop: float = 0.1) -> nn.Module:
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), Residual(drop), Residual(drop), *head)


def test_recomputing_trains_to_the_same_weights_bit_for_bit(toy: Toy) -> None:
    plain = toy.pipeline(small).fit(epochs=2, progress=False).model.state_dict()
    pipeline = toy.pipeline(small).distribute("single", activation_checkpointing=True)
    found = pipeline.fit(epochs=2, progress=False).model.state_dict()
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_compiled_it_trains_to_the_same_loss(toy: Toy) -> None:
    pipeline = toy.pipeline(partial(small, 0.0))  # compiled code draws other random numbers
    plain = pipeline.fit(epochs=1, progress=False)
    found = pipeline.distribute("single", compile=True).fit(epochs=1, progress=False)
    assert found.history.epochs[0].loss == pytest.approx(plain.history.epochs[0].loss, abs=1e-4)
    assert found.history.epochs[0].val_loss == pytest.approx(plain.history.epochs[0].val_loss, abs=1e-3)
    assert list(found.model.state_dict()) == list(plain.model.state_dict())


def test_fp16_trains(toy: Toy) -> None:
    history = toy.pipeline(small).distribute("single", precision="fp16").fit(epochs=3, progress=False).history
    assert history.epochs[-1].loss < history.epochs[0].loss


def test_the_plan_shows_both_between_surgery_and_wrapping(toy: Toy) -> None:
    how = {"activation_checkpointing": ["Residual"], "compile": "max-autotune"}
    steps = [step.what for step in toy.pipeline(small).distribute("single", **how).plan().steps]
    first = "recompute the activations of Residual"
    places = [
        steps.index(each) for each in (first, "compile in place, mode max-autotune", "wrap with single")
    ]
    assert places == sorted(places)


def test_the_ledger_measures_compiling_as_a_stage(toy: Toy) -> None:
    pipeline = toy.pipeline(small).distribute("single", precision="bf16", compile=True)
    names = [str(variant.id) for variant in variants(resolve(pipeline))]
    assert names.index("+ compile") == names.index("+ bf16") + 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"compile": True}, r"GyroDropout causes graph breaks.*compile=True"),
        ({"activation_checkpointing": True}, "GyroDropout counts forwards"),
    ],
)
def test_gyro_dropout_with_either_is_refused(toy: Toy, how: dict[str, bool], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        toy.pipeline(small).transform(GyroDropout()).distribute("single", **how).plan()


@pytest.mark.parametrize("how", [{"compile": "max-autotun"}, {"activation_checkpointing": "Residual"}])
def test_values_that_mean_nothing_are_refused_at_once(toy: Toy, how: dict[str, str]) -> None:
    with pytest.raises(StrategyError):
        toy.pipeline(small).distribute("single", **how)


def test_a_recipe_has_both(toy: Toy) -> None:
    both = {"activation_checkpointing": ["BasicBlock"], "compile": True}
    pipeline = Pipeline.from_recipe("baseline", train=str(toy.train), **both)
    assert pipeline.distribution.activation_checkpointing == ("BasicBlock",)
    assert pipeline.distribution.compile is True


def test_a_recipe_says_what_is_gathered_by_itself() -> None:
    options = {"device": "cpu", "wrap": ["Residual"]}
    pipeline = Pipeline.from_recipe("baseline", strategy="fsdp", strategy_options=options, devices=2)
    assert pipeline.distribution.options == options
    again = Pipeline.from_recipe(pipeline.to_recipe())
    assert again.distribution == pipeline.distribution
    with pytest.raises(RecipeError, match="wrap"):
        Pipeline.from_recipe("baseline", strategy="fsdp", strategy_options={"wrap": "Residual"})


def test_what_auto_chooses_is_said_and_kept(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    result = toy.pipeline(small).distribute("auto", device="cpu").fit(epochs=1)
    said = capsys.readouterr()
    note = result.history.to_dict()["strategy"]
    assert note.startswith("The strategy 'auto' chose 'single': there is one device; 0.0 M parameters need")
    assert note in said.out + said.err
