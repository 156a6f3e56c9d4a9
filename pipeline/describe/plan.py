"""The printable plan: every step in order, with what requested it and the reason for its position."""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ... import strategies
from ...common import machine
from ...common.model_state import describe_frozen, on_meta
from ...common.table import Table
from ...loaders.image_size import ImageSize, size_text
from ...loaders.sources import files_of
from ...strategies import Strategy
from ...transforms import CHANGES_MODEL, GhostBatchNorm, Transform
from .config import PRECISIONS, DataConfig, DistributedConfig
from .cuda_settings import choose_benchmark, uses_gpu
from .pipeline_spec import KIND_ORDER, PipelineSpec
from .rules import family, sets_size
from .sources import data_cautions

KIND_REASON = {
    "image": "in the loader, on each training image; evaluation uses the images unchanged",
    "surgery": "before anything holds a parameter: the optimizer and the wrapper must see the final modules",
    "algorithm": "Composer's",
    "memory_format": "after surgery, whose new modules would be contiguous; before wrapping",
    "optimizer": "around the optimizer, which is built from the final parameters",
    "schedule": "at the start of each epoch, after wrapping: it changes what is trained",
    "batch": "on each training batch, before the forward and the loss; evaluation uses the images unchanged",
    "loss": "in training only, after any mixing; evaluation uses the plain loss",
    "loop": "after each step; evaluation and the result use its weights",
    "evaluation": "in evaluation only",
}
_VERSIONS = 8  # torch._dynamo.config.recompile_limit
_UNSEEDED = "; FFCV's random crops and flips have no seed, so no two runs are equal, also not after a resume"

_STILL_TRAINED = (
    "with lr=0 the weights stay, but gradients are computed, and BatchNorm's statistics change. "
    "requires_grad_(False) freezes both"
)


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Example::

        >>> step = pipeline.plan().steps[0]
        >>> step.what, step.asked_by
        ('load train.beton', '.load()')
    """

    what: str
    asked_by: str
    why: str
    caution: str = ""  # what may make results worse, or other than expected


@dataclass(frozen=True, repr=False)
class Plan:
    """The steps in order, shown as a table in terminals and notebooks.

    Example::

        >>> plan = pipeline.plan()
        >>> plan.steps[0].what
        'load train.beton'
    """

    steps: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return `{"steps": [{"what", "asked_by", "why", "caution"}, …]}`."""
        return {"steps": [asdict(step) for step in self.steps]}

    @property
    def cautions(self) -> list[str]:
        """Sentences about what may make results worse, or other than expected."""
        return [f"Caution, step {number}: {step.caution}." for number, step in enumerate(self.steps, 1) if step.caution]

    def _table(self) -> Table:
        rows = [
            (str(number), step.what, step.asked_by, step.why + "; see the caution above" * bool(step.caution))
            for number, step in enumerate(self.steps, 1)
        ]
        return Table(("", "step", "requested by", "why here"), rows, title="Plan", stacks=True)

    def text(self, width: int) -> str:
        """Return the cautions, and the table of the steps, wrapped to fit `width` characters."""
        return "\n".join([*(textwrap.fill(one, width) for one in self.cautions), self._table().text(width)])

    def __repr__(self) -> str:
        return self.text(shutil.get_terminal_size().columns)

    def _repr_html_(self) -> str:
        cautions = "".join(f"<p><b>{html.escape(one)}</b></p>" for one in self.cautions)
        return cautions + self._table().html()


