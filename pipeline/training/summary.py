"""Summarize a model as it is trained: parameters, operations of a forward, and what it keeps for the backward."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from ...common.model_state import describe_frozen, train_mode
from ...common.table import Table
from ...loaders.image_size import height_width, size_text
from ...strategies.common.meta import fake_tensors
from ...strategies.options import Precision, half_dtype
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import resolve
from ..models.weights import weights_omitted
from .build import fork_rng, plain_torch, rebuild_model

REST = "(rest)"
"""The row of the model's own parameters, and of what its forward computes outside of its modules."""
_WIDTH = 30  # characters of a module's name and class, so that a table has at most 80


@dataclass(frozen=True)
class ModuleSummary:
    """A row of a `ModelSummary`.

    Attributes:
        name: of the module in the model, or `"(rest)"`: the model's own parameters and operations.
        kind: the module's class; "" for the rest.
        parameters: their number; a parameter that modules share counts in the first.
        trained: the number of those that require gradients.
        flops: of a forward in training, per image, a multiply-add counted as 2; None if unknown.
        activation_bytes: kept for the backward, for one microbatch; None if unknown.
    """

    name: str
    kind: str
    parameters: int
    trained: int
    flops: int | None = None
    activation_bytes: int | None = None


@dataclass(frozen=True, repr=False)
class ModelSummary:
    """The model of a pipeline as it is trained: after surgery, with what is frozen. It prints as a table.

    Attributes:
        modules: a row for each module at the top of the model.
        frozen: names of what is not trained, "" if nothing.
        microbatch: the number of images in one forward of one rank; all views of an image count.
        image_size: height and width of the images, in pixels.
        precision: in which the forward computes: fp32, bf16 or fp16.
        unknown: why operations and activations are not known; "" if they are.

    Example::

        >>> summary = pipeline.summary()
        >>> summary.parameters == summary.trained, summary.image_size
        (True, (32, 32))
    """

    modules: tuple[ModuleSummary, ...]
    frozen: str
    microbatch: int
    image_size: tuple[int, int]
    precision: Precision
    unknown: str = ""

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return sum(row.parameters for row in self.modules)

    @property
    def trained(self) -> int:
        """The number of parameters that require gradients."""
        return sum(row.trained for row in self.modules)

    @property
    def flops(self) -> int | None:
        """Of a forward in training, per image: matrix products, convolutions and attention, a multiply-add counted as
        2. None if unknown."""
        return None if self.unknown else sum(row.flops or 0 for row in self.modules)

    @property
    def activation_bytes(self) -> int | None:
        """What the model's forward keeps for the backward, for one microbatch, without parameters and buffers. None if
        unknown."""
        return None if self.unknown else sum(row.activation_bytes or 0 for row in self.modules)

    def table(self) -> Table:
        total = ModuleSummary("total", "", self.parameters, self.trained, self.flops, self.activation_bytes)
        unit = 1e9 if (self.flops or 0) >= 1e9 else 1e6
        heads = ["module", "parameters", "trained"]
        if not self.unknown:
            heads += ["GFLOPs" if unit == 1e9 else "MFLOPs", "activations"]
        rows = []
        for row in (*self.modules, total):
            name = f"{row.name}: {row.kind}" if row.kind else row.name
            name = name if len(name) <= _WIDTH else f"{name[: _WIDTH - 1]}…"
            cells = [name, f"{row.parameters:,}", f"{row.trained:,}"]
            if not self.unknown:
                cells += [f"{(row.flops or 0) / unit:,.2f}", f"{(row.activation_bytes or 0) / 1e6:,.1f} MB"]
            rows.append(cells)
        return Table(heads, rows, "Model", self._caption(), figures=True, line_after=len(rows) - 1)

    def _caption(self) -> str:
        frozen = f"Frozen: {self.frozen}. " * bool(self.frozen)
        if self.unknown:
            return f"{frozen}Operations and activations are not known: {self.unknown}"
        return (
            f"{frozen}FLOPs: of the forward of one image of {size_text(self.image_size)} pixels; a multiply-add is 2. "
            f"Activations: kept for the backward, {self.microbatch:,} images in {self.precision}."
        )

    def __repr__(self) -> str:
        return self.table().text(80)

    def _repr_html_(self) -> str:
        return self.table().html()


