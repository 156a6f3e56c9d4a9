"""Each task through the pipeline: trained, judged as by hand, the same under every strategy, resumed, and refused where
its data, model or transforms do not fit."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_jobs as jobs
import torch
import torch.nn.functional as F
import yaml
from command_line import done
from drivetrain import (
    CheckpointError,
    Classification,
    DataError,
    MultiLabel,
    Pipeline,
    PlanError,
    RecipeError,
    Regression,
    Segmentation,
    Task,
)
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.loaders.beton.layout import Field
from drivetrain.loaders.conversion.encode import Encoding, encode_image
from drivetrain.loaders.conversion.writer import Sample, write_betons
from drivetrain.pipeline.tasks.target_scale import carried_scale
from drivetrain.strategies import launch
from drivetrain.transforms import CutMix, InfoBatch, LabelSmoothing, MixUp, SelectiveBackprop, TestTimeFlip
from PIL import Image
from places import ROOT
from torch import nn

Files = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return {name: jobs.write(tmp_path_factory.mktemp("task"), targets) for name, (_, targets, *_) in jobs.TASKS.items()}


def validation(file: str) -> tuple[torch.Tensor, torch.Tensor]:
    with FFCVLoader(file, batch_size=jobs.VAL, image_size=jobs.SIDE, train=False, workers=1) as loader:
        ((batch, targets),) = loader
    return batch, targets


PREDICTED = {"your own": "prints all", "Classification": "%", "MultiLabel": ""}
"""What the table of `drivetrain predict` has, by task; of others numbers."""


@pytest.mark.parametrize("name", jobs.TASKS)
def test_it_learns_and_is_judged_as_by_hand(name: str, files: Files, tmp_path: Path) -> None:
    task: Task = jobs.TASKS[name][0]
    result = jobs.pipeline_of(name, files[name]).fit(epochs=3, out=tmp_path, progress=False, logger="csv")
    first, last = result.history.epochs[0], result.history.epochs[-1]
    assert last.loss < first.loss
    batch, targets = validation(files[name][1])
    if isinstance(task, Regression):
        task = task.with_scale(carried_scale(result.model))
    with torch.no_grad():
        outputs = task.outputs(result.model(batch))
        assert last.val_loss == pytest.approx(task.loss(outputs, targets).item(), abs=1e-5)
        several = isinstance(outputs, torch.Tensor) and outputs.dim() > 1
        meters = task.meters(outputs.shape[-1] if several else 1)
        for metric, meter in meters.items():
            meter.update(outputs, task.metric_targets(targets))
            assert last.metrics[metric] == pytest.approx(meter.compute().item(), rel=1e-6, abs=1e-5)
    assert result.metrics == {"val_loss": last.val_loss, **last.metrics}
    saved = json.loads((tmp_path / "history.json").read_text())
    assert saved["epochs"][-1]["metrics"] == last.metrics
    assert saved["monitor"] == {
        "name": task.monitor,
        "higher_is_better": task.monitor not in ("mae", "distance"),
        "unit": None if task.monitor in ("mae", "distance") else "fraction",
    }
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    row = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    assert {metric: float(row[metric]) for metric in last.metrics} == last.metrics
    assert task.monitor in str(result)
    Image.new("RGB", (40, 30)).save(tmp_path / "x.png")
    assert PREDICTED.get(name, ".") in done("predict", str(tmp_path), str(tmp_path / "x.png"))


def on_ranks(files: Files, strategy: str, devices: int) -> dict[str, Any]:
    """The history of each task, on ranks that exist already."""
    where = {"strategy": strategy, "devices": devices}
    pipelines = {name: jobs.pipeline_of(name, files[name], **where) for name in jobs.TASKS}
    return {name: jobs.history(each.fit(epochs=2, progress=False)) for name, each in pipelines.items()}


def all_on_ranks(files: Files, strategies: list[str]) -> dict[str, Any]:
    return {strategy: on_ranks(files, strategy, 2) for strategy in strategies}


@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "strategies", [["ddp"], pytest.param(["fsdp", "zero_redundancy"], marks=pytest.mark.slow)], ids=str
)
def test_each_is_the_same_under_every_strategy(files: Files, strategies: list[str]) -> None:
    """33 validation images leave one rank without a share of the last batch."""
    found = launch(all_on_ranks, files, strategies, devices=2)[0]
    for name in jobs.TASKS:
        alone = jobs.history(jobs.pipeline_of(name, files[name]).fit(epochs=2, progress=False))
        for strategy, histories in found.items():
            for one, other in zip(alone, histories[name], strict=True):
                assert other == pytest.approx(one, rel=1e-6, abs=2e-6), (strategy, name)


def weighted(last: float, smoothing: float = 0.0) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, last]), label_smoothing=smoothing)


def scaled(factor: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda outputs, targets: factor * F.cross_entropy(outputs, targets)


class Given(Task):
    """A task whose `repr` shows the loss that it was given with its address, or without its weights."""

    def __init__(self, criterion: Any) -> None:
        self._criterion = criterion

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self._criterion(outputs[0], targets)
        return value


@pytest.mark.parametrize("task", [lambda loss: Classification(loss=loss), Given], ids=["named", "your own"])
@pytest.mark.parametrize(
    ("loss", "others"),
    [
        (partial(weighted, 2.0), (partial(weighted, 3.0), partial(weighted, 2.0, 0.1), nn.CrossEntropyLoss)),
        (partial(scaled, 2.0), (partial(scaled, 3.0), lambda: F.cross_entropy)),
    ],
    ids=["module", "function"],
)
def test_another_loss_does_not_resume(
    loss: Callable[[], Any],
    others: tuple[Callable[[], Any], ...],
    task: Callable[[Any], Task],
    files: Files,
    tmp_path: Path,
) -> None:
    pipeline = jobs.pipeline_of("Classification", files["Classification"])
    pipeline = pipeline.optimize("sgd", lr=0.05, schedule="constant")
    pipeline.task(task(loss())).fit(epochs=1, out=tmp_path, progress=False)
    for other in others:
        with pytest.raises(CheckpointError, match="is of a run with task = "):
            pipeline.task(task(other())).fit(epochs=2, out=tmp_path, progress=False, resume=True)
    resumed = pipeline.task(task(loss())).fit(epochs=2, out=tmp_path, progress=False, resume=True)
    assert len(resumed.history.epochs) == 2


def test_mixing_and_flipping_labels(files: Files) -> None:
    pipeline = jobs.pipeline_of("MultiLabel", files["MultiLabel"]).transform(MixUp(0.4), CutMix(), TestTimeFlip())
    result = pipeline.fit(epochs=2, progress=False)
    assert all(0 <= value <= 1 for value in result.history.epochs[-1].metrics.values())


class OfTuples(Task):
    kind = "class indices"

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs[0], targets)


def test_flipping_needs_one_tensor(files: Files) -> None:
    pipeline = jobs.pipeline_of("Classification", files["Classification"]).task(OfTuples()).transform(TestTimeFlip())
    with pytest.raises(PlanError, match=r"takes the mean of one tensor, and the model returns a tuple.*outputs\(\)"):
        pipeline.build()


class Counted(OfTuples):
    def check(self, train: Any, val: Any) -> int:  # noqa: ARG002
        return 3


def test_mixing_needs_the_number_of_classes(files: Files) -> None:
    """A task of one's own may leave it open; the first step would end with an error."""
    pipeline = jobs.pipeline_of("Classification", files["Classification"])
    for transform in (MixUp(), CutMix()):
        name = type(transform).__name__
        with pytest.raises(PlanError, match=f"{name} makes probabilities .* OfTuples.check does not return the number"):
            pipeline.task(OfTuples()).transform(transform).build()
    pipeline.task(Counted()).transform(MixUp()).build().close()


