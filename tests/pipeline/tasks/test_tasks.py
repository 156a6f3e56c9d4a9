"""Tasks as values: their losses, metrics and predictions on tensors, also over two ranks, and what they refuse."""

import math
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from drivetrain import Classification, MultiLabel, PlanError, Regression, Segmentation, Task
from drivetrain.pipeline.runs.predictions import write_table
from drivetrain.pipeline.tasks import TASKS, get, to_dict
from drivetrain.pipeline.tasks.metrics import compute, pool, state_of, top
from drivetrain.pipeline.tasks.nests import to_float
from drivetrain.pipeline.tasks.task import update_metric
from drivetrain.pipeline.training.checks import check_metrics
from drivetrain.strategies import launch
from places import ROOT
from task_jobs import Cosine
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, Metric, MinMaxMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassF1Score,
)


def values(task: Task, batches: list[tuple[torch.Tensor, torch.Tensor]], width: int | None) -> dict[str, float]:
    meters = task.meters(width)
    for outputs, targets in batches:
        for meter in meters.values():
            update_metric(task, meter, task.outputs(outputs), task.metric_targets(targets))
    return compute(meters, 1)


class Keeps(Task):
    """Has its metric in an attribute, as a LightningModule does."""

    def __init__(self) -> None:
        self.error = MeanSquaredError()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, targets)

    def metrics(self) -> dict[str, Metric]:
        return {"error": self.error}


def test_each_evaluation_begins_without_what_kept_metrics_have_seen() -> None:
    task, ones = Keeps(), torch.ones(4)
    for wanted in (1.0, 0.25, 0.0):
        assert values(task, [(ones, ones - math.sqrt(wanted))], None) == {"error": pytest.approx(wanted)}
    task.error.update(ones, -ones)  # by the user
    assert values(task, [(ones, ones)], None) == {"error": 0}


def test_classification_is_judged_as_by_hand() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(n, 7), torch.randint(7, (n,))) for n in (16, 16, 5)]
    logits, targets = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    found = values(Classification(metrics=("top1", "top3", "top5", "recall")), batches, 7)
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    for k in (1, 3, 5):
        assert found[f"top{k}"] == pytest.approx((ranks < k).float().mean().item())
    recalls = [(logits.argmax(1) == targets)[targets == c].float().mean().item() for c in targets.unique()]
    assert found["recall"] == pytest.approx(sum(recalls) / 7, abs=1e-6)
    assert set(values(Classification(), batches, 7)) == {"top1", "top5"}
    assert set(values(Classification(), [(torch.randn(4, 5), torch.arange(4))], 5)) == {"top1"}
    assert torch.equal(Classification().predict(logits), logits.softmax(1))
    assert Classification().loss(logits, targets) == F.cross_entropy(logits, targets)


class Judged(Classification):
    DEFAULT_METRICS = ("top1", "f1")


def test_a_derived_task_has_its_own_default_metrics() -> None:
    """Also of few classes, of which the default of `Classification` has no top5."""
    assert [set(Judged().meters(width)) for width in (3, 10)] == [{"top1", "f1"}] * 2
    assert Judged().names == ("top1", "f1")


@pytest.mark.parametrize("task", [Classification, MultiLabel, Regression, Segmentation])
def test_every_metric_is_in_the_docstring_and_in_the_table(task: Any) -> None:
    (row,) = re.findall(rf"(?m)^\| `{task.__name__}\(.*", (ROOT / "docs/guide/tasks.md").read_text())
    for name in task.METRICS:
        assert f'"{name}"`' in task.__doc__, f"{task.__name__}'s docstring lacks the metric {name}"
        assert f"`{name}`" in row, f"docs/guide/tasks.md lacks the metric {name} of {task.__name__}"


