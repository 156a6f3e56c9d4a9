"""The plan: every step in its order, what asked for it, and why it stands there.

It alone knows the rules of order; what does not go together at all is in `rules.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from .. import strategies
from ..errors import PlanError
from ..markup import html_table
from ..transforms import CHANGES_MODEL, Transform
from ..transforms.table import drawn
from .cuda_settings import PRECISIONS, choose_benchmark, uses_gpu
from .rules import check_rules, family
from .stages import Data, Distribution

if TYPE_CHECKING:
    from .builder import Pipeline

# Surgery replaces modules, so it precedes whatever touches their parameters; a memory format set before
# surgery would be lost on the new modules (BlurPool after ChannelsLast: 3 weights of a ResNet).
KINDS = ("image", "surgery", "memory_format", "optimizer", "schedule", "batch", "loss", "loop", "evaluation")
KIND_ORDER = {kind: number for number, kind in enumerate(KINDS)}
KIND_REASON = {
    "image": "in the loader, on each training image; evaluation sees the images as they are",
    "surgery": "before anything holds a parameter: the optimizer and the wrapper must see the final modules",
    "memory_format": "after surgery, whose new modules would come back contiguous; before wrapping",
    "optimizer": "around the optimizer, which is made of the final parameters",
    "schedule": "at the start of each epoch; frozen weights are those of the wrapped model",
    "batch": "on each training batch, before the forward and the loss; evaluation sees the images as they are",
    "loss": "in training only, after any mixing; evaluation keeps the plain loss",
    "loop": "after each step; evaluation and the result take its weights",
    "evaluation": "in evaluation only",
}


@dataclass(frozen=True)
class Step:
    """One step of a plan."""

    what: str
    asked_by: str
    why: str


@dataclass(frozen=True, repr=False)
class Plan:
    """The steps in order. Prints as a table; shows as one in a notebook."""

    steps: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        """`{"steps": [{"what", "asked_by", "why"}, …]}`."""
        return {"steps": [asdict(step) for step in self.steps]}

    def __repr__(self) -> str:
        table = Table(title="Plan", title_justify="left")
        for column in ("", "step", "asked for by", "why here"):
            table.add_column(column, overflow="fold")
        for number, step in enumerate(self.steps, 1):
            table.add_row(str(number), *map(escape, (step.what, step.asked_by, step.why)))
        return drawn(table, 120)

    def _repr_html_(self) -> str:
        rows = ((str(number), *asdict(step).values()) for number, step in enumerate(self.steps, 1))
        return html_table(("", "step", "asked for by", "why here"), rows)


def sort_transforms(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """The transforms in the order of their declared facts, else as the user wrote them.

    Raises:
        PlanError: if a transform appears twice, or two ask to follow one another.
    """
    names = [type(transform).__name__ for transform in transforms]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"{name} was asked for {names.count(name)} times; once is enough. Remove one.")
    waiting = sorted(transforms, key=lambda transform: KIND_ORDER[transform.kind])
    ordered: list[Transform] = []
    while waiting:
        pending = {type(transform).__name__ for transform in waiting}
        ready = next((t for t in waiting if not pending.intersection(t.after)), None)
        if ready is None:
            raise PlanError(f"{' and '.join(sorted(pending))} each ask to follow the other. Remove one.")
        ordered.append(ready)
        waiting.remove(ready)
    return tuple(ordered)


def train_settings(data: Data, transforms: tuple[Transform, ...]) -> dict[str, Any]:
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


def make_plan(pipeline: Pipeline) -> Plan:
    """Checks a pipeline as a whole and lays out its steps; nothing is loaded, built or started.

    Raises:
        PlanError, StrategyError: naming the parts that do not go together, and the remedy.
    """
    data, how = pipeline.data, pipeline.distribution
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
    ordered = sort_transforms(pipeline.transforms)
    train_settings(data, ordered)
    check_rules(pipeline)
    steps = [
        Step(f"load {data.train}", ".load()", f"{data.loader} loader, global batch of {data.batch_size}, "
             f"{data.image_size} px{_eval_size(data)}; every rank takes its slice of each batch"),
        *(_transform_step(t) for t in ordered if t.kind == "image"),
        Step(f"build {pipeline.model_name}", "Pipeline()", f"with the seed {pipeline.seed}, the same on every rank"),
    ]  # fmt: skip
    steps += [_transform_step(t, how.name) for t in ordered if t.kind in CHANGES_MODEL]
    steps += _wrapping_steps(how)
    steps += _gpu_steps(pipeline)
    steps += [
        Step("check the output", "Drivetrain", "its width must be the number of classes of the data"),
        Step(f"wrap with {strategy.name}", ".distribute()" if how.asked else "default",
             f"{how.devices} device(s), {how.precision}, {how.accumulate} microbatch(es) a step: after surgery"),
        Step(f"optimizer: {pipeline.optimization.at(data.batch_size).describe()}",
             ".optimize()" if pipeline.optimized else "default",
             "; ".join(filter(None, ["made when the parameters are the final ones",
                                     pipeline.optimization.note(data.batch_size)]))),
    ]  # fmt: skip
    later = [t for t in ordered if t.kind not in ("image", *CHANGES_MODEL)]
    steps += [_transform_step(t) for t in later if KIND_ORDER[t.kind] < KIND_ORDER["loss"]]
    steps += [Step("loss: cross entropy", "default", "class indices or probabilities")]
    steps += [_transform_step(t) for t in later if KIND_ORDER[t.kind] >= KIND_ORDER["loss"]]
    return Plan(tuple(steps))


def _eval_size(data: Data) -> str:
    return "" if data.eval_size == data.image_size else f" ({data.eval_size} px in evaluation)"


def _wrapping_steps(how: Distribution) -> list[Step]:
    """What is done to the final modules before they are wrapped."""
    steps = []
    if how.activation_checkpointing:
        what = f"recompute the activations of {_policy_name(how.activation_checkpointing)}"
        steps.append(
            Step(what, ".distribute()", "on the final modules, inside of what gathers and compiles them")
        )
    if how.compile:
        what = "compile in place" + (f", mode {how.compile}" if isinstance(how.compile, str) else "")
        steps.append(Step(what, ".distribute()", "the final modules; inside the wrapper, so that names stay"))
    return steps


def _gpu_steps(pipeline: Pipeline) -> list[Step]:
    """What is set in torch for the run, where a GPU trains."""
    how = pipeline.distribution
    if not uses_gpu(how):
        return []
    benchmark, why = choose_benchmark(pipeline)
    steps = [
        Step(f"cuDNN benchmark {'on' if benchmark else 'off'}",
             "default" if how.cudnn_benchmark is None else ".distribute()", f"{why}; put back after the run")
    ]  # fmt: skip
    if how.matmul_precision is not None:
        what = f"float32 matrix products: {how.matmul_precision}"
        steps.append(
            Step(what, ".distribute()", f"{PRECISIONS[how.matmul_precision]}; put back after the run")
        )
    return steps


def _policy_name(policy: strategies.Policy) -> str:
    if isinstance(policy, bool):
        return "the model's blocks"
    return "what a function chooses" if callable(policy) else ", ".join(sorted(policy))


def _transform_step(transform: Transform, strategy: str = "") -> Step:
    why = KIND_REASON[transform.kind]
    if transform.kind == "memory_format" and family(strategy) in ("fsdp", "deepspeed"):
        why = "shards are contiguous: the images, and so the activations, take the format; the weights do not"
    return Step(f"{transform}", ".transform()", why)
