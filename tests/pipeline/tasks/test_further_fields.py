"""Further fields of a file in a pipeline: a task of one's own trains on boxes, keypoints, lists and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import field_jobs as jobs
import numpy as np
import pytest
import torch
from drivetrain import CheckpointError, DataError, Pipeline, PlanError, Task
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline import load_run
from drivetrain.pipeline.tasks.means import mean_of
from drivetrain.pipeline.tasks.task import TaskLoss
from drivetrain.pipeline.training.checks import targets_of
from drivetrain.transforms import EMA, SAM, CutOut, MixUp, ProgressiveResizing


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return jobs.write(tmp_path_factory.mktemp("fields"))


class Recorder(jobs.Middle):
    """Keeps the targets of each training step."""

    seen: list[Any] = []  # noqa: RUF012 — of the class, so that copies share it

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        if outputs.requires_grad:
            self.seen.append(targets)
        return super().loss(outputs, targets)


def test_a_step_gets_what_the_loader_yields(files: tuple[str, str]) -> None:
    Recorder.seen.clear()
    pipeline = jobs.pipeline_of(files).task(Recorder()).distribute("single", accumulate=2)
    pipeline.fit(epochs=1, progress=False)
    options: Any = {"batch_size": 16, "image_size": jobs.SIDE, "workers": 1, "fields": jobs.FIELDS}
    with FFCVLoader(files[0], **options) as loader:
        batches = list(loader)
    assert len(Recorder.seen) == 2 * len(batches)
    for number, (_, *expected) in enumerate(batches):
        for part, targets in enumerate(Recorder.seen[2 * number : 2 * number + 2]):
            for own, each in zip(targets, expected, strict=True):
                given = each[8 * part : 8 * part + 8]
                assert type(own) is type(given)
                for one, other in zip(own, given, strict=True):
                    assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_the_split_of_a_batch_changes_nothing(files: tuple[str, str]) -> None:
    """Its loss weights the pictures."""
    whole = jobs.history(files)
    np.testing.assert_allclose(jobs.history(files, strategy="single", accumulate=4), whole, rtol=1e-5)
    assert whole[-1][0] < whole[0][0]


class OfBoxes(Task):
    """Its mean is over all boxes of a batch, whose number follows from the shapes of the targets."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        each = [(own - box).abs().sum() for own, boxes in zip(outputs, targets[1], strict=True) for box in boxes]
        mean: torch.Tensor = sum(each, 0 * outputs.sum()) / torch.tensor(float(len(each)))
        return mean

    def denominator(self, targets: Any) -> float:
        return sum(map(len, targets[1]))


def test_a_batch_without_boxes_counts_for_nothing() -> None:
    """Its mean is 0 / 0, and so is its gradient, also where the denominator is a number."""
    mean = mean_of(TaskLoss(OfBoxes(), OfBoxes().loss))
    targets: Any = torch.zeros(2), [torch.zeros(0, 4)] * 2
    outputs = torch.ones(2, 4, requires_grad=True)
    assert mean.loss(outputs, targets).isnan()
    total = mean.numerator(outputs, targets, mean.denominator(targets))
    total.backward()
    assert total.item() == 0
    assert outputs.grad is not None
    assert not outputs.grad.any()


@pytest.mark.process
@pytest.mark.long
def test_ranks_train_as_one(files: tuple[str, str]) -> None:
    np.testing.assert_allclose(jobs.on_two_ranks(files), jobs.history(files), rtol=1e-5)


def test_the_recipe_has_them(files: tuple[str, str], tmp_path: Path) -> None:
    pipeline = jobs.pipeline_of(files)
    recipe = pipeline.to_recipe()
    assert recipe["loading"] == {"fields": list(jobs.FIELDS)}
    assert Pipeline.from_recipe(recipe) == pipeline
    assert hash(Pipeline.from_recipe(recipe)) == hash(pipeline)
    by_kind = pipeline.load(*files, batch_size=16, image_size=8, fields={"boxes": "boxes", "weight": None})
    assert Pipeline.from_recipe(by_kind.to_recipe()) == by_kind
    result = pipeline.fit(epochs=1, out=tmp_path / "run", progress=False)
    again = load_run(tmp_path / "run")
    assert again.evaluate() == result.evaluate() == result.metrics
    errors, model = again.errors(), result.model.eval().requires_grad_(False)
    with FFCVLoader(files[1], batch_size=1, image_size=jobs.SIDE, train=False, workers=1, fields=jobs.FIELDS) as loader:
        losses = [float(jobs.Middle().loss(model(images), tuple(targets))) for images, *targets in loader]
    np.testing.assert_allclose(errors.losses, losses, rtol=1e-4, atol=1e-7)


