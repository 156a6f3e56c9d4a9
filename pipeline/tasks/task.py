"""The base of all tasks: a value that says what targets look like, the loss, the metrics and the prediction."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from torch import nn

from ...common.errors import PlanError, suggest
from ...common.frozen import FrozenDict
from ...common.names import imported
from .means import Adapted, Count, LossFunction, Mean, mean_of, reduction_of, samples
from .metrics import NAMES_OF_RUN, Unit, by_name, imported_classes, named, of_numbers, takes_probabilities
from .nests import map_tensors, to_float

if TYPE_CHECKING:
    from torchmetrics import Metric

    from ...loaders.beton.labels import LabelFacts

Kind = Literal["class indices", "labels", "values", "masks", "views", "any"]
"""What the targets of a batch are: class indices `(B,)`, 0 or 1 for each label `(B, K)`, numbers `(B,)` or `(B, K)`,
class indices of pixels `(B, H, W)`, none (the views of each image are compared), or whatever the task takes."""

MODEL_LOSS = "model"  # the loss that a model computes itself when it is given the targets


@dataclass(frozen=True)
class Targets:
    source: str  # for messages
    read: Callable[[], NDArray[Any]]  # returns all labels, (N,) or (N, K); empty for masks
    facts: LabelFacts  # what is known of them
    some: NDArray[Any]  # the first and the last of them
    classes: tuple[str, ...] = ()  # names of the classes or labels; empty if the source has none
    named: bool = False  # labels are indices of these classes, which is checked wherever they are read
    largest: int | None = None  # the largest class index of some masks, except 255; None: no masks
    # Returns the further fields of the first and the last sample, as of images of that size; None: there are none.
    further: Callable[[tuple[int, int]], tuple[Any, ...]] | None = None

    @property
    def values(self) -> NDArray[Any]:
        """All labels, `(N,)` or `(N, K)`; empty for masks. Of large data, ask for `facts` instead."""
        return self.read()

    @property
    def range(self) -> tuple[int, int]:
        """The least and the greatest class index; if all have names the possible ones."""
        return self.facts.least, self.facts.greatest

    def two(self, size: tuple[int, int]) -> Any:
        """Those of two samples, as loaders deliver them for images of that height and width; masks are of class 0."""
        if self.largest is not None:
            two = torch.zeros((2, *size), dtype=torch.uint8)
        else:
            two = torch.from_numpy(self.some)
            two = two.float() if two.is_floating_point() or two.dim() > 1 else two  # vectors, whatever type is stored
        return two if self.further is None else (two, *self.further(size))


class Task:
    """What a pipeline trains for. It is a value: tasks with equal arguments are equal.

    For a task of your own, derive from this class and define `loss` and, to judge by more than the loss, `metrics`. The
    outputs are what the model returns, in float32: a tensor, or any nest of tuples, lists and dicts of tensors. Keep
    arguments in attributes, set in `__init__`: a task is pickled to ranks and compared by them.

    Example::

        >>> from torchmetrics import MeanSquaredError
        >>> class Angle(Task):
        ...     def loss(self, outputs, targets):
        ...         return 1 - torch.cos(outputs[:, 0] - targets).mean()
        ...
        ...     def metrics(self):
        ...         return {"mse": MeanSquaredError()}
        >>> pipeline = pipeline.task(Angle())
    """

    kind: ClassVar[Kind] = "any"
    """What the targets are. Transforms declare the kinds that they can mix or smooth; the plan rejects the others."""
    monitor: str = "val_loss"
    """The metric that decides which epoch is best: that of the lowest `val_loss`, or as the metric declares it."""
    higher_is_better: ClassVar[Mapping[str, bool]] = {}
    """Directions by the names of metrics, for those whose torchmetrics class does not declare `higher_is_better`."""
    units: ClassVar[Mapping[str, Unit]] = {}
    """Units by the names of metrics: `"fraction"` (0 to 1) or `"percent"`, for those whose class does not declare
    `unit`. torchmetrics' own metrics from 0 to 1 are fractions."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(self.metrics())

    @property
    def declares_monitor(self) -> bool:
        """Whether the direction of the monitored metric is known without creating it."""
        return False

    @property
    def loss_name(self) -> str:
        """The loss in plans."""
        return f"{type(self).__name__}.loss"

    @property
    def loss_in_model(self) -> bool:
        """Whether the model computes the loss: then `loss` receives the model's full output, which contains it."""
        return False

    def model_inputs(self, targets: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Return what the model's forward receives besides the images, by name, in training and evaluation but not in
        prediction. The base class returns nothing."""
        return {}

    @property
    def about(self) -> str:
        """What the plan says of targets and metrics."""
        return f"targets: {self.kind}; the best epoch is that of the best {self.monitor}"

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return the mean loss of a batch, a scalar.

        Args:
            outputs: what `outputs` returned.
            targets: `(B, …)`, on the device of the outputs. With `load(fields=…)`, a tuple: such labels, then each
                field, a tensor `(B, …)` or a list of B entries, such as boxes `(n, 4)` of each image.
        """
        raise PlanError(
            f"{type(self).__name__} must define the method loss(self, outputs, targets); see drivetrain.Task."
        )

    def denominator(self, targets: torch.Tensor) -> Count:
        """Return what the mean of `loss` divides by: the number of samples, unless a task defines it.

        A task whose loss weights or ignores targets defines it, so that the loss of a step is one mean over all
        microbatches and ranks, and `val_loss` one over all data. Where it is 0, the loss is not used.

        Args:
            targets: as `loss` receives them.

        Returns:
            A scalar on the device of the targets, such as `weights[targets].sum()` or `(targets != 255).sum()`; or a
            number, if it depends on the shape of the targets only.
        """
        return samples(targets)

    def metrics(self) -> Mapping[str, Metric]:
        """Return torchmetrics objects by name, of which each evaluation updates copies of its own with `(outputs,
        targets)` of each batch; torchmetrics' own classification metrics with `probabilities(outputs)`."""
        return {}

    def outputs(self, outputs: Any) -> Any:
        """Return what loss and metrics use of a model's output, which is in float32. The base class returns all."""
        return outputs

    def predict(self, outputs: Any) -> Any:
        """Return the prediction for what `outputs` returned: tensors with an entry per image, in any nest. The base
        class returns it unchanged."""
        return outputs

    def probabilities(self, outputs: Any) -> Any:
        """Return the probabilities for what `outputs` returned: what torchmetrics' classification metrics receive,
        which take logits for probabilities in a batch where all are from 0 to 1. The base class returns the outputs
        unchanged."""
        return outputs

    def row(self, prediction: Any, classes: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002
        """Return the prediction for one image, its part of what `predict` returned, as JSON values by name. `classes`
        are the names of the classes or labels, if there are any."""
        return {"prediction": map_tensors(torch.Tensor.tolist, prediction)}

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the targets as the metrics take them. The base class returns them unchanged."""
        return targets

    def check(self, train: Targets, val: Targets | None) -> int | None:  # noqa: ARG002
        """Check all targets, and return how many values the model must return per image; None if any number.

        Raises:
            PlanError: if the targets are not what this task trains on.
        """
        return None

    def meters(self, width: int | None) -> dict[str, Metric]:  # noqa: ARG002
        """Return new torchmetrics objects by name, for outputs of `width` values per image."""
        return _checked(self, self.metrics())

    def move(self, device: torch.device) -> LossFunction:  # noqa: ARG002
        """Return the loss, with its tensors on `device`."""
        return self.loss

    def mean(self, loss: LossFunction, *, checked: bool = False) -> Mean:
        """Return `loss`, a result of `move` or one that loss transforms made of it, as a mean; see `mean_of`."""
        if type(self).denominator not in (Task.denominator, StandardTask.denominator):
            return Mean(loss, self.denominator)
        return mean_of(loss, checked=checked)

    @property
    def assumes_mean(self) -> bool:
        """Whether the loss is taken to be the mean over the samples, because nothing declares its denominator."""
        return not self.mean(self.loss).known

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:  # noqa: ARG002
        """Return why outputs for two images cannot be those of this task, with the remedy; "" if they can."""
        return ""

    def __str__(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({given})"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, by name."""
        return dict(vars(self))

    def __eq__(self, other: object) -> bool:
        own = FrozenDict(self.options)
        return isinstance(other, Task) and type(other) is type(self) and own == FrozenDict(other.options)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(self.options)))