def lay_out(
    spec: PipelineSpec, data: DataConfig, transforms: tuple[Transform, ...], strategy: Strategy, precision: str = "",
    counts: str = "", targets: str = "", classes: str = "",
) -> tuple[Step, ...]:  # fmt: skip
    """`transforms` are sorted, `precision` is the reason for it, `counts` says how many samples go where, `targets`
    is a note on their scale, and `classes` one on the number of classes; each may be empty."""
    how, optimization = spec.distributed, spec.optimized
    devices = f"{how.ranks} device(s)" + (' ("auto")' if how.devices == "auto" else "")
    eval_size = f" ({_pixels(data.eval_size)} px in evaluation)" if data.eval_size != data.image_size else ""
    scaled = optimization.at(data.batch_size)
    built = spec.model if isinstance(spec.model, nn.Module) else None
    # The model here is the one before surgery: layers that will have the statistics of small groups are of no concern.
    grouped = any(transform.groups_statistics for transform in transforms)
    of_batch = how, data.batch_size, built
    split = _ghost_caution(transforms, *of_batch) if grouped else batch_norm_caution(*of_batch)
    fields = f", with the fields {', '.join(data.loading.fields)}" if data.loading.fields else ""
    steps = [
        Step(f"load {files_of(data.train)}", ".load()", f"{data.loader} loader, global batch of {data.batch_size}, "
             f"{_pixels(data.image_size)} px{eval_size}{fields}{data.for_plan()}{data.describe()}{counts}; "
             f"every rank loads its slice of each batch{_UNSEEDED * (data.loader == 'ffcv_stock')}",
             data_cautions(data)),
        *(_transform_step(t) for t in transforms if t.kind == "image"),
        Step(f"build {spec.model_name}", "Pipeline()",
             f"with seed {spec.seed}, the same on every rank{classes}{'' if built is None else _about(built)}"),
    ]  # fmt: skip
    steps += [_transform_step(t, how.name) for t in transforms if t.kind in CHANGES_MODEL]
    steps += _wrapping_steps(how, _freezing_caution(how, transforms, spec.epochs))
    steps += _gpu_steps(how, transforms)
    steps += [
        Step("check the output", "Drivetrain", "its width must be that of the data's targets"),
        Step(f"wrap with {strategy.name}", "default" if spec.distribution is None else ".distribute()",
             f"{devices}, {how.precision}, {how.accumulate} microbatch(es) per step{how.for_plan()}: "
             f"after surgery{'; ' * bool(precision)}{precision}{_slow_bf16(how)}", split),
        Step(f"optimizer: {scaled.describe()}",
             "default" if spec.optimization is None else ".optimize()",
             "; ".join(filter(None, [f"built from the final parameters{optimization.for_plan()}",
                                     optimization.note(data.batch_size)])),
             optimization.caution(data.batch_size)),
    ]  # fmt: skip
    steps += [
        Step(f"parameter group {pattern}: {', '.join(f'{name}={value}' for name, value in options.items())}",
             ".optimize()", "parameters whose names match, and no earlier pattern; all follow the schedule",
             _STILL_TRAINED * (options.get("lr") == 0 and not options.get("adamw_lr")))
        for pattern, options in scaled.full_groups.items()
    ]  # fmt: skip
    later = [t for t in transforms if t.kind not in ("image", *CHANGES_MODEL)]
    mixing = [type(t).__name__ for t in later if t.kind == "batch" and t.soft_targets]
    steps += [
        _transform_step(t, mixing=mixing, crop=data.loading.crop)
        for t in later
        if KIND_ORDER[t.kind] < KIND_ORDER["loss"]
    ]
    asked_by = "default" if spec.goal is None else ".task()"
    about = f"{spec.target.about}{'. ' * bool(targets)}{targets}"
    steps.append(Step(f"loss: {spec.target.loss_name}", asked_by, about, _assumed_mean(spec)))
    steps += [_transform_step(t) for t in later if KIND_ORDER[t.kind] >= KIND_ORDER["loss"]]
    return tuple(steps)


def _about(model: nn.Module) -> str:
    sizes = [(each.numel(), each.requires_grad) for each in model.parameters() if not is_lazy(each)]
    frozen = describe_frozen(model)
    trained = f", {sum(size for size, is_trained in sizes if is_trained):,} trained; frozen: {frozen}" * bool(frozen)
    meta = "; on the meta device, initialized by each module's reset_parameters()" * on_meta(model)
    return f"; {sum(size for size, _ in sizes):,} parameters{trained}{meta}"


def _pixels(image_size: ImageSize) -> str:
    return size_text(image_size) if isinstance(image_size, tuple) else str(image_size)


def _slow_bf16(how: DistributedConfig) -> str:
    slow = how.precision == "bf16" and not uses_gpu(how) and machine.bf16_instructions() == ""
    return "; this CPU has no bf16 instructions, so fp32 is faster" if slow else ""


def _assumed_mean(spec: PipelineSpec) -> str:
    """Caution if a batch is split and its loss may be another mean than that over the samples."""
    how, task = spec.distributed, spec.target
    if how.ranks * how.accumulate == 1 or not task.assumes_mean:
        return ""
    return (
        "the loss is taken as the mean over the samples, because it declares no denominator: if it weights or ignores "
        "targets, results depend on how a batch is split"
    )


def _wrapping_steps(how: DistributedConfig, of_compiling: str) -> list[Step]:
    steps = []
    if how.sync_batchnorm:
        steps.append(("synchronize BatchNorm", "statistics of the global batch, summed over all ranks"))
    if how.activation_checkpointing:
        budget = how.memory_budget
        what = f"recompute the activations of {_filter_name(how.activation_checkpointing)}"
        if budget is not None:
            what = f"recompute activations, to keep {budget:.0%} of their memory"
        why = "on the final modules, inside the units that gather and compile them"
        steps.append((what, why if budget is None else "the compiler chooses those that cost least"))
    if how.compile == "regions":
        steps.append(("compile the repeated blocks in place", "equal ones share one compilation"))
    elif how.compile:
        what = "compile in place" + (f", mode {how.compile}" if isinstance(how.compile, str) else "")
        steps.append((what, "the final modules, inside the wrapper, so that names do not change"))
    return [Step(what, ".distribute()", why, of_compiling * what.startswith("compile")) for what, why in steps]