def test_labels_are_judged_as_by_hand() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(40, 3), (torch.rand(40, 3) < 0.4).float()
    found = values(MultiLabel(), [(logits[:33], targets[:33]), (logits[33:], targets[33:])], 3)
    precisions, scores = [], []
    for label in range(3):
        order = logits[:, label].argsort(descending=True)
        hits = targets[order, label]
        precisions.append(((hits.cumsum(0) / torch.arange(1, 41)) * hits).sum() / hits.sum())
        chosen, true = logits[:, label] > 0, targets[:, label] > 0
        scores.append(2 * (chosen & true).sum() / (chosen.sum() + true.sum()))
    assert found["map"] == pytest.approx(torch.stack(precisions).mean().item(), abs=1e-6)
    assert found["f1"] == pytest.approx(torch.stack(scores).mean().item(), abs=1e-6)
    assert MultiLabel().loss(logits, targets) == F.binary_cross_entropy_with_logits(logits, targets)
    assert torch.equal(MultiLabel().predict(logits), logits.sigmoid())


def test_classes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """As the two cranes and the two maillots of ImageNet; "²" is a digit, but not a number."""
    names, shares = ("crane", "²", "crane"), torch.tensor([0.25, 0.125, 0.625])
    row = Classification().row(shares, names)
    assert row["class"] == "crane (2)"
    assert row["probability"] == 0.625
    assert row["probabilities"] == {"crane (2)": 0.625, "crane (0)": 0.25, "²": 0.125}
    assert MultiLabel().row(shares, names)["labels"] == ["crane (2)"]
    assert MultiLabel().row(torch.tensor([0.5, 0.49, 0.3]), names)["labels"] == ["crane (0)"]
    write_table(tmp_path / "p.csv", [{"image": "x.png", **row}], names)
    assert (tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()[0] == (
        "image,class,probability,probabilities.crane (0),probabilities.²,probabilities.crane (2)"
    )


@pytest.mark.parametrize(("middle", "spread"), [(0, 1), (10_000, 1), (0, 1e-4)])
def test_numbers_are_judged_as_by_hand(middle: int, spread: float) -> None:
    torch.manual_seed(0)
    outputs, targets = middle + spread * torch.randn(40, 1), middle + spread * torch.randn(40)
    batches = [(outputs[:33], targets[:33]), (outputs[33:], targets[33:])]
    found = values(Regression(metrics=("mae", "mse", "rmse", "r2")), batches, 1)
    errors = outputs[:, 0] - targets
    mse = errors.square().mean().item()
    assert found["mae"] == pytest.approx(errors.abs().mean().item(), abs=1e-6)
    assert found["mse"] == pytest.approx(mse, abs=1e-6)
    assert found["rmse"] == pytest.approx(math.sqrt(mse), abs=1e-6)
    assert found["r2"] == pytest.approx(1 - mse / targets.double().var(correction=0).item(), abs=1e-5)
    assert set(values(Regression(), [(outputs[:1], targets[:1])], 1)) == {"mae"}  # of one sample, R² is undefined
    equal = torch.full((4,), 0.1)
    assert values(Regression(metrics="r2"), [(equal[:, None], equal)], 1) == {"r2": 1}
    assert values(Regression(metrics="r2"), [(equal[:, None] + 1, equal)], 1) == {"r2": 0}
    task = Regression(loss="huber")
    assert task.loss(task.outputs(outputs), targets) == F.huber_loss(outputs[:, 0], targets)
    assert Regression(loss="l1").loss(outputs[:, 0], targets) == F.l1_loss(outputs[:, 0], targets)
    assert Regression().loss(outputs[:, 0], targets[:, None]).item() == pytest.approx(mse)


def test_r2_of_several_numbers_is_the_mean_of_theirs() -> None:
    """Whatever their units; of the last one, all targets are equal, and right."""
    torch.manual_seed(0)
    units = torch.tensor([1.0, 100.0, 0.01, 0.0])
    outputs, targets = (torch.randn(40, 4) * units + torch.tensor([0.0, 0.0, 5.0, 0.5]) for _ in range(2))
    found = values(Regression(metrics="r2"), [(outputs[:33], targets[:33]), (outputs[33:], targets[33:])], 4)
    errors = (outputs.double() - targets.double()).square().sum(0)
    around = (targets.double() - targets.double().mean(0)).square().sum(0)
    each = [*(1 - errors / around)[:3].tolist(), 1.0]
    assert found == {"r2": pytest.approx(sum(each) / 4, abs=1e-6)}


def test_auroc_is_of_classes_and_labels_with_both_kinds_of_samples() -> None:
    torch.manual_seed(0)
    logits, classes = torch.randn(40, 4), torch.arange(40) % 2  # of the others there is none
    labels = torch.stack([torch.zeros(40), torch.ones(40), *torch.randint(2, (2, 40))], 1)

    def by_hand(scores: torch.Tensor, positive: torch.Tensor) -> float:
        pairs = scores[positive][:, None] - scores[~positive]
        return (pairs > 0).float().mean().item()

    for task, targets, expected in (
        (Classification(metrics="auroc"), classes, [by_hand(logits.softmax(1)[:, c], classes == c) for c in (0, 1)]),
        (MultiLabel(metrics="auroc"), labels, [by_hand(logits[:, k], labels[:, k] == 1) for k in (2, 3)]),
    ):
        found = values(task, [(logits[:33], targets[:33]), (logits[33:], targets[33:])], 4)
        assert found == {"auroc": pytest.approx(sum(expected) / 2, abs=1e-6)}
    assert values(Classification(metrics="auroc"), [(logits, torch.full((40,), 3))], 4) == {}  # undefined


def test_masks_are_judged_as_by_hand() -> None:
    torch.manual_seed(0)
    logits, masks = torch.randn(6, 4, 5, 5), torch.randint(4, (6, 5, 5), dtype=torch.uint8)
    masks[:, 0] = 255
    task = Segmentation(4)
    found = values(task, [(logits[:4], masks[:4]), (logits[4:], masks[4:])], None)
    counted, chosen = masks != 255, logits.argmax(1)
    assert found["pixel_accuracy"] == pytest.approx((chosen == masks)[counted].float().mean().item())
    shares = []
    for c in range(4):
        one, other = (chosen == c) & counted, masks == c
        shares.append((one & other).sum() / (one | other).sum())
    assert found["miou"] == pytest.approx(torch.stack(shares).mean().item(), abs=1e-6)
    expected = F.cross_entropy(logits, masks.long(), ignore_index=255)
    assert task.loss(task.outputs({"out": logits, "aux": logits[:1]}), masks).item() == pytest.approx(expected.item())
    assert task.loss(logits, torch.full_like(masks, 255)) == 0
    assert torch.equal(task.predict(logits), chosen)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (3, 4)], ids=["images", "pixels"])
