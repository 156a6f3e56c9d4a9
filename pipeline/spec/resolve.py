"""From a pipeline's description to everything that the layers below need, decided once and checked as a whole.

It alone knows the rules of order; what does not go together at all is in `rules.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import strategies
from ...errors import PlanError
from ...strategies import Strategy
from ...strategies.launching.group import needs_ranks
from ...transforms import Transform
from .config import DataConfig, DistributedConfig, OptimizerConfig
from .kinds import sort_transforms
from .pipeline_spec import PipelineSpec
from .plan import Step, lay_out
from .rules import check_epochs, check_rules
from .sources import check_sources


@dataclass(frozen=True)
class ResolvedPlan:
    """A pipeline that was checked as a whole, with all that follows from its description.

    Attributes:
        spec: the description.
        data: what to load.
        transforms: in the order in which they are applied.
        strategy: that trains.
        optimization: the optimizer and its schedule, the learning rate scaled to the batch size.
        distribution: the strategy's name, devices, precision, and so on.
        train_settings: the training loader's further settings: those of `load`, and of the image transforms.
        steps: for people, as `Plan` prints them.
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
        """Whether it trains on ranks, which something must start."""
        return needs_ranks(self.strategy, self.distribution.devices)

    @property
    def seed(self) -> int:
        """Of weights, order and augmentation."""
        return self.spec.seed

    @property
    def recipe(self) -> str | None:
        """The name of the recipe that it comes from."""
        return self.spec.recipe

    def with_sources(self, train: str, val: str | None) -> ResolvedPlan:
        """Return it with other names of the same data, such as the files that named data sets were converted to."""
        data = dataclasses.replace(self.data, train=train, val=val)
        return dataclasses.replace(self, spec=self.spec.replace(data=data), data=data)


def resolve(spec: PipelineSpec, *, files: bool = True) -> ResolvedPlan:
    """Check a pipeline as a whole, and decide what follows from it. Nothing is loaded, built or started.

    Args:
        spec: the pipeline's description.
        files: whether to open the data's files as far as their headers, too. Data sets by name are not fetched.

    Raises:
        PlanError, StrategyError: naming the parts that do not go together, and the remedy.
        DataError: for a file that is missing, cannot be read, or is not a finished `.beton` file.
    """
    data, how = spec.data, spec.distributed
    if data is None:
        raise PlanError(
            "The pipeline has no data. Add .load('train.beton', 'val.beton', batch_size=…, image_size=…)."
        )
    strategy = strategies.get(how.strategy, **how.options)
    strategy.check(how.devices)
    parts = how.devices * how.accumulate
    if data.batch_size % parts:
        raise PlanError(
            f"batch_size={data.batch_size} is global and must divide into devices={how.devices} × "
            f"accumulate={how.accumulate} = {parts} parts; use {max(data.batch_size // parts, 1) * parts}."
        )
    transforms = sort_transforms(spec.transforms)
    settings = train_settings(data, transforms)
    check_rules(spec)
    steps = lay_out(spec, data, transforms, strategy)
    if spec.epochs is not None:
        check_epochs(spec, spec.epochs)
    if files:
        check_sources(data, how.devices)
    scaled = spec.optimized.at(data.batch_size)
    return ResolvedPlan(spec, data, transforms, strategy, scaled, how, settings, steps)


def train_settings(data: DataConfig, transforms: tuple[Transform, ...]) -> dict[str, Any]:
    """The training loader's settings: those of `load()`, and what the image transforms ask for.

    Raises:
        PlanError: if two of them set the same one.
    """
    settings = dict(data.settings)
    asked_by = {name: f".load({name}=…)" for name, value in settings.items() if value is not None}
    for transform in transforms:
        for name, value in transform.loader_settings.items():
            if name in asked_by:
                raise PlanError(
                    f"{asked_by[name]} and {transform} both set the loader's {name}, and an image has one "
                    f"{name}. Leave one of the two out."
                )
            settings[name], asked_by[name] = value, str(transform)
    return settings
