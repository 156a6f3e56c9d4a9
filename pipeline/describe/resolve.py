"""Resolve a pipeline's description into everything that training needs, decided and checked once.

`kinds.py` sorts the transforms; `rules.py` rejects invalid combinations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import strategies
from ...common.errors import PlanError
from ...loaders.sources import Files
from ...strategies import Strategy
from ...strategies.launching.group import needs_ranks
from ...transforms import Transform
from ..optim.config import OptimizerConfig
from ..tasks.task import Task
from .config import DataConfig, DistributedConfig
from .kinds import sort_transforms
from .pipeline_spec import PipelineSpec
from .plan import Step, lay_out
from .precision import take_precision
from .rules import check_epochs, check_rules
from .sources import check_loader, check_sources


@dataclass(frozen=True)
class ResolvedPlan:
    """A checked pipeline, with everything that follows from its description.

    Attributes:
        spec: the description, its precision decided.
        data: what to load.
        transforms: in the order in which they are applied.
        strategy: the strategy that trains.
        optimization: the optimizer and its schedule, the learning rate scaled to the batch size.
        distribution: the strategy's name, devices, precision, and so on.
        train_settings: additional settings of the training loader, from `load` and the image transforms.
        steps: what `Plan` prints.
    """

    spec: PipelineSpec
    data: DataConfig
    transforms: tuple[Transform, ...]
    strategy: Strategy
    optimization: OptimizerConfig
    distribution: DistributedConfig
    train_settings: Mapping[str, Any]
    steps: tuple[Step, ...]

    @property
    def needs_ranks(self) -> bool:
        """Whether it trains in a process group, whose ranks must be launched."""
        return needs_ranks(self.strategy, self.distribution.ranks)

    @property
    def seed(self) -> int:
        """The seed of weights, sample order and augmentation."""
        return self.spec.seed

    @property
    def task(self) -> Task:
        """What the pipeline trains for."""
        return self.spec.target

    @property
    def recipe(self) -> str | None:
        """The name of the recipe it is built from."""
        return self.spec.recipe

    def with_sources(self, train: str | Files, val: str | Files | None) -> ResolvedPlan:
        """Return the plan with other sources of the same data, e.g. the files converted from named data sets."""
        data = dataclasses.replace(self.data, train=train, val=val)
        return dataclasses.replace(self, spec=self.spec.replace(data=data), data=data)


def resolve(
    spec: PipelineSpec, *, files: bool = True, precision: strategies.Precision | None = None
) -> ResolvedPlan:
    """Check a full pipeline and decide what follows from it. Nothing is loaded, built or started.

    Args:
        spec: the pipeline's description.
        files: whether to read the headers of data files, too. Named data sets are not downloaded.
        precision: what "auto" means, in a run that resumes; default None: what the device computes natively.

    Raises:
        PlanError, StrategyError: naming the conflicting parts and the remedy.
        DataError: for a file that is missing, unreadable, or not a complete `.beton` file, and for what the loader does
            not have.
    """
    how, why = take_precision(spec.distributed, precision)
    if why:
        spec = spec.replace(distribution=how)
    data = spec.data
    if data is None:
        raise PlanError(
            "The pipeline has no data. Add .load('train.beton', 'val.beton', batch_size=…, image_size=…)."
        )
    strategy = strategies.get(how.strategy, **how.options)
    devices = how.ranks
    strategy.check(devices)
    check_divides(data.batch_size, devices, how.accumulate)
    transforms = sort_transforms(spec.transforms)
    settings = train_settings(data, transforms)
    check_rules(spec)
    check_loader(data, settings)
    steps = lay_out(spec, data, transforms, strategy, why)
    if spec.epochs is not None:
        check_epochs(spec, spec.epochs)
    if files:
        check_sources(data, devices)
    scaled = spec.optimized.at(data.batch_size)
    return ResolvedPlan(spec, data, transforms, strategy, scaled, how, settings, steps)


def check_divides(batch_size: int, devices: int, accumulate: int) -> None:
    """Raise PlanError if the global batch cannot be split, naming the numbers of devices that can split it.

    These come first, because a run cannot resume with another batch size.
    """
    microbatches = devices * accumulate
    if batch_size % microbatches == 0:
        return
    fitting = [n for n in range(1, 2 * devices + 1) if batch_size % (n * accumulate) == 0]
    smaller = f"batch_size={max(batch_size // microbatches, 1) * microbatches}"
    remedy = f"Pass {smaller}."
    if fitting:
        known = ", ".join(map(str, fitting))
        remedy = f"With this batch size, devices can be {known}; a new run can also pass {smaller}."
    raise PlanError(
        f"batch_size={batch_size} is global and must be divisible by devices={devices} × accumulate={accumulate} = "
        f"{microbatches}. {remedy}"
    )


def train_settings(data: DataConfig, transforms: tuple[Transform, ...]) -> dict[str, Any]:
    """Return the training loader's settings, from `load()` and the image transforms.

    Raises:
        PlanError: if two of them set the same one.
    """
    settings = dict(data.settings)
    set_by = {name: f".load({name}=…)" for name, value in settings.items() if value is not None}
    for transform in transforms:
        for name, value in transform.loader_settings.items():
            if name in set_by:
                raise PlanError(
                    f"{set_by[name]} and {transform} both set the loader's {name}, and an image has one "
                    f"{name}. Leave one of the two out."
                )
            settings[name], set_by[name] = value, str(transform)
    return settings
