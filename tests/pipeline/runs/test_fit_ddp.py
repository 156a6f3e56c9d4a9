"""`Pipeline.fit` on two ranks: the same numbers as on one device, and the same errors."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain import CheckpointError, Pipeline, PlanError, StrategyError, strategies
from drivetrain import transforms as t
from drivetrain.pipeline import FitResult
from drivetrain.strategies import Single, launch
from drivetrain.strategies.launching.meeting import LostRankError
from pipeline_data import (
    BATCH,
    CLASSES,
    SIDE,
    Drawing,
    Toy,
    batch_norm_model,
    evaluated,
    fit_all,
    numbers,
    plain_model,
    write_toy,
)
from process_state import run

pytestmark = pytest.mark.process

WHOLE = [
    ("ddp", case) for case in (
        "plain", "clipped", "accumulated", "a module", "a rank without a share", "torch loader", "methods",
        "clipped by value", "freezing", "layout", "averaged", "swa", "lookahead", "bandwidths",
    )
]  # fmt: skip
SHARDED = [
    ("fsdp", case) for case in (
        "plain", "clipped", "accumulated", "a rank without a share", "methods", "clipped by value", "freezing",
        "layout", "bandwidths",
    )
]  # fmt: skip
DIVIDED = [
    (strategy, case)
    for strategy in ("zero_redundancy", "fairscale_oss")
    for case in ("clipped", "methods", "averaged", "clipped by value", "freezing", "layout")
] + [
    ("fairscale_sharded_ddp", case)
    for case in ("clipped", "accumulated", "averaged", "swa", "freezing", "a rank without a share", "layout")
]
"""Strategies that divide the optimizer's state, and cases that these must train to the same numbers."""


def fit(pipeline: Pipeline) -> FitResult:
    return pipeline.fit(epochs=2, progress=False)


