"""The validated options of `load`, `distribute` and `fit`: one field each. torch is not imported until a config is
created.

Options that the stages share with the pipeline are inherited: `loaders.options`, `strategies.options`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast
from urllib.parse import urlsplit

from ... import strategies
from ...common.checks import check_whole, is_number
from ...common.errors import DrivetrainError, PlanError, StrategyError, suggest
from ...common.frozen import FrozenDict
from ...common.options.config import (
    IN_WORDS,
    NONE,
    TEXT,
    TEXTS,
    Check,
    Config,
    Key,
    Kind,
    Positive,
    Raises,
    Whole,
    Within,
    one_of,
    options_of,
)  # fmt: skip
from ...common.storage.addresses import is_address
from ...loaders.image_size import ImageSize, usual_size
from ...loaders.options import SIZE, ImageKeywords, ImageOptions, LoaderOptions, ReadKeywords, ReadOptions
from ...loaders.sample_options import SampleKeywords, SampleOptions
from ...loaders.sources import Files, Part, files_of
from ...strategies.options import Options, Precision, StepOptions

if TYPE_CHECKING:
    from ...strategies import Strategy

MatmulPrecision = Literal["highest", "high", "medium"]
PRECISIONS: dict[str, str] = {  # names of `torch.set_float32_matmul_precision`, and their meaning on a GPU
    "highest": "full float32",
    "high": "TF32: float32 with a 10-bit mantissa",
    "medium": "bfloat16 where the hardware supports it, else TF32",
}
LOADERS = {"ffcv": "FFCVLoader", "torch": "TorchLoader", "ffcv_stock": "StockFFCVLoader"}  # of `loaders`
Arguments = tuple[list[str], dict[str, Any]]  # the text of each positional argument, and the keywords

WEIGHTS = Kind(
    lambda value: isinstance(value, Mapping) and all(is_number(each, "(0, inf)") for each in value.values()),
    "a dict of sources and their weights, positive numbers",
)
SOURCE = Kind(lambda value: _is_path(value) and value != "", "text that is not empty")


def _is_path(value: object) -> bool:
    return isinstance(value, str | Path)


def _check_val(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        raise PlanError(
            f"{name}={dict(value)!r:.80} is a mix, but evaluation sees each sample once. Pass one data set, or a "
            "pattern such as '{a,b}.beton'."
        )


@dataclass(frozen=True)
class DataConfig(ReadOptions, SampleOptions):
    """The options of `Pipeline.load`."""

    error: ClassVar[type[DrivetrainError]] = PlanError
    place: ClassVar[str] = "load()"
    EXTRA: ClassVar[str] = "settings"

    train: Annotated[
        str | Mapping[str, float] | Files,
        SOURCE,
        WEIGHTS,
        Kind(lambda value: isinstance(value, Files), "files", json=False),
        Check(lambda _, value: files_of(value)),
        IN_WORDS,
    ]
    """Training data: a .beton file (relative paths are relative to the working directory), its address
    (s3://bucket/train.beton), files that are one data set (train-{000..127}.beton), a data set by name (cifar10:train);
    or a mix of several, with their weights: {a.beton: 3, b.beton: 1}. Files of one data set, and of a mix, have the
    same fields and classes. An epoch of a mix has as many samples as all its data sets together, of each its share by
    weight: `loaders.order.epoch.mixed`."""
    val: Annotated[
        str | Files | None,
        SOURCE,
        Kind(lambda value: isinstance(value, Files), "files", json=False),
        Kind(lambda value: value is None, "None"),
        Check(_check_val),
        IN_WORDS,
    ] = None
    """Data to evaluate on after each epoch, likewise, but not a mix; None: none."""
    _: KW_ONLY
    eval_image_size: Annotated[ImageSize, SIZE, IN_WORDS] | None = None
    """Side of the images in evaluation, or height and width; None: image_size. A model trained on random crops is often
    most accurate on slightly larger images (Touvron et al. 2019, arXiv:1906.06423)."""
    loader: Annotated[str, one_of(LOADERS), IN_WORDS] = "ffcv"
    """The loader: ffcv; torch for the plain PyTorch baseline; ffcv_stock for FFCV's own loader, whose augmentation is
    not repeatable. What FFCV's own loader does not have is rejected; see `loaders.StockFFCVLoader`."""
    order: Literal["random", "quasi_random"] = "random"
    """Order of the training samples: random; or quasi_random, which mixes about 16 batches at a time, so that files
    larger than the memory are read in long runs."""
    settings: Annotated[Mapping[str, Any], Key("loading")] = field(default_factory=FrozenDict)
    """Additional settings of the loader: crop, scale, padding, flip, eval_crop, eval_ratio, mean, std, …"""
    # Options of the training loader, without those that image transforms set.
    loading: LoaderOptions = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits and self.val is None:
            files = files_of(self.train)
            object.__setattr__(self, "val", Files((Part(str(files), files.names),)))
        for name in ("image_size", "eval_image_size"):
            object.__setattr__(self, name, usual_size(getattr(self, name)))
        if self.workers is not None:
            also = f" with loader={self.loader!r}, or None for one per core"
            check_whole("workers", self.workers, PlanError, 0 if self.loader == "torch" else 1, also=also)
        known = options_of(ImageOptions)
        for name in self.settings:
            if name not in known:
                names = (*known, *options_of(DataConfig))
                raise PlanError(f"load() has no option {name!r}.{suggest(name, names)}")
        object.__setattr__(self, "loading", LoaderOptions(**self.read_options, **self.settings))
        normal = {name: getattr(self.loading, name) for name in self.settings}
        object.__setattr__(self, "settings", FrozenDict(normal))

    @classmethod
    def loading_from(cls, train: object, val: object, options: Mapping[str, Any]) -> Self:
        """Return the config of `load`'s arguments; a mix is a dict of sources and weights."""
        named = None if val is None else source_name(val, "val")
        source: Any = (
            source_name(train, "train")
            if not isinstance(train, Mapping)
            else {source_name(each, "train"): weight for each, weight in train.items()}
        )
        made = cls(source, named, **cls.split(options))
        if made.splits and named is not None and not made.held_out:
            option = "val_split" if made.val_split is not None else "folds"
            raise PlanError(
                f"val={named!r} and {option}={getattr(made, option)} are both data to evaluate on. Leave one out; "
                f"of a recipe, set val or {option} to null: val=null, or {option}=null."
            )
        return made

    @property
    def read_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in options_of(ReadOptions)}

    def evaluated_on(self, source: str | Path | None) -> Self:
        """Return these options for an evaluation alone, which reads nothing of the training data: on all samples of
        `source`, or, if it is None, on the validation data."""
        if source is None and (self.held_out or self.val is None):
            return self
        files: Any = self.val if source is None else source_name(source, "data")
        return replace(self, train=files, val=files, **asdict(SampleOptions()))

    @property
    def held_out(self) -> bool:
        """Whether the validation data is a part of the training data."""
        return self.splits and self.val is not None and files_of(self.val).names == files_of(self.train).names

    @property
    def eval_size(self) -> ImageSize:
        """In pixels."""
        return self.image_size if self.eval_image_size is None else self.eval_image_size

    def arguments(self) -> Arguments:
        sources: list[object] = [self.train] if self.val is None or self.held_out else [self.train, self.val]
        named = {name: value for name, value in self.changed().items() if name not in ("train", "val")}
        return [*map(repr, sources)], named | dict(self.settings)


