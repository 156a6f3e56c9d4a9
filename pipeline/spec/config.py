"""What `.load()` and `.distribute()` were told, as values that check themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ... import strategies
from ...checks import check_whole, make_plain
from ...errors import PlanError, suggest
from ...loaders.settings import Settings
from ...strategies import Strategy
from .frozen import FrozenDict

LOADERS = ("ffcv", "torch")
MatmulPrecision = Literal["highest", "high", "medium"]
PRECISIONS: dict[str, str] = {
    "highest": "full float32",
    "high": "TF32: float32 with 10 bits after the point",
    "medium": "bfloat16 where the hardware has it, else TF32",
}
"""Names of `torch.set_float32_matmul_precision`, and what they mean on a GPU."""


# What a loader is told by the pipeline itself: by load()'s own arguments, the seed, and the strategy.
_NOT_SETTINGS = {
    "batch_size", "image_size", "train", "seed", "rank", "world_size", "drop_last", "pad_last", "dtype", "order",
    "fields",
}  # fmt: skip


Arguments = tuple[list[str], dict[str, Any]]
"""Of a call: the text of each positional argument, and the named ones."""


@dataclass(frozen=True)
class Data:
    """What `Pipeline.load` was told; see there.

    Raises:
        PlanError, DataError: naming the value that cannot be used.
    """

    train: str
    val: str | None
    batch_size: int
    image_size: int
    loader: str = "ffcv"
    workers: int | None = None
    settings: Mapping[str, Any] = field(default_factory=FrozenDict)
    eval_image_size: int | None = None

    @property
    def eval_size(self) -> int:
        """Side of the images in evaluation, in pixels."""
        return self.image_size if self.eval_image_size is None else self.eval_image_size

    def arguments(self) -> Arguments:
        """The arguments of `load()` that give this."""
        sources = [self.train] if self.val is None else [self.train, self.val]
        return [*map(repr, sources)], changed(self, "train", "val", "settings") | dict(self.settings)

    def __post_init__(self) -> None:
        make_plain(self)
        object.__setattr__(self, "settings", FrozenDict(self.settings))
        if self.loader not in LOADERS:
            raise PlanError(f"No loader is named {self.loader!r}.{suggest(str(self.loader), LOADERS)}")
        least = 0 if self.loader == "torch" else 1
        if self.workers is not None:
            also = f" with loader={self.loader!r}, or None for one per core"
            check_whole("workers", self.workers, PlanError, least, also=also)
        if self.eval_image_size is not None:
            check_whole(
                "eval_image_size", self.eval_image_size, PlanError, 1, also=", or None for image_size"
            )
        known = {f.name for f in dataclasses.fields(Settings)} - _NOT_SETTINGS
        for name in self.settings:
            if name not in known:
                raise PlanError(f"load() has no setting {name!r}.{suggest(name, known)}")
        try:
            Settings(batch_size=self.batch_size, image_size=self.image_size, **self.settings)
        except (TypeError, IndexError) as error:  # a number where a pair belongs, and the like
            raise PlanError(f"load() cannot use the settings {dict(self.settings)}: {error}.") from error


@dataclass(frozen=True)
class Distribution:
    """What `Pipeline.distribute` was told; see there.

    Raises:
        PlanError, StrategyError: naming the value that cannot be used.
    """

    strategy: str | Strategy = "single"
    devices: int = 1
    precision: strategies.Precision = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    activation_checkpointing: strategies.Policy = False
    compile: bool | str = False
    options: Mapping[str, Any] = field(default_factory=FrozenDict)
    asked: bool = False
    cudnn_benchmark: bool | None = None
    matmul_precision: MatmulPrecision | None = None

    def arguments(self) -> Arguments:
        """The arguments of `distribute()` that give this."""
        return [repr(self.strategy)], changed(self, "strategy", "options", "asked") | dict(self.options)

    def __post_init__(self) -> None:
        make_plain(self)
        object.__setattr__(self, "options", FrozenDict(self.options))
        policy = self.activation_checkpointing
        if isinstance(policy, Collection) and not isinstance(policy, str):
            names = sorted(set(policy)) if all(isinstance(name, str) for name in policy) else policy
            object.__setattr__(self, "activation_checkpointing", tuple(names))  # a list might change
        strategies.get(self.strategy, **self.options)
        check_whole("devices", self.devices, PlanError, 1)
        strategies.Options.of(self.step_options)
        _check_cuda(self.cudnn_benchmark, self.matmul_precision)

    @property
    def device(self) -> str | None:
        """The strategy's option of that name; None: it takes CUDA where there is any."""
        device: str | None = self.options.get("device", getattr(self.strategy, "device", None))
        return device

    @property
    def step_options(self) -> strategies.PrepareOptions:
        """What every strategy's `prepare` is told."""
        return {
            "precision": self.precision,
            "clip_norm": self.clip_norm,
            "accumulate": self.accumulate,
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compile,
        }

    @property
    def name(self) -> str:
        """Of the strategy."""
        return self.strategy if isinstance(self.strategy, str) else self.strategy.name


def _check_cuda(cudnn_benchmark: object, matmul_precision: object) -> None:
    """Raise PlanError for a value that means nothing."""
    if cudnn_benchmark is not None and not isinstance(cudnn_benchmark, bool):
        raise PlanError(
            f"cudnn_benchmark={cudnn_benchmark!r} must be True, False, or None to let the plan choose."
        )
    if matmul_precision is not None and matmul_precision not in tuple(PRECISIONS):
        raise PlanError(
            f"matmul_precision={matmul_precision!r} is not known.{suggest(str(matmul_precision), PRECISIONS)}"
        )


def changed(value: Any, *others: str) -> dict[str, Any]:
    """The fields of a dataclass that do not have their defaults, but for those named."""
    return {
        f.name: getattr(value, f.name)
        for f in dataclasses.fields(value)
        if f.name not in others and getattr(value, f.name) != f.default
    }


def source_name(source: object, argument: str) -> str:
    """A data source as text.

    Raises:
        PlanError: if it is no path or name, such as a data set that was not converted.
    """
    if not isinstance(source, str | Path):
        raise PlanError(
            f"load() takes the path of a .beton file (or a name such as 'cifar10:train') as {argument}, not "
            f"a {type(source).__name__}. Convert a data set first: drivetrain.loaders.convert(it, 'train.beton')."
        )
    return str(source)


ONE_DEVICE = Distribution()
"""Of a pipeline whose `distribute` was not called."""
