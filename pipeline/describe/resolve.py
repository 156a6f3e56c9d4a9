"""Resolve a pipeline's description into everything that training needs, decided and checked once."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from ... import strategies
from ...common import machine
from ...common.errors import PlanError
from ...loaders.sources import Files, files_of
from ...strategies import Strategy
from ...strategies.launching.group import needs_ranks
from ...transforms import Transform
from ..optim.config import OptimizerConfig
from ..tasks.standard import AUTO, Segmentation
from ..tasks.task import Task
from .config import DataConfig, DistributedConfig
from .cuda_settings import uses_gpu
from .pipeline_spec import PipelineSpec, sort_transforms
from .plan import Step, lay_out
from .rules import check_epochs, check_rules
from .sources import check_loader, check_sources, number_of_classes, sample_notes


@dataclass(frozen=True)
class ResolvedPlan:
    spec: PipelineSpec  # its precision and number of classes decided
    data: DataConfig
    transforms: tuple[Transform, ...]  # in the order in which they are applied
    strategy: Strategy
    optimization: OptimizerConfig  # the learning rate scaled to the batch size
    distribution: DistributedConfig
    train_settings: Mapping[str, Any]  # of the training loader, from `load` and the image transforms
    steps: tuple[Step, ...]

    @property
    def needs_ranks(self) -> bool:
        return needs_ranks(self.strategy, self.distribution.ranks)

    @property
    def seed(self) -> int:
        return self.spec.seed

    @property
    def task(self) -> Task:
        return self.spec.target

    @property
    def recipe(self) -> str | None:
        return self.spec.recipe

    def with_sources(self, train: str | Files, val: str | Files | None) -> Self:
        """Of the same data, e.g. the files converted from named data sets."""
        data = dataclasses.replace(self.data, train=train, val=val)
        return dataclasses.replace(self, spec=self.spec.replace(data=data), data=data)


def resolve(spec: PipelineSpec, *, files: bool = True, precision: strategies.Precision | None = None) -> ResolvedPlan:
    """Check a full pipeline and decide what follows; nothing is loaded or started. `files`: whether to read their
    headers; the number of classes, if it is "auto", is read in any case. `precision`: what "auto" means in a run that
    resumes; None: what the device computes natively."""
    how = spec.distributed
    strategy = strategies.get(how.strategy, **how.options)
    strategy.check(how.ranks)  # first: the precision of "auto" depends on the device, which must be there
    how, why = take_precision(how, precision)
    if why:
        spec = spec.replace(distribution=how)
    data = spec.data
    if data is None:
        raise PlanError("The pipeline has no data. Add .load('train.beton', 'val.beton', batch_size=…, image_size=…).")
    spec, classes = take_classes(spec, data)
    devices = how.ranks
    check_divides(data.batch_size, devices, how.accumulate)
    transforms = sort_transforms(spec.transforms)
    settings = train_settings(data, transforms)
    check_rules(spec)
    check_loader(data, settings)
    counts, targets = sample_notes(data, spec.target) if files else ("", "")
    if files:  # else nothing is trained
        if spec.epochs is not None:
            check_epochs(spec, spec.epochs)
        check_sources(data, devices)
    steps = lay_out(spec, data, transforms, strategy, why, counts, targets, classes)
    scaled = spec.optimized.at(data.batch_size)
    return ResolvedPlan(spec, data, transforms, strategy, scaled, how, settings, steps)


def check_divides(batch_size: int, devices: int, accumulate: int) -> None:
    """Name the numbers of devices that can split the batch first: a run cannot resume with another batch size."""
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


def take_classes(spec: PipelineSpec, data: DataConfig) -> tuple[PipelineSpec, str]:
    """Return the pipeline with the data's number of classes in the place of "auto", and what the plan says of it."""
    task, options = spec.target, spec.model_options
    in_model = options.get("num_classes") == AUTO
    in_task = isinstance(task, Segmentation) and task.options["classes"] == AUTO
    if not (in_model or in_task):
        return spec, ""
    count = number_of_classes(data, task)
    if in_model:
        spec = spec.replace(model_options={**options, "num_classes": count})
    if in_task:
        spec = spec.replace(goal=type(task)(**{**task.options, "classes": count}))
    return spec, f"; classes auto: {count}, as in {files_of(data.train)}"


NATIVE = (8, 0)  # the compute capability of Ampere; older GPUs of NVIDIA emulate bf16, slowly


def take_precision(how: DistributedConfig, kept: strategies.Precision | None) -> tuple[DistributedConfig, str]:
    """Return the options with "auto" decided, and why. `kept`, the checkpoint's, stays the same on any device."""
    if how.precision != "auto":
        return how, ""
    precision, why = choose_precision(how) if kept is None else (kept, "as in the checkpoint")
    return dataclasses.replace(how, precision=precision), f"precision auto: {why}"


def choose_precision(how: DistributedConfig) -> tuple[strategies.Precision, str]:
    """A GPU counts if all of this process have bf16 units; a CPU if it has bf16 instructions that oneDNN, which
    computes the layers, may use (`ONEDNN_MAX_CPU_ISA`)."""
    if uses_gpu(how) and torch.version.hip is not None:  # AMD numbers its GPUs in another way
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU computes it") if native else ("fp32", "the GPU does not compute bf16")
    if uses_gpu(how):
        for number in range(torch.cuda.device_count()):
            if torch.cuda.get_device_capability(number) < NATIVE:
                return "fp32", f"{torch.cuda.get_device_name(number)} has no bf16 units"
        return "bf16", f"{torch.cuda.get_device_name()} has bf16 units"
    name = machine.bf16_instructions()
    if name is None:
        return "fp32", "this system does not list the CPU's instructions"
    return ("bf16", f"the CPU has {name}") if name else ("fp32", "no bf16 instructions of the CPU can be used")
