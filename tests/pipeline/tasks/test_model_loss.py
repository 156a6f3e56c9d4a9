"""Models that compute their loss themselves: the same numbers as with the task's loss, on any strategy; and what
cannot work is refused before training."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_folders
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drivetrain import Classification, MultiLabel, Pipeline, PlanError, Regression, Segmentation
from drivetrain.strategies import launch
from drivetrain.transforms import (
    SAM,
    ColOut,
    CutMix,
    EfficientTrain,
    LabelSmoothing,
    MixUp,
    SelectiveBackprop,
    TestTimeFlip,
)
from same_runs import assert_same_weights
from task_jobs import LABELS, SIDE, Outputs, history, numbers_of, vectors, write

LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "Classification": F.cross_entropy,
    "MultiLabel": F.binary_cross_entropy_with_logits,
    "Regression": lambda outputs, labels: F.mse_loss(outputs[:, 0], labels),
    "Regression of vectors": F.mse_loss,
    "Regression of whole numbers": lambda outputs, labels: F.mse_loss(outputs[:, 0], labels),
}
TASKS: dict[str, tuple[Any, Any, int]] = {
    "Classification": (Classification, lambda p: p.mean((1, 2)).argmax(1), 3),
    "MultiLabel": (MultiLabel, vectors, LABELS),
    "Regression": (Regression, numbers_of, 1),
    "Regression of vectors": (Regression, lambda p: p.mean((1, 2)).astype(np.float32) / 100, 3),
    "Regression of whole numbers": (Regression, lambda p: p.mean((1, 2, 3)).astype(np.int64) // 100, 1),
}
"""By name: the task, the targets of images, the model's outputs per image."""

Files = dict[str, tuple[str, str]]


class Inside(Outputs):
    """A model that returns its loss; `odd` is how it does it wrongly."""

    def __init__(self, num_classes: int, loss: str = "Classification", odd: str = "") -> None:
        super().__init__(num_classes)
        self.loss, self.odd = loss, odd

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(images)
        loss = None if labels is None or self.odd == "None" else LOSSES[self.loss](logits, labels)
        if self.odd == "tensor":
            return logits
        if self.odd == "object":
            return SimpleNamespace(loss=loss, logits=logits)
        if self.odd == "vector" and loss is not None:
            loss = loss.repeat(2)
        return {"loss": loss, "logits": logits}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return {name: write(tmp_path_factory.mktemp("inside"), task[1]) for name, task in TASKS.items()}


def pipeline_of(name: str, files: Files, *, own: bool = True, **options: Any) -> Pipeline:
    """With the model's loss, or the task's."""
    task, _, width = TASKS[name]
    start = Pipeline(Inside, num_classes=width, loss=name, **options).task(task(loss="model") if own else task())
    start = start.load(*files[name], batch_size=32, image_size=SIDE, flip=False, workers=1)
    return start.optimize("sgd", lr=0.05, momentum=0.9)


def assert_same(found: list[tuple[float, ...]], expected: list[tuple[float, ...]], note: Any = "") -> None:
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=2e-6, rel=1e-5), note


@pytest.mark.parametrize("name", TASKS)
def test_its_numbers_are_those_of_the_tasks_loss(name: str, files: Files, tmp_path: Path) -> None:
    pipeline = pipeline_of(name, files, odd="object" if name == "Regression" else "")
    result = pipeline.distribute("single", accumulate=2).fit(epochs=2, out=tmp_path, progress=False)
    plain = pipeline_of(name, files, own=False).distribute("single", accumulate=2)
    assert_same(history(result), history(plain.fit(epochs=2, progress=False)))
    assert "loss: the model's own loss" in repr(pipeline.plan())
    again = Pipeline.from_recipe(tmp_path / "recipe.yaml")
    assert again.goal == pipeline.goal
    assert again.to_recipe()["task"] == {"name": type(pipeline.goal).__name__, "loss": "model"}
    assert result.metrics["val_loss"] == pipeline.evaluate(tmp_path)["val_loss"]


