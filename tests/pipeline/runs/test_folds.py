"""`Pipeline.cross_validate` and `drivetrain folds`."""

import dataclasses
import json
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from command_line import run
from drivetrain import Pipeline, PlanError
from pipeline_data import CLASSES, SIDE, TRAIN, Toy


@pytest.fixture(scope="module")
def pipeline(toy: Toy) -> Pipeline:
    return toy.pipeline()


def test_each_fold_is_a_training_of_its_own(pipeline: Pipeline, toy: Toy, tmp_path: Path) -> None:
    found = pipeline.cross_validate(3, epochs=1, progress=False, out=tmp_path)
    for fold, metrics in enumerate(found.metrics):
        alone = pipeline.load(
            toy.train, batch_size=32, image_size=SIDE, flip=False, workers=1, folds=3, fold=fold
        ).fit(epochs=1, progress=False)
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


def test_one_fold_and_no_data_are_refused(pipeline: Pipeline) -> None:
    with pytest.raises(PlanError, match="folds=1 must be an integer, 2 or more"):
        pipeline.cross_validate(1)
    with pytest.raises(PlanError, match="The pipeline has no data"):
        dataclasses.replace(pipeline, data=None).cross_validate()
    with pytest.raises(PlanError, match="has no option 'fold'"):
        pipeline.cross_validate(fold=3)


@pytest.mark.slow
@pytest.mark.process
def test_the_command(toy: Toy, tmp_path: Path) -> None:
    recipe = Pipeline("cifar_resnet", num_classes=CLASSES, width=4).load(
        toy.train, batch_size=32, image_size=SIDE
    )
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_recipe() | {"epochs": 1}))
    end = run("folds", "recipe.json", "--folds", "2", "--json", "--quiet", cwd=tmp_path)
    assert (end.code, end.err) == (0, "")
    found = json.loads(end.out)
    assert len(found["folds"]) == 2
    assert found["mean"].keys() == {"top1", "val_loss"}
