"""Reject combinations that cannot work, by what each part declares."""

from collections.abc import Callable

from ... import strategies
from ...common.checks import check_whole
from ...common.errors import PlanError
from ...loaders.sources import files_of
from ...transforms import Transform
from ..optim.optimizers import gathers, is_schedule_free, label, needs_whole_matrices
from ..optim.schedules import label as label_of_schedule
from ..tasks.means import NOT_PER_SAMPLE, LossFunction, Mean, samples
from ..tasks.scales import check_monitor
from .config import DataConfig
from .pipeline_spec import PipelineSpec, sort_transforms

FAMILIES = {"hsdp": "fsdp", "zero_redundancy": "ddp", "fairscale_oss": "ddp"}
"""Strategies whose family is not the first word of their name. Those in the DDP family here shard only the optimizer
state: every rank has full weights and gradients, so transforms of these work."""


SHARDS_THE_STATE = ("zero_redundancy", "fairscale_oss")
MIGHT_BE_CHOSEN = ("ddp", "fsdp")
"""Families of what `auto` chooses on several devices."""


def family(strategy: str) -> str:
    """Return single, dp, ddp, fsdp, deepspeed, fairscale, auto, or a third party's."""
    return FAMILIES.get(strategy, strategy.split("_")[0])


def belongs(strategy: str, group: str) -> bool:
    """Whether it is in a family or subgroup: `"deepspeed_stage_3"` includes its offload variants."""
    if group == family(group):
        # Not by the first word, which names of other families may share: `fairscale_oss` is in the DDP family.
        return group == family(strategy)
    return f"{strategy}_".startswith(f"{group}_")


def check_rules(spec: PipelineSpec) -> None:
    for rule in RULES:
        rule(spec)


def check_epochs(spec: PipelineSpec, epochs: int) -> None:
    """Reject an invalid number, or one too small for a transform to complete."""
    check_whole("epochs", epochs, PlanError, 1)
    if spec.data is not None:
        for transform in spec.transforms:
            transform.check_epochs(epochs, spec.data.image_size)


def check_split_seed(data: DataConfig) -> None:
    """Reject a seed without a selection, where something is trained: `cross_validate` adds the folds."""
    if data.split_seed and not data.splits and data.per_class is None and data.limit is None:
        raise PlanError(
            f"split_seed={data.split_seed} is the seed of val_split, folds, per_class and limit, which are missing. "
            "Pass one of them, or leave split_seed out."
        )


def _unsafe_strategies(spec: PipelineSpec) -> None:
    how = spec.distributed
    strategy = strategies.get(how.strategy, **how.options).name  # "deepspeed" does not specify the stage
    chosen = MIGHT_BE_CHOSEN if family(strategy) == "auto" and how.ranks > 1 else (strategy,)
    for transform in spec.transforms:
        unsafe = [one for one in chosen if any(belongs(one, each) for each in transform.unsafe_with)]
        if not unsafe:
            continue
        which = f"{unsafe[0]!r}{f', which {strategy!r} might choose,' * (unsafe[0] != strategy)}"
        if transform.kind == "algorithm":
            raise PlanError(
                f"{transform} runs when the strategy {which} has sharded weights or gradients, and is not declared "
                f"safe there. Declare it, if it is: from_composer(…, safe_with={family(unsafe[0])!r}); or distribute "
                "with 'single' or 'ddp'."
            )
        raise PlanError(
            f"{_name(transform)} does not work with the strategy {which} (see its documentation). Leave it out, or "
            "distribute with 'single' or 'ddp'."
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
                f"{_name(transform)} leaves parameters without a gradient, for which {how.name!r} would wait: {remedy}."
            )


def _clipping_of_shards(spec: PipelineSpec) -> None:
    strategy = spec.distributed.name
    sharded = next((transform for transform in spec.transforms if transform.needs_whole_weights), None)
    if sharded is None or family(strategy) in ("single", "ddp", "dp"):
        return
    does = "might shard" if family(strategy) == "auto" else "shards"
    raise PlanError(
        f"{sharded} needs unsharded weights, but {strategy!r} {does} them. Use {sharded.needs_whole_weights}, or "
        "distribute with 'ddp'."
    )


def _same_method_twice(spec: PipelineSpec) -> None:
    seen: dict[str, Transform] = {}
    for transform in spec.transforms:
        other = seen.setdefault(transform.known_as, transform)
        if other is not transform:
            raise PlanError(f"{other} and {transform} are the same method. Leave one of the two out.")


