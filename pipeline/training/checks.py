"""Check that model, data and loss match, before any training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...common.errors import BetonError, DrivetrainError, PlanError
from ...common.model_state import buffers_kept, on_meta
from ...loaders.beton.data_set import BetonFiles
from ...loaders.beton.labels import LabelFacts
from ...loaders.beton.targets import NOT_COUNTED
from ...loaders.conversion.folders import refuse_odd_names
from ...loaders.epochs import EpochLoader
from ...loaders.image_size import ImageSize, height_width, size_text
from ...loaders.sources import files_of
from ...strategies.common.meta import fake_tensors
from ...strategies.options import half_dtype
from ...transforms import Transform
from ..describe.resolve import ResolvedPlan
from ..describe.rules import loss_of_samples, needs_losses, sets_size
from ..models.libraries import loss_mismatch
from ..tasks.means import Mean
from ..tasks.metrics import check_value
from ..tasks.nests import map_tensors
from ..tasks.task import (
    StandardTask,
    Targets,
    Task,
    loss_and_metric_inputs,
    loss_of_model,
    shape_of,
    update_metric,
)
from .hooks import evaluated_outputs
from .loop import forward

if TYPE_CHECKING:
    from torchmetrics import Metric

_WITHOUT_VALUES = (
    " The model is on the meta device. If its forward depends on values, or has tensors that are neither parameters "
    "nor buffers, build it on the CPU."
)
_MASKS = 64  # that are read to find class indices which a model does not have


@dataclass(frozen=True)
class TrainedOn:
    """What a trained model knows of its training data."""

    classes: tuple[str, ...]  # names of the classes or labels; empty if the data had none
    count: int  # of class indices

    def targets(self, judged: Targets) -> Targets:
        """Return the targets of the training data, as far as they are known, given those that are evaluated."""
        own: dict[str, Any] = {}
        if self.count:
            own = {"read": partial(np.arange, self.count), "facts": LabelFacts.of([np.arange(self.count)])}
        return replace(judged, source="the training data", classes=self.classes, named=False, **own)


def targets_of(loader: EpochLoader, source: str, task: Task) -> Targets:
    names = tuple(loader.classes)
    refuse_odd_names(names, f"Rename it, and convert {source} again.")  # a file of an older version may have it
    beton, ends = loader.beton, loader.some(2)
    further = partial(loader.fields_of, ends) if loader.settings.fields else None
    if beton is None or not loader.has_masks:
        some = loader.labels[ends] if beton is None else beton.read(beton.label_name, ends)
        named = beton is not None and bool(names) and beton.fields[beton.label_name] == "int"
        # Indices with names are checked wherever they are read, so that not all are read here.
        facts = LabelFacts.of([np.arange(len(names))]) if named else loader.label_facts
        return Targets(source, lambda: loader.labels, facts, some, names, named=named, further=further)
    if task.kind not in ("masks", "views", "any"):
        raise PlanError(
            f"{source} has a mask per image, but {type(task).__name__} trains on {task.kind}. Pass "
            "task(Segmentation(classes))."
        )
    largest = _largest(loader, beton, getattr(task, "ignored", (NOT_COUNTED,)))
    none = np.empty(0)
    return Targets(source, lambda: none, LabelFacts.of([]), none, names, largest=largest, further=further)


def _largest(loader: EpochLoader, files: BetonFiles, ignored: Sequence[int]) -> int:
    """Of masks all over the samples that are used: to read all would take minutes. A damaged one may be skipped."""
    own, largest = loader.settings, 0
    skipped = (BetonError,) if own.train and own.on_error == "skip" else ()
    for beton, number in map(files.locate, np.unique(loader.some(_MASKS)).tolist()):
        with suppress(*skipped):
            mask = beton.mask(files.label_name, number)
            largest = max(largest, int(mask.max(where=~np.isin(mask, ignored), initial=0)))
    return largest


def check_output(plan: ResolvedPlan, model: nn.Module, width: int | None, targets: Targets) -> tuple[Any, Any]:
    """Check by a forward of two images in each mode that the model returns what the task needs, `width` values per
    image (None: any). Return the outputs in evaluation, for loss and metrics. Buffers do not change. Of a model on the
    meta device only shapes are computed, and zeros returned."""
    task, data, precision = plan.task, plan.data, plan.distribution.step_options["precision"]
    training, size, inputs = model.training, data.eval_size, dict[str, torch.Tensor]()
    channels, views = len(data.loading.mean), data.loading.views
    smaller = _smaller(plan)
    shape = (2, channels) if views == 1 else (2, views, channels)
    context = nullcontext() if precision == "fp32" else torch.autocast("cpu", dtype=half_dtype(precision))
    try:
        with torch.no_grad(), context, buffers_kept(model), _shapes_on_meta(model) as own:
            run = _called(model.eval(), own) if own else model.eval()
            output = run(torch.zeros(2, channels, *height_width(size)))  # as in prediction
            # Lazy modules have their shapes now, so that their statistics change only in the copies, too.
            tensors = own or {name: buffer.clone() for name, buffer in model.named_buffers()}
            two = targets.two(height_width(size))
            inputs = task.model_inputs(two)
            again = inputs or views != 1
            judged = forward(run, torch.zeros(*shape, *height_width(size)), **inputs) if again else output
            call = _called(model.train(), tensors)
            for size in (*smaller, data.image_size):
                inputs = task.model_inputs(targets.two(height_width(size)))
                trained = forward(call, torch.zeros(*shape, *height_width(size)), **inputs)
    except Exception as error:  # a model may raise anything
        of = "" if channels == 3 else f" with {channels} channel{'s' * (channels > 1)}"
        further = "".join(f" and {name} {shape_of(value)}" for name, value in inputs.items())
        names = ", ".join(f"{name}=targets" for name in inputs)
        signature = (
            f". It is called as model(images, {names}), for a loss that it computes: write forward(self, images, "
            "labels=None), or leave out loss='model'."
        )
        remedy = _WITHOUT_VALUES * on_meta(model)
        if size in smaller:
            remedy = (
                f" {smaller[size]} trains on images of this size: build the model for any size (timm's vision "
                f"transformers: dynamic_img_size=True), or leave {smaller[size]} out.{remedy}"
            )
        raise PlanError(
            f"The model does not accept images of {size_text(size)} pixels{of}{further}: "
            f"{type(error).__name__}: {error}{signature if inputs else ''}{remedy}"
        ) from error
    finally:
        model.train(training)
    if isinstance(task, StandardTask) and type(trained) is not type(judged):
        raise PlanError(
            f"The model returns a {type(trained).__name__} in training mode, and in evaluation a "
            f"{type(judged).__name__}. Disable its auxiliary outputs (torchvision: aux_logits=False), or use them in a "
            "task of your own."
        )
    if task.loss_in_model:
        for each in (judged, trained):
            loss_of_model(each, two)
        if wrong := loss_mismatch(model, task.kind):
            raise PlanError(wrong)
    for mode, each, side in (
        ("", output, data.eval_size), ("", judged, data.eval_size), ("In training mode: ", trained, size)
    ):  # fmt: skip
        shown = loss_and_metric_inputs(task, each)[1]
        wrong = task.output_error(shown, width, str(files_of(data.train)))
        if wrong := wrong or _resolution(task, shown, height_width(side)):
            raise PlanError(f"{mode}{wrong}")
    _try_evaluation(plan, model, context)
    used = loss_and_metric_inputs(task, judged)
    return map_tensors(lambda each: torch.zeros(each.shape, dtype=each.dtype), used) if own else used


def _try_evaluation(plan: ResolvedPlan, model: nn.Module, context: AbstractContextManager[Any]) -> None:
    """Predict two images as evaluation does with transforms, which might reject them: after the first epoch."""
    data, transforms = plan.data, plan.transforms
    tried = any(transform.kind == "evaluation" for transform in transforms) and data.loading.views == 1
    if not tried or on_meta(model):
        return
    training = model.training
    with torch.no_grad(), context, buffers_kept(model):
        predict = evaluated_outputs(transforms, lambda seen: plan.task.outputs(model.eval()(seen)))
        predict(torch.zeros(2, len(data.loading.mean), *height_width(data.eval_size)))
    model.train(training)


def _smaller(plan: ResolvedPlan) -> dict[ImageSize, str]:
    """Return the sizes in training besides the full one, and which transforms, in their order, lead to each: together,
    they may make images smaller than each of them alone."""
    full, found = plan.data.image_size, dict[ImageSize, str]()
    resized = {full: ""}  # what a later transform may get
    for transform in sorted(plan.transforms, key=sets_size, reverse=True):  # the loader's sizes come first
        for size, names in list(resized.items()):
            if names and transform.depends_on_length:  # it may act only while images have another size
                continue
            joined = " with ".join(filter(None, (names, type(transform).__name__)))
            own = dict.fromkeys(_sizes(transform, size, plan.spec.epochs), joined)
            found = own | found
            resized = own | resized if transform.changes_image_size else resized
    found.pop(full, None)
    return found


def _sizes(transform: Transform, size: ImageSize, epochs: int | None) -> Iterable[ImageSize]:
    """Of one that sets the size of each epoch, those of all epochs, as of their middles."""
    if epochs is None or not sets_size(transform):
        return transform.sizes(size)
    return [transform.size(size, (epoch + 0.5) / epochs) for epoch in range(epochs)]


@contextmanager
def _shapes_on_meta(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """If the model is on the meta device, yield tensors in their places for a forward on the CPU, of which only the
    shapes are computed inside the block; else an empty dict."""
    if not on_meta(model):
        yield {}
        return
    from torch._subclasses.fake_tensor import FakeTensorMode  # here, because it takes a second

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    own = fake_tensors(model, mode)
    with mode:
        yield own


def _called(model: nn.Module, tensors: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """Return the model with other parameters or buffers."""
    return lambda images, **further: torch.func.functional_call(model, tensors, images, further)


def _resolution(task: Task, outputs: Any, size: tuple[int, int]) -> str:
    if task.kind != "masks" or task.loss_in_model or tuple(outputs.shape[2:]) == size:
        return ""
    return (
        f"The model returns logits for {' × '.join(map(str, outputs.shape[2:]))} pixels of images of "
        f"{' × '.join(map(str, size))}. Let it end with torch.nn.functional.interpolate(logits, images.shape[2:])."
    )


def check_loss(
    loss: Mean, outputs: Any, targets: Any, classes: int | None, *, soft: bool, evaluates: bool = False
) -> None:
    """Test a loss on the model's outputs for two images, on the device of training: that of training or, with
    `evaluates`, of evaluation. `classes`: of class indices, which become probabilities if `soft`."""
    if soft and classes is not None and not targets.is_floating_point():
        targets = F.one_hot(targets.long(), classes).float()
    indices = classes is not None and not targets.is_floating_point()
    what = f"{'probabilities' if soft else 'class indices' if indices else 'targets'} {shape_of(targets)}"
    shape = f"logits {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else "the model's outputs"
    try:
        with torch.enable_grad():  # the outputs have none: a gradient is of the loss's own parameters
            value, count = loss.loss(outputs, targets), loss.denominator(targets)
    except DrivetrainError:
        raise
    except Exception as error:  # a custom loss may raise anything
        about = "Targets are those of the data; with LabelSmoothing, MixUp or CutMix, probabilities (B, C)."
        if evaluates:
            about = (
                "Transforms change the loss and its targets in training only. Let it accept those of the data, too, or "
                "leave out the validation data."
            )
        raise PlanError(
            f"{'In evaluation, the' if evaluates else 'The'} loss does not accept {shape} and {what}: "
            f"{type(error).__name__}: {error}. {about}"
        ) from error
    _check_denominator(count)
    if not isinstance(value, torch.Tensor) or value.dim():
        returned = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PlanError(f"The loss returns {returned} for 2 images, but must return their mean: a tensor of shape ().")
    if value.requires_grad:
        raise PlanError(
            f"The loss has trainable parameters of its own: {_parameters(loss.loss, value)}. The optimizer has those "
            "of the model only, so they would stay as they are. Put them into the model, which then computes the loss "
            "(loss='model'), or freeze them with requires_grad_(False)."
        )


def check_losses(transforms: Sequence[Transform], loss: Mean, outputs: Any, targets: Any) -> None:
    """Test that the training loss gives a value for each of two images, if transforms need them: they might first do so
    in the middle of training."""
    for transform in filter(needs_losses, transforms):
        each, name = loss_of_samples(transform, loss), type(transform).__name__
        assert each is not None, "the rules of the plan check it"
        try:
            each(outputs, targets)
        except Exception as error:  # a custom loss may raise anything
            raise PlanError(
                f"{name} needs the loss of each sample, which the loss does not return with reduction='none': "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Let it do so, or leave out {name}."
            ) from error


def _parameters(loss: object, value: torch.Tensor) -> str:
    """Return the names of a module's parameters that have a gradient; of another loss, their shapes."""
    while not isinstance(loss, nn.Module) and hasattr(loss, "base"):  # what wraps a loss has it there
        loss = loss.base
    names = {id(each): name for name, each in loss.named_parameters()} if isinstance(loss, nn.Module) else {}
    leaves, waiting, seen = list[torch.Tensor](), [value.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            waiting += [before for before, _ in node.next_functions]
    return ", ".join(sorted(names.get(id(each), f"a tensor {tuple(each.shape)}") for each in leaves))


def _check_denominator(count: object) -> None:
    is_scalar = isinstance(count, torch.Tensor) and not count.dim()
    number = count.item() if isinstance(count, torch.Tensor) and is_scalar else count
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < math.inf:
        returned = f"{tuple(number.shape)}" if isinstance(number, torch.Tensor) else repr(number)
        raise PlanError(
            f"The loss's denominator returns {returned:.80} for 2 targets, but must return a finite scalar, not "
            "negative: the sum of what their means divide by."
        )


def check_metrics(task: Task, meters: Mapping[str, Metric], outputs: Any, targets: Any) -> None:
    for name, meter in meters.items():
        try:
            update_metric(task, meter, outputs, task.metric_targets(targets))
        except Exception as error:  # a custom metric may raise anything
            raise PlanError(
                f"The metric {name!r} does not accept the model's outputs and the targets {shape_of(targets)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        check_value(name, meter)