def test_a_loss_with_weights_trains_and_is_evaluated_with_them(files: Files) -> None:
    weight = torch.tensor([1.0, 5.0, 0.5])
    pipeline = jobs.pipeline_of("Classification", files["Classification"])
    weighted = pipeline.task(Classification(loss=nn.CrossEntropyLoss(weight=weight)))
    result = weighted.transform(LabelSmoothing(0.1)).fit(epochs=1, progress=False)
    batch, targets = validation(files["Classification"][1])
    with torch.no_grad():
        logits = result.model(batch)[0]
    expected = nn.CrossEntropyLoss(weight=weight)(logits, targets)
    assert result.metrics["val_loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert "CrossEntropyLoss" in repr(weighted.plan())


def test_a_recipe_names_its_task(files: Files, tmp_path: Path) -> None:
    for name, (task, *_) in jobs.TASKS.items():
        pipeline = jobs.pipeline_of(name, files[name]).replace(epochs=1)
        recipe = pipeline.to_recipe()
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        again = Pipeline.from_recipe(path)
        assert again.goal == task
        assert again.to_recipe() == {**recipe, "name": again.recipe}
    plain = Pipeline.from_recipe(recipe | {"task": "MultiLabel"})
    assert plain.goal == MultiLabel()
    for wrong, words in (
        ({"task": "Multi"}, "No task is named 'Multi'"),
        ({"task": {"metrics": ["map"]}}, "needs a name"),
        ({"task": 3}, "task=3 must be"),
        ({"task": {"name": "MultiLabel", "metrics": ["mAP"]}}, "no metric is named 'mAP'"),
    ):
        with pytest.raises(RecipeError, match=words):
            Pipeline.from_recipe({**recipe, **wrong})


def indices(pictures: np.ndarray) -> np.ndarray:
    return np.arange(len(pictures)) % jobs.LABELS


def of_probabilities(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -(targets * outputs.log_softmax(1)).sum(1).mean()


def of_the_batch(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)


def ignoring(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:  # noqa: ARG001
    return F.cross_entropy(outputs, targets)


def refusing(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction={"mean": "mean"}[reduction])


REFUSED: dict[str, tuple[Callable[[Pipeline], Pipeline], Any, str]] = {
    "numbers as classes": (
        lambda p: p.task(Classification()), jobs.numbers_of, "float labels, but Classification trains .*Regression",
    ),
    "vectors as classes": (lambda p: p, jobs.vectors, "vectors of 3 numbers as labels"),
    "numbers as labels": (
        lambda p: p.task(MultiLabel()), jobs.numbers_of, "one number per image, but MultiLabel needs a vector",
    ),
    "values as labels": (
        lambda p: p.task(MultiLabel()), lambda pictures: pictures.mean((1, 2)).astype(np.float32),
        r"has the value .* in the vector of sample 0, but MultiLabel needs 0 or 1",
    ),
    "another width": (
        lambda p: p.task(Regression()), jobs.numbers_of, r"returns \(2, 3\) for 2 images, but .* 1 number",
    ),
    "masks": (lambda p: p.task(Segmentation(3)), jobs.numbers_of, "needs a mask per image"),
    "smoothing of labels": (
        lambda p: p.task(MultiLabel()).transform(LabelSmoothing()), jobs.vectors,
        "LabelSmoothing needs targets that are class indices, but MultiLabel has labels",
    ),
    "mixing of numbers": (
        lambda p: p.task(Regression()).transform(MixUp()), jobs.numbers_of,
        "MixUp needs targets that are class indices or labels, but Regression has values",
    ),
    "mixing of what a task of one's own has": (
        lambda p: p.task(jobs.Cosine()).transform(CutMix()), jobs.numbers_of, "CutMix needs targets .* Cosine has any",
    ),
    "a loss of vectors": (
        lambda p: p.task(MultiLabel(loss=lambda outputs, _: outputs)), jobs.vectors,
        r"The loss returns \(2, 3\) for 2 images",
    ),
    "a loss that raises": (
        lambda p: p.task(MultiLabel(loss=nn.CTCLoss())), jobs.vectors, "The loss does not accept logits .* and targets",
    ),
    "a loss of mixed images that evaluation cannot use": (
        lambda p: p.task(Classification(loss=of_probabilities)).transform(MixUp()), indices,
        r"In evaluation, the loss does not accept logits \(2, 3\) and class indices .*in training only",
    ),
    "a loss of smoothed targets that evaluation cannot use": (
        lambda p: p.task(Classification(loss=nn.BCEWithLogitsLoss())).transform(LabelSmoothing()), indices,
        "In evaluation, the loss does not accept",
    ),
    "a loss that cannot select": (
        lambda p: p.task(Classification(loss=of_the_batch)).transform(SelectiveBackprop()), indices,
        "SelectiveBackprop needs the loss of each sample, but of_the_batch returns one value per batch",
    ),
    "a loss that ignores reduction, to select": (
        lambda p: p.task(Classification(loss=ignoring)).transform(SelectiveBackprop()), indices,
        r"SelectiveBackprop needs .* The loss of 2 samples has shape \(\) with reduction='none'",
    ),
    "a loss that ignores reduction, to prune": (
        lambda p: p.task(Classification(loss=ignoring)).transform(InfoBatch(anneal=0)), indices,
        r"InfoBatch needs .* The loss of 2 samples has shape \(\) with reduction='none'",
    ),
    "a loss that refuses reduction": (
        lambda p: p.task(Classification(loss=refusing)).transform(SelectiveBackprop()), indices,
        "SelectiveBackprop needs the loss of each sample.* KeyError: 'none'",
    ),
    "a task without a loss": (lambda p: p.task(Task()), jobs.numbers_of, r"Task must define the method loss"),
}  # fmt: skip


def test_numbers_in_another_order_in_validation_are_refused(tmp_path: Path) -> None:
    """Named by the columns of a table of labels, as those of `MultiLabel`."""
    pictures = jobs.images(8, 3)
    files = [str(tmp_path / name) for name in ("train.beton", "val.beton")]
    for file, names in zip(files, (["x", "y"], ["y", "x"]), strict=True):
        convert((pictures, pictures.mean((1, 2))[:, :2]), file, classes=names, progress=False)
    pipeline = Pipeline(jobs.Outputs, num_classes=2).task(Regression())
    pipeline = pipeline.load(*files, batch_size=8, image_size=jobs.SIDE, workers=1)
    with pytest.raises(PlanError, match=r"^Value 0 is 'x' in .*train\.beton and 'y' in .*val\.beton\. Convert both"):
        pipeline.fit(epochs=1, progress=False)


def test_a_number_whose_class_indices_have_names(tmp_path: Path) -> None:
    """Such as ages in folders: the names are those of indices, of which validation data may have others."""
    pictures = jobs.images(8, 3)
    files = [str(tmp_path / name) for name in ("train.beton", "val.beton")]
    for file, names in zip(files, ("abcdefgh", "stuvwxyz"), strict=True):
        convert((pictures, np.arange(8)), file, classes=[*names], progress=False)
    pipeline = Pipeline(jobs.Outputs, num_classes=1).task(Regression())
    pipeline = pipeline.load(*files, batch_size=8, image_size=jobs.SIDE, workers=1)
    assert pipeline.fit(epochs=1, progress=False).history.epochs


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(case: str, tmp_path: Path) -> None:
    change, targets, words = REFUSED[case]
    files = jobs.write(tmp_path, targets)
    start = Pipeline(jobs.Outputs, num_classes=jobs.LABELS)
    start = start.load(*files, batch_size=32, image_size=jobs.SIDE, workers=1)
    with pytest.raises(PlanError, match=words):
        change(start).fit(epochs=1, progress=False)


def test_other_data_in_validation_is_refused(files: Files, tmp_path: Path) -> None:
    pictures = jobs.images(8, 3)
    two = tmp_path / "two.beton"
    convert((pictures, pictures.mean((1, 2))[:, :2].astype(np.float32)), two, progress=False)
    train, _ = files["Regression of vectors"]
    pipeline = jobs.pipeline_of("Regression of vectors", (train, str(two)))
    with pytest.raises(PlanError, match=r"has 3 values per image, .*two.beton has 2"):
        pipeline.fit(epochs=1, progress=False)


@pytest.mark.parametrize("dtype", ["|u1", "<i8"])
def test_labels_of_any_type_that_ffcv_stores(dtype: str, tmp_path: Path) -> None:
    """They reach the check before training as the loader gives them."""
    pictures, file = jobs.images(32, 1), tmp_path / "labels.beton"
    labels = jobs.vectors(pictures).astype(dtype)
    samples = [
        Sample(encode_image(one, Encoding()), (own.tobytes(),)) for one, own in zip(pictures, labels, strict=True)
    ]
    fields = [Field("image", "rgb_image"), Field("label", "ndarray", np.dtype(dtype), (jobs.LABELS,))]
    write_betons([file], samples, len(samples), fields, {"classes": []})
    start = Pipeline(jobs.Outputs, num_classes=jobs.LABELS).task(MultiLabel(metrics="f1"))
    result = start.load(str(file), batch_size=16, image_size=jobs.SIDE, workers=1).fit(epochs=1, progress=False)
    assert np.isfinite(result.history.epochs[0].loss)


def test_names_of_classes_that_are_not_utf8(tmp_path: Path) -> None:
    """In a file of an older version. A run would fail after its first epoch, when it saves its history."""
    pictures, file = jobs.images(32, 1), tmp_path / "named.beton"
    samples = [Sample(encode_image(one, Encoding()), (number % 2,)) for number, one in enumerate(pictures)]
    fields = [Field("image", "rgb_image"), Field("label", "int")]
    write_betons([file], samples, len(samples), fields, {"classes": ["caf\udce9", "tea"]})
    start = Pipeline(jobs.Outputs, num_classes=2).load(str(file), batch_size=16, image_size=jobs.SIDE, workers=1)
    words = r"The name of the class 'caf\\udce9' is not UTF-8\. Rename it, and convert .*named\.beton again"
    with pytest.raises(DataError, match=words):
        start.fit(epochs=1, progress=False)


def test_what_is_no_task_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Did you mean MultiLabel\(\)\?"):
        Pipeline(jobs.Outputs, num_classes=3).task(MultiLabel)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.long
def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines one after another, on small data; then the task of one's own that it defines."""
    monkeypatch.chdir(tmp_path)
    pictures = jobs.images(16, 1)
    masks = (pictures[..., 0] > 90).astype(np.uint8)
    names: dict[str, Any] = {"images": pictures, "labels": jobs.vectors(pictures), "masks": masks}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/tasks.md").read_text(), re.DOTALL):
        exec(block, names)
    assert set(names["result"].metrics) == {"val_loss", "map", "f1"}
    train = jobs.write(tmp_path, jobs.numbers_of)
    own = Pipeline(jobs.Outputs, num_classes=1).load(*train, batch_size=32, image_size=jobs.SIDE, workers=1)
    assert set(own.task(names["Angle"]()).fit(epochs=1, progress=False).metrics) == {"val_loss", "error"}
