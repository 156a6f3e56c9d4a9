"""The validated options of `load`, `optimize` and `distribute`: one field each.

To add an option, add a field: builder, recipes, command line, plan and documentation derive from it. Only type checkers
need it in a second place, `PipelineSpec`, which a test names. torch is not imported until a config is created.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ... import strategies
from ...common.checks import check_whole, is_number, is_whole
from ...common.errors import PlanError, suggest
from ...common.frozen import FrozenDict
from ...common.options.option import (
    AUTO,
    FLAG,
    INTEGER,
    MAPPING,
    NULL,
    NUMBER,
    PAIR,
    PATH,
    POSITIVE,
    TEXT,
    TEXTS,
    WEIGHTS,
    Config,
    OptionalGroups,
    Source,
    known,
    named_options,
    number,
    option,
    whole,
)
from ...common.storage.addresses import PATIENCE
from ...loaders.image_size import ImageSize, is_size, usual_size
from ...loaders.sources import Files, files_of
from ..optim.schedules import (
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

    from ...strategies import OptimizerFactory, Strategy

MatmulPrecision = Literal["highest", "high", "medium"]
PRECISIONS: dict[str, str] = {
    "highest": "full float32",
    "high": "TF32: float32 with a 10-bit mantissa",
    "medium": "bfloat16 where the hardware supports it, else TF32",
}
"""Names of `torch.set_float32_matmul_precision`, and their meaning on a GPU."""

LOADERS = {"ffcv": "FFCVLoader", "torch": "TorchLoader", "ffcv_stock": "StockFFCVLoader"}
"""The loaders by name, as classes of `loaders`."""

Arguments = tuple[list[str], dict[str, Any]]
"""The arguments of a call: the text of each positional one, and the keyword arguments."""

# Loader settings that the pipeline sets, from load()'s own options, the seed and the strategy.
_NOT_SETTINGS = {
    "batch_size", "image_size", "train", "seed", "rank", "world_size", "drop_last", "pad_last", "dtype", "order",
    "fields",
}  # fmt: skip


def _check_train(_: str, value: Any) -> None:
    files_of(value)


def _check_val(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        raise PlanError(
            f"{name}={dict(value)!r:.80} is a mix, but evaluation sees each sample once. Pass one data set, or a "
            "pattern such as '{a,b}.beton'."
        )


def _check_eval_size(name: str, value: Any) -> None:
    if value is not None and not is_size(usual_size(value)):
        raise PlanError(
            f"{name}={value!r} must be a positive integer, or two: height and width; or None for image_size."
        )


@dataclass(frozen=True)
class DataConfig(Config):
    """The options of `Pipeline.load`.

    Raises:
        PlanError, DataError: naming the invalid value.
    """

    EXTRA: ClassVar[str] = "settings"

    train: str | Mapping[str, float] | Files = field(
        metadata=option(
            "training data: a .beton file (relative paths are relative to the working directory), its address "
            "(s3://bucket/train.beton), files that are one data set (train-{000..127}.beton), a data set by name "
            "(cifar10:train); or a mix of several, with their weights: {a.beton: 3, b.beton: 1}",
            PATH,
            WEIGHTS,
            more="Files of one data set, and of a mix, have the same fields and classes. An epoch of a mix has as many "
            "samples as all its data sets together, of each its share by weight: `loaders.order.mixed`.",
            check=_check_train,
            in_plan=False,
        )
    )
    val: str | Files | None = field(
        default=None,
        metadata=option(
            "data to evaluate on after each epoch, likewise, but not a mix; None: none",
            PATH,
            NULL,
            check=_check_val,
            in_plan=False,
        ),
    )
    _: KW_ONLY
    batch_size: int = field(
        metadata=option(
            "global batch size, in images",
            POSITIVE,
            more="Step k trains on the same samples on one device or on eight.",
            in_plan=False,
        )
    )
    image_size: ImageSize = field(
        metadata=option(
            "side of square images, or height and width, in pixels", POSITIVE, PAIR, in_plan=False
        ),
    )
    eval_image_size: ImageSize | None = field(
        default=None,
        metadata=option(
            "the same in evaluation; None: image_size",
            POSITIVE,
            PAIR,
            NULL,
            more="A model trained on random crops is often most accurate on slightly larger images (Touvron et al. "
            "2019, arXiv:1906.06423).",
            check=_check_eval_size,
            in_plan=False,
        ),
    )
    loader: str = field(
        default="ffcv",
        metadata=option(
            "ffcv; torch for the plain PyTorch baseline; ffcv_stock for FFCV's own loader, whose augmentation is not "
            "repeatable",
            TEXT,
            more="What FFCV's own loader does not have is rejected; see `loaders.StockFFCVLoader`.",
            check=known("loader", LOADERS),
            in_plan=False,
        ),
    )
    order: str = field(
        default="random",
        metadata=option(
            "order of the training samples: random; or quasi_random, which mixes about 16 batches at a time, so that "
            "files larger than the memory are read in long runs",
            TEXT,
            check=known("order", ("random", "quasi_random")),
        ),
    )
    workers: int | None = field(
        default=None,
        metadata=option(
            "loader threads (ffcv, ffcv_stock) or processes (torch) per rank; None: one per core",
            INTEGER,
            NULL,
        ),
    )
    batches_ahead: int = field(
        default=3,
        metadata=option(
            "batches that the loader prepares while one is in use",
            POSITIVE,
            more="More even out samples that take long; each takes the memory of a batch. 3 is FFCV's.",
            check=whole(1),
        ),
    )
    cache: str | None = field(
        default=None,
        metadata=option(
            "folder of the local copies of files at an address; None: remote in $DRIVETRAIN_DATA, else in "
            "~/.cache/drivetrain",
            PATH,
            NULL,
            more="The ranks of a machine, and later jobs, share a copy.",
            in_plan=False,
        ),
    )
    cache_limit: float | None = field(
        default=None,
        metadata=option(
            "GB that these copies may take on disk; None: no limit",
            NUMBER,
            NULL,
            more="Copies that nobody uses are removed, the least recently used first.",
            check=number("(0, 1e9]", unit=", in GB", none=True),
            in_plan=False,
        ),
    )
    patience: float = field(
        default=PATIENCE,
        metadata=option(
            "seconds for which the server of files at an address may not answer",
            NUMBER,
            more="Its requests are repeated with growing pauses, which is reported. Five minutes are enough for the "
            "restart of a server or a router.",
            check=number("[0, 1e9]", unit=", in seconds"),
            in_plan=False,
        ),
    )
    settings: Mapping[str, Any] = field(
        default_factory=FrozenDict,
        metadata=option(
            "additional settings of the loader: crop, scale, padding, flip, eval_crop, eval_ratio, mean, std, …",
            MAPPING,
            key="loading",
        ),
    )

    def __post_init__(self) -> None:
        from ...loaders.options import Settings

        super().__post_init__()
        for name in ("image_size", "eval_image_size"):
            object.__setattr__(self, name, usual_size(getattr(self, name)))
        if isinstance(self.train, Mapping):
            object.__setattr__(self, "train", FrozenDict(self.train))
        if self.workers is not None:
            also = f" with loader={self.loader!r}, or None for one per core"
            check_whole("workers", self.workers, PlanError, 0 if self.loader == "torch" else 1, also=also)
        names = {f.name for f in dataclasses.fields(Settings)} - _NOT_SETTINGS
        for name in self.settings:
            if name not in names:
                raise PlanError(f"load() has no setting {name!r}.{suggest(name, names)}")
        try:
            Settings(batch_size=self.batch_size, image_size=self.image_size, **self.settings)
        except (TypeError, IndexError) as error:  # e.g. a number instead of a pair
            raise PlanError(f"load() cannot use the settings {dict(self.settings)}: {error}.") from error

    @property
    def eval_size(self) -> ImageSize:
        """Side of the images in evaluation, or height and width, in pixels."""
        return self.image_size if self.eval_image_size is None else self.eval_image_size

    def arguments(self) -> Arguments:
        """Return the arguments of `load()` that create this config."""
        sources: list[object] = [self.train] if self.val is None else [self.train, self.val]
        named = {name: value for name, value in self.changed().items() if name not in ("train", "val")}
        return [*map(repr, sources)], named | dict(self.settings)


def _check_share(name: str, value: Any) -> None:
    if not is_number(value, "[0, 1)"):
        raise PlanError(f"{name}={value!r} is a fraction of all steps and must be in [0, 1).")


def _check_scaled(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise PlanError(
            f"{name}={value!r} must be True or False; the batch size to scale from is base_batch_size."
        )


@dataclass(frozen=True)
class OptimizerConfig(Config):
    """The options of `Pipeline.optimize`.

    Raises:
        PlanError: naming the invalid value.
    """

    EXTRA: ClassVar[str] = "options"

    optimizer: str | type[torch.optim.Optimizer] | OptimizerFactory = field(
        default="sgd",
        metadata=option(
            "sgd, sgdw, adam, adamw, muon, or package.module:Class, such as torch.optim:NAdam",
            key="",
            more="Or a class, with its options. Or a factory: a function `parameters -> Optimizer`, never an "
            "optimizer. It is called on the final parameters, after surgery and wrapping.",
            in_plan=False,
        ),
    )
    options: Mapping[str, Any] = field(
        default_factory=lambda: FrozenDict({"lr": 0.1, "momentum": 0.9}),
        metadata=option(
            "lr, momentum, weight_decay, …",
            MAPPING,
            key="optimizer",
            more="The optimizer's own arguments.",
        ),
    )
    _: KW_ONLY
    schedule: str | ScheduleFunction = field(
        default="cosine",
        metadata=option(
            "learning rate schedule, per step: cosine, linear, constant, step, multistep, onecycle, wsd, or "
            "package.module:function",
            TEXT,
            more="Or a function of the progress, 0 to 1 from the end of warm-up to the end of the run, that returns a "
            "factor of the learning rate (finite, 0 or more; checked before training). Or a factory of any torch "
            "scheduler, recognised by its first parameter, which must be named `optimizer`: `lambda optimizer: "
            "torch.optim.lr_scheduler.StepLR(optimizer, 30)`. The scheduler is stepped once per optimizer step, also "
            "during warm-up; on resume, it is created again and stepped as often as before, which restores its state "
            "exactly.",
            in_plan=False,
        ),
    )
    schedule_options: Mapping[str, Any] = field(
        default_factory=FrozenDict,
        metadata=option(
            "the schedule's own options: every, gamma, milestones, rise, start, end, decay, shape",
            MAPPING,
            more="Fractions are of the full run, warm-up included; factors are of the peak learning rate. linear, "
            "cosine: end=0. step: every=1/3, gamma=0.1. multistep: milestones=(0.3, 0.6, 0.8), gamma=0.2. onecycle: "
            "rise=0.3, start=1/25, end=1/250000. wsd: decay=0.2, shape='1-sqrt', end=0. For a function or a factory: "
            "its keyword arguments.",
            in_plan=False,
        ),
    )
    warmup: float = field(
        default=0.0,
        metadata=option(
            "fraction of all steps, 0 to 1, in which the learning rate rises linearly to its peak",
            NUMBER,
            more="It multiplies any schedule except onecycle, which has its own.",
            check=_check_share,
            in_plan=False,
        ),
    )
    groups: Mapping[str, Mapping[str, Any]] = field(
        default_factory=FrozenDict,
        metadata=option(
            "options of the optimizer for some parameters, by patterns over their names: {'head.*': {'lr': 1.0}}",
            MAPPING,
            more="Names are those of `model.named_parameters()` after surgery, and patterns those of `fnmatch`, in "
            "which `*` matches dots, too. A parameter takes the options of the first pattern that matches it, and "
            "`optimize`'s for all others. A pattern that matches nothing is an error, raised before training. The "
            "schedule scales every group by the same factor. `drivetrain.pipeline.layerwise_decay` returns groups.",
            in_plan=False,
        ),
    )
    base_batch_size: int | None = field(
        default=None,
        metadata=option(
            "global batch size, in images, that the learning rate was tuned for; None: the pipeline's own, in a recipe "
            "the one before overrides",
            POSITIVE,
            NULL,
            more="If `load` has another, the plan states how much the learning rate per image differs.",
            check=whole(1, none="the batch size of load()"),
            in_plan=False,
        ),
    )
    scale_lr: bool = field(
        default=False,
        metadata=option(
            "whether to scale the learning rate from base_batch_size to the batch size: linearly for sgd and sgdw, by "
            "the square root for adam and adamw",
            FLAG,
            more="Also by the square root for torch's NAdam, RAdam and RMSprop; for other optimizers no rule is known. "
            "See Goyal et al. 2017, arXiv:1706.02677, and Malladi et al. 2022, arXiv:2205.10287. In a pipeline "
            "from a recipe, base_batch_size defaults to the recipe's batch size.",
            check=_check_scaled,
            in_plan=False,
        ),
    )

    _torch_scheduler: ClassVar[bool] = False

    def __post_init__(self) -> None:
        from ..optim.optimizers import check_no_options, check_options, find_optimizer

        object.__setattr__(self, "optimizer", find_optimizer(self.optimizer))
        object.__setattr__(self, "schedule", find_schedule(self.schedule))
        object.__setattr__(self, "schedule_options", named_options("schedule_options", self.schedule_options))
        object.__setattr__(self, "groups", named_options("groups", self.groups))
        if self.is_factory:
            check_no_options(self.options)
        super().__post_init__()
        check_schedule(self.schedule, self.schedule_options, self.warmup)
        if not self.is_factory:
            check_options(self.optimizer, self.options)
        object.__setattr__(self, "_torch_scheduler", is_factory(self.schedule))  # asked in every step
        self._check_groups()
        if self.scale_lr:
            self._check_scaling()

    def _check_groups(self) -> None:
        from ..optim.optimizers import check_options

        for pattern, options in self.groups.items():
            if not isinstance(options, Mapping) or not options or "params" in options:
                raise PlanError(
                    f"groups[{pattern!r}]={options!r:.80} must be a dict of the optimizer's options, such as "
                    "{'lr': 1.0}."
                )
            if not self.is_factory:
                check_options(self.optimizer, {**self.options, **options}, f"groups[{pattern!r}]")

    def _check_scaling(self) -> None:
        from ..optim.optimizers import SCALING, label

        if self.base_batch_size is None:
            raise PlanError(
                "scale_lr=True needs the batch size that the learning rate was tuned for. Pass base_batch_size=…."
            )
        if self.is_factory:
            raise PlanError(
                "scale_lr=True needs an optimizer by name, such as 'sgd'. Scale lr in your factory."
            )
        if not self.scaling:
            known = ", ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in SCALING))
            raise PlanError(
                f"scale_lr=True: no rule is known for how the learning rate of {label(self.optimizer)} depends on the "
                f"batch size, only for {known}. Set lr for this batch size yourself."
            )

    @property
    def is_factory(self) -> bool:
        """Whether the optimizer is a user's function, neither a name nor a class."""
        return not isinstance(self.optimizer, str | type)

    def arguments(self) -> Arguments:
        """Return the arguments of `optimize()` that create this config."""
        factory = self.optimizer
        name = getattr(factory, "__qualname__", type(factory).__qualname__)
        named = {name: value for name, value in self.changed().items() if name != "optimizer"}
        if "schedule" in named and not isinstance(self.schedule, str):
            named["schedule"] = Source(label(self.schedule))
        return [repr(factory) if isinstance(factory, str) else name], dict(self.options) | named

    @property
    def lr(self) -> float:
        """The peak learning rate as given, or the optimizer's default."""
        from ..optim.optimizers import default_lr

        return float(self.options["lr"] if "lr" in self.options else default_lr(self.optimizer))

    @property
    def scaling(self) -> str:
        """How the learning rate scales with the batch size: `"linear"` or `"square root"`, see `optimizers.SCALING`; ""
        if no rule is known."""
        from ..optim.optimizers import SCALING, class_of

        kind = class_of(self.optimizer)
        return "" if kind is None else SCALING.get(kind, "")

    def _scale(self, batch_size: int) -> float:
        """Return the factor of the learning rate from the base batch size to `batch_size`."""
        ratio = batch_size / (self.base_batch_size or batch_size)
        return math.sqrt(ratio) if self.scaling == "square root" else ratio

    def lr_for(self, batch_size: int) -> float:
        """Return the learning rate scaled from the base batch size to `batch_size`."""
        return self.lr * self._scale(batch_size)

    def at(self, batch_size: int) -> OptimizerConfig:
        """Return the config for batches of this size: with `scale_lr`, the learning rate is scaled; with a torch
        scheduler, see `scheduled_scale`."""
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
        """Return the factor by which `scale_lr` multiplies each learning rate of a torch scheduler, whether it computes
        it from the optimizer's or, as OneCycleLR does, sets it itself; 1 otherwise."""
        return self._scale(batch_size) if self.scale_lr and self.uses_torch_scheduler else 1.0

    def note(self, batch_size: int) -> str:
        """Return the plan's note on learning rate and batch size; "" if they were tuned together."""
        base = self.base_batch_size
        if base is None or self.is_factory or (base == batch_size and not self.scale_lr):
            return ""
        if not self.scaling:
            return f"caution: the learning rate is for batches of {base:,} images, not {batch_size:,}"
        given = f"lr={self.lr:g} is for batches of {base:,} images"
        if self.scale_lr and self.uses_torch_scheduler:
            return (
                f"the scheduler's learning rates are for batches of {base:,} images; each is multiplied by "
                f"{self._scale(batch_size):.4g} for {batch_size:,} ({self.scaling}, scale_lr)"
            )
        scaled = f"{self.lr_for(batch_size):.4g}"
        if self.scale_lr:
            return f"{given}; scaled to {scaled} for {batch_size:,} ({self.scaling}, scale_lr)"
        ratio = base / batch_size
        per_image = f"{ratio:.3g} times" if ratio >= 1 else f"1/{1 / ratio:.3g} of"
        return (
            f"caution: {given}; with {batch_size:,} the learning rate per image is {per_image} that. "
            f"scale_lr=True makes it {scaled} ({self.scaling})"
        )

    def factory(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Build the optimizer. Strategies call this with the final parameters, or groups of them.

        Raises:
            PlanError: if the optimizer rejects the parameters, or does not have an option of a group.
        """
        from ..optim.optimizers import class_of, label

        given = list(parameters)
        build = class_of(self.optimizer) or self.optimizer
        try:
            optimizer: torch.optim.Optimizer = build(given, **self.options)  # type: ignore[operator]
        except ValueError as error:
            if self.is_factory or isinstance(error, PlanError):
                raise
            raise PlanError(f"{label(self.optimizer)} cannot train this model: {error}.") from error
        for pattern, options in self.groups.items():
            for name in options.keys() - optimizer.defaults.keys():
                raise PlanError(
                    f"groups[{pattern!r}]: {type(optimizer).__name__} has no option {name!r} for single parameters."
                    f"{suggest(name, optimizer.defaults)}"
                )
        return optimizer

    @property
    def uses_torch_scheduler(self) -> bool:
        """Whether `schedule` is a factory of a torch scheduler, which then sets the learning rates itself."""
        return self._torch_scheduler

    def warmup_factor(self, step: int, steps: int) -> float:
        """Return the factor of the warm-up alone at step `step`, counted from 0, of `steps`: 1 after it."""
        warm = self.warmup * steps
        return (step + 1) / (warm + 1) if step < warm else 1.0

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the learning rate's factor at step `step`, counted from 0, of `steps`.

        With a torch scheduler, return the factor by which to multiply the scheduler's own learning rates.

        Raises:
            PlanError: if a function returns an invalid factor.
        """
        if self.uses_torch_scheduler:
            return self.warmup_factor(step, steps)
        warm = self.warmup * steps
        after = max(step - warm, 0.0) / max(steps - warm, 1)
        if not isinstance(self.schedule, str):
            factor = factor_at(self.schedule, self.schedule_options, after)
        else:
            schedule = named(self.schedule, self.schedule_options)
            whole = schedule.whole_run
            factor = schedule.factor(
                step / max(steps, 1) if whole else after, steps if whole else steps - warm
            )
        return self.warmup_factor(step, steps) * factor

    def describe(self) -> str:
        """Return the optimizer and its options as one line."""
        from ..optim.optimizers import label as label_of_optimizer

        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        name = label_of_optimizer(self.optimizer)
        warm = f", warm-up {self.warmup:.0%} of all steps" if self.warmup else ""
        schedule = describe_schedule(self.schedule, self.schedule_options)
        if not options:
            return f"{name}, {schedule}{warm}"
        return f"{name} ({options}), {schedule} schedule{warm}"


def _check_benchmark(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise PlanError(f"{name}={value!r} must be True, False, or None to let the plan choose.")


def _check_devices(name: str, value: Any) -> None:
    if value != "auto" and not is_whole(value, 1):
        raise PlanError(f'{name}={value!r} must be a positive integer, or "auto".')


def _check_precision(_: str, value: Any) -> None:
    from ...strategies.options import check_precision

    check_precision(value, "auto")


def _check_matmul_precision(name: str, value: Any) -> None:
    if value is not None and value not in tuple(PRECISIONS):
        raise PlanError(f"{name}={value!r} is not known.{suggest(str(value), PRECISIONS)}")


@dataclass(frozen=True)
class DistributedConfig(Config):
    """The options of `Pipeline.distribute`.

    Raises:
        PlanError, StrategyError: naming the invalid value.
    """

    EXTRA: ClassVar[str] = "options"

    strategy: str | Strategy = field(
        default="single",
        metadata=option(
            "name of a strategy of drivetrain.strategies.available()",
            TEXT,
            more="Or a strategy object.",
            in_plan=False,
        ),
    )
    _: KW_ONLY
    devices: int | Literal["auto"] = field(
        default=1,
        metadata=option(
            'number of ranks; "auto": the world size under torchrun, else the number of visible GPUs, else 1',
            POSITIVE,
            AUTO,
            more="Outside torchrun, more than one are started as new interpreters.",
            check=_check_devices,
            in_plan=False,
        ),
    )
    precision: strategies.Precision | Literal["auto"] = field(
        default="fp32",
        metadata=option(
            "fp32; bf16 or fp16: autocast over fp32 weights; or auto: bf16 where the device computes it natively, "
            "else fp32",
            TEXT,
            more='"auto" is decided when the pipeline is resolved: on GPUs by their bf16 units (NVIDIA: compute '
            "capability 8.0), on CPUs by their instructions, `avx512_bf16` or `amx_bf16` on x86, unless "
            "`ONEDNN_MAX_CPU_ISA` excludes them. The plan shows what was taken and why. A resumed run keeps the "
            "checkpoint's. If the machines of a job differ, the run stops: set it then.",
            check=_check_precision,
            in_plan=False,
        ),
    )
    accumulate: int = field(
        default=1, metadata=option("microbatches per step and rank", POSITIVE, in_plan=False)
    )
    clip_norm: float | None = field(
        default=None,
        metadata=option("maximum norm of all gradients together; None: no clipping", NUMBER, NULL),
    )
    activation_checkpointing: strategies.ModuleFilter = field(
        default=False,
        metadata=option(
            "modules that recompute their activations in the backward pass: True for the model's blocks, or a list of "
            "class names",
            FLAG,
            TEXTS,
            more="Or a function of name and module.",
            in_plan=False,
        ),
    )
    compile: bool | str = field(
        default=False,
        metadata=option(
            "whether to compile the model in place with torch.compile; or the name of a mode",
            FLAG,
            TEXT,
            in_plan=False,
        ),
    )
    sync_batchnorm: bool = field(
        default=False,
        metadata=option(
            "whether BatchNorm layers compute their statistics over the global batch, on all ranks, as on one device; "
            "otherwise over a rank's microbatch",
            FLAG,
            more="Numbers and running statistics are then those of one device, on CPUs and GPUs, up to the order of "
            "sums, at the cost of two small messages per layer and step. Not with `accumulate`, because a layer would "
            "need its inputs from all microbatches at once.",
            in_plan=False,
        ),
    )
    cudnn_benchmark: bool | None = field(
        default=None,
        metadata=option(
            "on GPUs: whether cuDNN benchmarks its convolution algorithms and selects the fastest; None: if all images "
            "have one size",
            FLAG,
            NULL,
            more="They are benchmarked at the first batch of each size. None also disables this if torch is set to "
            "deterministic algorithms, because the selection may differ from run to run. Restored after the run.",
            check=_check_benchmark,
            in_plan=False,
        ),
    )
    matmul_precision: MatmulPrecision | None = field(
        default=None,
        metadata=option(
            "on GPUs: precision of float32 matrix multiplications: highest (float32), high (TF32) or medium; None: "
            "torch's current setting",
            TEXT,
            NULL,
            more="TF32 is several times faster on GPUs that support it, but changes the results. Convolutions are not "
            "affected: cuDNN computes float32 convolutions in TF32 by default. Restored after the run.",
            check=_check_matmul_precision,
            in_plan=False,
        ),
    )
    timeout: float = field(
        default=600.0,
        metadata=option(
            "seconds that the ranks wait for each other in a collective",
            NUMBER,
            more="Then every rank that is left raises a StrategyError. Default: ten minutes, enough for a slow file "
            "system or a compilation; torch's half hour wastes more of a job that has lost a rank.",
            check=number("(0, 1e6]", unit=" seconds"),
            in_plan=False,
        ),
    )
    options: Mapping[str, Any] = field(
        default_factory=FrozenDict,
        metadata=option("options of the strategy, such as device", MAPPING, key="strategy_options"),
    )

    def __post_init__(self) -> None:
        modules = self.activation_checkpointing
        if isinstance(modules, Collection) and not isinstance(modules, str):
            names = sorted(set(modules)) if all(isinstance(name, str) for name in modules) else modules
            object.__setattr__(self, "activation_checkpointing", tuple(names))  # lists are mutable
        strategies.get(self.strategy, **self.options)
        super().__post_init__()
        decided = dataclasses.replace(self, precision="fp32") if self.precision == "auto" else self
        strategies.Options.of(decided.step_options)

    def arguments(self) -> Arguments:
        """Return the arguments of `distribute()` that create this config."""
        named = {name: value for name, value in self.changed().items() if name != "strategy"}
        return [repr(self.strategy)], named | dict(self.options)

    @property
    def ranks(self) -> int:
        """The number of ranks; for `devices="auto"`, what that means in this process."""
        from ...strategies.launching.group import automatic_devices

        return automatic_devices(self.device) if self.devices == "auto" else self.devices

    @property
    def device(self) -> str | None:
        """The strategy's `device` option; None: CUDA if available."""
        device: str | None = self.options.get("device", getattr(self.strategy, "device", None))
        return device

    @property
    def step_options(self) -> strategies.PrepareOptions:
        """The options of `Strategy.prepare`, shared by all strategies. The precision must be decided."""
        assert self.precision != "auto"
        return {
            "precision": self.precision,
            "clip_norm": self.clip_norm,
            "accumulate": self.accumulate,
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compile,
            "sync_batchnorm": self.sync_batchnorm,
        }

    @property
    def name(self) -> str:
        """The strategy's name."""
        return self.strategy if isinstance(self.strategy, str) else self.strategy.name


def train_source(source: object) -> str | dict[str, float]:
    """Return the source of training data: as `source_name`, or those of a mix with their weights."""
    if not isinstance(source, Mapping):
        return source_name(source, "train")
    return {source_name(name, "train"): weight for name, weight in source.items()}


def source_name(source: object, argument: str) -> str:
    """Return a data source as a string.

    Raises:
        PlanError: if it is not a path or a name, e.g. a data set that was not converted.
    """
    if not isinstance(source, str | Path):
        raise PlanError(
            f"load() takes the path of a .beton file (or a name such as 'cifar10:train') as {argument}, not "
            f"a {type(source).__name__}. Convert a data set first: drivetrain.loaders.convert(it, 'train.beton'). "
            "Several files are a pattern, '{a,b}.beton', or a dict with weights."
        )
    return str(source)
