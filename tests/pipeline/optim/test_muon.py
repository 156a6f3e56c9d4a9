"""Muon: torch's numbers for matrices, the plain formula's for convolutions, AdamW's for the rest; on shards, too."""

from pathlib import Path
from typing import Any

import group_jobs
import pytest
import torch
from drivetrain import Pipeline, PlanError, StrategyError, strategies
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.optim.config import OptimizerConfig
from drivetrain.pipeline.optim.muon import ADAMW, MUON, AdaMuon, Muon, orthogonalized
from drivetrain.strategies import launch
from drivetrain.transforms import NoWeightDecay
from pipeline_data import Toy, batch_norm_model, plain_model
from same_runs import assert_resumes
from torch import nn

STEPS = 5


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def stepped(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: int = STEPS) -> list[torch.Tensor]:
    """The weights after some steps, with gradients that depend on the step alone."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_matrices_get_torchs_numbers(nesterov: bool, adjust: str) -> None:
    """torch's own iterates in bf16; equal shapes are batched here, one by one there."""
    shapes = [(8, 8), (6, 12), (12, 6), (6, 12), (8, 8), (6, 12)]
    options: dict[str, Any] = {
        "lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "ns_steps": 5,
    }  # fmt: skip
    ours, theirs = parameters(*shapes), parameters(*shapes)
    found = stepped(Muon(ours, adjust_lr=adjust, precision="bf16", **options), ours)
    expected = stepped(torch.optim.Muon(theirs, adjust_lr_fn=adjust, **options), theirs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def plain_muon(weight: torch.Tensor, steps: int, lr: float, momentum: float) -> torch.Tensor:
    """The formula of the publication, one matrix at a time."""
    weight, buffer = weight.clone(), torch.zeros_like(weight)
    for step in range(steps):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        buffer = momentum * buffer + (1 - momentum) * gradient
        update = (1 - momentum) * gradient + momentum * buffer
        x = update.reshape(len(weight), -1)
        x = x / x.norm()
        if x.shape[0] > x.shape[1]:
            x = x.T
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        if x.shape[0] == weight[0].numel() != len(weight):
            x = x.T
        weight -= lr * max(1, len(weight) / weight[0].numel()) ** 0.5 * x.reshape(weight.shape)
    return weight


@pytest.mark.parametrize("shape", [(16, 3, 3, 3), (64, 3, 3, 3), (8, 8, 1, 1), (12, 5), (4, 6, 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_get_the_formulas_numbers(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    (weight,) = parameters(shape)
    expected = plain_muon(weight.detach(), STEPS, 0.02, 0.95)
    if len(shape) == 4:
        weight.data = weight.data.to(memory_format=layout)
    found = stepped(Muon([weight], lr=0.02), [weight])
    torch.testing.assert_close(found, [expected], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [Muon, AdaMuon])
def test_complex_matrices_are_adamws(kind: Any) -> None:
    """Orthogonalized, they would lose their imaginary parts."""
    start = torch.randn(6, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(9))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [kind([ours], adamw_lr=0.01), torch.optim.AdamW([theirs], 0.01, (0.9, 0.95), weight_decay=0.0)]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ours.grad = torch.randn(6, 4, dtype=torch.complex64, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def plain_adamuon(weight: torch.Tensor, steps: int, lr: float, momentum: float, decay: float) -> torch.Tensor:
    """Algorithm 1 of the paper, one matrix at a time."""
    weight, buffer, squares = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(steps):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        buffer = momentum * buffer + gradient
        signs = buffer.sign().reshape(1, len(weight), -1)
        direction = orthogonalized(signs, 5, torch.float32).reshape(weight.shape)
        squares = momentum * squares + (1 - momentum) * direction * direction
        scaled = direction / (squares.sqrt() + 1e-8)
        gamma = 0.2 * weight.numel() ** 0.5 / scaled.norm()
        weight -= lr * (gamma * scaled + decay * weight)
    return weight


@pytest.mark.parametrize("shape", [(16, 3, 3, 3), (12, 5), (5, 12), (8, 8, 1, 1)])
def test_adamuon_has_the_papers_numbers(shape: tuple[int, ...]) -> None:
    weights = parameters(shape, shape)
    expected = [plain_adamuon(weight.detach(), STEPS, 0.01, 0.9, 0.1) for weight in weights[:1]]
    optimizer = AdaMuon(weights[:1], lr=0.01, momentum=0.9, weight_decay=0.1)
    before = weights[0].detach().clone()
    found = stepped(optimizer, weights[:1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], before)


def test_adamuons_steps_are_as_large_as_adamws() -> None:
    matrix, vector = parameters((20, 30), (7,))
    before = matrix.detach().clone()
    optimizer = AdaMuon([matrix, vector], lr=0.03)
    algorithms = [(group["algorithm"], group["lr"]) for group in optimizer.param_groups]
    assert algorithms == [(MUON, 0.03), (ADAMW, 0.03)]
    stepped(optimizer, [matrix, vector], 1)
    torch.testing.assert_close((matrix - before).square().mean().sqrt().item(), 0.2 * 0.03)


def test_singular_values_end_near_one() -> None:
    matrices = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalized(matrices, 5, torch.float32))
    assert 0.6 < values.min() < values.max() < 1.3
    assert torch.equal(orthogonalized(torch.zeros(1, 3, 4), 5, torch.float32), torch.zeros(1, 3, 4))


def test_all_other_parameters_get_adamws_numbers() -> None:
    """Vectors, single rows and columns, and whatever a group excludes."""
    shapes = [(5,), (1, 1, 8), (7, 1, 1), (4, 6)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    groups = [{"params": ours[:3]}, {"params": ours[3:], "orthogonalize": False, "adamw_lr": 0.02}]
    muon = Muon(groups, lr=9.0, adamw_lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    algorithms = [(group["algorithm"], group["lr"]) for group in muon.param_groups]
    assert algorithms == [(ADAMW, 0.01), (ADAMW, 0.02)]
    reference = [{"params": theirs[:3]}, {"params": theirs[3:], "lr": 0.02}]
    adamw = torch.optim.AdamW(reference, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    found, expected = stepped(muon, ours), stepped(adamw, theirs)
    assert all(map(torch.equal, found, expected))


def test_a_group_becomes_its_matrices_and_the_rest(toy: Toy) -> None:
    model = batch_norm_model()
    optimizer = Muon(model.parameters(), lr=0.05, adamw_lr=0.001)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [(g["algorithm"], g["lr"], [names[p] for p in g["params"]]) for g in optimizer.param_groups]
    assert found == [(MUON, 0.05, ["0.weight", "5.weight"]), (ADAMW, 0.001, ["1.weight", "1.bias", "5.bias"])]
    named = Muon(model.named_parameters(), lr=0.05)
    assert [len(group["params"]) for group in named.param_groups] == [2, 3]
    # A schedule scales both, and reports that of the matrices.
    pipeline = toy.pipeline(batch_norm_model).transform(NoWeightDecay())
    pipeline = pipeline.optimize("muon", lr=0.05, weight_decay=0.1, groups={"5.*": {"orthogonalize": False}})
    result = pipeline.fit(epochs=3, progress=False)
    assert 0 < result.history.epochs[-1].lr < 0.05
    losses = [epoch.loss for epoch in result.history.epochs]
    assert losses[-1] < losses[0]


def test_the_rate_of_a_group_is_that_of_all_its_parameters(toy: Toy) -> None:
    """As the plan and the run print it; a strategy may create the optimizer again from its groups."""
    groups = {
        "0.*": {"lr": 0.01},
        "1.*": {"lr": 0.0},
        "5.weight": {"orthogonalize": False, "lr": 0.003},
        "5.*": {"lr": 0.01, "adamw_lr": 0.5},
    }
    pipeline = toy.pipeline(batch_norm_model).optimize("muon", adamw_lr=0.004, groups=groups)
    with pipeline.build() as built:
        optimizer, note = built.engine.optimizer, built.note
        names = {parameter: name for name, parameter in built.engine.plain_model.named_parameters()}
        again = Muon([{k: v for k, v in g.items() if k != "algorithm"} for g in optimizer.param_groups], adamw_lr=0.004)
    expected = {"0.weight": 0.01, "1.weight": 0.0, "1.bias": 0.0, "5.weight": 0.003, "5.bias": 0.5}
    for each in (optimizer, again):
        assert {names[p]: g["lr"] for g in each.param_groups for p in g["params"]} == expected
    plan = [step.what for step in pipeline.plan().steps]
    for text in ("0.* (lr=0.01, adamw_lr=0.002)", "1.* (lr=0.0, adamw_lr=0.0)"):
        assert text in note
        assert f"parameter group {text.replace(' (', ': ').rstrip(')')}" in plan
    bias = nn.Linear(3, 3).bias
    (halved,) = Muon([{"params": [bias], "lr": 0.01}], lr=0.02, adamw_lr=0.004).param_groups
    assert halved["lr"] == 0.002
    (unscaled,) = AdaMuon([{"params": [bias], "lr": 0.01}], lr=0.02).param_groups
    assert unscaled["lr"] == 0.01


@pytest.mark.parametrize("name", ["muon", pytest.param("adamuon", marks=pytest.mark.slow)])
def test_resuming_goes_on_bit_for_bit(name: str, toy: Toy, tmp_path: Path) -> None:
    groups = {"5.*": {"orthogonalize": False}}
    assert_resumes(toy.pipeline(batch_norm_model).optimize(name, lr=0.05, groups=groups), tmp_path)


def test_in_recipes_and_what_is_refused(toy: Toy) -> None:
    groups = {"4.*": {"orthogonalize": False}}
    pipeline = toy.pipeline(nn.Identity).optimize("muon", lr=0.03, betas=(0.8, 0.9), groups=groups)
    assert Pipeline.from_recipe(pipeline.to_recipe()) == pipeline
    for options, message in (
        ({"adjust_lr": "mine"}, "adjust_lr='mine' must be one of original, match_rms_adamw"),
        ({"precision": "fp8"}, "precision='fp8' must be one of fp32, bf16, or None"),
        ({"momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\)"),
        ({"adamw_lr": -1.0}, "adamw_lr=-1.0 must be 0 or more"),
        ({"ns_steps": 0}, "ns_steps=0 must be a positive integer"),
        ({"scale_lr": True, "base_batch_size": 8}, "no rule is known for how the learning rate of muon"),
    ):
        with pytest.raises(PlanError, match=message):
            toy.pipeline(plain_model).optimize("muon", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "strategy", "message"),
    [
        ("muon", "deepspeed_stage_1", "'muon' needs whole matrices, but 'deepspeed_stage_1' shards.*or with 'fsdp'"),
        ("adamuon", "deepspeed", "'adamuon' needs whole matrices"), ("adamuon", "fsdp", ""),
        ("muon", "deepspeed", "needs whole matrices, but 'deepspeed' shards"),
        (torch.optim.Adafactor, "fsdp", "'Adafactor' needs whole matrices, but 'fsdp' shards.*use 'adamw'"),
        (torch.optim.Adafactor, "auto", "'auto' might shard"), ("muon", "fsdp", ""),
        ("muon", "zero_redundancy", ""), ("muon", "auto", ""), (torch.optim.Adafactor, "ddp", ""),
    ],
)  # fmt: skip
def test_strategies(toy: Toy, optimizer: Any, strategy: str, message: str) -> None:
    pipeline = toy.pipeline(plain_model).optimize(optimizer, lr=0.1).distribute(strategy, devices=2, device="cpu")
    if not message:
        resolve(pipeline, files=False)
        return
    with pytest.raises(PlanError, match=message):
        pipeline.plan()


@pytest.mark.parametrize("kind", [Muon, torch.optim.Adafactor])
def test_deepspeed_refuses_a_factorys_too(kind: Any, one_process_group: None) -> None:  # noqa: ARG001
    with pytest.raises(StrategyError, match=f"{kind.__name__} needs whole matrices.*flattens"):
        strategies.get("deepspeed_stage_2", device="cpu").prepare(nn.Linear(2, 2), kind)


PAIRS = [
    (name, optimizer)
    for optimizer in ("muon", "adamuon")
    for name in (
        "ddp", "zero_redundancy", "fairscale_oss", "fairscale_sharded_ddp", "fsdp", "fsdp_cpu_offload",
    )
]  # fmt: skip


@pytest.mark.process
@pytest.mark.slow
def test_under_every_strategy_that_takes_it(one_thread: None) -> None:  # noqa: ARG001
    """One device's losses, on shards too, also after a resume."""
    alone = group_jobs.all_of([("single", "muon"), ("single", "adamuon")])
    (first, _) = launch(group_jobs.all_of, PAIRS, devices=2, timeout=250)
    assert set(PAIRS) == set(first)
    for (strategy, optimizer), found in first.items():
        group_jobs.assert_nearly(found, alone["single", optimizer], strategy)


def test_muon_takes_all_of_its_options_from_the_configuration() -> None:
    config = OptimizerConfig("muon", {"lr": 0.1, "adamw_lr": 0.2, "ns_steps": 3})
    (matrices, rest) = config.factory(parameters((3, 4), (3,))).param_groups
    assert (matrices["lr"], matrices["ns_steps"], rest["lr"]) == (0.1, 3, 0.2)
    (_, rest) = OptimizerConfig("muon", {"lr": 0.1, "adamw_lr": None}).factory(parameters((3, 4), (3,))).param_groups
    assert rest["lr"] == 0.1
    with pytest.raises(PlanError, match="lr=None must be a number"):
        OptimizerConfig("muon", {"lr": None})