def _excluded(spec: PipelineSpec) -> None:
    for transform in spec.transforms:
        other = next((each for each in spec.transforms if each.known_as in transform.excludes), None)
        if other is not None:
            raise PlanError(
                f"{_name(transform)} does not work with {_name(other)} (see its documentation). Leave one of the two "
                "out."
            )


def _two_averages(spec: PipelineSpec) -> None:
    averages = [_name(t) for t in spec.transforms if t.averages_weights]
    averages += [label(spec.optimized.optimizer)] * is_schedule_free(spec.optimized.optimizer)
    if len(averages) > 1:
        first, second = averages[:2]
        raise PlanError(f"{first} and {second} both set the weights to evaluate. Leave one of the two out.")


def _compiled(spec: PipelineSpec) -> None:
    unsafe = next((transform for transform in spec.transforms if not transform.compile_safe), None)
    if not spec.distributed.compile or unsafe is None:
        return
    what, remedy = f"{_name(unsafe)} causes graph breaks (see its documentation)", ""
    if unsafe.kind == "algorithm":
        what = f"{unsafe} is not known to compile without graph breaks"
        remedy = ", or declare it, if it does: from_composer(…, compile_safe=True)"
    raise PlanError(
        f"{what}, but distribute(compile={spec.distributed.compile!r}) is set. Leave one of the two out{remedy}."
    )


def sets_size(transform: Transform) -> bool:
    return type(transform).size is not Transform.size


# What transforms declare, what else a pipeline has, and the message if it has both.
_CONFLICTS: tuple[tuple[Callable[[Transform], bool], Callable[[PipelineSpec], bool], str], ...] = (
    (
        lambda transform: transform.clips_gradients,
        lambda spec: spec.distributed.clip_norm is not None,
        "{transform} and distribute(clip_norm={how.clip_norm}) both clip the gradients. Leave one of the two out.",
    ),
    (
        sets_size,
        lambda spec: spec.data is not None and spec.data.loading.crop == "padded",
        "{name} changes the size of the images, but crop='padded' keeps that of the file. Use crop='resized', or leave "
        "{name} out.",
    ),
    (
        sets_size,
        lambda spec: spec.data is not None and spec.data.loading.cuts_out,
        "{name} changes the size of the images, but cutout= is in pixels, which would hide more of small ones. Use the "
        "transform CutOut(length=…) in place of cutout=, or leave {name} out.",
    ),
    (
        lambda transform: transform.takes_tokens,
        lambda _: True,
        "{name} truncates sequences of tokens, but a pipeline loads images. Use it in a custom loop, or "
        "ProgressiveResizing here.",
    ),
    (
        lambda transform: transform.counts_forwards,
        lambda spec: bool(spec.distributed.activation_checkpointing),
        "{name} counts forwards, but activation_checkpointing runs each twice: the second would compute something "
        "else. Leave one of the two out.",
    ),
    (
        lambda transform: transform.groups_statistics,
        lambda spec: spec.distributed.sync_batchnorm,
        "{transform} computes BatchNorm's statistics over small groups of images, but distribute(sync_batchnorm=True) "
        "over the global batch. Leave one of the two out.",
    ),
)


def _conflicts(spec: PipelineSpec) -> None:
    for has, conflicts, message in _CONFLICTS:
        transform = next(filter(has, spec.transforms), None)
        if transform is not None and conflicts(spec):
            how = spec.distributed
            raise PlanError(message.format(transform=transform, name=_name(transform), how=how))


def _flat_shards_of_matrices(spec: PipelineSpec) -> None:
    optimizer, strategy = spec.optimized.optimizer, spec.distributed.name
    sharded = family(strategy) == "deepspeed" or (family(strategy) in ("fsdp", "auto") and not gathers(optimizer))
    if not sharded or not needs_whole_matrices(optimizer):
        return
    remedy = ", or with 'fsdp', where it gathers them" if gathers(optimizer) else "; or use 'adamw'"
    raise PlanError(
        f"The optimizer {label(optimizer)!r} needs whole matrices, but {strategy!r} "
        f"{'might shard' if family(strategy) == 'auto' else 'shards'} them. Distribute with 'ddp' or 'zero_redundancy'"
        f"{remedy}."
    )


