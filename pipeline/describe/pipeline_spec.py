"""The description of a training run: model, data, transforms, optimizer and strategy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from torch import nn

from ...common.errors import PlanError
from ...common.frozen import FrozenDict
from ...common.options.config import SEED
from ...common.options.signatures import documented
from ...common.table import Table
from ...loaders.options import ImageOptions
from ...strategies import ModuleFilter, OptimizerFactory, Precision, Strategy
from ...transforms import Transform
from ...transforms.base import missing_hook
from ..models.factories import model_factory
from ..optim.config import OptimizerConfig
from ..optim.schedules import ScheduleFunction
from ..tasks.standard import Classification
from ..tasks.task import Task
from .config import DataConfig, DataKeywords, DistributedConfig, FitOptions, MatmulPrecision

# Surgery replaces modules, so it comes before everything that uses their parameters. New modules would lose a memory
# format set before surgery (BlurPool after ChannelsLast: 3 weights of a ResNet). An algorithm of Composer's may be
# surgery.
KINDS = (
    "image", "surgery", "algorithm", "memory_format", "optimizer", "schedule", "batch", "loss", "loop", "evaluation"
)  # fmt: skip
KIND_ORDER = {kind: number for number, kind in enumerate(KINDS)}


def sort_transforms(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Sort by kind and `after`; ties keep the user's order. None may be there twice, or two follow each other."""
    names = [type(transform).__name__ for transform in transforms]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"{name} appears {names.count(name)} times in the pipeline. Keep only one.")
    waiting = sorted(transforms, key=lambda transform: KIND_ORDER[transform.kind])
    ordered: list[Transform] = []
    while waiting:
        pending = {type(transform).__name__ for transform in waiting}
        ready = next((t for t in waiting if not pending.intersection(t.after)), None)
        if ready is None:
            raise PlanError(f"{' and '.join(sorted(pending))} must each follow the other. Remove one.")
        ordered.append(ready)
        waiting.remove(ready)
    return tuple(ordered)