def test_accuracies_are_those_of_torchmetrics(k: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties, and over three ranks, of which one saw nothing; ranks do not import it."""
    torch.manual_seed(0)
    metrics, theirs = [top(k)(6) for _ in range(4)], MulticlassAccuracy(6, average="micro", top_k=k)
    for number, size in enumerate((7, 1, 12)):
        outputs, targets = torch.randint(4, (size, 6, *shape)).float(), torch.randint(6, (size, *shape))
        for metric in (theirs, metrics[0], metrics[1 + number % 2]):
            metric.update(outputs, targets)
    with monkeypatch.context() as patch:
        for name in ("torchmetrics", "torchmetrics.utilities"):
            patch.setitem(sys.modules, name, None)
        pool("top", metrics[1], [state_of(metric) for metric in metrics[1:]])
    assert metrics[0].compute() == metrics[1].compute() == theirs.compute()
    metrics[0].reset()
    assert metrics[0].update_count == 0
    assert top(9)(6).compute().isnan()


def test_metrics_do_not_depend_on_the_batches() -> None:
    """Nor where all logits of a batch are from 0 to 1, which torchmetrics takes for probabilities."""
    torch.manual_seed(0)
    narrow, wide = torch.rand(8, 3), torch.randn(24, 3) * 3
    logits, indices = torch.cat([narrow, wide]), torch.randint(3, (32,))
    calibration = MulticlassCalibrationError(3)
    for task, targets in (
        (
            MultiLabel(metrics=("map", "f1", "precision", "recall", "auroc")),
            (torch.rand(32, 3) < 0.4).float(),
        ),
        (Classification(metrics={"auroc": "auroc", "calibration": calibration, "f1": "f1"}), indices),
        (
            Segmentation(3, metrics={"miou": "miou", "auroc": MulticlassAUROC(3)}),
            indices[:, None, None],
        ),
    ):
        given = logits[..., None, None] if isinstance(task, Segmentation) else logits
        whole = values(task, [(given, targets)], 3)
        split = values(task, [(given[:8], targets[:8]), (given[8:], targets[8:])], 3)
        assert split == pytest.approx(whole, abs=1e-6), task


def test_a_task_is_a_value() -> None:
    one = Classification(metrics=["top1", "f1"], monitor="f1")
    assert one == Classification(metrics=("top1", "f1"), monitor="f1") == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(Classification(metrics=("top1", "f1"), monitor="f1"))
    assert one != Classification()
    assert Classification() != MultiLabel()
    assert repr(one) == "Classification(metrics=('top1', 'f1'), monitor='f1')"
    assert Regression(loss=F.mse_loss) == Regression(loss="mse") == Regression()
    assert Cosine(2.0) == Cosine(2.0) != Cosine(3.0)
    with pytest.raises(AttributeError, match="Classification is frozen"):
        one.monitor = "top1"
    for task in (
        one, MultiLabel(), Segmentation(4, loss=F.cross_entropy), Cosine(2.0),
        Regression(loss="torch.nn:MSELoss"),
    ):  # fmt: skip
        assert get(**to_dict(task)) == task
    metric = MulticlassF1Score(3)
    made = Classification(metrics=[metric, "top1"]).meters(3)
    assert set(made) == {"multiclass_f1_score", "top1"}
    assert made["multiclass_f1_score"] is not metric


def test_a_metric_is_its_class_and_settings() -> None:
    def task(metric: Any) -> Task:
        return Classification(metrics={"f1": metric})

    one = task(MulticlassF1Score(3))
    updated = MulticlassF1Score(3)
    updated.update(torch.randn(4, 3), torch.arange(4) % 3)
    assert one == task(MulticlassF1Score(3)) == pickle.loads(pickle.dumps(one)) == task(updated)
    for other in (MulticlassF1Score(4), MulticlassF1Score(3, average="micro"), MulticlassAccuracy(3), "f1"):
        assert one != task(other)
        assert task(other) != one
    assert task(MaxMetric() * 2.0) == task(MaxMetric() * 2.0) != task(MaxMetric() * 3.0)
    assert task(MinMaxMetric(SumMetric())) != task(MinMaxMetric(MeanMetric()))


def test_metrics_of_ones_own_stay_with_ignored_classes() -> None:
    own = {"own": MulticlassF1Score(4), "miou": "miou"}
    meters = Segmentation(4, ignore_index=0, metrics=own).meters(4)
    assert [type(each).__name__ for each in meters.values()] == ["MulticlassF1Score", "MeanIoU"]


def test_what_models_return_is_taken_apart() -> None:
    logits, other = torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3)
    task = Classification()
    for outputs in (logits, (logits, other), [logits], {"logits": logits, "loss": other}, {"x": logits}):
        assert task.outputs(outputs) is logits
    nest = to_float({"a": (logits, [torch.arange(2)]), "b": None})
    assert nest["a"][0].dtype == torch.float32
    assert nest["a"][1][0].dtype == torch.int64
    assert nest["b"] is None


def test_a_loss_with_weights_moves_without_changing_the_task() -> None:
    weights = torch.tensor([1.0, 3.0])
    module = nn.CrossEntropyLoss(weight=weights)
    task = Classification(loss=module)
    moved: Any = task.move(torch.device("cpu"))
    assert moved is not module
    assert torch.equal(moved.weight, weights)
    assert task.loss_name == "CrossEntropyLoss"


def test_a_metric_by_its_class_has_a_name_in_recipes() -> None:
    task = Classification(metrics={"top1": "top1", "mean": MeanMetric})
    named = to_dict(task)
    assert named["metrics"] == {"top1": "top1", "mean": "torchmetrics:MeanMetric"}
    assert get(**named) == task
    assert isinstance(task.meters(3)["mean"], MeanMetric)
    assert Regression(metrics=(MeanMetric,)).names == ("mean_metric",)
    with pytest.raises(PlanError, match=r"MeanMetric\(\) cannot be imported by name\. It is a MeanMetric object"):
        to_dict(Classification(metrics={"mean": MeanMetric()}))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "metric by a wrong name": (
        partial(Classification, metrics=("top1", "acuracy")), "no metric is named 'acuracy'",
    ),
    "metric of another task": (partial(Regression, metrics=("map",)), "no metric is named 'map'"),
    "no metric": (partial(MultiLabel, metrics=(3,)), "3 is not a metric. Pass names of .*'map'"),
    "a set": (partial(MultiLabel, metrics={"map"}), "must be a list of metrics, or a dict"),
    "a number": (partial(MultiLabel, metrics=3), "metrics=3 must be a list of metrics"),
    "a class": (partial(MultiLabel, metrics=dict), "is not a metric"),
    "a class with arguments": (
        partial(MultiLabel, metrics=MulticlassCalibrationError),
        "MulticlassCalibrationError cannot be created without arguments: .*Pass an object",
    ),
    "no module": (partial(MultiLabel, metrics={"a": "nowhere:A"}), "The metric 'nowhere:A' cannot be imported"),
    "two of one name": (partial(Regression, metrics=("mae", "mae")), "two metrics have one name"),
    "name of the run": (partial(Regression, metrics={"loss": "mae"}), "cannot be named 'loss'"),
    "monitor": (partial(Regression, monitor="top1"), "monitor='top1' is not a metric of it"),
    "loss by a wrong name": (partial(Regression, loss="mae"), "no loss is named 'mae'. .*huber"),
    "loss of a module": (
        partial(Regression, loss="torch.nn:Nothing"), "'torch.nn:Nothing' cannot be imported",
    ),
    "loss of the script": (
        partial(Regression, loss="__main__:mine"),
        "loss '__main__:mine' is defined in the running script.*to a separate module",
    ),
    "loss of the standard library": (
        partial(Regression, loss="os:system"), "names Python's standard library, which has no losses",
    ),
    "imported class": (
        partial(Regression, loss="torch.optim:SGD"), "must be a function, a module, or a name",
    ),
    "task of the script": (partial(get, "__main__:Mine"), "'__main__:Mine' is defined in the running script"),
    "task of the standard library": (partial(get, "json:JSONDecoder"), "which has no tasks"),
    "loss class": (partial(Regression, loss=nn.MSELoss), "must be a function, a module, or a name"),
    "classes": (partial(Segmentation, 1), "classes=1 must be an integer of at least 2"),
    "task by a wrong name": (
        partial(get, "Multilabel"), "No task is named 'Multilabel'. Did you mean 'MultiLabel'",
    ),
    "argument": (partial(get, "MultiLabel", metric="map"), "MultiLabel does not take"),
    "not a task": (partial(get, "torch.nn:Linear"), "not a class derived from drivetrain.Task"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(PlanError, match=words):
        make()


def test_a_task_in_a_file_of_its_own_needs_only_a_line_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "Task", "task")
    assert type(get("Task")) is Task


def test_a_metric_of_several_numbers_is_refused() -> None:
    meters = Classification(metrics={"f1": MulticlassF1Score(3, average=None)}).meters(3)
    meters["f1"].update(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(PlanError, match=r"'f1' returns tensor.* one number. Average it"):
        compute(meters, 1)


class Second(MeanMetric):
    """Needs three samples, and counts how often it was computed."""

    computed = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:  # type: ignore[override]
        super().update((outputs.argmax(1) == targets).float())

    def compute(self) -> torch.Tensor:
        type(self).computed += 1
        raise ValueError("more than two samples are needed")


def test_a_metric_of_several_numbers_is_refused_before_training() -> None:
    """It would be known after the first epoch. What cannot be computed of two samples is not judged by them."""
    outputs, targets = torch.randn(2, 3), torch.tensor([0, 1])
    several = Classification(metrics={"top1": "top1", "f1": MulticlassF1Score(3, average=None)})
    with pytest.raises(PlanError, match=r"'f1' returns tensor.* one number. Average it"):
        check_metrics(several, several.meters(3), outputs, targets)
    other = Classification(metrics={"top1": "top1", "f1": MulticlassF1Score(3), "second": Second})
    check_metrics(other, other.meters(3), outputs, targets)
    assert Second.computed == 1


def product(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.prod(0)


class Reduced(Metric):
    """Keeps `fold(state, values)`, reduced over ranks by `reduction`; its value is `total(state)`."""

    full_state_update = True

    def __init__(
        self,
        reduction: Any,
        fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        start: float | Sequence[float] = 0.0,
        total: Callable[[torch.Tensor], torch.Tensor] = torch.sum,
    ) -> None:
        super().__init__()
        self.add_state("kept", torch.tensor(start), dist_reduce_fx=reduction)
        self.kept: torch.Tensor
        self.fold, self.total = fold, total

    def update(self, values: torch.Tensor) -> None:
        self.kept = self.fold(self.kept, values)

    def compute(self) -> torch.Tensor:
        return self.total(self.kept)


class Listed(Metric):
    """Keeps all values in a list, with or without a reduction."""

    full_state_update = False

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx=reduction)
        self.kept: Any

    def update(self, values: torch.Tensor) -> None:
        self.kept.append(values)

    def compute(self) -> torch.Tensor:
        return torch.cat(self.kept).std() if isinstance(self.kept, list) else self.kept.std()


def plus(state: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return state + values.sum()


def meters() -> dict[str, Metric]:
    return {
        "sum": Reduced("sum", plus),
        "mean": Reduced("mean", plus),
        "max": Reduced("max", lambda state, values: torch.maximum(state, values.max()), -9.0),
        "min": Reduced("min", lambda state, values: torch.minimum(state, values.min()), 9.0),
        "function": Reduced(product, plus),
        "none": Reduced(None, plus, total=lambda state: state.max()),
        "cat of tensors": Reduced("cat", lambda state, values: torch.cat([state, values]), (), torch.std),
        "cat": Listed("cat"),
        "list": Listed(None),
        "torchmetrics' sum": SumMetric(),
        "combined": SumMetric() * 2.0 + MaxMetric(),
        "wrapped": MinMaxMetric(MeanMetric()),
    }


BATCHES: dict[int, list[list[list[float]]]] = {
    2: [[[1.0, 5.0], [2.0]], [[4.0, 3.0]]],
    1: [[], [[1.0, 5.0], [4.0]]],
}
"""By the number of ranks that see samples: the updates of each rank."""


def updated(made: dict[str, Metric], batches: list[list[float]]) -> dict[str, Metric]:
    for batch in batches:
        for metric in made.values():
            metric.update(torch.tensor(batch))
    return made


def of_this_rank() -> dict[str, Any]:
    """The values over both ranks, those of torchmetrics' own synchronization, and an error."""
    rank, found = dist.get_rank(), dict[str, Any]()
    for seen, batches in BATCHES.items():
        made = updated(meters(), batches[rank])
        made.pop("wrapped")
        found[str(seen)] = compute(made, 2)
    made = updated({"wrapped": meters()["wrapped"]}, BATCHES[2][rank])
    pooled = [state_of(made["wrapped"])]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, pooled[0])
    pool("wrapped", made["wrapped"], gathered)
    found["wrapped"] = made["wrapped"].compute()["raw"].item()
    theirs = updated(meters(), BATCHES[2][rank])
    for name in ("cat of tensors", "list", "wrapped"):  # torchmetrics needs as many values on each rank
        del theirs[name]
    found["theirs"] = {name: metric.compute().item() for name, metric in theirs.items()}
    x = torch.arange(6.0)[rank * 2 : rank * 2 + 4]
    correlation = PearsonCorrCoef()
    correlation.update(x, x.square())
    found["correlation"] = compute({"r": correlation}, 2)["r"]
    unlike = Reduced("sum", lambda _, values: values)
    unlike.update(torch.zeros(2 + rank))
    try:
        compute({"unlike": unlike}, 2)
    except PlanError as error:
        found["error"] = str(error)
    return found


