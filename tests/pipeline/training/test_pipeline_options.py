"""Options of a pipeline in its plan, recipe, ledger and training: activation_checkpointing=, compile=, fp16, and
`loader="ffcv_stock"`."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import DataError, Pipeline, PlanError, RecipeError, StrategyError
from drivetrain.pipeline import Ledger
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.variant import LOADER, in_turn, other
from drivetrain.pipeline.measuring.variants import alone_and_without, stages, variants, with_loader
from drivetrain.transforms import GyroDropout, LabelSmoothing, ProgressiveResizing, RandAugment
from pipeline_data import CLASSES, Toy, evaluated, plain_model, surroundings
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


# torch hides it, where it asks a block's input for its gradient, but pytest's filter makes it an error before.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
@pytest.mark.parametrize("how", [{"compile": True}, {"compile": "regions", "activation_checkpointing": 0.2}], ids=str)
def test_compiled_it_trains_to_the_same_loss(toy: Toy, how: dict[str, Any]) -> None:
    pipeline = toy.pipeline(partial(small, 0.0))  # compiled code draws other random numbers
    plain = pipeline.fit(epochs=1, progress=False)
    found = pipeline.distribute("single", **how).fit(epochs=1, progress=False)
    assert found.history.epochs[0].loss == pytest.approx(plain.history.epochs[0].loss, abs=1e-4)
    assert found.history.epochs[0].val_loss == pytest.approx(plain.history.epochs[0].val_loss, abs=1e-3)
    assert list(found.model.state_dict()) == list(plain.model.state_dict())


def test_fp16_trains(toy: Toy) -> None:
    history = toy.pipeline(small).distribute("single", precision="fp16").fit(epochs=3, progress=False).history
    assert history.epochs[-1].loss < history.epochs[0].loss


def test_the_plan_shows_both_between_surgery_and_wrapping(toy: Toy) -> None:
    how = {"activation_checkpointing": ["Residual"], "compile": "max-autotune"}
    steps = [step.what for step in toy.pipeline(small).distribute("single", **how).plan().steps]
    parts = "recompute the activations of Residual", "compile in place, mode max-autotune", "wrap with single"
    places = [steps.index(each) for each in parts]
    assert places == sorted(places)


def test_the_plan_shows_regions_and_a_memory_budget(toy: Toy) -> None:
    how = {"activation_checkpointing": 0.25, "compile": "regions"}
    steps = [step.what for step in toy.pipeline(small).distribute("single", **how).plan().steps]
    at = steps.index("recompute activations, to keep 25% of their memory")
    assert steps[at + 1] == "compile the repeated blocks in place"


def test_a_ledgers_variants_without_compile_have_no_memory_budget(toy: Toy) -> None:
    how = {"activation_checkpointing": 0.25, "compile": "regions", "accumulate": 2}
    plan = resolve(toy.pipeline(small).distribute("single", **how))
    for variant in (*variants(plan), *alone_and_without(plan)):
        own = variant.plan.distribution
        assert own.compile or not own.activation_checkpointing
        if own.compile and own.accumulate == 2:
            assert own.activation_checkpointing == 0.25


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
    both = {"activation_checkpointing": 0.5, "compile": "regions"}
    pipeline = Pipeline.from_recipe("baseline", train=str(toy.train), **both)
    again = Pipeline.from_recipe(pipeline.to_recipe())
    assert (again.distribution.activation_checkpointing, again.distribution.compile) == (0.5, "regions")


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


def stock(toy: Toy, **load: Any) -> Pipeline:
    return toy.pipeline(plain_model, **{"loader": "ffcv_stock", "scale": (0.9, 1), "ratio": (1, 1)} | load)


def test_the_plan_states_what_is_not_repeatable(toy: Toy) -> None:
    assert "ffcv_stock loader" in repr(stock(toy).plan())
    words = "FFCV's random crops and flips have no seed, so no two runs are equal, also not after a resume"
    assert stock(toy).plan().steps[0].why.endswith(words)
    assert "no seed" not in repr(toy.pipeline().plan())


def test_a_recipe_takes_it(toy: Toy) -> None:
    changes = {"loader": "ffcv_stock", "loading.crop": "resized", "transforms": [], "batch_size": 32}
    made = Pipeline.from_recipe("cifar10-quickstart", train=toy.train, val=toy.val, **changes)
    assert resolve(made).data.loader == made.to_recipe()["loader"] == "ffcv_stock"


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            {"crop": "padded", "scale": (0.25, 1), "ratio": (3 / 4, 4 / 3)},
            "crop='padded' is not available in FFCV's own loader",
        ),
        ({"color_jitter": (0.1, 0, 0)}, "color_jitter="),
        ({"verify": True}, "verify=True"),
    ],
)
def test_the_plan_rejects_what_ffcv_does_not_have(toy: Toy, load: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        stock(toy, **load).plan()


def test_the_plan_rejects_transforms_and_sources(toy: Toy) -> None:
    with pytest.raises(DataError, match=r"policy=.*rand_augment.* is not available"):
        stock(toy).transform(RandAugment()).plan()
    for source in ({toy.train: 1}, "s3://bucket/train.beton", "train-{0..3}.beton"):
        with pytest.raises(DataError, match="FFCV's own loader reads"):
            Pipeline(plain_model).load(source, batch_size=8, image_size=16, loader="ffcv_stock").plan()


@pytest.mark.long
def test_training(toy: Toy, tmp_path: Path) -> None:
    """To the end, in two image sizes; nothing stays behind in the process."""
    pipeline = stock(toy, batch_size=16).transform(ProgressiveResizing(initial_scale=0.5, delay=0.3))
    before, threads = surroundings(), set(threading.enumerate())
    result = pipeline.fit(epochs=3, out=tmp_path, progress=False)
    assert surroundings() == before
    assert set(threading.enumerate()) <= threads  # what an earlier test left may end meanwhile
    epochs = result.history.epochs
    assert epochs[-1].loss < 0.7 * epochs[0].loss
    assert epochs[-1].accuracy > 0.6
    loss, accuracy = evaluated(result.model, toy.val)  # by FFCVLoader; images of 16 pixels, crops of 14
    assert (loss, accuracy) == pytest.approx((epochs[-1].val_loss, epochs[-1].accuracy), abs=0.05)
    assert "ffcv_stock loader" in (tmp_path / "plan.txt").read_text()


def test_the_stages_of_a_ledger(toy: Toy) -> None:
    plan = resolve(stock(toy).transform(LabelSmoothing(0.1)))
    assert [stage.name for stage in stages(plan)] == ["ffcv_stock loader", "LabelSmoothing"]
    whole, alone = with_loader(resolve(toy.pipeline()), "ffcv_stock")
    assert whole.spec is alone.spec
    assert whole.plan.data.loader == "ffcv_stock"
    assert str(whole.id) == "full pipeline, ffcv_stock loader"
    assert str(alone.id) == "ffcv_stock loader alone"
    assert [one.id.workload for one in (whole, alone)] == ["train", "loader"]
    for name in ("ffcv", "fcv"):
        words = f"other_loader='{name}' must be a loader other than .*: 'torch', 'ffcv_stock'"
        with pytest.raises(PlanError, match=words):
            toy.pipeline().ledger(other_loader=name)
    with pytest.raises(DataError, match="cutout=4 is not available in FFCV's own loader"):
        toy.pipeline(cutout=4).ledger(other_loader="ffcv_stock")


@pytest.mark.process
@pytest.mark.slow  # half a minute
def test_a_ledger_shows_both(toy: Toy, tmp_path: Path) -> None:
    how: dict[str, Any] = {"seconds": 40, "within": 0.9, "progress": False}
    ledger = toy.pipeline(plain_model).ledger(other_loader="ffcv_stock", **how)
    whole, alone = other("ffcv_stock")
    assert ledger.measured(whole)
    assert ledger.measured(alone)
    assert ledger.others.keys() == {whole, alone}
    assert len({trial.samples for one, trial in ledger.rounds[0].items() if one.kind != "model"}) == 1
    assert "ffcv_stock loader alone: " in repr(ledger)
    ledger.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json").others == ledger.others
    own = stock(toy).ledger(**how)
    assert own.measured(in_turn("ffcv_stock loader"))
    assert own.measured(LOADER)