@pytest.fixture(scope="module")
def cases(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Pipeline, dict[str, Any]]]:
    """Name: a pipeline, and how one device must distribute to compute the same."""
    lone = write_toy(tmp_path_factory.mktemp("lone") / "val.beton", BATCH + 1, seed=3)
    lonely = {"train": toy.train, "val": lone, "batch_size": BATCH, "image_size": SIDE, "workers": 1}
    uncropped = {"flip": False, "scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    torch_loader = lonely | uncropped | {"loader": "torch", "workers": 0}
    return {
        "plain": (toy.pipeline(plain_model), {}),
        "clipped": (toy.pipeline(plain_model), {"clip_norm": 0.05}),
        "accumulated": (toy.pipeline(plain_model), {"accumulate": 2}),
        "batch norm": (toy.pipeline(batch_norm_model), {}),
        "a module": (toy.pipeline(plain_model()), {}),
        "a rank without a share": (toy.pipeline().load(**lonely).replace(seed=1), {}),
        "torch loader": (toy.pipeline().load(**torch_loader), {}),
        "mixed": (toy.pipeline().transform(t.MixUp(), t.CutMix(), t.ColOut(), t.CutOut()), {}),
        "methods": (
            toy.pipeline().transform(t.SAM(), t.EMA(half_life=3), t.ProgressiveResizing(finetune=0.25)),
            {},
        ),
        "bandwidths": (toy.pipeline().transform(t.EfficientTrain(size_increment=2), t.RandAugment()), {}),
        "layout": (toy.pipeline().transform(t.ChannelsLast(), t.WeightStandardization()).replace(seed=1), {}),
        "freezing": (toy.pipeline().transform(t.LayerFreezing(0.0, 1.0)), {}),
        "averaged": (toy.pipeline(plain_model).transform(t.EMA(half_life=3), t.NoWeightDecay()), {}),
        "swa": (toy.pipeline().transform(t.SWA(start=0.3, end=0.7)), {}),
        "lookahead": (toy.pipeline(plain_model).transform(t.Lookahead(2)), {}),
        "clipped by value": (
            toy.pipeline().transform(t.GradientClipping("value", 0.01), t.NoWeightDecay(), t.TestTimeFlip()),
            {},
        ),
    }


@pytest.fixture(scope="module")
def on_one_device(cases: Any) -> Callable[[str], FitResult]:
    """Return a case's result on one device, trained on first use."""

    @cache
    def result(name: str) -> FitResult:
        pipeline, how = cases[name]
        return fit(pipeline.distribute("single", **how))

    return result


def on_ranks(cases: Any, strategies_and_names: list[tuple[str, str]]) -> dict[str, Pipeline]:
    pipelines = {}
    for strategy, name in strategies_and_names:
        pipeline, how = cases[name]
        searches = name == "freezing" and strategy not in ("fsdp", "fairscale_sharded_ddp")
        search = {"find_unused_parameters": True} if searches else {}
        pipelines[f"{strategy} {name}"] = pipeline.distribute(strategy, devices=2, **how, **search)
    return pipelines


@pytest.fixture(scope="module")
def on_two_ranks(cases: Any) -> list[dict[str, Any]]:
    pipelines = on_ranks(cases, [*WHOLE, ("ddp", "batch norm"), ("ddp", "mixed"), *SHARDED])
    pipelines["diverging"] = pipelines["ddp plain"].optimize("sgd", lr=1e9)
    return launch(fit_all, pipelines, devices=2, timeout=120)


@pytest.fixture(scope="module")
def divided(cases: Any) -> list[dict[str, Any]]:
    return launch(fit_all, on_ranks(cases, DIVIDED), devices=2, timeout=240)


def same_training(found: Any, alone: FitResult) -> None:
    """Every number of every epoch, and the weights; `found` is the message of an error if it failed."""
    assert not isinstance(found, str), found
    figures, weights = found
    for one, two in zip(numbers(alone), figures, strict=True):
        assert two == pytest.approx(one, abs=1e-5)
    torch.testing.assert_close(weights, alone.model.state_dict(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "name"), DIVIDED)
def test_a_divided_optimizer_trains_as_on_one_device(
    strategy: str, name: str, on_one_device: Callable[[str], FitResult], divided: list[dict[str, Any]]
) -> None:
    same_training(divided[0][f"{strategy} {name}"], on_one_device(name))


@pytest.mark.parametrize(("strategy", "name"), [*WHOLE, *SHARDED])
def test_two_ranks_train_as_one_device(
    strategy: str, name: str, on_one_device: Callable[[str], FitResult], on_two_ranks: list[dict[str, Any]]
) -> None:
    same_training(on_two_ranks[0][f"{strategy} {name}"], on_one_device(name))


@pytest.mark.parametrize("transform", [t.SAM(), t.GradientClipping("norm")], ids=str)
def test_what_needs_whole_gradients_is_refused_where_each_is_on_one_rank(toy: Toy, transform: t.Transform) -> None:
    pipeline = toy.pipeline().transform(transform)
    with pytest.raises(PlanError, match=f"{type(transform).__name__} does not work with .*'fairscale_sharded_ddp'"):
        pipeline.distribute("fairscale_sharded_ddp", devices=2).plan()
    pipeline.distribute("fairscale_oss", devices=2).plan()


def test_two_ranks_mix_as_two_microbatches(cases: Any, on_two_ranks: list[dict[str, Any]]) -> None:
    alone = fit(cases["mixed"][0].distribute("single", accumulate=2))
    same_training(on_two_ranks[0]["ddp mixed"], alone)


def test_batch_norm_on_two_ranks_is_that_of_two_microbatches(
    toy: Toy, cases: Any, on_two_ranks: list[dict[str, Any]]
) -> None:
    alone = fit(cases["batch norm"][0].distribute("single", accumulate=2))
    found, weights = on_two_ranks[0]["ddp batch norm"]
    assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in numbers(alone)], abs=1e-5)
    parameters = dict(alone.model.named_parameters())
    torch.testing.assert_close({n: weights[n] for n in parameters}, parameters, rtol=1e-5, atol=1e-5)
    # Both ranks evaluated with the statistics that were saved.
    saved = batch_norm_model()
    saved.load_state_dict(weights)
    assert evaluated(saved, toy.val) == pytest.approx(found[-1][1:], rel=1e-3, abs=0)


def test_a_loss_that_is_lost_is_one_error_on_every_rank(on_two_ranks: list[dict[str, Any]]) -> None:
    for rank in on_two_ranks:
        assert rank["diverging"].startswith("NonFiniteError: At step ")
        assert "Lower the learning rate" in rank["diverging"]