def test_whole_numbers_reach_the_model_as_floats() -> None:
    """As they reach the losses of the task. Of integers, torch's have a value, but no gradient."""
    labels = Regression(loss="model").model_inputs(torch.tensor([[3], [5]]))["labels"]
    assert (labels.dtype, labels.tolist()) == (torch.float32, [3.0, 5.0])


def test_it_resumes_and_takes_what_does_not_touch_the_loss(files: Files, tmp_path: Path) -> None:
    pipeline = pipeline_of("MultiLabel", files).optimize("sgd", lr=0.05, schedule="constant")
    pipeline = pipeline.transform(SAM(), MixUp(0.4), CutMix())  # mixed vectors are vectors
    whole = pipeline.fit(epochs=2, progress=False)
    pipeline.fit(epochs=1, out=tmp_path, progress=False)
    again = pipeline.fit(epochs=2, out=tmp_path, progress=False, resume=True)
    found, expected = ([(e.loss, e.val_loss, e.metrics) for e in each.history.epochs] for each in (again, whole))
    assert found == expected
    assert_same_weights(again, whole)


def test_it_takes_methods_that_change_the_images_alone(files: Files) -> None:
    """Their targets are those that need not follow the images."""
    pipeline = pipeline_of("Classification", files).transform(EfficientTrain(size_increment=4), ColOut(0.25, 0.25))
    (epoch,) = pipeline.fit(epochs=1, progress=False).history.epochs
    plain = pipeline_of("Classification", files, own=False).transform(*pipeline.transforms)
    assert_same([(epoch.loss, epoch.val_loss)], [history(plain.fit(epochs=1, progress=False))[0][:2]])


@pytest.mark.parametrize(("problem", "name"), [(None, "Classification"), (None, "MultiLabel"), (None, "Regression"),
                                               ("regression", "Regression of vectors")])  # fmt: skip
def test_hugging_faces_loss(problem: str | None, name: str, files: Files, tmp_path: Path) -> None:
    """To 1e-6 in every figure of a short training with the task's own loss."""
    task, _, width = TASKS[name]
    folder = hf_folders.save(tmp_path / "vit", "vit", num_labels=width)
    options = {} if problem is None else {"problem_type": problem}
    start = Pipeline(folder, num_classes=width, **options)
    start = start.load(*files[name], batch_size=32, image_size=SIDE, workers=1).optimize("adamw", lr=0.003)
    own, plain = (history(start.task(each).fit(epochs=2, progress=False)) for each in (task(loss="model"), task()))
    assert_same(own, plain)


RANKS = (
    ("ddp", "MultiLabel"), ("fsdp", "MultiLabel"), ("zero_redundancy", "Regression"),
    ("fairscale_sharded_ddp", "Regression"), ("deepspeed_stage_3", "MultiLabel"), ("ddp", "hf"), ("fsdp", "hf"),
)  # fmt: skip
"""Strategies, and what they train."""


def made(name: str, files: Files, folder: str) -> Pipeline:
    return hf_pipeline(files, folder) if name == "hf" else pipeline_of(name, files)


def on_ranks(files: Files, folder: str) -> list[Any]:
    pipelines = [made(name, files, folder).distribute(strategy, devices=2) for strategy, name in RANKS]
    return [history(pipeline.fit(epochs=1, progress=False)) for pipeline in pipelines]


def hf_pipeline(files: Files, folder: str) -> Pipeline:
    start = Pipeline(folder, num_classes=3).load(
        *files["Classification"], batch_size=32, image_size=SIDE, flip=False, workers=1
    )
    return start.task(Classification(loss="model")).optimize("sgd", lr=0.05)