def _schedule_free(spec: PipelineSpec) -> None:
    optimizer, strategy = spec.optimized.optimizer, spec.distributed.name
    whole = family(strategy) in ("single", "ddp", "dp", "fsdp", "auto") and strategy not in SHARDS_THE_STATE
    if is_schedule_free(optimizer) and not whole:
        raise PlanError(
            f"{label(optimizer)!r} computes the weights to evaluate from the optimizer's state, which {strategy!r} "
            "keeps elsewhere than the weights. Distribute with 'ddp' or 'fsdp'."
        )


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
        # Those that change the images alone declare targets because others, such as masks, would have to follow.
        images = transform.kind == "batch" and transform.keeps_samples and not transform.soft_targets
        uses = transform.targets is not None and not (mixes or images)
        if transform.kind == "loss" or transform.unknown or uses:
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
        raise PlanError(f"{type(task).__name__} compares several views of each image. Pass views=2 to load().")
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
        if transform.kind in ("batch", "algorithm") and not sets_size(transform):
            raise PlanError(
                f"{_name(transform)} changes batches of images, but with views={views} there are several of each "
                "sample. Leave it out."
            )


def _fields(spec: PipelineSpec) -> None:
    fields = () if spec.data is None else tuple(spec.data.loading.fields)
    task = spec.target
    if not fields:
        return
    if task.kind != "any":
        raise PlanError(
            f"fields={list(fields)} are targets for a task of your own, but {type(task).__name__} has {task.kind} "
            "only. Leave fields out, or pass task(…) with a class derived from drivetrain.Task, whose loss takes them."
        )
    for transform in spec.transforms:
        if transform.unknown:
            raise PlanError(
                f"{_name(transform)} may change images and targets in ways that fields={list(fields)} do not follow. "
                "Leave one of the two out."
            )


def _pruned_samples(spec: PipelineSpec) -> None:
    pruning = next((transform for transform in spec.transforms if transform.prunes_samples), None)
    if pruning is None:
        return
    for transform in spec.transforms:
        if transform.unknown or (transform.kind in ("batch", "algorithm") and not transform.keeps_samples):
            raise PlanError(
                f"{_name(pruning)} scores single samples, but {_name(transform)} may mix or select those of a batch. "
                "Leave one of the two out; or declare keeps_samples = True in its class, if each image that it returns "
                "is still of the sample in its place."
            )
    data = spec.data
    mixes = data is not None and files_of(data.train).weights is not None
    if data is not None and (mixes or data.balance is not None):
        what = "the weights of a mix" if mixes else "balance="
        raise PlanError(
            f"{_name(pruning)} leaves samples out of an epoch, of which {what} set the shares. Leave one of the two "
            "out."
        )
    if spec.optimized.uses_torch_scheduler:
        raise PlanError(
            f"{_name(pruning)} makes epochs of different lengths, but the torch scheduler "
            f"{label_of_schedule(spec.optimized.schedule)} counts steps. Use a schedule by name, or a function of the "
            "progress."
        )


def needs_losses(transform: Transform) -> bool:
    """Whether it needs the loss of each sample."""
    return transform.selects_samples or transform.prunes_samples


def loss_of_samples(transform: Transform, mean: Mean) -> LossFunction | None:
    """Return the loss of each sample as a transform that needs it takes it; None: there is none."""
    return mean.unreduced if transform.selects_samples else mean.each


def _losses_of_samples(spec: PipelineSpec) -> None:
    for transform in filter(needs_losses, spec.transforms):
        if loss_of_samples(transform, _mean(spec)) is None:
            raise PlanError(
                f"{_name(transform)} needs the loss of each sample, but {spec.target.loss_name} {NOT_PER_SAMPLE}"
            )


def _denominator(spec: PipelineSpec) -> None:
    late = next((transform for transform in spec.transforms if transform.replaces_targets), None)
    if late is not None and _mean(spec).denominator is not samples:
        raise PlanError(
            f"{late} replaces the targets of each microbatch, but {spec.target.loss_name} weights or ignores targets, "
            "so that its mean would depend on how a batch is split. Use Drivetrain's own "
            f"{late.known_as}(), or a loss that does neither."
        )


def _mean(spec: PipelineSpec) -> Mean:
    """Return the loss in training."""
    import torch  # here: most pipelines are checked without it

    loss: LossFunction = spec.target.move(torch.device("cpu"))
    for transform in sort_transforms(spec.transforms):
        loss = transform.loss(loss) if transform.kind == "loss" else loss
    return spec.target.mean(loss, checked=True)


RULES: tuple[Callable[[PipelineSpec], None], ...] = (
    _unsafe_strategies, _unused_parameters, _conflicts, _clipping_of_shards, _same_method_twice, _excluded,
    _two_averages, _compiled, _flat_shards_of_matrices, _schedule_free, _targets, _monitor, _loss_of_the_model, _views,
    _fields, _pruned_samples, _losses_of_samples, _denominator,
)  # fmt: skip


def _name(transform: Transform) -> str:
    return type(transform).__name__
