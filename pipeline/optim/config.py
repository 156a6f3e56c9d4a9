"""The validated options of `Pipeline.optimize`, and what follows from them. torch is imported on use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ...common.checks import is_flag, plain
from ...common.errors import PlanError, suggest
from ...common.frozen import FrozenDict
from ...common.options.config import IN_WORDS, MAPPING, TEXT, Config, Key, Kind, Positive, Within
from .schedules import (
    ScheduleFunction,
    check_schedule,
    describe_schedule,
    factor_at,
    find_schedule,
    is_factory,
    label,
    named,
)

if TYPE_CHECKING:
    import torch

    from ...strategies import OptimizerFactory


class OptionalGroups(FrozenDict):
    """Groups whose patterns may match nothing: of a ledger's variants, without the parameters that surgery adds."""


def named_options(name: str, given: object) -> FrozenDict:
    """With tuples in place of lists, which JSON and YAML have instead."""
    if not isinstance(given, Mapping) or not MAPPING.fits(given):
        raise PlanError(f"{name}={given!r:.80} must be a dict of names and values.")
    kind = OptionalGroups if isinstance(given, OptionalGroups) else FrozenDict
    return kind({key: _with_tuples(value) for key, value in given.items()})


def _with_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tuples(each) for key, each in value.items()}
    return tuple(_with_tuples(each) for each in value) if isinstance(value, list | tuple) else plain(value)


class _Source(str):
    """Its `repr` is itself: the name of a function in a pipeline's `repr`."""

    __repr__ = str.__str__