class DataKeywords(ReadKeywords, SampleKeywords, ImageKeywords, total=False):
    """The options of `Pipeline.load` as keywords, for type checkers."""

    # keywords of DataConfig
    eval_image_size: ImageSize | None
    loader: str
    order: Literal["random", "quasi_random"]
    # end


@dataclass(frozen=True)
class DistributedConfig(StepOptions):
    """The options of `Pipeline.distribute`."""

    error: ClassVar[type[DrivetrainError]] = PlanError
    place: ClassVar[str] = "distribute()"
    EXTRA: ClassVar[str] = "options"

    strategy: Annotated[str | Strategy, IN_WORDS] = "single"
    """Name of a strategy of drivetrain.strategies.available(). Or a strategy object."""
    _: KW_ONLY
    devices: Annotated[int | Literal["auto"], Whole(1), IN_WORDS] = 1
    """Number of ranks; "auto": the world size under torchrun, else the number of visible GPUs, else 1. Outside
    torchrun, more than one are started as new interpreters."""
    precision: Annotated[Precision | Literal["auto"], Raises(StrategyError), IN_WORDS] = "fp32"
    """Precision: fp32; bf16 or fp16: autocast over fp32 weights; or auto: bf16 where the device computes it natively,
    else fp32. "auto" is decided when the pipeline is resolved: on GPUs by their bf16 units (NVIDIA: compute capability
    8.0), on CPUs by their instructions, `avx512_bf16` or `amx_bf16` on x86, unless `ONEDNN_MAX_CPU_ISA` excludes them.
    The plan shows what was taken and why. A resumed run keeps the checkpoint's. If the machines of a job differ, the
    run stops: set it then."""
    cudnn_benchmark: Annotated[bool | None, IN_WORDS] = None
    """On GPUs: whether cuDNN benchmarks its convolution algorithms and selects the fastest; None: the plan's choice, on
    if all images have one size. They are benchmarked at the first batch of each size. None also disables this if torch
    is set to deterministic algorithms, because the selection may differ from run to run. Restored after the run."""
    matmul_precision: Annotated[MatmulPrecision | None, IN_WORDS] = None
    """On GPUs: precision of float32 matrix multiplications: highest (float32), high (TF32) or medium; None: torch's
    current setting. TF32 is several times faster on GPUs that support it, but changes the results. Convolutions are not
    affected: cuDNN computes float32 convolutions in TF32 by default. Restored after the run."""
    timeout: Annotated[float, Within("(0, 1e6]", " seconds"), IN_WORDS] = 600.0
    """Seconds that the ranks wait for each other in a collective. Then every rank that is left raises a StrategyError.
    Default: ten minutes, enough for a slow file system or a compilation; torch's half hour wastes more of a job that
    has lost a rank."""
    options: Annotated[Mapping[str, Any], Key("strategy_options")] = field(default_factory=FrozenDict)
    """Options of the strategy, such as device."""

    def __post_init__(self) -> None:
        modules = self.activation_checkpointing
        if isinstance(modules, Collection) and not isinstance(modules, str):
            names = sorted(set(modules)) if all(isinstance(name, str) for name in modules) else modules
            object.__setattr__(self, "activation_checkpointing", tuple(names))  # lists are mutable
        strategies.get(self.strategy, **self.options)
        super().__post_init__()

    def arguments(self) -> Arguments:
        named = {name: value for name, value in self.changed().items() if name != "strategy"}
        return [repr(self.strategy)], named | dict(self.options)

    @property
    def ranks(self) -> int:
        """For `devices="auto"`, what that means in this process."""
        from ...strategies.launching.group import automatic_devices

        return automatic_devices(self.device) if self.devices == "auto" else self.devices

    @property
    def device(self) -> str | None:
        """None: CUDA if available."""
        device: str | None = self.options.get("device", getattr(self.strategy, "device", None))
        return device

    @property
    def step_options(self) -> strategies.PrepareOptions:
        """Of `Strategy.prepare`. The precision must be decided."""
        assert self.precision != "auto"
        return cast("strategies.PrepareOptions", {name: getattr(self, name) for name in options_of(Options)})

    @property
    def name(self) -> str:
        return self.strategy if isinstance(self.strategy, str) else self.strategy.name


