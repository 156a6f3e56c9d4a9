"""The callbacks of the package: early stopping, norms of gradients, profiles."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drivetrain import (
    Callback,
    Classification,
    DrivetrainError,
    EarlyStopping,
    GradientNorms,
    PlanError,
    Profile,
    RunView,
)
from host_syncs import HostSyncs
from pipeline_data import BATCH, CLASSES, TRAIN, Toy, plain_model
from torch import nn
from torchmetrics import MaxMetric, MeanMetric

STEPS = TRAIN // BATCH  # in an epoch


def test_early_stopping_stops_at_the_evaluation_that_its_patience_allows(toy: Toy) -> None:
    pipeline = toy.pipeline().optimize("sgd", lr=1e-9, schedule="constant")  # which improves nothing
    stopping = EarlyStopping("val_loss", patience=2, min_delta=0.01)
    for _ in range(2):  # the same object again
        result = pipeline.fit(epochs=9, progress=False, callbacks=[stopping])
        assert len(result.history.epochs) == 3
        assert result.stopped == (f"EarlyStopping: val_loss has not improved on {stopping.best:.6g} for 2 evaluations")
    by_loss = pipeline.fit(epochs=9, progress=False, callbacks=[EarlyStopping("loss", 1, min_delta=1.0)])
    assert len(by_loss.history.epochs) == 2
    improving = toy.pipeline().fit(epochs=3, progress=False, callbacks=[EarlyStopping(patience=1)])
    assert improving.stopped is None


def test_early_stopping_counts_the_evaluations_before_a_resume(toy: Toy, tmp_path: Path) -> None:
    """The first epoch sets the best value, the second one does not improve, and the third one is the second of two."""
    pipeline = toy.pipeline().optimize("sgd", lr=1e-9, schedule="constant")
    first, second = (EarlyStopping("val_loss", patience=2, min_delta=0.01) for _ in range(2))
    begun = pipeline.fit(epochs=2, out=tmp_path, progress=False, callbacks=[first])
    assert begun.stopped is None
    resumed = pipeline.fit(epochs=6, out=tmp_path, progress=False, callbacks=[second], resume="auto")
    assert len(resumed.history.epochs) == 3
    assert resumed.stopped is not None
    assert second.best == first.best == begun.history.epochs[0].val_loss


def test_early_stopping_does_not_compare_with_the_best_value_of_another_metric(toy: Toy, tmp_path: Path) -> None:
    """A continued run would stop, because its accuracy is not above the best loss."""
    pipeline = toy.pipeline().optimize("sgd", lr=1e-9, schedule="constant")
    options: dict[str, Any] = {"epochs": 6, "progress": False, "out": tmp_path}
    loss = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    assert len(pipeline.fit(callbacks=[loss], **options).history.epochs) == 2
    accuracy = EarlyStopping("top1", patience=2)
    continued = pipeline.fit(callbacks=[accuracy], resume="auto", continue_stopped=True, **options)
    assert len(continued.history.epochs) == 5, "the first one sets the best value, and two more do not improve"
    assert continued.stopped is not None
    assert accuracy.best == continued.history.epochs[2].accuracy
    for old, best in (({"best": 0.5, "waited": 1}, 0.5), (EarlyStopping(mode="max").state_dict(), None)):
        stopping = EarlyStopping()
        stopping.load_state_dict({**old, "best": 0.5})
        assert stopping.best == best


def test_early_stopping_counts_evaluations_in_a_row() -> None:
    """Also one that is undefined; after a stop from the beginning, for a run that is continued."""
    stopping, stops = EarlyStopping("top1", patience=2, mode="max"), list[int]()
    for number, value in enumerate([0.5, None, 0.6, 0.5, 0.55, 0.2, 0.3], 1):
        metrics = {} if value is None else {"top1": value}
        view: Any = SimpleNamespace(metrics=metrics, stop=lambda _, at=number: stops.append(at))
        stopping.on_evaluation_end(view)
    assert stops == [5, 7]
    assert stopping.best == 0.6


def test_early_stopping_of_a_metric_that_few_classes_lack(toy: Toy) -> None:
    """It would stop the run after `patience` evaluations."""
    stopping = EarlyStopping("top5", patience=1)
    with pytest.raises(PlanError, match="no metric is named 'top5'"):
        toy.pipeline().fit(epochs=2, progress=False, callbacks=[stopping])
    monitored = toy.pipeline().task(Classification(metrics=("top1", "top5")))
    assert monitored.fit(epochs=1, progress=False, callbacks=[stopping]).stopped is None


class Worst(MaxMetric):
    """A metric whose name tells nothing, and whose class declares the direction."""

    higher_is_better = False

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:  # type: ignore[override]
        super().update(torch.nn.functional.cross_entropy(outputs, targets.long(), reduction="none"))


def test_early_stopping_knows_the_direction_from_the_metrics_class(toy: Toy) -> None:
    """The loss falls: a stop after one evaluation means that the highest value counted as the best."""
    pipeline = toy.pipeline().task(Classification(metrics={"top1_worst": Worst()}))
    falling = pipeline.fit(epochs=3, progress=False, callbacks=[EarlyStopping("top1_worst", patience=1)])
    worst = [epoch.metrics["top1_worst"] for epoch in falling.history.epochs]
    assert worst == sorted(worst, reverse=True)
    assert falling.stopped is None
    other = EarlyStopping("top1_worst", patience=1, mode="max")
    assert len(pipeline.fit(epochs=3, progress=False, callbacks=[other]).history.epochs) == 2
    undeclared = toy.pipeline().task(Classification(metrics={"top1": "top1", "top1_mean": MeanMetric()}))
    with pytest.raises(PlanError, match=r"'top1_mean' does not declare .*Pass mode='min' or mode='max'"):
        undeclared.fit(epochs=1, progress=False, callbacks=[EarlyStopping("top1_mean")])


def test_gradient_norms_are_logged(toy: Toy, tmp_path: Path) -> None:
    class Norms(Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def needs_gradients(self, step: int) -> bool:  # noqa: ARG002
            return True

        def on_step_end(self, view: RunView) -> None:
            parts = [gradient.norm() for _, gradient in view.named_gradients()]
            self.norms.append(torch.stack(parts).norm().item())

    norms, options = Norms(), {"epochs": 1, "progress": False, "logger": "csv"}
    toy.pipeline().fit(out=tmp_path / "a", callbacks=[norms, GradientNorms(every=2)], **options)
    toy.pipeline().fit(out=tmp_path / "b", callbacks=[GradientNorms(every=2, by="group")], **options)
    for folder, names in (("a", ["gradients/0", "gradients/4"]), ("b", ["gradients/group 0"])):
        with (tmp_path / folder / "metrics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["gradients/total"]]
        assert [int(row["step"]) for row in rows] == [2, 4]
        for row in rows:
            total = float(row["gradients/total"])
            assert total == pytest.approx(norms.norms[int(row["step"]) - 1], rel=1e-5)
            assert sum(float(row[name]) ** 2 for name in names) == pytest.approx(total**2, rel=1e-5)


class Watched(GradientNorms):
    """Notes each line that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__(every=1)
        self.waits: list[str] = []

    def on_step_end(self, view: RunView) -> None:
        with HostSyncs() as syncs:
            super().on_step_end(view)
        self.waits += syncs.found