@plain_torch()
def summarize(spec: PipelineSpec) -> ModelSummary:
    """Summarize a copy of the model, with random weights where files would be read. Nothing is computed with numbers:
    only shapes pass through the model."""
    plan = resolve(spec, files=False)
    with weights_omitted():
        model, _ = rebuild_model(plan.spec, plan.transforms)
    data, how = plan.data, plan.distribution
    views = data.loading.views
    assert isinstance(views, int), "a pipeline takes no views of several sizes"
    microbatch = data.batch_size // (how.ranks * how.accumulate) * views
    size, precision = height_width(data.image_size), how.step_options["precision"]
    for transform in plan.transforms:
        transform.begin(model, 1)
    counts, unknown = _Counts(), ""
    with fork_rng(plan.seed), _not_logged():
        try:
            if any(map(is_lazy, model.parameters())):  # they get their shapes by a forward
                with torch.no_grad():
                    model.eval()(torch.zeros(2, len(data.loading.mean), *size))
            counts.follow(_groups(model))
            _forward(model, counts, (microbatch, len(data.loading.mean), *size), precision)
        except Exception as error:  # a model may raise anything
            unknown = _reason(error)
    rows = _rows(model, None if unknown else counts, microbatch)
    return ModelSummary(rows, describe_frozen(model), microbatch, size, precision, unknown)


@contextmanager
def _not_logged() -> Iterator[None]:
    """Inside the block, torch does not print a traceback for shapes that do not fit, besides raising."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _groups(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules at the top, by name; inside of a single one, those at its top."""
    prefix, children = "", dict(model.named_children())
    while len(children) == 1:
        ((name, only),) = children.items()
        if not any(only.children()):
            break
        prefix, children = f"{prefix}{name}.", dict(only.named_children())
    return {f"{prefix}{name}": child for name, child in children.items()}


class _Counts:
    """The operations and the bytes kept for the backward, by group of modules."""

    def __init__(self) -> None:
        self.flops, self.kept = defaultdict[str, int](int), defaultdict[str, int](int)
        self.counter = FlopCounterMode(display=False)
        self.known: dict[int, torch.UntypedStorage] = {}  # by address, which is unique while they are referred to
        self._group, self._outer, self._counted = REST, list[str](), 0

    def follow(self, groups: Mapping[str, nn.Module]) -> None:
        names = {module: name for name, group in [*groups.items()][::-1] for module in group.modules()}
        for module, name in names.items():
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(self._leave)

    def _enter(self, name: str, *_: object) -> None:
        self.settle()
        self._outer.append(self._group)
        self._group = name

    def _leave(self, *_: object) -> None:
        self.settle()
        self._group = self._outer.pop()

    def settle(self) -> None:
        """Count the operations since the last call for the current group."""
        total = self.counter.get_total_flops()
        self.flops[self._group] += total - self._counted
        self._counted = total

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known[storage._cdata] = storage
            self.kept[self._group] += storage.nbytes()
        return tensor


def _forward(model: nn.Module, counts: _Counts, shape: tuple[int, ...], precision: Precision) -> None:
    """Run a forward in training mode on tensors without values."""
    train_mode(model)
    half = None if precision == "fp32" else half_dtype(precision)
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        tensors = fake_tensors(model, fakes)
        for tensor in tensors.values():
            counts.known[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        call = partial(torch.func.functional_call, model, tensors)
        with (
            nullcontext() if half is None else torch.autocast("cpu", dtype=half),
            torch.autograd.graph.saved_tensors_hooks(counts.keep, lambda tensor: tensor),
            counts.counter,
        ):
            call(torch.zeros(shape))
            counts.settle()


def _rows(model: nn.Module, counts: _Counts | None, microbatch: int) -> tuple[ModuleSummary, ...]:
    groups, seen = _groups(model), set[nn.Parameter]()
    rows = []
    for name, module in [*groups.items(), (REST, model)]:
        own = [each for each in module.parameters() if each not in seen and not is_lazy(each)]
        seen.update(own)
        sizes = sum(each.numel() for each in own), sum(each.numel() for each in own if each.requires_grad)
        flops = None if counts is None else round(counts.flops[name] / microbatch)
        kept = None if counts is None else counts.kept[name]
        if any((*sizes, flops, kept)):
            rows.append(ModuleSummary(name, "" if module is model else type(module).__name__, *sizes, flops, kept))
    return tuple(rows)


def _reason(error: Exception) -> str:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return "its forward depends on the values of tensors, and here only shapes pass through it"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"its forward of images raised {type(error).__name__}: {first:.200}"
