"""Reject combinations that cannot work, by what each part declares. `kinds.py` decides the order."""

from __future__ import annotations

from collections.abc import Callable

from ... import strategies
from ...common.checks import check_whole
from ...common.errors import PlanError
from ...transforms import (
    GhostBatchNorm,
    GradientClipping,
    GyroDropout,
    ProgressiveResizing,
    SeqLengthWarmup,
    Transform,
)
from ..optim.optimizers import gathers, label, needs_whole_matrices
from ..tasks.scales import check_monitor
from .kinds import find
from .pipeline_spec import PipelineSpec

FAMILIES = {"hsdp": "fsdp", "zero_redundancy": "ddp", "fairscale_oss": "ddp"}
"""Strategies whose family is not the first word of their name. Those in the DDP family here shard only the optimizer
state: every rank has full weights and gradients, so transforms of these work."""


def family(strategy: str) -> str:
    """Return a strategy's family: single, dp, ddp, fsdp, deepspeed, fairscale, auto, or a third party's."""
    return FAMILIES.get(strategy, strategy.split("_")[0])


def belongs(strategy: str, group: str) -> bool:
    """Return whether a strategy is in a family or subgroup: `"deepspeed_stage_3"` includes its offload variants."""
    if group == family(group):
        # Not by the first word, which names of other families may share: `fairscale_oss` is in the DDP family.
        return group == family(strategy)
    return f"{strategy}_".startswith(f"{group}_")


def check_rules(spec: PipelineSpec) -> None:
    """Check a pipeline against every rule below.

    Raises:
        PlanError: naming both parts and the remedy.
    """
    for rule in RULES:
        rule(spec)


def check_epochs(spec: PipelineSpec, epochs: int) -> None:
    """Reject an invalid number of epochs, or one too small for a transform to complete.

    Raises:
        PlanError: naming the value or the transform, and the remedy.
    """
    check_whole("epochs", epochs, PlanError, 1)
    resizing, data = find(spec.transforms, ProgressiveResizing), spec.data
    if resizing is None or data is None or resizing.finetune == 0:
        return
    if resizing.size(data.image_size, 1 - 0.5 / epochs) != data.image_size:
        raise PlanError(
            f"{resizing} sets one size per epoch, and with epochs={epochs} none would have full size. Train for more "
            f"epochs, or set finetune to at least {0.5 / epochs:g}."
        )


def _unsafe_strategies(spec: PipelineSpec) -> None:
    how = spec.distributed
    strategy = strategies.get(
        how.strategy, **how.options
    ).name  # "deepspeed" alone does not specify the stage
    for transform in spec.transforms:
        unsafe = any(belongs(strategy, each) for each in transform.unsafe_with)
        if unsafe and transform.kind == "algorithm":
            raise PlanError(
                f"{transform} runs when the strategy {strategy!r} has sharded weights or gradients, and is not "
                f"declared safe there. Declare it, if it is: from_composer(…, safe_with={family(strategy)!r}); or "
                "distribute with 'single' or 'ddp'."
            )
        if unsafe:
            raise PlanError(
                f"{_name(transform)} does not work with the strategy {strategy!r} (see its documentation). Leave "
                "it out, or distribute with 'single' or 'ddp'."
            )


def _unused_parameters(spec: PipelineSpec) -> None:
    how = spec.distributed
    if family(how.name) not in ("ddp", "auto") or how.ranks == 1:
        return
    strategy = strategies.get(how.strategy, **how.options)
    remedy = f"add find_unused_parameters=True to .distribute({how.name!r}, …)"
    if family(how.name) == "auto":
        remedy = "distribute with 'ddp_find_unused_parameters' or 'fsdp', because 'auto' might choose 'ddp'"
    for transform in spec.transforms:
        if transform.unused_parameters and not getattr(strategy, "find_unused_parameters", False):
            raise PlanError(
                f"{_name(transform)} leaves parameters without a gradient, for which {how.name!r} would wait: "
                f"{remedy}."
            )