@dataclass(frozen=True, init=False, repr=False)
class PipelineSpec:
    """The fields of a `Pipeline`, and the methods that build it; see there for the arguments and for equality."""

    model: Callable[..., nn.Module] | nn.Module
    model_options: Mapping[str, Any]
    data: DataConfig | None = None
    transforms: tuple[Transform, ...] = ()
    optimization: OptimizerConfig | None = None
    distribution: DistributedConfig | None = None
    seed: int = 0
    epochs: int | None = None
    recipe: str | None = None
    goal: Task | None = None
    fit_options: FitOptions | None = None

    def __init__(
        self, model: str | Callable[..., nn.Module] | nn.Module, *, seed: int = 0, **model_options: Any
    ) -> None:
        if model_options.keys() >= _FIELDS - {"model", "seed"}:
            # dataclasses.replace passes every field by name; no factory has all of them as options.
            self._take(model=model, seed=seed, **model_options)
            return
        if isinstance(model, str):
            model = model_factory(model)
        self._take(model=model, model_options=model_options, seed=seed)

    def _take(self, **fields: Any) -> None:
        """Those that are not given keep the defaults of the class."""
        unknown = sorted(fields.keys() - _FIELDS)
        if unknown:
            raise PlanError(f"A pipeline has no field {unknown[0]!r}.")
        model, seed = fields["model"], fields["seed"]
        options = FrozenDict(fields["model_options"])
        if isinstance(model, nn.Module) and options:
            raise PlanError(f"The model is already built; it cannot take {sorted(options)}. Pass its factory instead.")
        if not callable(model):
            raise PlanError(f"A model must be a module, a factory or a name, not {model!r:.80}.")
        if not SEED.fits(seed):
            raise PlanError(f"seed={seed!r} must be {SEED.name}.")
        # A frozen dataclass rejects assignment.
        vars(self).update(fields, model_options=options)

    def replace(self, **changes: Any) -> Self:
        """Return a copy of the same class with some fields changed, without calling its constructor.

        Raises:
            PlanError: for an unknown field or an invalid value.

        Example::

            >>> pipeline.replace(seed=3).seed
            3
        """
        new = copy.copy(self)
        new._take(**{name: getattr(self, name) for name in _FIELDS} | changes)
        return new

    @property
    def model_name(self) -> str:
        """The model's name in plans and messages."""
        if isinstance(self.model, nn.Module):
            return f"a copy of your {type(self.model).__name__}"
        return getattr(self.model, "__name__", type(self.model).__name__)

    @property
    def optimized(self) -> OptimizerConfig:
        """The options of `optimize`; the defaults if it was not called and `optimization` is None."""
        return self.optimization or OptimizerConfig()

    @property
    def distributed(self) -> DistributedConfig:
        """The options of `distribute`; the defaults if it was not called and `distribution` is None."""
        return self.distribution or DistributedConfig()

    def fit_defaults(self) -> dict[str, Any]:
        """Return the options of `fit` that the pipeline has, from a recipe.

        Example::

            >>> pipeline.fit_defaults()
            {}
        """
        return {} if self.fit_options is None else self.fit_options.changed()

    @property
    def target(self) -> Task:
        """The task; classification if `task` was not called and `goal` is None."""
        return self.goal or Classification()

    @documented(DataConfig, ImageOptions)
    def load(
        self, train: str | Path | Mapping[str, float], val: str | Path | None = None, **options: Unpack[DataKeywords]
    ) -> Self:
        """Set the data: `.beton` files, their addresses, or data sets by name: `"cifar10:train"`, `"cifar10:test"`.

        A pattern such as `"train-{000..127}.beton"` is one data set in several files, and a dict of sources and weights
        is a mix.

        Raises:
            PlanError, DataError: naming the invalid value.

        Example::

            >>> pipeline = Pipeline("resnet18", num_classes=2).load(
            ...     "train.beton", "val.beton", batch_size=16, image_size=32, crop="padded", workers=2
            ... )
        """
        data = DataConfig.loading_from(train, val, options)
        before, optimization = self.data, self.optimization
        replaced = before is not None and before.batch_size != data.batch_size
        if before and replaced and optimization is not None and optimization.base_batch_size is None:
            # The learning rate was tuned for the previous batch size.
            optimization = dataclasses.replace(optimization, base_batch_size=before.batch_size)
        return self.replace(data=data, optimization=optimization)

    def transform(self, *transforms: Transform) -> Self:
        """Add transforms, in any order; the plan sorts them, but keeps the order of `MixUp`, `CutMix`, `CutOut` and
        `ColOut` among each other.

        Raises:
            PlanError: if one is not a transform, appears twice, or does not define the method of its kind.

        Example::

            >>> pipeline = pipeline.transform(BlurPool(), LabelSmoothing(0.1))
            >>> len(pipeline.transforms)
            2
        """
        given: tuple[object, ...] = transforms
        for transform in given:
            if not isinstance(transform, Transform):
                hint = f" Did you mean {transform.__name__}()?" if isinstance(transform, type) else ""
                raise PlanError(f"transform() takes transforms such as BlurPool(), not {transform!r}.{hint}")
        for transform in transforms:
            if lacking := missing_hook(type(transform)):  # it would do nothing
                raise PlanError(lacking)
        sort_transforms((*self.transforms, *transforms))
        return self.replace(transforms=(*self.transforms, *transforms))

    def task(self, task: Task) -> Self:
        """Set what the pipeline trains for: `Classification` (the default), `MultiLabel`, `Regression`, `Segmentation`,
        or a task of your own.

        Raises:
            PlanError: if it is not a task.

        Example::

            >>> pipeline = pipeline.task(Classification(metrics=("top1", "f1"), monitor="f1"))
        """
        given: object = task
        if not isinstance(given, Task):
            hint = f" Did you mean {given.__name__}()?" if isinstance(given, type) else ""
            raise PlanError(f"task() takes a task such as MultiLabel(), not {given!r:.80}.{hint}")
        return self.replace(goal=task)

    @documented(OptimizerConfig)
    def optimize(
        self,
        optimizer: str | type[torch.optim.Optimizer] | OptimizerFactory,
        *,
        # parameters of OptimizerConfig
        schedule: str | ScheduleFunction = "cosine",
        schedule_options: Mapping[str, Any] = FrozenDict(),
        warmup: float = 0.0,
        groups: Mapping[str, Mapping[str, Any]] = FrozenDict(),
        base_batch_size: int | None = None,
        scale_lr: bool = False,
        # end
        **options: Any,
    ) -> Self:
        """Set the optimizer, by name or class with its options (`lr=2.0, momentum=0.9, weight_decay=5e-5`), or as a
        factory; and the schedule of its learning rate.

        Raises:
            PlanError: for an unknown name, with the closest known one, or an invalid value.

        Example::

            >>> groups = {"*.bias": {"lr": 2e-3}}
            >>> pipeline = pipeline.optimize("adamw", lr=1e-3, weight_decay=0.05, warmup=0.1, groups=groups)
        """
        if scale_lr is True and base_batch_size is None and self.recipe is not None and self.data is not None:
            base_batch_size = self.optimized.base_batch_size or self.data.batch_size
        given = dict(locals())  # each name is a field of the config
        del given["self"]
        return self.replace(optimization=OptimizerConfig(**given))

    @documented(DistributedConfig)
    def distribute(
        self,
        strategy: str | Strategy,
        *,
        # parameters of DistributedConfig
        devices: int | Literal["auto"] = 1,
        precision: Precision | Literal["auto"] = "fp32",
        cudnn_benchmark: bool | None = None,
        matmul_precision: MatmulPrecision | None = None,
        timeout: float = 600.0,
        accumulate: int = 1,
        clip_norm: float | None = None,
        activation_checkpointing: ModuleFilter | float = False,
        compile: bool | str = False,
        sync_batchnorm: bool = False,
        # end
        **options: Any,
    ) -> Self:
        """Set the strategy that trains the model, by name or as an object.

        Raises:
            StrategyError: for an unknown strategy, with the closest name, or an invalid value.
            PlanError: for invalid `devices` or GPU settings.

        Example::

            >>> pipeline = pipeline.distribute("ddp", devices=4, precision="bf16", accumulate=2, clip_norm=1.0)
        """
        given = dict(locals())  # see `optimize`
        del given["self"]
        return self.replace(distribution=DistributedConfig(**given))

    def __repr__(self) -> str:
        """Return the calls that build an equal pipeline, as far as text can, without default values."""
        head = {"seed": self.seed} if self.seed else {}
        name = type(self.model).__name__ if isinstance(self.model, nn.Module) else self.model_name
        lines = [f"{type(self).__name__}({_call((name,), {**head, **self.model_options})})"]
        if self.data:
            lines.append(f"  .load({_call(*self.data.arguments())})")
        if self.goal is not None:
            lines.append(f"  .task({self.goal!r})")
        if self.transforms:
            lines.append(f"  .transform({', '.join(map(repr, self.transforms))})")
        if self.optimization is not None:
            lines.append(f"  .optimize({_call(*self.optimization.arguments())})")
        if self.distribution is not None:
            lines.append(f"  .distribute({_call(*self.distribution.arguments())})")
        about = [] if self.recipe is None else [f"recipe {self.recipe!r}"]
        about += [] if self.epochs is None else [f"epochs={self.epochs}"]
        about += [f"{name}={value!r}" for name, value in self.fit_defaults().items()]
        return "\n".join([*lines, f"  # {', '.join(about)}"] if about else lines)

    def _repr_html_(self) -> str:
        sources, loading = ([], {}) if self.data is None else self.data.arguments()
        _, distribution = self.distributed.arguments()
        about = {"recipe": self.recipe, "epochs": self.epochs, "seed": self.seed, **self.fit_defaults()}
        rows = {
            "data": "\n".join([*sources, _call((), loading)]) or "none: add .load(…)",
            "model": "\n".join(filter(None, [self.model_name, _call((), self.model_options)])),
            "task": repr(self.target),
            "transforms": "\n".join(map(repr, self.transforms)),
            "optimizer": self.optimized.describe(),
            "strategy": _call((self.distributed.name,), distribution),
            "run": _call((), {name: value for name, value in about.items() if value is not None}),
        }
        return Table((type(self).__name__, ""), [row for row in rows.items() if row[1]]).html()


def _call(positional: Sequence[object], named: Mapping[str, object]) -> str:
    return ", ".join([*map(str, positional), *(f"{name}={value!r}" for name, value in named.items())])


_FIELDS = {field.name for field in dataclasses.fields(PipelineSpec)}