OnNonFinite = Literal["raise", "skip"]

LOG_EVERY = 50  # optimizer steps between two entries, so that logging costs next to nothing

CALLBACKS = Kind(
    lambda value: isinstance(value, list | tuple), "a list of callbacks, such as [EarlyStopping('val_loss')]"
)


def check_out(name: str, value: Any) -> None:
    if value == "":
        raise PlanError(
            f"{name}='' is not a folder. Pass the path of a folder ('.' for this one), or None for no files."
        )
    if isinstance(value, Path) and re.match(r"\w+:/", str(value)):
        raise PlanError(f"{name}={value!r} is the path of an address. Pass the address as text.")
    if not is_address(value):
        return
    parts = urlsplit(value)
    if parts.scheme in ("http", "https"):
        raise PlanError(
            f"{name}={value!r}: a web server cannot be written. Pass a folder, or the address of a store, such as "
            "s3://bucket/run."
        )
    if "@" in parts.netloc:  # its text is not repeated
        raise PlanError(
            f"{name} is an address with credentials, which plans and logs would show. Set them in the environment, as "
            "the store's own tools do, and pass the address without them."
        )
    if not (parts.netloc + parts.path).strip("/") or parts.query or parts.fragment:
        raise PlanError(f"{name}={value!r} is not the address of a folder. Pass one like s3://bucket/run.")