def _clipped_twice(spec: PipelineSpec) -> None:
    clipping = next((t for t in spec.transforms if t.known_as == "GradientClipping"), None)
    if clipping is not None and spec.distributed.clip_norm is not None:
        raise PlanError(
            f"{clipping} and distribute(clip_norm={spec.distributed.clip_norm}) both clip the gradients. "
            "Leave one of the two out."
        )


def _clipping_of_shards(spec: PipelineSpec) -> None:
    clipping = find(spec.transforms, GradientClipping)
    strategy = spec.distributed.name
    if clipping is None or family(strategy) in ("single", "ddp", "dp"):
        return
    does = "might shard" if family(strategy) == "auto" else "shards"
    if clipping.by == "adaptive":
        raise PlanError(
            f"{clipping} needs unsharded weights, but {strategy!r} {does} them. Use by='norm' or by='value', or "
            "distribute with 'ddp'."
        )


def _same_method_twice(spec: PipelineSpec) -> None:
    seen: dict[str, Transform] = {}
    for transform in spec.transforms:
        other = seen.setdefault(transform.known_as, transform)
        if other is not transform:
            raise PlanError(f"{other} and {transform} are the same method. Leave one of the two out.")


def _two_averages(spec: PipelineSpec) -> None:
    averages = [_name(t) for t in spec.transforms if t.known_as in ("EMA", "Lookahead", "SWA")]
    if len(averages) > 1:
        first, second = averages[:2]
        raise PlanError(f"{first} and {second} both set the weights to evaluate. Leave one of the two out.")


def _resizing_of_padded_crops(spec: PipelineSpec) -> None:
    data = spec.data
    if data is not None and data.loading.crop == "padded" and find(spec.transforms, ProgressiveResizing):
        raise PlanError(
            "ProgressiveResizing changes the size of the images, but crop='padded' keeps that of the file. Use "
            "crop='resized', or leave ProgressiveResizing out."
        )


def _sequences_of_images(spec: PipelineSpec) -> None:
    if find(spec.transforms, SeqLengthWarmup):
        raise PlanError(
            "SeqLengthWarmup truncates sequences of tokens, but a pipeline loads images. Use it in a custom loop, or "
            "ProgressiveResizing here."
        )


def _compiled(spec: PipelineSpec) -> None:
    if not spec.distributed.compile:
        return
    for transform in spec.transforms:
        if not transform.compile_safe and transform.kind == "algorithm":
            raise PlanError(
                f"{transform} is not known to compile without graph breaks, but distribute(compile="
                f"{spec.distributed.compile!r}) is set. Leave one of the two out, or declare it, if it does: "
                "from_composer(…, compile_safe=True)."
            )
        if not transform.compile_safe:
            raise PlanError(
                f"{_name(transform)} causes graph breaks (see its documentation), but distribute(compile="
                f"{spec.distributed.compile!r}) is set. Leave one of the two out."
            )


def _counted_forwards(spec: PipelineSpec) -> None:
    if spec.distributed.activation_checkpointing and find(spec.transforms, GyroDropout):
        raise PlanError(
            "GyroDropout counts forwards, but activation_checkpointing runs each twice: the second would drop other "
            "features. Leave one of the two out."
        )


def _opposite_statistics(spec: PipelineSpec) -> None:
    ghost = find(spec.transforms, GhostBatchNorm)
    if ghost is not None and spec.distributed.sync_batchnorm:
        raise PlanError(
            f"{ghost} computes BatchNorm's statistics over small groups of images, but distribute(sync_batchnorm=True) "
            "over the global batch. Leave one of the two out."
        )


def _flat_shards_of_matrices(spec: PipelineSpec) -> None:
    optimizer, strategy = spec.optimized.optimizer, spec.distributed.name
    sharded = family(strategy) == "deepspeed" or (
        family(strategy) in ("fsdp", "auto") and not gathers(optimizer)
    )
    if not sharded or not needs_whole_matrices(optimizer):
        return
    raise PlanError(
        f"The optimizer {label(optimizer)!r} needs whole matrices, but {strategy!r} "
        f"{'might shard' if family(strategy) == 'auto' else 'shards'} them. Distribute with 'ddp' or 'zero_redundancy'"
        f"{', or with' if gathers(optimizer) else '; or use'} {_REMEDIES[gathers(optimizer)]}."
    )


