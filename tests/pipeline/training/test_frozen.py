"""The running statistics of frozen BatchNorm layers stay, in every loop; what is frozen is named."""

from typing import Any

import pytest
import torch
from drivetrain.common.model_state import describe_frozen, frozen_norms, train_mode
from drivetrain.pipeline import evaluate, train_epoch
from drivetrain.transforms import EMA, BlurPool, LayerFreezing
from pipeline_data import CLASSES, Toy, batch_norm_model
from torch import nn


def half_frozen() -> nn.Module:
    """A frozen stem with a BatchNorm of each kind, and a trained head with one."""
    torch.manual_seed(1)
    stem = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.MaxPool2d(2)
    )  # fmt: skip
    head = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 64, CLASSES))
    return nn.Sequential(stem.requires_grad_(False), head)


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers() if ".num" in name or "running" in name}


def check(model: nn.Module) -> None:
    expected = statistics(half_frozen())
    moved = {name for name, value in statistics(model).items() if not torch.equal(value, expected[name])}
    assert moved == {f"1.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("case", ["single", pytest.param("ddp", marks=pytest.mark.process)])
def test_statistics_stay_in_fit(toy: Toy, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    how: dict[str, Any] = {"single": {"accumulate": 2}, "ddp": {"devices": 2}}[case]
    pipeline = toy.pipeline(half_frozen).distribute(case, **how).transform(BlurPool(), EMA(half_life=2))
    check(pipeline.fit(epochs=2, eval_every_steps=3).model)
    if case == "single":
        assert "Frozen: 0 (2 BatchNorm layers in evaluation mode)." in capsys.readouterr().out


def test_custom_loops(toy: Toy) -> None:
    with toy.pipeline(half_frozen).build() as built:
        built.begin(epochs=1)
        built.engine.model.train()
        built.begin_epoch()
        for images, _ in built.train:
            built.engine.model(images)
    check(built.engine.plain_model)
    model = half_frozen().requires_grad_(True).train()
    LayerFreezing(0.0).freeze(model, 0.7)
    assert [norm.training for norm in (model[0][1], model[0][2], model[1][0])] == [False, False, True]


@pytest.mark.usefixtures("one_process_group")
def test_layers_freeze_after_an_evaluation_of_shards(toy: Toy) -> None:
    """It leaves copies of parameters gathered, and each step makes them again from the shards."""
    pipeline = toy.pipeline(batch_norm_model).transform(LayerFreezing(0.0)).distribute("fsdp", device="cpu")
    with pipeline.build() as built:
        built.begin(epochs=2)
        built.begin_epoch()
        train_epoch(built.engine, built.train, built.loss, built.hooks)
        before = built.engine.export_state()
        assert built.val is not None
        evaluate(built.engine, built.val, built.hooks)
        built.begin_epoch()  # of three layers, one is frozen now
        train_epoch(built.engine, built.train, built.loss, built.hooks)
        after = built.engine.export_state()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert "5.weight" in moved
    assert "0.weight" not in moved


def test_what_is_frozen_is_named(toy: Toy) -> None:
    model = half_frozen()
    assert describe_frozen(model) == "0 (2 BatchNorm layers in evaluation mode)"
    model[0][1].weight.requires_grad_(True)
    assert describe_frozen(model) == "0.0, 0.1.bias"
    train_mode(model)
    assert not frozen_norms(model), "the bias alone is frozen, and the others are among trained layers"
    assert describe_frozen(half_frozen().requires_grad_(True)) == ""
    row = next(step for step in toy.pipeline(half_frozen()).plan().steps if step.what.startswith("build"))
    assert "1,156 parameters, 1,036 trained; frozen: 0 (2 BatchNorm" in row.why
    groups = {"1.0.*": {"lr": 0.0}, "1.2.*": {"lr": 1.0}}
    steps = toy.pipeline(half_frozen).optimize("sgd", lr=0.1, groups=groups).plan().steps
    cautions = [step.caution for step in steps if step.what.startswith("parameter")]
    assert ["lr=0 the weights stay" in caution for caution in cautions] == [True, False]