@pytest.mark.process
@pytest.mark.usefixtures("one_thread")
def test_each_reduction_over_two_ranks() -> None:
    first, second = launch(of_this_rank, devices=2, device="cpu", timeout=120)
    assert first == second
    as_one = ["sum", "max", "min", "cat of tensors", "cat", "list", "torchmetrics' sum", "combined"]
    for seen, batches in BATCHES.items():
        whole = updated(meters(), [batch for of_rank in batches for batch in of_rank])
        names = as_one if seen == 2 else [*as_one, "mean", "function", "none"]
        for name in names:
            expected = whole[name].compute().item()
            assert first[str(seen)][name] == pytest.approx(expected, abs=1e-6), (seen, name)
    assert first["2"] == pytest.approx(first["2"] | first["theirs"], abs=1e-6)
    assert (first["2"]["mean"], first["2"]["function"], first["2"]["none"]) == (7.5, 56, 8)
    assert first["wrapped"] == pytest.approx(3.0)
    x = torch.cat([torch.arange(4.0), torch.arange(2.0, 6.0)])
    assert first["correlation"] == pytest.approx(torch.corrcoef(torch.stack([x, x.square()]))[0, 1].item(), abs=1e-5)
    assert "The metric 'unlike' (Reduced) cannot be merged over ranks" in first["error"]


def test_a_monitored_top5_stays_with_few_classes() -> None:
    assert set(Classification(monitor="top5").meters(4)) == {"top1", "top5"}
    assert set(Classification(monitor="top1").meters(4)) == {"top1"}
    assert set(Classification().meters(5)) == {"top1"}, "of five classes, all are among five"
    assert set(Classification().meters(6)) == {"top1", "top5"}


def test_precision_recall_and_f1_are_means_over_classes_and_labels() -> None:
    """Of three different numbers, so that none can be in the place of another."""
    names = ("precision", "recall", "f1")
    logits = F.one_hot(torch.tensor([0, 0, 1, 1, 2, 2])).float()
    found = values(Classification(metrics=names), [(logits, torch.tensor([0, 0, 0, 1, 1, 2]))], 3)
    expected = {"precision": 2 / 3, "recall": 13 / 18, "f1": (0.8 + 0.5 + 2 / 3) / 3}
    assert found == pytest.approx(expected, abs=1e-6)
    logits = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]])
    labels = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    found = values(MultiLabel(metrics=names), [(logits, labels)], 2)
    assert found == pytest.approx({"precision": 7 / 12, "recall": 2 / 3, "f1": 0.6}, abs=1e-6)