def _freezing_caution(how: DistributedConfig, transforms: Sequence[Transform], epochs: int | None) -> str:
    """Caution if layers might freeze in more epochs than torch compiles versions of a model."""
    freezing = next((transform for transform in transforms if transform.level(1.0) > 0), None)
    if freezing is None or not how.compile or family(how.name) == "fsdp":  # whose units change a few times each
        return ""
    if epochs is not None and len({freezing.level(epoch / epochs) for epoch in range(epochs)}) < _VERSIONS:
        return ""
    return (
        f"{type(freezing).__name__} changes the model at the start of epochs, and torch compiles {_VERSIONS} versions "
        "of one at most, that of evaluation among them: it runs all further ones uncompiled. Let fewer epochs follow "
        "the one in which the first layers freeze, or leave one of the two out"
    )


def _gpu_steps(how: DistributedConfig, transforms: tuple[Transform, ...]) -> list[Step]:
    if not uses_gpu(how):
        return []
    benchmark, why = choose_benchmark(how, transforms)
    steps = [
        Step(f"cuDNN benchmark {'on' if benchmark else 'off'}",
             "default" if how.cudnn_benchmark is None else ".distribute()", f"{why}; restored after the run")
    ]  # fmt: skip
    if how.matmul_precision is not None:
        what = f"float32 matrix multiplications: {how.matmul_precision}"
        why = f"{PRECISIONS[how.matmul_precision]}; restored after the run"
        steps.append(Step(what, ".distribute()", why))
    return steps


def _filter_name(module_filter: strategies.ModuleFilter | float) -> str:
    if isinstance(module_filter, bool | float):
        return "the model's blocks"
    return "what a function selects" if callable(module_filter) else ", ".join(sorted(module_filter))


def _transform_step(transform: Transform, strategy: str = "", mixing: Sequence[str] = (), crop: str = "") -> Step:
    why = KIND_REASON[transform.kind]
    if transform.kind == "memory_format" and family(strategy) in ("fsdp", "deepspeed"):
        why = "shards are contiguous: the images and thus the activations get the format, the weights do not"
    if len(mixing) > 1 and type(transform).__name__ in mixing:
        why += f"; {' and '.join(mixing)} both mix every batch, one after the other"
    if crop == "random" and sets_size(transform):
        why += "; crop='random' cuts smaller pieces for it, in the same resolution"
    return Step(f"{transform}", ".transform()", " ".join(filter(None, [why, transform.caution])))


def batch_norms(model: nn.Module) -> int:
    """Return the number of layers with their batch's statistics; GhostBatchNorm's are of small groups in any case."""
    return sum(
        isinstance(module, _BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and not getattr(module, "averages_variances", False)
        for module in model.modules()
    )


def _may_copy(how: DistributedConfig) -> bool:
    return how.name == "dp" and uses_gpu(how)  # one process, but possibly several GPUs


def batch_norm_caution(how: DistributedConfig, batch_size: int, model: nn.Module | None) -> str:
    """Caution if BatchNorm's statistics would be those of a part of the batch; `model` is None if not built yet."""
    parts = how.ranks * how.accumulate
    copies = _may_copy(how)
    if how.sync_batchnorm or (parts == 1 and not copies):
        return ""
    layers = None if model is None else batch_norms(model)
    if layers == 0:
        return ""
    which = "BatchNorm, if the model has any," if layers is None else f"BatchNorm ({layers} layers)"
    part = "one GPU's images" if copies else f"each microbatch of {batch_size // parts} images"
    together = ", on several ranks with sync_batchnorm=True" if how.ranks > 1 else ""
    remedy = f"{'ddp with ' if copies else ''}sync_batchnorm=True makes them equal"
    if how.accumulate > 1:
        remedy = f"GroupNorm does not depend on the split; nor does accumulate=1{together}"
    return (
        f"{which} uses the statistics of {part}, not of the batch of {batch_size}, so results differ from one device "
        f"without accumulate. {remedy}"
    )


def _ghost_caution(
    transforms: Sequence[Transform], how: DistributedConfig, batch_size: int, model: nn.Module | None
) -> str:
    """Caution if a split batch has more groups of GhostBatchNorm, and so smaller ones, than a whole one, or if `dp`
    may split it among GPUs."""
    parts = how.ranks * how.accumulate
    copies = _may_copy(how)
    images = batch_size // parts
    for transform in transforms:
        if not isinstance(transform, GhostBatchNorm) or (model is not None and not batch_norms(model)):
            continue
        if copies:
            return (
                f"with several GPUs, {transform} divides the images of each by themselves, and evaluation uses the "
                "statistics of the first one's alone, so results differ from one device. With ddp, evaluation uses "
                "those of all ranks, and a ghost_batch_size that divides a rank's images makes them equal"
            )
        most = transform.ghost_batch_size
        groups, whole = parts * -(-images // most), -(-batch_size // most)
        if groups > whole:
            return (
                f"{transform} divides each microbatch of {images} images by itself, so that a batch of {batch_size} "
                f"has {groups} groups instead of {whole}, and results differ from one device without accumulate. A "
                f"ghost_batch_size that divides {images} makes them equal"
            )
    return ""
