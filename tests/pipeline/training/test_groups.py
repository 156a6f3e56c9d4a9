"""Parameter groups by name: which parameters, which options, under every strategy."""

from typing import Any

import group_jobs
import pytest
import torch
from drivetrain import Pipeline, PlanError
from drivetrain.pipeline import layerwise_decay
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.measuring.variants import alone_and_without, in_turn
from drivetrain.pipeline.optim.config import OptimizerConfig
from drivetrain.pipeline.optim.groups import GroupedFactory
from drivetrain.pipeline.training.build import build, build_model
from drivetrain.strategies import launch
from drivetrain.transforms import NoWeightDecay, SqueezeExcite
from pipeline_data import Toy, batch_norm_model, numbers, plain_model
from torch import nn
from torchvision.models import resnet18, vgg11, vit_b_16

Groups = dict[str, dict[str, Any]]


def built(groups: Groups, model: nn.Module | None = None, *, decay: bool = False) -> tuple[Any, str]:
    """The optimizer's groups, with names in place of parameters, and the note."""
    model = batch_norm_model() if model is None else model
    config = OptimizerConfig("sgd", {"lr": 0.1, "weight_decay": 0.01}, groups=groups)
    plain = NoWeightDecay().optimizer(config.factory) if decay else config.factory
    factory = GroupedFactory(plain, groups, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    made = factory(p for p in model.parameters() if p.requires_grad).param_groups
    return [([names[p] for p in g["params"]], g["lr"], g["weight_decay"]) for g in made], factory.note


def test_the_first_pattern_that_matches_wins() -> None:
    found, note = built({"5.*": {"lr": 1.0}, "*.bias": {"weight_decay": 0.0}, "*": {"lr": 0.2}})
    expected = [
        (["5.weight", "5.bias"], 1.0, 0.01),
        (["1.bias"], 0.1, 0.0),
        (["0.weight", "1.weight"], 0.2, 0.01),
    ]
    assert found == expected
    assert note.endswith("); *.bias (weight_decay=0.0): 8 in 1 tensor(s); * (lr=0.2): 224 in 2 tensor(s).")
    found, note = built({"0.weight": {"lr": 0.5}})
    assert [names for names, *_ in found] == [["1.weight", "1.bias", "5.weight", "5.bias"], ["0.weight"]]
    assert note == "Parameter groups: 0.weight (lr=0.5): 216 in 1 tensor(s); all others: 532 in 4 tensor(s)."


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError(closure)


def test_a_group_without_a_learning_rate(toy: Toy) -> None:
    with pytest.raises(PlanError, match="WithoutRate has a parameter group without 'lr'"):
        toy.pipeline().optimize(lambda params: WithoutRate(params)).fit(epochs=1, progress=False)


def test_with_no_weight_decay_both_apply() -> None:
    found, _ = built({"5.*": {"lr": 1.0, "weight_decay": 0.5}}, decay=True)
    plain, head = [(["0.weight"], 0.1, 0.01), (["1.weight", "1.bias"], 0.1, 0.0)], (["5.bias"], 1.0, 0.0)
    assert found == [*plain, (["5.weight"], 1.0, 0.5), head]


@pytest.mark.parametrize(
    ("groups", "message"), [
        ({"haed.*": {"lr": 1.0}}, r"groups\['haed.\*'\] matches none of the 4 trained parameters.*head.weight"),
        ({"*.weight": {"lr": 1.0}, "head.weight": {"lr": 2.0}}, "left without parameters: .*weight' comes before"),
        ({"stem.*": {"lr": 1.0}}, "matches only parameters that do not require gradients"),
    ],
)  # fmt: skip
def test_a_pattern_without_parameters_is_an_error(groups: Groups, message: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("stem", "body", "head")})
    model["stem"].requires_grad_(False)
    with pytest.raises(PlanError, match=message):
        built(groups, model)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"*": {"learning_rate": 1.0}},
            r"optimize\('sgd'\), groups\['\*'\] has no option 'learning_rate'.*mean 'lr'",
        ),
        ({"*": {"lr": -1.0}}, r"groups\['\*'\] cannot use .*Invalid learning rate"),
        ({"*": {"lr": "fast"}}, "lr='fast' must be a number"),
        ({"*": {}}, r"groups\['\*'\]={} must be a dict of the optimizer's options"),
        ({"*": 0.1}, r"groups\['\*'\]=0.1 must be a dict"),
        ({"*": {"params": []}}, "must be a dict of the optimizer's options"),
        (["*"], r"groups=\['\*'\] must be a dict"),
    ],
)
def test_what_is_refused_when_the_pipeline_is_described(groups: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Pipeline(plain_model).optimize("sgd", lr=0.1, groups=groups)


def test_a_pipeline_trains_them_from_a_recipe_and_resumes(toy: Toy, tmp_path: Any, capsys: Any) -> None:
    groups = {"4.*": {"lr": 0.02, "betas": [0.8, 0.9]}}
    pipeline = toy.pipeline(nn.Identity).optimize("adam", lr=0.01, groups=groups)
    assert pipeline.optimized.groups["4.*"] == {"lr": 0.02, "betas": (0.8, 0.9)}
    assert Pipeline.from_recipe(pipeline.to_recipe()) == pipeline
    steps = [(step.what, step.asked_by) for step in resolve(pipeline, files=False).steps]
    assert ("parameter group 4.*: lr=0.02, betas=(0.8, 0.9)", ".optimize()") in steps
    scaled = resolve(pipeline.replace(optimization=OptimizerConfig(
        "adam", {"lr": 0.01}, groups=groups, base_batch_size=8, scale_lr=True)), files=False)  # fmt: skip
    assert scaled.optimization.groups["4.*"]["lr"] == pytest.approx(0.04)
    pipeline = pipeline.replace(model=plain_model)
    whole = pipeline.fit(epochs=2, out=tmp_path)
    note = "Parameter groups: 4.* (lr=0.02, betas=(0.8, 0.9)): 516 in 2 tensor(s)"
    assert note in capsys.readouterr().out
    assert whole.history.facts["parameter groups"].startswith(note)
    one = pipeline.fit(epochs=2, progress=False, resume=sorted((tmp_path / "checkpoints").glob("step*"))[0])
    assert numbers(one) == numbers(whole)
    assert whole.history.epochs[0].lr < 0.01, "that of the other parameters"
    same = pipeline.optimize("adam", lr=0.01, groups={"*": {"lr": 0.01}}), pipeline.optimize("adam", lr=0.01)
    grouped, plain = (one.fit(epochs=1, progress=False) for one in same)
    assert numbers(grouped) == numbers(plain)
    wrong = toy.pipeline().optimize("sgd", lr=0.1, groups={"5.*": {"lr": 1.0}})
    with pytest.raises(PlanError, match="matches none of the 4"):
        wrong.fit(epochs=1, progress=False)
    own = toy.pipeline().optimize(lambda p: torch.optim.SGD(p, lr=0.1), groups={"4.*": {"beta": 1.0}})
    with pytest.raises(PlanError, match=r"groups\['4.\*'\]: SGD has no option 'beta'"):
        own.fit(epochs=1, progress=False)


def test_names_are_those_after_surgery(toy: Toy) -> None:
    pipeline = toy.pipeline(resnet18).transform(SqueezeExcite())
    plan = resolve(pipeline, files=False)
    model, _ = build_model(plan.spec, plan.transforms)
    after = [name for name, _ in model.named_parameters() if ".se." in name]
    assert after
    found, _ = built({"*.se.*": {"lr": 1.0}}, model)
    assert found[1][0] == after


def test_a_ledgers_variants_may_lack_names_that_surgery_makes(toy: Toy) -> None:
    def model() -> nn.Module:
        layers = nn.Conv2d(3, 16, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
        return nn.Sequential(*layers)

    renamed = {"0.se.*": {"lr": 0.5}, "3.*": {"lr": 0.2}}
    pipeline = toy.pipeline(model).optimize("sgd", lr=0.1, groups=renamed)
    pipeline = pipeline.transform(SqueezeExcite(min_channels=3))
    plan = resolve(pipeline)
    rows = [*in_turn(plan), *alone_and_without(plan)]
    assert rows[0].spec != pipeline
    for row in rows:
        excited = any(isinstance(transform, SqueezeExcite) for transform in row.plan.transforms)
        with build(row.plan) as made:
            rates = [group["lr"] for group in made.engine.optimizer.param_groups]
        assert rates == ([0.1, 0.5, 0.2] if excited else [0.1, 0.2])
    wrong = pipeline.optimize("sgd", lr=0.1, groups={"1.*": {"lr": 0.5}})
    with pytest.raises(PlanError, match="matches none"), build(in_turn(resolve(wrong))[-1].plan):
        pass


def test_layerwise_decay() -> None:
    with torch.device("meta"):
        vit, resnet = vit_b_16(), resnet18()
    groups = layerwise_decay(vit, 1.0, 0.5)
    found, _ = built(groups, vit)
    rates = {name: rate for names, rate, _ in found for name in names}
    assert rates["heads.head.weight"] == rates["encoder.ln.weight"] == 0.1, "those of optimize()"
    for number in range(12):
        assert rates[f"encoder.layers.encoder_layer_{number}.mlp.0.weight"] == 0.5 ** (12 - number)
    for name in ("class_token", "conv_proj.bias", "encoder.pos_embedding"):
        assert rates[name] == 0.5**13
    groups = layerwise_decay(resnet, 0.1, 1.0)
    blocks = {f"layer{a}.{b}.*" for a in (1, 2, 3, 4) for b in (0, 1)}
    assert set(groups) == {"conv1.weight", "bn1.weight", "bn1.bias"} | blocks
    assert all(options == {"lr": 0.1} for options in groups.values())
    resnet.conv1.requires_grad_(False)
    assert "conv1.weight" not in layerwise_decay(resnet, 0.1)
    with pytest.raises(PlanError, match=r"factor=1.5 must be a finite number in \(0, 1\]"):
        layerwise_decay(resnet, 0.1, 1.5)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Linear(4, 2))
    assert layerwise_decay(layers, 1.0, 0.5) == {
        "0.*": {"lr": 0.25},
        "1.*": {"lr": 0.25},
        "2.0.*": {"lr": 0.5},
    }
    with torch.device("meta"):
        deep = layerwise_decay(vgg11(), 1.0, 0.5)
    assert (deep["features.0.*"]["lr"], deep["classifier.3.*"]["lr"], len(deep)) == (2**-10, 0.5, 10)
    for made, error in (
        (nn.LazyLinear(2), "lazy layers"),
        (nn.Linear(2, 2).requires_grad_(False), "is trained"),
    ):
        with pytest.raises(PlanError, match=error):
            layerwise_decay(made, 0.1)


ADAMW = ("fsdp", "zero_redundancy", "deepspeed_stage_2", "deepspeed_stage_3")
NADAM = ("ddp", "fsdp", "fairscale_oss", "fairscale_sharded_ddp", "deepspeed_stage_1")
PAIRS = [*((name, "adamw") for name in ADAMW), *((name, "nadam") for name in NADAM)]


@pytest.mark.process
@pytest.mark.long
@pytest.mark.slow
def test_under_every_strategy(one_thread: None) -> None:  # noqa: ARG001
    """Groups, torch schedulers and optimizers by class: one device's numbers, and its groups, also after a resume."""
    alone = group_jobs.all_of([("single", config) for config in ("adamw", "nadam")])
    (first, _) = launch(group_jobs.all_of, PAIRS, devices=2, timeout=250)
    for (strategy, config), found in first.items():
        expected = alone["single", config]
        place = f"{strategy} {config}"
        assert found["groups"] == expected["groups"], place
        assert found["note"] == expected["note"], place
        for run in ("losses", "resumed"):
            rates = [rate for _, rate in found[run]]
            assert rates == [rate for _, rate in expected["losses"]][-len(rates) :], place
            losses = [loss for loss, _ in expected["losses"]][-len(rates) :]
            assert [loss for loss, _ in found[run]] == pytest.approx(losses, abs=2e-5), f"{place} {run}"
