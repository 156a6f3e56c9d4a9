"""`num_classes="auto"`, and `Segmentation("auto")`: the number of classes of the training data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import segmentation_jobs as masks
import yaml
from drivetrain import MultiLabel, Pipeline, PlanError, Regression, Segmentation
from drivetrain.loaders import convert
from drivetrain.pipeline import load_run
from drivetrain.pipeline.describe.resolve import resolve
from pipeline_data import CLASSES, Toy, plain_model, toy_arrays


def auto(train: str, **load: Any) -> Pipeline:
    start = Pipeline("cifar_resnet", num_classes="auto", width=4)
    return start.load(train, **{"batch_size": 8, "image_size": 16, "workers": 1} | load)


def number(pipeline: Pipeline) -> Any:
    return resolve(pipeline).spec.model_options["num_classes"]


def test_it_is_decided_in_the_plan(toy: Toy) -> None:
    pipeline = auto(toy.train)
    assert number(pipeline) == CLASSES
    (step,) = (step for step in pipeline.plan().steps if step.what == "build cifar_resnet")
    assert step.why == f"with seed 0, the same on every rank; classes auto: {CLASSES}, as in {toy.train}"
    assert pipeline.to_recipe()["model_options"]["num_classes"] == "auto"
    assert Pipeline.from_recipe(pipeline.to_recipe()) == pipeline
    assert pipeline.summary().modules[-1].parameters == 4 * 4 * CLASSES + CLASSES
    with pipeline.build() as built:
        assert built.engine.plain_model[-1].out_features == CLASSES  # type: ignore[index]


def test_the_number_is_in_the_run(tmp_path: Path) -> None:
    """It trains as with the number written out, resumes, and opens without the data."""
    source, run = tmp_path / "train.beton", tmp_path / "run"
    convert(toy_arrays(32, 0), source, progress=False)
    pipeline = auto(str(source))
    by_hand = pipeline.replace(model_options={"num_classes": CLASSES, "width": 4})
    first, same = pipeline.fit(epochs=1, out=run, progress=False), by_hand.fit(epochs=1, progress=False)
    assert first.history.epochs[0].loss == same.history.epochs[0].loss
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert recipe["model_options"] == {"num_classes": CLASSES, "width": 4}
    resumed = pipeline.fit(epochs=1, out=run, resume="auto", progress=False)
    assert resumed.history.epochs == first.history.epochs
    source.unlink()
    assert load_run(run).predict(toy_arrays(1, 0)[0][0])[0]["class"] in map(str, range(CLASSES))


def test_labels_without_names_vectors_and_numbers(tmp_path: Path) -> None:
    images, labels = toy_arrays(16, 0)
    for name, targets, expected in (
        ("indices", labels, CLASSES), ("labels", np.eye(6, dtype=np.uint8)[labels], 6), ("numbers", labels / 2, 1),
    ):  # fmt: skip
        convert((images, targets), tmp_path / f"{name}.beton", progress=False)
        assert number(auto(str(tmp_path / f"{name}.beton"))) == expected
    several = auto(str(tmp_path / "labels.beton")).task(MultiLabel())
    assert several.fit(epochs=1, progress=False).history.epochs


def test_whole_numbers_are_one_target_of_a_regression(tmp_path: Path) -> None:
    """Not indices of classes, also where these have names."""
    images, labels = toy_arrays(16, 0)
    for name, classes in (("ages", None), ("named", [f"{n} years" for n in range(20 + CLASSES)])):
        file = tmp_path / f"{name}.beton"
        convert((images, labels + 20), file, classes=classes, progress=False)
        assert number(auto(str(file))) == 20 + CLASSES
        assert number(auto(str(file)).task(Regression())) == 1
    result = auto(str(tmp_path / "ages.beton")).task(Regression()).fit(epochs=1, progress=False)
    assert isinstance(result.predict(images[0])[0]["value"], float)


def test_the_classes_of_masks_are_those_that_have_names(tmp_path: Path) -> None:
    file, nameless = tmp_path / "masks.beton", tmp_path / "nameless.beton"
    convert([*map(masks.scene, range(16))], file, classes=(*masks.CLASSES, "void"), progress=False)
    pipeline = Pipeline(masks.Net, num_classes="auto").load(str(file), batch_size=8, image_size=24, workers=1)
    task = Segmentation("auto", ignore_index=3, metrics=("pixel_accuracy",))
    found = resolve(pipeline.task(task)).spec
    assert found.goal == Segmentation(3, ignore_index=3, metrics=("pixel_accuracy",))
    assert found.model_options["num_classes"] == 3
    assert resolve(pipeline.task(Segmentation("auto"))).spec.goal == Segmentation(4)
    assert pipeline.task(task).to_recipe()["task"]["classes"] == "auto"
    result = pipeline.task(task).fit(epochs=1, progress=False)
    assert result.task == found.goal
    with pytest.raises(PlanError, match=r"classes=4, .* leaves fewer than 2"):
        resolve(pipeline.task(Segmentation("auto", ignore_index=(0, 1, 2))))
    convert([*map(masks.scene, range(16))], nameless, progress=False)
    with pytest.raises(PlanError, match=r"nameless.beton has masks without names of their classes. Convert it with"):
        pipeline.load(str(nameless), batch_size=8, image_size=24).task(task).plan()


@pytest.mark.parametrize("train", ["cifar10:train", "https://data.example.org/train.beton"])
def test_data_that_is_not_here_needs_the_number(train: str) -> None:
    with pytest.raises(
        PlanError, match=rf"'auto', .* but {train} is not a .beton file on this machine\. Pass the number"
    ):
        auto(train).plan()


def test_a_missing_file_is_reported_as_without_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "train.beton")
    for pipeline in (auto(missing), Pipeline(plain_model).load(missing, batch_size=8, image_size=16)):
        with pytest.raises(ValueError, match=r"train\.beton does not exist"):
            pipeline.plan()