@dataclass(frozen=True)
class OptimizerConfig(Config):
    """The options of `Pipeline.optimize`."""

    place: ClassVar[str] = "optimize()"
    EXTRA: ClassVar[str] = "options"

    optimizer: Annotated[str | type[torch.optim.Optimizer] | OptimizerFactory, Key(""), IN_WORDS] = "sgd"
    """The optimizer: sgd, sgdw, adam, adamw, muon, adamuon, schedulefree_sgd, schedulefree_adamw, or
    package.module:Class, such as torch.optim:NAdam. Or a class, with its options. Or a factory: a function `parameters
    -> Optimizer`, never an optimizer. It is called on the final parameters, after surgery and wrapping."""
    options: Annotated[Mapping[str, Any], Key("optimizer")] = field(
        default_factory=lambda: FrozenDict({"lr": 0.1, "momentum": 0.9})
    )
    """lr, momentum, weight_decay, …. The optimizer's own arguments."""
    _: KW_ONLY
    schedule: Annotated[str | ScheduleFunction, TEXT, Kind(callable, "a function", json=False), IN_WORDS] = "cosine"
    """Learning rate schedule, per step: cosine, linear, constant, step, multistep, onecycle, wsd, or
    package.module:function. Or a function of the progress, 0 to 1 from the end of warm-up to the end of the run, that
    returns a factor of the learning rate (finite, 0 or more; checked before training). Or a factory of any torch
    scheduler, recognized by its first parameter, named `optimizer` or annotated as one: `lambda optimizer:
    torch.optim.lr_scheduler.StepLR(optimizer, 30)`. The scheduler is stepped once per optimizer step, also during
    warm-up; on resume, it is created again and stepped as often as before, which restores its state exactly."""
    schedule_options: Annotated[Mapping[str, Any], IN_WORDS] = field(default_factory=FrozenDict)
    """The schedule's own options: every, gamma, milestones, rise, start, end, decay, shape. Fractions are of the full
    run, warm-up included; factors are of the peak learning rate. linear, cosine: end=0. step: every=1/3, gamma=0.1.
    multistep: milestones=(0.3, 0.6, 0.8), gamma=0.2. onecycle: rise=0.3, start=1/25, end=1/250000. wsd: decay=0.2,
    shape='1-sqrt', end=0. For a function or a factory: its keyword arguments."""
    warmup: Annotated[float, Within("[0, 1)", ", a fraction of all steps"), IN_WORDS] = 0.0
    """Fraction of all steps, 0 to 1, in which the learning rate rises linearly to its peak. It multiplies any schedule
    except onecycle, which has its own."""
    groups: Annotated[Mapping[str, Mapping[str, Any]], IN_WORDS] = field(default_factory=FrozenDict)
    """Options of the optimizer for some parameters, by patterns over their names: {'head.*': {'lr': 1.0}}. Names are
    those of `model.named_parameters()` after surgery, and patterns those of `fnmatch`, in which `*` matches dots, too.
    A parameter takes the options of the first pattern that matches it, and `optimize`'s for all others. A pattern that
    matches nothing is an error, raised before training. The schedule scales every group by the same factor.
    `drivetrain.pipeline.layerwise_decay` returns groups."""
    base_batch_size: Annotated[Positive | None, IN_WORDS] = None
    """Global batch size, in images, that the learning rate was tuned for; None: the pipeline's own, in a recipe the one
    before overrides. If `load` has another, the plan states how much the learning rate per image differs."""
    scale_lr: Annotated[
        bool, Kind(is_flag, "True or False; the batch size to scale from is base_batch_size"), IN_WORDS
    ] = False
    """Whether to scale the learning rate from base_batch_size to the batch size: linearly for sgd and sgdw, by the
    square root for adam and adamw. Also by the square root for torch's NAdam, RAdam and RMSprop; for other optimizers
    no rule is known. See Goyal et al. 2017, arXiv:1706.02677, and Malladi et al. 2022, arXiv:2205.10287. In a pipeline
    from a recipe, base_batch_size defaults to the recipe's batch size."""

    _torch_scheduler: ClassVar[bool] = False

    def __post_init__(self) -> None:
        from .optimizers import check_options, find_optimizer, is_schedule_free
        from .optimizers import label as label_of

        object.__setattr__(self, "optimizer", find_optimizer(self.optimizer))
        object.__setattr__(self, "schedule", find_schedule(self.schedule))
        for name in ("options", "schedule_options", "groups"):
            object.__setattr__(self, name, named_options(name, getattr(self, name)))
        if self.is_factory and self.options:
            given = dict(self.options)
            raise PlanError(f"optimize() got a factory and the options {given}. Set them in the factory.")
        super().__post_init__()
        check_schedule(self.schedule, self.schedule_options, self.warmup)
        if not self.is_factory:
            check_options(self.optimizer, self.options)
        if is_schedule_free(self.optimizer) and self.schedule != "constant":
            raise PlanError(
                f"optimize({label_of(self.optimizer)!r}) averages its weights instead of lowering the learning rate, "
                f"but schedule={label(self.schedule)!r} lowers it. Pass schedule='constant'; warmup=… can be set."
            )
        object.__setattr__(self, "_torch_scheduler", is_factory(self.schedule))  # asked in every step
        self._check_groups()
        if self.scale_lr:
            self._check_scaling()

    def _check_groups(self) -> None:
        from .optimizers import check_options

        for pattern, options in self.groups.items():
            if not isinstance(options, Mapping) or not options or "params" in options:
                raise PlanError(
                    f"groups[{pattern!r}]={options!r:.80} must be a dict of the optimizer's options, such as "
                    "{'lr': 1.0}."
                )
            if not self.is_factory:
                check_options(self.optimizer, {**self.options, **options}, f"groups[{pattern!r}]")

    def _check_scaling(self) -> None:
        from .optimizers import SCALING, label

        if self.base_batch_size is None:
            raise PlanError(
                "scale_lr=True needs the batch size that the learning rate was tuned for. Pass base_batch_size=…."
            )
        if self.is_factory:
            raise PlanError("scale_lr=True needs an optimizer by name, such as 'sgd'. Scale lr in your factory.")
        if not self.scaling:
            known = ", ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in SCALING))
            raise PlanError(
                f"scale_lr=True: no rule is known for how the learning rate of {label(self.optimizer)} depends on the "
                f"batch size, only for {known}. Set lr for this batch size yourself."
            )

    @property
    def is_factory(self) -> bool:
        return not isinstance(self.optimizer, str | type)

    def arguments(self) -> tuple[list[str], dict[str, Any]]:
        factory = self.optimizer
        name = getattr(factory, "__qualname__", type(factory).__qualname__)
        named = {name: value for name, value in self.changed().items() if name != "optimizer"}
        if "schedule" in named and not isinstance(self.schedule, str):
            named["schedule"] = _Source(label(self.schedule))
        return [repr(factory) if isinstance(factory, str) else name], dict(self.options) | named

    @property
    def lr(self) -> float:
        from .optimizers import default_lr

        return float(self.options["lr"] if "lr" in self.options else default_lr(self.optimizer))

    @property
    def scaling(self) -> str:
        from .optimizers import SCALING, class_of

        kind = class_of(self.optimizer)
        return "" if kind is None else SCALING.get(kind, "")

    def _scale(self, batch_size: int) -> float:
        ratio = batch_size / (self.base_batch_size or batch_size)
        return math.sqrt(ratio) if self.scaling == "square root" else ratio

    def lr_for(self, batch_size: int) -> float:
        return self.lr * self._scale(batch_size)

    def at(self, batch_size: int) -> OptimizerConfig:
        """With `scale_lr`, the learning rate is scaled; with a torch scheduler, see `scheduled_scale`."""
        if not self.scale_lr or self.uses_torch_scheduler:  # whose rates are scaled: it may set them itself
            return self
        options = {**self.options, "lr": self.lr_for(batch_size)}
        scaled = {
            pattern: {**own, "lr": own["lr"] * self._scale(batch_size)} if "lr" in own else own
            for pattern, own in self.groups.items()
        }
        groups = OptionalGroups(scaled) if isinstance(self.groups, OptionalGroups) else scaled
        return dataclasses.replace(self, options=options, groups=groups, base_batch_size=batch_size)

    def scheduled_scale(self, batch_size: int) -> float:
        """Return the factor of a torch scheduler's learning rates, which it may set itself, as OneCycleLR does."""
        return self._scale(batch_size) if self.scale_lr and self.uses_torch_scheduler else 1.0

    def note(self, batch_size: int) -> str:
        """Return what `scale_lr` does; empty without it."""
        base = self.base_batch_size
        if base is None or self.is_factory or not self.scaling or not self.scale_lr:
            return ""
        how = f"for {batch_size:,} ({self.scaling}, scale_lr)"
        if self.uses_torch_scheduler:
            return (
                f"the scheduler's learning rates are for batches of {base:,} images; each is multiplied by "
                f"{self._scale(batch_size):.4g} {how}"
            )
        return f"lr={self.lr:g} is for batches of {base:,} images; scaled to {self.lr_for(batch_size):.4g} {how}"

    def caution(self, batch_size: int) -> str:
        """Empty if learning rate and batch size were tuned together."""
        base = self.base_batch_size
        if base is None or base == batch_size or (self.scaling and self.scale_lr):
            return ""
        if not self.scaling:
            return f"the learning rate is for batches of {base:,} images, not {batch_size:,}"
        ratio = base / batch_size
        per_image = f"{ratio:.3g} times" if ratio >= 1 else f"1/{1 / ratio:.3g} of"
        return (
            f"lr={self.lr:g} is for batches of {base:,} images; with {batch_size:,} the learning rate per image is "
            f"{per_image} that. scale_lr=True makes it {self.lr_for(batch_size):.4g} ({self.scaling})"
        )

    def factory(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Strategies call this with the final parameters, or groups of them."""
        from .optimizers import class_of, is_schedule_free, label

        given = list(parameters)
        build = class_of(self.optimizer) or self.optimizer
        try:
            optimizer: torch.optim.Optimizer = build(given, **self.options)  # type: ignore[operator]
        except ValueError as error:
            if self.is_factory or isinstance(error, PlanError):
                raise
            raise PlanError(f"{label(self.optimizer)} cannot train this model: {error}.") from error
        if self.is_factory and is_schedule_free(type(optimizer)):  # what depends on it is checked by its name
            name = type(optimizer).__name__
            raise PlanError(
                f"optimize() got a factory of {name}, so its schedule and strategy cannot be checked. Pass the "
                f"class, and its options: optimize({name}, lr=…, schedule='constant')."
            )
        for pattern, options in self.groups.items():
            for name in options.keys() - optimizer.defaults.keys():
                raise PlanError(
                    f"groups[{pattern!r}]: {type(optimizer).__name__} has no option {name!r} for single parameters."
                    f"{suggest(name, optimizer.defaults)}"
                )
        return optimizer

    @property
    def uses_torch_scheduler(self) -> bool:
        return self._torch_scheduler

    def warmup_factor(self, step: float, steps: int) -> float:
        warm = self.warmup * steps
        return (step + 1) / (warm + 1) if step < warm else 1.0

    def lr_factor(self, step: float, steps: int) -> float:
        """`step` counts from 0. With a torch scheduler, the factor multiplies the scheduler's own learning rates."""
        if self.uses_torch_scheduler:
            return self.warmup_factor(step, steps)
        warm = self.warmup * steps
        after = max(step - warm, 0.0) / max(steps - warm, 1)
        if not isinstance(self.schedule, str):
            factor = factor_at(self.schedule, self.schedule_options, after)
        else:
            schedule = named(self.schedule, self.schedule_options)
            progress, length = (step / max(steps, 1), steps) if schedule.whole_run else (after, steps - warm)
            factor = schedule.factor(progress, length)
        return self.warmup_factor(step, steps) * factor

    @property
    def full_groups(self) -> Mapping[str, Mapping[str, Any]]:
        """The groups, with the options that follow from theirs: of Muon, `adamw_lr`."""
        from torch import zeros

        from .muon import Muon
        from .optimizers import class_of

        kind = class_of(self.optimizer)
        if not (isinstance(kind, type) and issubclass(kind, Muon)):
            return self.groups
        defaults = kind([zeros(1)], **self.options).defaults
        full = {pattern: {**own, **kind.derived(own, defaults)} for pattern, own in self.groups.items()}
        return OptionalGroups(full) if isinstance(self.groups, OptionalGroups) else full

    def describe(self) -> str:
        from .optimizers import label as label_of_optimizer

        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        name = label_of_optimizer(self.optimizer)
        warm = f", warm-up {self.warmup:.0%} of all steps" if self.warmup else ""
        schedule = describe_schedule(self.schedule, self.schedule_options)
        if not options:
            return f"{name}, {schedule}{warm}"
        return f"{name} ({options}), {schedule} schedule{warm}"
