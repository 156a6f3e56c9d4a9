"""`loader="ffcv_stock"` in pipelines: the plan, training, recipes, and ledgers that show it next to other loaders."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from drivetrain import DataError, Pipeline, PlanError
from drivetrain.pipeline import Ledger
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.variants import stages, with_loader
from drivetrain.pipeline.measuring.variant import LOADER, in_turn, other
from drivetrain.transforms import LabelSmoothing, ProgressiveResizing, RandAugment
from pipeline_data import Toy, evaluated, plain_model, surroundings


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
        ({"crop": "padded"}, "crop='padded' is not available in FFCV's own loader"),
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
    pipeline = stock(toy).transform(ProgressiveResizing(initial_scale=0.5, delay=0.3))
    before, threads = surroundings(), set(threading.enumerate())
    result = pipeline.fit(epochs=5, out=tmp_path, progress=False)
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