@dataclass(frozen=True, kw_only=True)
class FitOptions(Config):
    """The options of `Pipeline.fit` that a recipe can set: they belong to the training, not to one start of it."""

    place: ClassVar[str] = "fit()"

    out: Annotated[str | Path | None, Kind(_is_path, "the path of a folder or an address"), NONE, Check(check_out)] = (
        None
    )
    """Folder for the results, or its address, such as `s3://bucket/run`; None: no files. It contains `plan.txt` and
    `recipe.yaml`; `history.json` and `model.safetensors`, written after each epoch; `curves.png`, drawn at the end; and
    `checkpoints/`. With several machines, it must be shared. Files of an address are written to a local folder and
    uploaded in the background (extra `remote`)."""
    init_from: Annotated[
        str | Path | None, Kind(_is_path, "the path of a run, a checkpoint or a file of weights"), NONE
    ] = None
    """Weights to begin with: the folder of a run or of a checkpoint, or a file of weights, `.safetensors`, or of
    `torch.save` (`.pth`, `.pt`, `.bin`), of which only tensors and plain values are read (`weights_only=True`); None:
    the model's own. From a run or a checkpoint, the weights used for evaluation are loaded: averages with EMA or SWA.
    Names may be those before or after the transforms. What does not match, such as a last layer for other classes,
    keeps the model's own values and is reported (`History.facts['init_from']`). Optimizer, schedule and position begin
    from scratch, unlike with `resume`. With `resume="auto"`, they are used only if `out` has no checkpoint."""
    on_nonfinite: OnNonFinite = "raise"
    """What happens at a non-finite loss: `"raise"`: an error with step, rank and the last good checkpoint; `"skip"`:
    all ranks skip the steps whose loss or gradients are not finite. Non-finite weights raise before they are evaluated,
    saved or returned. A skipped step still advances the learning rate, and the history counts it. On a GPU, `"skip"`
    makes every step wait for its loss and gradients."""
    logger: Annotated[object, TEXT, TEXTS, NONE, Kind(lambda _: True, "an object", json=False)] = None
    """Where metrics and hyperparameters go: `"csv"` (`out/metrics.csv`), `"prometheus"` (`out/metrics.prom`: the newest
    values, for node_exporter's textfile collector), `"otel"` (OpenTelemetry's SDK, over OTLP), `"tensorboard"`
    (`out/tensorboard/`), `"wandb"` or `"mlflow"` (a run that is begun and ended here), these three services configured
    by their own environment variables, an object with `log(dict, step=)`
    or `log_metrics(dict, step=)`, such as `wandb.init(…)` or the module `mlflow`, or a list of them. Hyperparameters
    are the recipe's values by dotted key, `optimizer.lr`. It receives the metrics of each epoch, and those of every
    `log_every`-th step under names that begin with `step/`, where the loss is that of rank 0's share of the batch. Only
    rank 0 logs; if this call starts the ranks, an object is copied to it. A logger that fails is disabled, with a
    `LoggerWarning`. A resumed run continues the same files."""
    log_every: Positive = LOG_EVERY
    """Optimizer steps between two entries of the logger. The default costs next to nothing. Logging never waits for the
    device."""
    callbacks: Annotated[Sequence[object], CALLBACKS] = ()
    """What to run at steps, evaluations and epochs: objects of subclasses of `drivetrain.Callback`, such as
    `EarlyStopping("val_loss")`, or `{name, …options}`, each class at most once. They see a read-only view of the run
    and can stop it. Checkpoints contain their state."""
    eval_every: Positive = 1
    """Epochs between two evaluations on the validation data. The last epoch is always evaluated. In the history, epochs
    without an evaluation have None."""
    eval_every_steps: Positive | None = None
    """Optimizer steps of the run between two further evaluations; None: only at the end of epochs. Such evaluations are
    logged, are in `History.evaluations`, and do not change the training."""


def source_name(source: object, argument: str) -> str:
    if not isinstance(source, str | Path):
        raise PlanError(
            f"load() takes the path of a .beton file (or a name such as 'cifar10:train') as {argument}, not "
            f"a {type(source).__name__}. Convert a data set first: drivetrain.loaders.convert(it, 'train.beton'). "
            "Several files are a pattern, '{a,b}.beton', or a dict with weights."
        )
    return str(source)