def test_a_run_resumes_with_the_same_ones_only(files: tuple[str, str], tmp_path: Path) -> None:
    kinds = {"boxes": "boxes", "points": "keypoints", "classes": None, "weight": None}
    options: Any = {"epochs": 1, "out": tmp_path, "resume": "auto", "progress": False}
    one = jobs.pipeline_of(files, {"fields": kinds}).fit(**options)
    again = jobs.pipeline_of(files, {"fields": kinds}).fit(**options)
    assert again.history.epochs == one.history.epochs
    with pytest.raises(CheckpointError, match="load settings"):
        jobs.pipeline_of(files).fit(**options)


def test_sizes_and_averages_go_with_them(files: tuple[str, str]) -> None:
    """Of two images that try the loss before training, the fields are those of their full size."""
    transforms = ProgressiveResizing(0.5, delay=0.3, finetune=0.3), EMA(0.9), SAM(), CutOut(1, 0.2)
    pipeline = jobs.pipeline_of(files, {"eval_image_size": 80, "crop": "fit"}).transform(*transforms)
    result = pipeline.fit(epochs=2, progress=False)
    assert np.isfinite(result.history.epochs[-1].loss)
    with pipeline.build() as built:
        labels, boxes, points, classes, weight = targets_of(built.train, "train", jobs.Middle()).two((80, 80))
    assert labels.tolist() == [0, (jobs.TRAIN - 1) % 3]
    for number, own, at in zip((0, jobs.TRAIN - 1), boxes, points, strict=True):
        stored, middles, _ = jobs.places(number)
        scale = np.array([80 / jobs.WIDTH, 80 / jobs.HEIGHT])
        np.testing.assert_allclose(own, stored * np.tile(scale, 2), rtol=1e-5)
        np.testing.assert_allclose(at, middles * scale, rtol=1e-4, atol=1e-4)
    assert [len(each) for each in classes] == [len(each) for each in boxes]
    assert weight.tolist() == [1, 2]


def test_the_plan_names_them(files: tuple[str, str]) -> None:
    step = jobs.pipeline_of(files).plan().steps[0]
    assert ", with the fields boxes, points, classes, weight" in step.why


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda p: p.replace(goal=None), r"fields=\['boxes', .* but Classification has class indices only"),
        (lambda p: p.transform(MixUp()), "MixUp"),
    ],
)
def test_what_does_not_take_them(files: tuple[str, str], changed: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        changed(jobs.pipeline_of(files)).plan()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"fields": ["boxs"]}, "'boxs' is not a field of .*Did you mean 'boxes'"),
        ({"fields": "boxes"}, "fields='boxes' must be a list of texts or a dict"),
        ({"loader": "torch"}, "only available in FFCVLoader"),
        (
            {"policy": {"name": "trivial_augment"}},
            "'boxes' .boxes., 'points' .keypoints. do not follow policy=",
        ),
    ],
)
def test_fields_that_cannot_be_loaded(files: tuple[str, str], load: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        jobs.pipeline_of(files, load).build()


def test_a_loss_that_does_not_take_them_is_named_before_training(files: tuple[str, str]) -> None:
    class Deaf(jobs.Middle):
        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return (outputs[:, 0] - targets).mean()

        def denominator(self, targets: Any) -> Any:
            return len(targets[0])

    with pytest.raises(PlanError, match=r"The loss does not accept logits \(2, 6\) and targets a tuple"):
        jobs.pipeline_of(files).task(Deaf()).build()