class StandardTask(Task):
    """A task with a loss and metrics by name.

    Args:
        loss: a function of outputs and targets that returns the mean loss; an `nn.Module`; a name in `LOSSES`; or
            `"package.module:function"`. Unless it is one of torch's, a loss that weights or ignores targets has an
            attribute or method `denominator`, like `Task.denominator`. Its own parameters are not trained: if they
            require gradients, building the pipeline raises a PlanError. None: the first of `LOSSES`. `"model"`: the
            loss that the model computes. Its forward takes `(images, labels=None)`, and with labels returns a dict or
            an object with `loss`, the mean over the batch, and `logits`; Hugging Face's image models do.
        metrics: names in `METRICS`; classes of torchmetrics or `"package.module:Class"`, which are created without
            arguments; torchmetrics objects, which are copied, and which a recipe cannot contain; or a dict of them by
            name. None: the default of the task.
        monitor: the name of the metric that decides which epoch is best, or `"val_loss"`. None: the first metric.

    Raises:
        PlanError: for an unknown name, with the closest one.
    """

    LOSSES: ClassVar[Mapping[str, LossFunction]]
    METRICS: ClassVar[Mapping[str, Callable[[int], Any]]]
    """What makes each metric, from the number of values per image."""
    DEFAULT_METRICS: ClassVar[tuple[str, ...]]

    def __init__(self, *, metrics: Any = None, loss: Any = None, monitor: str | None = None) -> None:
        metrics = imported_classes(metrics)
        criterion = self._loss_of(loss)
        if loss != MODEL_LOSS and not (isinstance(loss, str) and isinstance(criterion, nn.Module)):
            loss = None if criterion is self._loss_of(None) else criterion
        chosen = named(self, self.DEFAULT_METRICS if metrics is None else metrics)
        if monitor is not None:
            _check_monitored(self, monitor, chosen)
        given = {"metrics": metrics, "loss": loss, "monitor": monitor}
        monitor = next(iter(chosen), "val_loss") if monitor is None else monitor
        vars(self).update(_metrics=chosen, _given=given, _criterion=criterion, monitor=monitor)  # it is frozen

    _metrics: Mapping[str, Any]
    _given: Mapping[str, Any]
    _criterion: LossFunction

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen. Create another one with other arguments.")

    def _loss_of(self, loss: Any) -> LossFunction:
        if loss is None:
            return next(iter(self.LOSSES.values()))
        if isinstance(loss, str):
            if loss == MODEL_LOSS:
                return loss_of_model
            if loss in self.LOSSES:
                return self.LOSSES[loss]
            if ":" not in loss:
                raise PlanError(f"{self}: no loss is named {loss!r}.{suggest(loss, [*self.LOSSES, MODEL_LOSS])}")
            loss = imported("loss", loss)
            loss = loss() if isinstance(loss, type) and issubclass(loss, nn.Module) else loss
        if isinstance(loss, type) or not callable(loss):
            names = [*self.LOSSES, MODEL_LOSS]
            raise PlanError(f"{self}: loss={loss!r:.80} must be a function, a module, or a name: {names}.")
        if reduction_of(loss) == "sum":
            raise PlanError(
                f"{type(self).__name__}: loss={loss!r:.80} returns a sum, which depends on how a batch is split. Use "
                "reduction='mean', and multiply the learning rate instead."
            )
        return loss  # type: ignore[no-any-return]

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        if self.loss_in_model:
            return self._criterion(outputs, targets)
        return self._criterion(self.loss_outputs(outputs), self.loss_targets(targets))

    def loss_outputs(self, outputs: Any) -> Any:
        """Return the outputs as a loss by name, a function or a module takes them. The base class returns them."""
        return outputs

    def loss_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the targets as a loss by name, a function or a module takes them. The base class returns them."""
        return targets

    def denominator(self, targets: torch.Tensor) -> Count:
        return self.mean(self._function(self._criterion)).denominator(targets)

    @property
    def assumes_mean(self) -> bool:
        return not self.mean(self._function(self._criterion)).known

    @property
    def names(self) -> tuple[str, ...]:
        """`top5` of the default is left out for up to five classes."""
        return tuple(self._metrics)

    @property
    def declares_monitor(self) -> bool:
        return isinstance(self._metrics.get(self.monitor), str)

    @property
    def loss_in_model(self) -> bool:
        return self._criterion is loss_of_model

    def model_inputs(self, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"labels": targets} if self.loss_in_model else {}

    @property
    def loss_name(self) -> str:
        if self.loss_in_model:
            return "the model's own loss"
        for name, known in self.LOSSES.items():
            if known is self._criterion:
                return name.replace("_", " ")
        criterion = self._criterion
        return getattr(criterion, "__qualname__", type(criterion).__name__)

    @property
    def about(self) -> str:
        metrics = ", ".join(self._metrics) or "the loss"
        return f"targets: {self.kind}; evaluated by {metrics}; the best epoch is that of the best {self.monitor}"

    def move(self, device: torch.device) -> LossFunction:
        criterion = self._criterion
        moved = copy.deepcopy(criterion).to(device) if isinstance(criterion, nn.Module) else criterion
        return self._function(moved)

    def _function(self, criterion: LossFunction) -> LossFunction:
        if type(self).loss is not StandardTask.loss:
            return self.loss
        if self.loss_in_model or type(self).loss_targets is StandardTask.loss_targets:
            return criterion
        return Adapted(criterion, self.loss_targets, self.loss_outputs)

    def outputs(self, outputs: Any) -> Any:
        """Return the main tensor of a model's output: itself; `logits` or `out` of a dict; the first of a tuple."""
        key = main_key(outputs)
        if isinstance(outputs, Mapping | Sequence):
            return None if key is None else outputs[key]
        return getattr(outputs, "logits", outputs)

    def meters(self, width: int | None) -> dict[str, Metric]:
        return by_name(self, self._metrics, self.METRICS, 1 if width is None else width)

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self._given.items() if value is not None}