@pytest.mark.slow  # five strategies
@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("one_thread")
def test_the_same_under_every_strategy(files: Files, tmp_path: Path) -> None:
    """33 validation images leave one rank without a share of the last batch."""
    folder = hf_folders.save(tmp_path / "vit", "vit", num_labels=3)
    found = launch(on_ranks, files, folder, devices=2)[0]
    alone = {name: history(made(name, files, folder).fit(epochs=1, progress=False)) for _, name in RANKS}
    for (strategy, name), epochs in zip(RANKS, found, strict=True):
        assert_same(epochs, alone[name], (strategy, name))


@pytest.mark.filterwarnings("ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_lightning_reaches_the_same(files: Files) -> None:
    import logging

    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pipeline = pipeline_of("Regression", files)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module, data, arguments, _ = pipeline.to_lightning(epochs=1, **quiet)
    trainer = pl.Trainer(**arguments)
    trainer.fit(module, data)
    (epoch,) = pipeline.fit(epochs=1, progress=False).history.epochs
    for name in ("loss", "val_loss", "mae"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(epoch.values()[name], abs=1e-5)


REFUSED: dict[str, tuple[str, Callable[[Pipeline], Pipeline], str]] = {
    "labels that it does not take": (
        "Classification", lambda p: p.replace(model=Outputs, model_options={"num_classes": 3}),
        r"and labels \(2,\): TypeError.*model\(images, labels=targets\).*write forward\(self, images, labels=None\)",
    ),
    "no loss": ("Classification", lambda p: with_odd(p, "None"), "it returned None as loss. Leave out loss='model'"),
    "a tensor": ("Classification", lambda p: with_odd(p, "tensor"), "as 'logits'; it returned Tensor"),
    "a loss per image": ("Classification", lambda p: with_odd(p, "vector"), r"The loss returns \(2,\) for 2 images"),
    "a loss that cannot take the targets": (
        "Classification", lambda p: p.replace(model_options={"num_classes": 3, "loss": "MultiLabel"}),
        r"The model does not accept images of 16 × 16 pixels and labels \(2,\)",
    ),
    "smoothing": ("Classification", lambda p: p.transform(LabelSmoothing()), "LabelSmoothing changes .*loss itself"),
    "mixing": ("Classification", lambda p: p.transform(MixUp()), "MixUp changes targets, outputs or the loss"),
    "selection": ("Classification", lambda p: p.transform(SelectiveBackprop()), "SelectiveBackprop changes"),
    "flipping": ("Classification", lambda p: p.transform(TestTimeFlip()), "TestTimeFlip changes"),
    "dp": ("Classification", lambda p: p.distribute("dp"), "'dp' gathers the outputs"),
}  # fmt: skip


def with_odd(pipeline: Pipeline, odd: str) -> Pipeline:
    return pipeline.replace(model_options={**pipeline.model_options, "odd": odd})


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(case: str, files: Files) -> None:
    name, change, words = REFUSED[case]
    with pytest.raises(PlanError, match=words):
        change(pipeline_of(name, files)).fit(epochs=1, progress=False)


def test_a_loss_for_other_targets_is_refused(files: Files, tmp_path: Path) -> None:
    """Of a vector of numbers, the models make labels unless they are told otherwise."""
    start = Pipeline(hf_folders.save(tmp_path / "vit", "vit", num_labels=3), num_classes=3)
    start = start.load(*files["Regression of vectors"], batch_size=32, image_size=SIDE, workers=1)
    with pytest.raises(
        PlanError, match=r"'multi_label_classification', but the targets are values. Build it with prob"
    ):
        start.task(Regression(loss="model")).fit(epochs=1, progress=False)


def test_a_loss_that_is_named_otherwise() -> None:
    with pytest.raises(PlanError, match=r"no loss is named 'modell'. Did you mean 'model'"):
        Classification(loss="modell")
    assert Segmentation(3, loss="model").options == {"classes": 3, "loss": "model"}
    assert MultiLabel(loss="model") == MultiLabel(loss="model") != MultiLabel()
    assert repr(Classification(loss="model")) == "Classification(loss='model')"