def test_gradient_norms_do_not_wait_for_the_device(toy: Toy, tmp_path: Path) -> None:
    """But for the copy to the host, which is asynchronous on a GPU."""
    watched = Watched()
    toy.pipeline().fit(epochs=1, out=tmp_path, progress=False, logger="csv", callbacks=[watched])
    assert watched.waits
    assert [line for line in watched.waits if "host_copy.py" not in line] == []


def test_gradient_norms_of_wide_and_complex_numbers(toy: Toy, tmp_path: Path) -> None:
    class Turned(nn.Module):
        """The logits of a layer in float64, times complex numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.layers, self.turn = plain_model().double(), nn.Parameter(torch.ones(CLASSES, dtype=torch.complex64))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            turned: torch.Tensor = self.layers(images.double()) * self.turn
            return turned.real

    class Squares(Callback):
        def __init__(self) -> None:
            self.sums: list[float] = []

        def needs_gradients(self, step: int) -> bool:  # noqa: ARG002
            return True

        def on_step_end(self, view: RunView) -> None:
            self.sums.append(sum(each.abs().double().square().sum().item() for _, each in view.named_gradients()))

    squares = Squares()
    options: dict[str, Any] = {"out": tmp_path, "progress": False, "logger": "csv"}
    toy.pipeline(Turned).fit(epochs=1, callbacks=[squares, GradientNorms(every=1)], **options)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["gradients/total"]]
    assert [float(row["gradients/total"]) ** 2 for row in rows] == pytest.approx(squares.sums, rel=1e-5)
    for row in rows:
        parts = [float(row[f"gradients/{name}"]) for name in ("layers", "turn")]
        assert sum(part**2 for part in parts) == pytest.approx(float(row["gradients/total"]) ** 2, rel=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.profiler")
def test_a_profile_names_the_steps(toy: Toy, tmp_path: Path) -> None:
    trace = tmp_path / "deep" / "trace.json"
    toy.pipeline().fit(epochs=2, progress=False, callbacks=[Profile(trace, start=2, steps=3)])
    named = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in named if str(name).startswith("step ")} == {"step 3", "step 4", "step 5"}
    assert any("convolution" in str(name) for name in named)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.profiler")
def test_a_run_that_ends_where_its_profile_would_begin_has_none(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    toy.pipeline().fit(epochs=1, callbacks=[Profile(trace, start=STEPS)])
    assert not trace.exists()
    assert f"the run ended before step {STEPS + 1}; there is no {trace}" in "".join(capsys.readouterr())


class Steps(Callback):
    taken = 0

    def on_step_end(self, view: RunView) -> None:
        self.taken = view.step


def test_the_folder_of_a_profile_is_tried_before_training(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    steps = Steps()
    with pytest.raises(DrivetrainError, match="file cannot be a folder"):
        toy.pipeline().fit(epochs=1, progress=False, callbacks=[Profile(tmp_path / "file/trace.json"), steps])
    assert steps.taken == 0
