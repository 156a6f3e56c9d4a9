"""The direction and the unit of a metric: declared, or refused, and used by everything alike."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drivetrain import Classification, EarlyStopping, Pipeline, PlanError
from drivetrain.pipeline.measuring.ledger import train_each
from drivetrain.pipeline.measuring.runner import Variant
from drivetrain.pipeline.measuring.tuning.arena import Arena
from drivetrain.pipeline.runs.checkpoints.directory import CheckpointDir, best_of
from drivetrain.pipeline.tasks.scales import Scale, scales
from drivetrain.pipeline.telemetry.history import read_history
from pipeline_data import Toy
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassHingeLoss


class Percent(MeanMetric):
    """The accuracy in percent."""

    higher_is_better = True
    unit = "percent"

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        super().update(100 * (outputs.argmax(1) == targets).float())


class Undeclared(MeanMetric):
    """The share of errors, which falls; nothing says so."""

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        super().update((outputs.argmax(1) != targets).float())


class Falling(Undeclared):
    higher_is_better = False


class Declares(Classification):
    higher_is_better: ClassVar = {"error": False}
    units: ClassVar = {"error": "fraction"}


def judged_by(toy: Toy, metrics: dict[str, Any], kind: type[Classification] = Classification) -> Pipeline:
    return toy.pipeline().task(kind(metrics=metrics)).optimize("sgd", lr=0.02, schedule="constant")


def test_units_and_directions() -> None:
    class Doubled(MulticlassAccuracy):
        def compute(self) -> Any:
            return 2 * super().compute()

    metrics = {
        "own": MulticlassAccuracy(4), "doubled": Doubled(4), "hinge": MulticlassHingeLoss(4), "percent": Percent(),
        "error": Undeclared(), "top1": "top1",
    }  # fmt: skip
    share, number = Scale(higher_is_better=True, unit="fraction"), Scale(higher_is_better=False)
    expected = {
        "loss": number, "val_loss": number, "own": share, "doubled": Scale(higher_is_better=True), "hinge": number,
        "percent": Scale(higher_is_better=True, unit="percent"), "error": Scale(higher_is_better=None), "top1": share,
    }  # fmt: skip
    assert scales(Classification(metrics=metrics)) == expected
    declared = scales(Declares(metrics=metrics))["error"]
    assert declared == Scale(higher_is_better=False, unit="fraction")

    class Wrong(Percent):
        unit = "permille"

    with pytest.raises(PlanError, match="'wrong' declares higher_is_better=True and unit='permille'"):
        scales(Classification(metrics={"wrong": Wrong()}))


def test_an_undeclared_direction_is_refused(toy: Toy) -> None:
    undeclared = judged_by(toy, {"error": Undeclared()})
    for verb in (undeclared.plan, lambda: undeclared.fit(epochs=1, progress=False)):
        with pytest.raises(PlanError, match=r"monitors 'error', and nothing declares .* Set higher_is_better = "):
            verb()
    undeclared.task(Classification(metrics={"error": Undeclared()}, monitor="val_loss")).plan()
    undeclared.load(toy.train, batch_size=32, image_size=16).plan()  # there is no best epoch


@pytest.mark.parametrize("kind", [Classification, Declares])
def test_the_best_epoch_is_that_of_the_fewest_errors(toy: Toy, tmp_path: Path, kind: type[Classification]) -> None:
    metric = Falling() if kind is Classification else Undeclared()
    stopping = EarlyStopping("error", patience=9)
    fitted = judged_by(toy, {"error": metric}, kind)
    result = fitted.fit(epochs=4, out=tmp_path, progress=False, callbacks=[stopping])
    errors = [epoch.metrics["error"] for epoch in result.history.epochs]
    assert errors[-1] < errors[0]
    assert stopping.best == min(errors)
    store = CheckpointDir(tmp_path / "checkpoints")
    run = store.run
    assert run is not None
    best = best_of(list(store.of_run(run)))
    assert best is not None
    assert best.content.history.epochs[-1].metrics["error"] == min(errors)


def test_an_iou_is_monitored_as_its_class_declares_it(toy: Toy, tmp_path: Path) -> None:
    """`EarlyStopping`, checkpoints and the plan need no list of names."""

    class Iou(Percent):
        unit = "fraction"

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            MeanMetric.update(self, (outputs.argmax(1) == targets).float())

    stopping = EarlyStopping("iou", patience=9)
    pipeline = judged_by(toy, {"iou": Iou()})
    result = pipeline.fit(epochs=2, out=tmp_path, progress=False, callbacks=[stopping])
    assert stopping.best == max(epoch.metrics["iou"] for epoch in result.history.epochs)
    undeclared = pipeline.task(Classification(metrics={"iou": Undeclared()}, monitor="val_loss"))
    with pytest.raises(PlanError, match="'iou' does not declare whether higher is better"):
        undeclared.fit(epochs=1, progress=False, callbacks=[EarlyStopping("iou")])


def test_an_accuracy_in_percent(toy: Toy, tmp_path: Path) -> None:
    """It has the name of a fraction, and values above 1."""
    pipeline = judged_by(toy, {"accuracy": Percent(), "iou": Falling(), "top1": "top1"})
    result = pipeline.fit(epochs=2, out=tmp_path, progress=False)
    last = result.history.epochs[-1]
    assert last.metrics["accuracy"] == pytest.approx(100 * last.metrics["top1"], abs=1e-4)
    assert f"accuracy {last.metrics['accuracy']:.2f}%  iou {last.metrics['iou']:.4g}  top1 " in str(last)
    saved = read_history(tmp_path)
    assert saved is not None
    assert str(saved) == str(result.history)
    assert f"{last.metrics['accuracy']:.2f}%" in saved._repr_html_()
    resumed = pipeline.fit(epochs=3, out=tmp_path, progress=False, resume="auto")
    assert len(resumed.history.epochs) == 3
    assert (tmp_path / "curves.png").exists()
    arena = Arena(float("inf"), 0.1, epochs=2)
    assert arena.accuracy(pipeline, 0) == pytest.approx(last.metrics["top1"], abs=1e-6)
    rows: dict[Any, Any] = {}
    train_each([Variant("plain", pipeline)], rows, 2, None, progress=False)
    assert rows["plain"].accuracy == pytest.approx(last.metrics["top1"], abs=1e-6)
    assert rows["plain"].seconds_to_target is not None


def test_what_is_no_share_is_not_tuned(toy: Toy) -> None:
    pipeline = judged_by(toy, {"iou": Falling()})
    for verb in (
        lambda: pipeline.tune(seconds=5, allow=("resolution",), progress=False),
        lambda: pipeline.ledger(accuracy=True, epochs=1, progress=False),
    ):
        with pytest.raises(PlanError, match="monitors 'iou', which declares no unit"):
            verb()
