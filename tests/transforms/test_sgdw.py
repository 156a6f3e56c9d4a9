"""SGD with decoupled weight decay, compared with Composer's, and in a pipeline."""

import copy

import composer_reference
import pytest
import torch
from drivetrain.pipeline.optim.config import OptimizerConfig
from drivetrain.pipeline.optim.optimizers import SGDW
from drivetrain.pipeline.training.schedule import Schedule
from drivetrain.transforms import NoWeightDecay
from pipeline_data import Toy
from torch import nn

OPTIONS = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.05}


def gradients(model: nn.Module, step: int) -> None:
    images = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(images).square().mean().backward()


@pytest.mark.long
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_are_composers(nesterov: bool) -> None:
    reference = composer_reference.load("composer.optim").DecoupledSGDW
    mine = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    theirs = copy.deepcopy(mine)
    ours = SGDW(mine.parameters(), **OPTIONS, nesterov=nesterov)
    composers = reference(theirs.parameters(), **OPTIONS, nesterov=nesterov)
    for step in range(6):
        for optimizer, model in ((ours, mine), (composers, theirs)):
            optimizer.param_groups[0]["lr"] = 0.5 * (1 - step / 6)
            gradients(model, step)
            optimizer.step()
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    assert ours.param_groups[0]["weight_decay"] == 0.05


def test_weights_without_a_gradient_and_groups_without_decay_stay() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias.fill_(1.0)
    idle = nn.Parameter(torch.ones(2, 2))
    factory = NoWeightDecay().optimizer(OptimizerConfig("sgdw", {"lr": 1.0, "weight_decay": 0.5}).factory)
    optimizer = factory([*model.parameters(), idle])
    weight = model.weight.detach().clone()
    model.weight.grad, model.bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(model.weight, weight / 2)
    assert idle.equal(torch.ones(2, 2))
    assert model.bias.equal(torch.ones(2))


def test_decay_follows_the_schedule_and_its_state_travels() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimization = OptimizerConfig("sgdw", {"lr": 0.2, "weight_decay": 0.1}, schedule="linear")
    optimizer = optimization.factory([weight])
    schedule, expected = Schedule(optimization, optimizer, 4), 1.0
    for step in range(4):
        schedule.set_lr(step)
        if step == 2:  # a checkpoint in the middle, at a rate below the peak
            fresh = optimization.factory([weight])
            fresh.load_state_dict(optimizer.state_dict())
            optimizer = fresh
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 4)
        weight.grad = torch.zeros(1)
        optimizer.step()
        expected *= 1 - 0.1 * (1 - step / 4)
    assert weight.item() == pytest.approx(expected)


def test_a_group_without_a_learning_rate_stays() -> None:
    optimizer = SGDW([{"params": [nn.Parameter(torch.ones(1))], "lr": 0.0}], lr=0.1, weight_decay=0.1)
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == 1.0


def test_decay_follows_a_scheduler_that_writes_into_the_learning_rate() -> None:
    """Torch's do so if it is a tensor, as for compiled steps."""
    weight, rate, expected = nn.Parameter(torch.ones(1)), torch.tensor(0.2), 1.0
    optimizer = SGDW([{"params": [weight], "lr": rate}], weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    for step in range(4):
        weight.grad = torch.zeros(1)
        optimizer.step()
        scheduler.step()
        expected *= 1 - 0.1 * (1 - step / 4)
    assert rate.item() == 0
    assert weight.item() == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_decay_at_the_peak_of_torchs_scheduler(scale: float) -> None:
    """OneCycleLR sets `initial_lr` to where it begins, 1/25 of the peak."""
    weight = nn.Parameter(torch.ones(1))
    options = {"max_lr": 0.2, "total_steps": 8, "pct_start": 0.5, "cycle_momentum": False}
    optimization = OptimizerConfig(
        "sgdw",
        {"lr": 0.2, "weight_decay": 0.1},
        schedule=torch.optim.lr_scheduler.OneCycleLR,
        schedule_options=options,
    )
    optimizer, expected = optimization.factory([weight]), 1.0
    schedule = Schedule(optimization, optimizer, 8, scale)
    for step in range(8):
        rate = schedule.set_lr(step)
        weight.grad = torch.zeros(1)
        optimizer.step()
        expected *= 1 - 0.1 * rate / (0.2 * scale)
    assert rate < 0.2 * scale / 100
    assert weight.item() == pytest.approx(expected)


def test_the_range_of_learning_rates_does_not_depend_on_the_optimizers_own(toy: Toy) -> None:
    first, second = (toy.pipeline().optimize("sgdw", lr=lr, weight_decay=0.1).lr_range(steps=12) for lr in (0.001, 1.0))
    assert first.losses == second.losses


def test_a_pipeline_trains_with_it(toy: Toy) -> None:
    pipeline = toy.pipeline().optimize("sgdw", lr=0.1, momentum=0.9, weight_decay=1e-3, schedule="constant")
    assert pipeline.fit(epochs=3, progress=False).accuracy == 1.0