_REMEDIES = {True: "'fsdp', where it gathers them", False: "'adamw'"}


def _targets(spec: PipelineSpec) -> None:
    task = spec.target
    for transform in spec.transforms:
        if transform.targets is not None and task.kind not in transform.targets:
            kinds = " or ".join(transform.targets)
            raise PlanError(
                f"{_name(transform)} needs targets that are {kinds}, but {type(task).__name__} has {task.kind}. Leave "
                "it out."
            )


def _monitor(spec: PipelineSpec) -> None:
    if spec.data is not None and spec.data.val is not None:
        check_monitor(spec.target)


def _loss_of_the_model(spec: PipelineSpec) -> None:
    task = spec.target
    if not task.loss_in_model:
        return
    for transform in spec.transforms:
        # Labels are vectors, which stay vectors when mixed; class indices would become probabilities.
        mixes = transform.kind == "batch" and task.kind == "labels"
        if transform.kind == "loss" or transform.unknown or (transform.targets is not None and not mixes):
            raise PlanError(
                f"{_name(transform)} {'may change' if transform.unknown else 'changes'} targets, outputs or the loss, "
                "but with loss='model' the model computes its loss itself. Leave one of the two out."
            )
    if family(spec.distributed.name) == "dp":
        raise PlanError(
            "The strategy 'dp' gathers the outputs of several devices, but with loss='model' each would return a loss "
            "of its own images. Distribute with 'ddp', or leave out loss='model'."
        )


def _views(spec: PipelineSpec) -> None:
    views = 1 if spec.data is None else spec.data.loading.views
    task = spec.target
    if not isinstance(views, int):
        raise PlanError(
            f"views={list(views)!r:.80} makes images of several sizes, which no task of a pipeline takes. Pass a "
            "number of views, or load them with FFCVLoader for a loop of your own."
        )
    if views == 1 and task.kind == "views":
        raise PlanError(
            f"{type(task).__name__} compares several views of each image. Pass views=2 to load()."
        )
    if views == 1:
        return
    if task.kind not in ("views", "any"):
        raise PlanError(
            f"views={views} makes several images of each sample, but {type(task).__name__} has {task.kind} of one. "
            "Leave views out, or pass task(Contrastive())."
        )
    if task.kind == "views" and spec.data is not None and spec.data.batch_size < 2:
        raise PlanError(
            f"batch_size={spec.data.batch_size} has no other image that {type(task).__name__} could compare with. Use "
            "a larger batch_size."
        )
    if task.kind == "views" and spec.distributed.accumulate > 1:
        raise PlanError(
            f"With accumulate={spec.distributed.accumulate}, {type(task).__name__} would compare images only with "
            "those of their microbatch. Leave accumulate out, or use a smaller batch_size."
        )
    for transform in spec.transforms:
        if transform.kind in ("batch", "algorithm") and not isinstance(transform, ProgressiveResizing):
            raise PlanError(
                f"{_name(transform)} changes batches of images, but with views={views} there are several of each "
                "sample. Leave it out."
            )


RULES: tuple[Callable[[PipelineSpec], None], ...] = (
    _unsafe_strategies,
    _unused_parameters,
    _clipped_twice,
    _clipping_of_shards,
    _same_method_twice,
    _two_averages,
    _resizing_of_padded_crops,
    _sequences_of_images,
    _compiled,
    _counted_forwards,
    _opposite_statistics,
    _flat_shards_of_matrices,
    _targets,
    _monitor,
    _loss_of_the_model,
    _views,
)
"""Every rule, one function each."""


def _name(transform: Transform) -> str:
    return type(transform).__name__
