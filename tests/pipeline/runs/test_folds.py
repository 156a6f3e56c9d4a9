"""`Pipeline.cross_validate` and `drivetrain folds`."""

import dataclasses
import json
import math
from pathlib import Path
from statistics import fmean, stdev

import fsspec
import numpy as np
import pytest
import torch
from command_line import done, run
from drivetrain import Classification, Pipeline, PlanError
from drivetrain.strategies import launch
from pipeline_data import CLASSES, SIDE, TRAIN, Toy
from torchmetrics import SumMetric


@pytest.fixture(scope="module")
def pipeline(toy: Toy) -> Pipeline:
    return toy.pipeline()


def test_each_fold_is_a_training_of_its_own(pipeline: Pipeline, toy: Toy, tmp_path: Path) -> None:
    found = pipeline.cross_validate(3, epochs=1, progress=False, out=tmp_path)
    for fold, metrics in enumerate(found.metrics):
        alone = pipeline.load(toy.train, batch_size=32, image_size=SIDE, flip=False, workers=1, folds=3, fold=fold).fit(
            epochs=1, progress=False
        )
        assert metrics == alone.metrics
    values = [metrics["top1"] for metrics in found.metrics]
    assert (found.mean["top1"], found.std["top1"]) == (fmean(values), stdev(values))
    assert found.errors.samples.tolist() == [*range(TRAIN)]  # every sample once
    assert found.errors.targets.tolist() == (np.arange(TRAIN) % CLASSES).tolist()
    assert found.errors.confusion.sum() == TRAIN
    right = (found.errors.targets == found.errors.predictions).mean()
    assert found.errors.metrics["top1"] == pytest.approx(right)
    assert f"{found.mean['top1']:.2%}" in str(found)
    again = pipeline.cross_validate(3, epochs=1, progress=False, out=tmp_path, resume="auto")
    assert again.metrics == found.metrics
    times = [[each.epochs[0].seconds for each in one.histories] for one in (found, again)]
    assert times[0] == times[1]  # nothing was trained again


@pytest.mark.usefixtures("own_cache")
def test_an_address_may_end_as_that_of_a_folder(pipeline: Pipeline) -> None:
    store = fsspec.filesystem("memory")
    pipeline.cross_validate(2, epochs=1, progress=False, out="memory://folds/", checkpoints=None)
    assert sorted(store.glob("/folds/*/history.json")) == [f"/folds/fold-{fold}/history.json" for fold in range(2)]
    store.rm("/folds", recursive=True)


class OfMany(SumMetric):
    """The samples, if there are at least 43: of the folds of 43, 43 and 42, the last has none."""

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:  # type: ignore[override]  # noqa: ARG002
        super().update(len(outputs))

    def compute(self) -> torch.Tensor:
        found = super().compute()
        return found if found >= 43 else found * math.nan


def test_a_metric_that_is_undefined_in_a_fold_counts_in_the_others(pipeline: Pipeline) -> None:
    task = Classification(metrics={"of_many": OfMany(), "top1": "top1"}, monitor="top1")
    found = pipeline.task(task).cross_validate(3, epochs=1, progress=False)
    assert [each.get("of_many") for each in found.metrics] == [43, 43, None]
    assert (found.mean["of_many"], found.std["of_many"], found.errors.metrics["of_many"]) == (43, 0, 43)
    assert found.mean["top1"] == fmean(metrics["top1"] for metrics in found.metrics)
    names = found.table().heads
    rows = [dict(zip(names, row, strict=True)) for row in found.table().rows]
    assert [row["of_many"] for row in rows] == ["43", "43", "", "43", "0"]
    assert rows[2]["top1"] == f"{found.metrics[2]['top1']:.2%}"
    assert "of_many: 2 of 3 folds" in str(found)


def test_one_fold_and_no_data_are_refused(pipeline: Pipeline) -> None:
    with pytest.raises(PlanError, match="folds=1 must be an integer, 2 or more"):
        pipeline.cross_validate(1)
    with pytest.raises(PlanError, match="The pipeline has no data"):
        dataclasses.replace(pipeline, data=None).cross_validate()
    with pytest.raises(PlanError, match="has no option 'fold'"):
        pipeline.cross_validate(fold=3)
    for out in ("", 5):
        with pytest.raises(PlanError, match=r"out=.* the path of a folder"):
            pipeline.cross_validate(out=out)


@pytest.mark.slow
@pytest.mark.process
def test_the_command(toy: Toy, tmp_path: Path) -> None:
    recipe = Pipeline("cifar_resnet", num_classes=CLASSES, width=4).load(toy.train, batch_size=32, image_size=SIDE)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_recipe() | {"epochs": 1}))
    end = run("folds", "recipe.json", "--folds", "2", "--json", "--quiet", cwd=tmp_path)
    assert (end.code, end.err) == (0, "")
    found = json.loads(end.out)
    assert len(found["folds"]) == 2
    assert found["mean"].keys() == {"top1", "val_loss"}


def test_the_command_continues_in_the_folder_of_its_recipe(toy: Toy, tmp_path: Path) -> None:
    recipe = toy.named().load(toy.train, batch_size=64, image_size=SIDE, workers=1).replace(epochs=1).to_recipe()
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"out": f"{tmp_path / 'cv'}"}))
    command = ("folds", f"{tmp_path / 'recipe.json'}", "--folds", "2", "--json", "--quiet")
    first, histories = done(*command), [*(tmp_path / "cv").glob("fold-*/history.json")]
    times = [json.loads(each.read_text())["epochs"][0]["seconds"] for each in histories]
    assert (done(*command), len(times)) == (first, 2)
    assert [json.loads(each.read_text())["epochs"][0]["seconds"] for each in histories] == times


@pytest.mark.process
def test_of_several_ranks_one_prints(toy: Toy, tmp_path: Path) -> None:
    """Each rank runs the command, as torchrun starts it."""
    recipe = toy.named().distribute("ddp", device="cpu", devices=2).replace(epochs=1).to_recipe()
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    command = ("folds", f"{tmp_path / 'recipe.json'}", "--folds", "2", "--json", "--quiet")
    first, second = launch(done, *command, devices=2, device="cpu", timeout=120)
    assert (len(json.loads(first)["folds"]), second) == (2, "")