def drawn(pipeline: Pipeline) -> list[float]:
    Drawing.drawn.clear()
    pipeline.fit(epochs=1, progress=False)
    return Drawing.drawn[-3:]


def drawn_again(pipeline: Pipeline) -> tuple[list[float], list[float], list[float]]:
    """Twice, and with another seed."""
    return drawn(pipeline), drawn(pipeline), drawn(pipeline.replace(seed=1))


def test_ranks_draw_apart_and_the_same_again(toy: Toy) -> None:
    """Masks of dropout, and all that layers draw."""
    two = toy.pipeline(Drawing).distribute("ddp", devices=2, device="cpu")
    (first, again, other), (second, again_too, others) = launch(drawn_again, two, devices=2, device="cpu")
    assert not {*first} & {*second}
    assert not {*first, *second} & {*other, *others}
    assert (again, again_too) == (first, second)
    assert drawn(toy.pipeline(Drawing).distribute("single", device="cpu")) == first  # rank 0's are those of one process


def test_an_error_on_a_rank_comes_as_if_it_were_here(toy: Toy, tmp_path: Path) -> None:
    """And not as a StrategyError with a rank's traceback in it; nothing is left in the folder."""
    pipeline = toy.pipeline(plain_model).replace(model_options={"classes": CLASSES + 1})
    with pytest.raises(PlanError, match=r"returns \(2, 5\) for 2 images, but .* has 4 classes") as caught:
        pipeline.distribute("ddp", devices=2).fit(epochs=1, out=tmp_path, progress=False)
    assert "Traceback" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class InGroup(Single):
    """Trains on one device, in a process group."""

    name = "in_group"
    needs_group = True

    def prepare(self, *args: Any, **options: Any) -> Any:
        assert dist.get_world_size() == 1
        return super().prepare(*args, **options)


@pytest.mark.slow
def test_a_strategy_that_needs_a_process_group_gets_one_on_one_device(toy: Toy) -> None:
    found = fit(toy.pipeline().distribute(InGroup("cpu")))
    assert numbers(found) == numbers(fit(toy.pipeline().distribute("single")))
    assert not dist.is_initialized()


SCRIPT = """
import sys
import torch
from torch import nn
from drivetrain import Pipeline
from ipykernel.zmqshell import ZMQInteractiveShell

ZMQInteractiveShell.instance()  # what a notebook's process has

class Mine(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))

    def forward(self, images):
        return self.layers(images)

pipeline = Pipeline(Mine, classes=4).load(
    sys.argv[1], sys.argv[2], batch_size=32, image_size=16, workers=1
).optimize("sgd", lr=0.5)
two = pipeline.distribute("ddp", devices=2).fit(epochs=2, out=sys.argv[3], progress=True)
one = pipeline.fit(epochs=2, progress=False)
assert type(two.model) is Mine
assert two.model(torch.zeros(1, 3, 16, 16)).shape == (1, 4)
for left, right in zip(one.model.parameters(), two.model.parameters()):
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
for left, right in zip(one.history.epochs, two.history.epochs):
    assert abs(left.loss - right.loss) < 1e-5, (left, right)
    assert left.accuracy == right.accuracy
print("the same")
"""


@pytest.mark.slow  # launched ranks and scripts without a main guard: test_launch_scripts.py
def test_a_model_of_a_script_without_a_main_guard(toy: Toy, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "run"
    done = run(sys.executable, script, toy.train, toy.val, out, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1  loss") == 1  # rank 0 alone shows progress
    # A notebook shows standard error in red, and out of order: what ranks show there goes to standard output.
    assert "epoch 1/2" in done.stdout
    assert "epoch 1/2" not in done.stderr
    assert done.stdout.endswith("the same\n")
    assert len(json.loads((out / "history.json").read_text())["epochs"]) == 2


def test_a_lost_rank_is_named_and_not_what_that_leads_to(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a rank that was about to resume: the checkpoint is not to blame."""

    def lost(*_: Any, **__: Any) -> Any:
        raise LostRankError("Rank 1 does not answer.") from CheckpointError("It is incomplete. Start from scratch.")

    monkeypatch.setattr(strategies, "launch", lost)
    with pytest.raises(StrategyError, match=r"Rank 1 does not answer\.\nThere is no complete checkpoint"):
        toy.pipeline().distribute("ddp", devices=2, device="cpu").fit(epochs=1, progress=False)