def main_key(outputs: Any) -> Any:
    """Return where a dict or a tuple that a model returns has its main tensor; None if it is empty, or neither."""
    if isinstance(outputs, Mapping):
        return next((name for name in ("logits", "out") if name in outputs), next(iter(outputs), None))
    return 0 if isinstance(outputs, Sequence) and outputs else None


def loss_of_model(outputs: Any, targets: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Return the loss that a model computed: `loss` of the dict or the object that it returned."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, torch.Tensor):
        has_loss = hasattr(outputs, "loss") or isinstance(outputs, Mapping)
        what = "None as loss" if has_loss else type(outputs).__name__
        raise PlanError(
            f"With loss='model', the model is called as model(images, labels=targets), and must return a dict or an "
            f"object with the mean loss as 'loss' and the outputs as 'logits'; it returned {what}. Leave out "
            "loss='model' to train with the task's loss."
        )
    return loss.float()


@dataclass(frozen=True)
class TaskLoss:
    task: Task
    base: LossFunction
    checked: bool = False  # whether the targets are class indices that were checked not to be negative

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        if self.task.loss_in_model:
            return self.base(outputs, targets)
        return self.base(to_float(self.task.outputs(outputs)), targets)

    def as_mean(self) -> Mean:
        mean = self.task.mean(self.base, checked=self.checked)
        total, each = (None if part is None else TaskLoss(self.task, part) for part in (mean.total, mean.each))
        return Mean(self, mean.denominator, total, mean.known, each)


def update_metric(task: Task, metric: Metric, outputs: Any, targets: Any) -> None:
    """`targets` as `metric_targets` returns them."""
    outputs = task.probabilities(outputs) if takes_probabilities(metric) else outputs
    if of_numbers(metric):
        outputs, targets = map_tensors(torch.Tensor.double, (outputs, targets))
    metric.update(outputs, targets)


def loss_and_metric_inputs(task: Task, output: Any) -> tuple[Any, Any]:
    output = to_float(output)
    used = to_float(task.outputs(output))
    return (output if task.loss_in_model else used), used


def model_inputs(loss: LossFunction, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    return loss.task.model_inputs(targets) if isinstance(loss, TaskLoss) else {}


def shape_of(outputs: Any) -> object:
    return tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"


def names_of(count: int, classes: Sequence[str]) -> list[str]:
    """Return a name for each class, its number if the data has no names. Names that several have, as ImageNet's two
    cranes, are followed by their numbers."""
    if len(classes) != count:
        return [*map(str, range(count))]
    if len(set(classes)) == count:
        return list(classes)
    often = Counter(classes)
    return [f"{name} ({number})" if often[name] > 1 else name for number, name in enumerate(classes)]


def check_names(train: Targets, val: Targets | None, what: str) -> None:
    if val is None or not train.classes or not val.classes or train.classes == val.classes:
        return
    remedy = f"Convert both from data of the same {what}."
    if len(train.classes) != len(val.classes):
        raise PlanError(
            f"{train.source} has {len(train.classes)} {what}, {val.source} has {len(val.classes)}. {remedy}"
        )
    pairs = zip(train.classes, val.classes, strict=True)
    number = next(i for i, (one, other) in enumerate(pairs) if one != other)
    kind = {"classes": "Class", "labels": "Label"}.get(what, "Value")
    raise PlanError(
        f"{kind} {number} is {train.classes[number]!r} in {train.source} and {val.classes[number]!r} in {val.source}. "
        f"{remedy}"
    )


def vectors(task: Task, train: Targets, val: Targets | None, what: str) -> int:
    """Return the number of values of each target, 1 for `(N,)`; they must be finite, and alike in both sources."""
    widths = []
    for targets in filter(None, (train, val)):
        some = targets.some
        if some.dtype.kind not in "biuf" or some.ndim > 2:
            raise PlanError(
                f"{targets.source} has labels {some.shape[1:]} of {some.dtype}, but {task} needs {what}. Convert "
                "it with one number or one vector of numbers per image."
            )
        if not targets.facts.finite:
            raise PlanError(f"{targets.source} has labels that are not finite. Convert it again without them.")
        widths.append(some.shape[1] if some.ndim == 2 else 1)
    if len(set(widths)) > 1 and val is not None:
        raise PlanError(
            f"{train.source} has {widths[0]} values per image, {val.source} has {widths[1]}. Convert both alike."
        )
    return widths[0]


def _checked(task: Task, metrics: Any) -> dict[str, Any]:
    from torchmetrics import Metric

    if not isinstance(metrics, Mapping) or not all(isinstance(each, Metric) for each in metrics.values()):
        wrong = f"{metrics!r:.80}"
        raise PlanError(f"{task}.metrics() must return a dict of torchmetrics objects by name, not {wrong}.")
    for name in metrics:
        if not isinstance(name, str) or name in NAMES_OF_RUN:
            raise PlanError(f"{task}: a metric cannot be named {name!r}. Choose another name.")
    _check_monitored(task, task.monitor, metrics)
    # A task may keep them in attributes: without copies, an evaluation would add to what the ones before have seen.
    fresh = copy.deepcopy(dict(metrics))
    for metric in fresh.values():
        metric.reset()
    return fresh


def _check_monitored(task: Task, monitor: str, metrics: Mapping[str, Any]) -> None:
    known = ["val_loss", *metrics]
    if monitor not in known:
        raise PlanError(f"{task}: monitor={monitor!r} is not a metric of it.{suggest(str(monitor), known)}")
