"""Build what trains a pipeline, in the plan's order: loaders, model, engine, loss."""

from __future__ import annotations

import copy
import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ... import loaders
from ...common.errors import PlanError, StrategyError
from ...common.model_state import ModelState, load_state, on_meta, train_mode
from ...common.storage.addresses import is_address
from ...common.storage.cache import Remote
from ...loaders.epochs import EpochLoader
from ...loaders.image_size import height_width
from ...loaders.selection import Selection
from ...loaders.sources import Files, Part, Source, files_of
from ...strategies import Engine, OptimizerFactory
from ...strategies.common.meta import materialise, values_follow, without_reset
from ...strategies.devices import rank_device
from ...strategies.launching.group import in_group, join_group
from ...strategies.launching.meeting import under_torchrun
from ...transforms import CHANGES_MODEL, NothingChanged, Report, Transform
from ..describe.config import LOADERS, DataConfig, DistributedConfig
from ..describe.pipeline_spec import PipelineSpec
from ..describe.plan import batch_norm_caution
from ..describe.resolve import ResolvedPlan
from ..describe.rules import check_epochs
from ..describe.sources import folder_of, scale_of_targets
from ..models.factories import CLASSES, name_of_factory
from ..models.weights import weights_omitted
from ..optim.groups import GroupedFactory
from ..optim.optimizers import refuse_unusable
from ..tasks.means import LossFunction, mean_of
from ..tasks.nests import map_tensors
from ..tasks.scales import Scale, scale_of
from ..tasks.standard import Classification, Regression
from ..tasks.target_scale import TargetScale, adopt_scale, attach_scale, carried_scale
from ..tasks.task import TaskLoss
from ..telemetry.history import Monitor
from .calibration import calibrate
from .checks import TrainedOn, check_loss, check_losses, check_metrics, check_output, targets_of
from .hooks import Microbatch, TrainingHooks
from .loop import StepLoss
from .model_identity import model_identity
from .schedule import Schedule


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute gradients, in float32 and on the CPU by default, whatever the caller has set (`no_grad`, `autocast`, …):
    with the caller's settings, a run would fail within torch or train other numbers."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if (dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def fork_rng(seed: int) -> Iterator[None]:
    """Seed torch's generators, and restore them. CUDA's only if it is initialized: forking them would initialize it."""
    here = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=here):
        torch.manual_seed(seed)
        yield


def draw_apart(seed: int, rank: int) -> None:
    """Let each rank draw numbers of its own (dropout) from here on; those of rank 0 stay those of one process."""
    if rank:
        torch.manual_seed(int(np.random.SeedSequence(seed, spawn_key=(rank,)).generate_state(1, np.uint32)[0]))


@dataclass
class Built:
    """What one process trains with. Close it, or use it as a context manager, to end the loaders' threads.

    Attributes:
        plan: the resolved pipeline, whose task knows the scale of the targets.
        engine: the wrapped model and its optimizer; see `strategies.Engine`.
        train, val: loaders of `(images (B, 3, H, W), labels (B,) or (B, K))`, where B is this rank's share of the
            batch.
        loss: the training loss, of what the model returns; evaluation uses the task's own loss.
        hooks: what transforms do in the loop (mixing batches, averaging weights, …), with the run's position.
        reports: what each transform changed.
        monitor: the metric that decides which epoch is best.
        note: a sentence for the user about the parameter groups; "" without.
        identity: what the model is; see `model_identity`.
        split_batch_norm: a sentence about BatchNorm layers that see a part of the batch; "" if there are none.
        targets: the scale of the targets of `Regression`, if it is fitted or should be; else "".
        without_values: names of tensors that are NaN until a checkpoint is loaded, and why: of a model on the meta
            device, those that no `reset_parameters` initializes.
        metrics: names of the metrics of an evaluation on these classes: those of the task, but perhaps not `top5`.
        in_own_loop: whether it is of `Pipeline.build`, so that `begin` refuses too few epochs.

    Example::

        >>> with pipeline.build() as built:
        ...     stats = train_epoch(built.engine, built.train, built.loss)
        >>> stats.images
        32
    """

    plan: ResolvedPlan
    engine: Engine
    train: EpochLoader
    val: EpochLoader | None
    loss: TaskLoss
    hooks: TrainingHooks
    reports: tuple[Report, ...]
    monitor: Monitor
    note: str = ""
    split_batch_norm: str = ""
    targets: str = ""
    identity: dict[str, str] = field(default_factory=dict)
    without_values: dict[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    in_own_loop: bool = False
    _begun: Schedule | None = field(default=None, init=False, repr=False)

    def begin(self, epochs: int) -> Schedule:
        """Start a training of so many epochs in a loop of your own, from the current weights. Return the schedule,
        whose `set_lr(built.hooks.state.step)` sets the learning rates of a step."""
        if self.in_own_loop:  # else it was checked; or a batch is shown, perhaps without a number of epochs
            check_epochs(self.plan.spec, epochs)
        steps = epochs * self.train.full_length
        self.hooks.begin(self.engine, steps, self.train)
        scale = self.plan.optimization.scheduled_scale(self.plan.data.batch_size)
        if self._begun is not None:  # its last learning rates, which may be near 0, would be the peaks
            self._begun.restore_peaks()
        self._begun = Schedule(self.plan.optimization, self.engine.optimizer, steps, scale)
        return self._begun

    def begin_epoch(self) -> None:
        """Set training mode, in which frozen BatchNorm layers stay in evaluation, and what transforms change between
        epochs: the image size, frozen layers. Call it before each epoch."""
        self.engine.reshard()  # an evaluation may have left gathered copies: to freeze these would not last a step
        self.hooks.begin_epoch(self.train, self.plan.data.image_size)
        train_mode(self.engine.model)

    def step_loss(self, microbatches: Sequence[Microbatch]) -> StepLoss:
        """Return the loss of one step in a loop of your own: the shares that the microbatches of all ranks have in its
        mean. Every rank calls it once per step, with the result of `hooks.microbatches`."""
        return StepLoss(mean_of(self.loss), microbatches, self.engine, equal=self.hooks.equal_shares)

    def close(self) -> None:
        """End the loaders' threads and processes."""
        self.train.close()
        if self.val is not None:
            self.val.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


Initial = Callable[[nn.Module], Mapping[str, torch.Tensor]]
"""Loads weights into a model after surgery, before the strategy wraps it, and returns those of its tensors that are on
the meta device, which are loaded afterwards."""


@plain_torch()
def build(
    plan: ResolvedPlan, initial: Initial | None = None, resumes: bool = False, trained: TrainedOn | None = None
) -> Built:
    """Build everything for this process, which is a rank if there is a process group. With `resumes`, a checkpoint may
    follow, so tensors may be `Built.without_values`. With `trained`, the model is only evaluated: the training data is
    not opened, and `Built.train` is that of the evaluation. All errors are raised before any training."""
    how = plan.distribution
    if plan.needs_ranks and under_torchrun() and not in_group():  # for a custom loop: `fit` has joined them by now
        join_group(device=how.device, timeout=how.timeout)  # before the loaders: each loads the share of its rank
    device = expected_device(how)
    train, val = make_loaders(plan, device, evaluates=trained is not None)
    parts = make_parts(plan, train, val, trained)
    later: Mapping[str, torch.Tensor] = {}
    if initial is not None:
        later = initial(parts.model)
        parts = replace(parts, plan=_scaled(plan, parts.model))  # of weights that are evaluated, theirs
    plan = parts.plan
    vacant = {name: why for name, why in without_reset(parts.model).items() if name not in later}
    if not resumes:
        refuse_vacant(vacant)
    factory = optimizer_factory(plan, parts.model)
    split = batch_norm_caution(how, plan.data.batch_size, parts.model)
    # Values of a model on the meta device come from the seed, whatever the process has drawn before.
    with fork_rng(plan.seed) if on_meta(parts.model) else nullcontext(), values_follow() as unwritten:
        engine = plan.strategy.prepare(parts.model, partial(_usable, factory), **how.step_options)
    vacant |= {name: why for name, why in unwritten.items() if name not in later}
    if not resumes:
        refuse_vacant(vacant)
    if later:
        engine.import_state(later, strict=False)
    note = factory.note if isinstance(factory, GroupedFactory) else ""
    # With devices=1, `prepare` may be the first to join the ranks of torchrun.
    if engine.device != device or engine.world_size != train.settings.world_size:
        train.close()
        if val is not None:
            val.close()
        train, val = make_loaders(plan, engine.device, evaluates=trained is not None)
    hooks = TrainingHooks(plan.transforms, plan.seed, parts.classes, how.precision)
    loss = parts.loss(engine.device)
    batches = partial(make_loader, plan, plan.data.train, train=True, device=engine.device)
    hooks.calibrate = partial(calibrate, engine, batches, loss)
    return Built(
        plan, engine, train, val, loss, hooks, parts.reports, parts.monitor,
        note, split, parts.targets, parts.identity, vacant, parts.metrics,
    )  # fmt: skip


def refuse_vacant(vacant: Mapping[str, str]) -> None:
    for reason in vacant.values():
        raise PlanError(f"{reason[:1].upper()}{reason[1:]}")


@dataclass(frozen=True)
class Parts:
    """The model and the loss, for Drivetrain's loop or Lightning's, checked against the data."""

    plan: ResolvedPlan
    model: nn.Module
    reports: tuple[Report, ...]
    width: int | None  # values that the model returns per image, such as the number of classes; None if any
    example: tuple[Any, Any]  # outputs for two images, as the loss receives them, and their targets
    monitor: Monitor
    identity: dict[str, str]
    targets: str  # a note on their scale, or ""
    metrics: tuple[str, ...]

    @property
    def classes(self) -> int | None:
        """For soft targets; None if targets cannot be mixed."""
        return self.width if self.plan.task.kind in ("class indices", "labels") else None

    def loss(self, device: torch.device) -> TaskLoss:
        task, (outputs, targets) = self.plan.task, self.example
        loss = training_loss(self.plan, device)
        outputs, targets = map_tensors(lambda tensor: tensor.to(device), (outputs, targets))
        mixing = next((t for t in self.plan.transforms if t.kind == "batch" and t.soft_targets), None)
        if mixing is not None and task.kind == "class indices" and self.width is None:
            raise PlanError(
                f"{type(mixing).__name__} makes probabilities of class indices, but {type(task).__name__}.check does "
                "not return the number of classes. Return it there."
            )
        soft = any(t.soft_targets for t in self.plan.transforms)
        classes = self.width if task.kind == "class indices" else None
        mean, transforms = task.mean(loss.base), self.plan.transforms
        check_loss(mean, outputs, targets, classes, soft=soft)
        check_losses(transforms, mean, outputs, targets)
        if self.plan.data.val is not None and (soft or any(t.kind == "loss" for t in transforms)):
            check_loss(task.mean(task.move(device)), outputs, targets, classes, soft=False, evaluates=True)
        return loss


def make_parts(
    plan: ResolvedPlan, train: EpochLoader, val: EpochLoader | None, trained: TrainedOn | None = None
) -> Parts:
    data, task = plan.data, plan.task
    judged = None if val is None or data.val is None else targets_of(val, str(files_of(data.val)), task)
    if trained is not None and judged is not None:
        targets = trained.targets(judged)
    else:
        targets = targets_of(train, str(files_of(data.train)), task)
    width = task.check(targets, judged)
    identity: dict[str, str] = {}
    model, reports = build_model(
        plan.spec, plan.transforms, lambda fresh: identity.update(model_identity(fresh, plan.spec.model))
    )
    for transform in plan.transforms:
        transform.begin(model, len(train))  # one epoch, until training sets the actual length
    two = targets.two(height_width(data.eval_size))
    with fork_rng(plan.seed):
        outputs, used = check_output(plan, model, width, targets)
    note = ""
    if isinstance(task, Regression):

        def fit() -> TargetScale | None:
            return task.fit_scale(targets.values, train.indices, train.frequencies, targets.source)

        fitted = scale_of_targets(task, data, train.beton if trained is None else None, fit)
        note = task.note(fitted)
        if fitted is not None and task.scale_targets:
            attach_scale(model, fitted)
    meters = task.meters(width)
    check_metrics(task, meters, used, two)
    known = {name: scale_of(task, name, meter) for name, meter in meters.items()}
    scale = known.get(task.monitor, Scale(higher_is_better=False))
    monitor = Monitor(task.monitor, scale.higher_is_better is not False, scale.unit)
    return Parts(_scaled(plan, model), model, reports, width, (outputs, two), monitor, identity, note, tuple(meters))


def _scaled(plan: ResolvedPlan, model: nn.Module) -> ResolvedPlan:
    """Return the plan of a task that knows the scale of the targets, if the model has one."""
    task = plan.task
    if not isinstance(task, Regression) or not task.scale_targets:
        return plan
    return replace(plan, spec=plan.spec.replace(goal=task.with_scale(carried_scale(model))))


def expected_device(how: DistributedConfig) -> torch.device:
    """Where this rank is expected to train: loaders, whose buffers depend on it, are created first."""
    try:
        return rank_device(how.device)
    except StrategyError:  # `prepare` raises the strategy's own error
        return torch.device("cpu")


def make_loaders(
    plan: ResolvedPlan, device: torch.device, *, evaluates: bool = False
) -> tuple[EpochLoader, EpochLoader | None]:
    """Return those of training and of evaluation; if a model is only evaluated, twice the latter."""
    train, val = plan.data.train, plan.data.val
    if evaluates and val is not None:
        only = make_loader(plan, val, train=False, device=device)
        return only, only
    first = make_loader(plan, train, train=True, device=device)
    if val is None:
        return first, None
    return first, make_loader(plan, val, train=False, device=device, selection=first.selected)


def make_loader(
    plan: ResolvedPlan,
    source: Source,
    *,
    train: bool,
    device: torch.device,
    ranks: tuple[int, int] | None = None,  # this rank, and the world size
    selection: Selection | None = None,  # of the training data, if it is known
) -> EpochLoader:
    data = plan.data
    ranks = ranks or ((dist.get_rank(), dist.get_world_size()) if in_group() else (0, 1))
    own: dict[str, Any] = {
        "image_size": data.image_size if train else data.eval_size,
        "train": train,
        "seed": plan.seed,
        "order": data.order if train else None,
        "drop_last": train,  # a partial batch would give its samples more weight, and another weight on each rank
        "rank": ranks[0],
        "world_size": ranks[1],
    }
    kind: Any = getattr(loaders, LOADERS[data.loader])
    given = data.read_options | own | dict(plan.train_settings if train else data.settings)
    chosen = data if train and data.selects else None
    loader: EpochLoader = kind(source_files(data, source), indices=chosen, device=device, **given)
    if not train and data.held_out:
        loader.set_indices((selection or loader.selection(data)).val)
    return loader


def source_files(data: DataConfig, source: Source, *, progress: bool = True) -> str | Files:
    """Return files or a folder: named data sets are converted; of remote files, local copies, still empty, or the
    addresses of streams."""
    if (folder := folder_of(data, source)) is not None:
        return folder
    remote = Remote(data.cache, data.cache_limit, data.patience)

    def local(name: str) -> str | Path:
        if data.stream and is_address(name):  # each rank has its own
            return name
        return loaders.resolve(name, progress=progress, remote=remote)

    files = files_of(source)
    return str(local(files.names[0])) if len(files.names) == 1 and files.weights is None else files.map(local)


def resolve_data(plan: ResolvedPlan, progress: bool, *, names: bool = False) -> ResolvedPlan:
    """Find the files of the data. With `names`, a data set keeps the name or address by which it was given, which
    loggers and results show, also if its one file is elsewhere."""
    data = plan.data

    def find(source: Source) -> str | Files:
        found, name = source_files(data, source, progress=progress), str(files_of(source))
        if names and isinstance(found, str) and found != name:
            return Files((Part(name, (found,)),))
        return found

    return plan.with_sources(find(data.train), None if data.val is None else find(data.val))


class _MetaNoticed(TorchFunctionMode):
    """Inside the block, notice whether code creates tensors on the meta device itself."""

    found = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None:
            self.found = self.found or torch.device(device).type == "meta"
        return function(*args, **kwargs)


@plain_torch()
def build_on_meta(spec: PipelineSpec, transforms: Sequence[Transform]) -> tuple[nn.Module, bool]:
    """Return the model after surgery, without memory for its values, and whether it is also trained from there, because
    the user built it so. What needs values raises an error of torch's."""
    own: list[bool] = []
    with weights_omitted(), torch.device("meta"), _MetaNoticed() as noticed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model that is trained gives them
        model, _ = build_model(spec, transforms, lambda _: own.append(noticed.found), shapes=True)
    given = spec.model
    return model, on_meta(given) if isinstance(given, nn.Module) else own[0]


def build_model(
    spec: PipelineSpec,
    transforms: Sequence[Transform],
    look: Callable[[nn.Module], None] | None = None,
    *,
    shapes: bool = False,  # whether only the shapes of the result are used
) -> tuple[nn.Module, tuple[Report, ...]]:
    """Return the model after surgery, on the CPU or the meta device, and what each changed. `look` is called before
    it."""
    with fork_rng(spec.seed):
        model = _fresh_model(spec)
        if look is not None:
            look(model)
        reports = []
        valueless = not shapes and on_meta(model)
        for transform in (each for each in transforms if each.kind in CHANGES_MODEL):
            if valueless and not transform.on_meta:
                raise PlanError(
                    f"{type(transform).__name__} reads or sets values of weights, and {spec.model_name} is on the meta "
                    "device, without values. Build the model on the CPU, or remove the transform."
                )
            report: object = transform.apply(model)
            if not isinstance(report, Report):
                raise PlanError(
                    f"{type(transform).__name__}.apply returned {report!r:.80}, not a Report. Return "
                    "Report(name, changed, …), or what common.surgery.operate returns."
                )
            reports.append(report)
    return model, tuple(reports)


@plain_torch()
def identity_of(spec: PipelineSpec) -> dict[str, str]:
    """Return what the model is, built once more, without the warnings of it that training issues."""
    identity: dict[str, str] = {}
    with warnings.catch_warnings(action="ignore"):
        build_model(spec, (), lambda fresh: identity.update(model_identity(fresh, spec.model)))
    return identity


@plain_torch()
def rebuild_model(
    spec: PipelineSpec, transforms: Sequence[Transform], state: ModelState | None = None
) -> tuple[nn.Module, tuple[Report, ...]]:
    """Do what `build_model` does, without its warnings. With `state`, files of initial weights are not read, and a
    model on the meta device gets its values on the CPU."""
    with warnings.catch_warnings(), weights_omitted() if state else nullcontext():
        warnings.simplefilter("ignore", NothingChanged)  # training has issued this warning already
        model, reports = build_model(spec, transforms)
    if state:
        materialise(model, torch.device("cpu"), reset=False)
        adopt_scale(model, state.weights)
        load_state(model, state)
    return model, reports


def _fresh_model(spec: PipelineSpec) -> nn.Module:
    options = ", ".join(f"{name}={value!r:.40}" for name, value in spec.model_options.items())
    if isinstance(spec.model, nn.Module):
        try:
            copied = _not_compiled(copy.deepcopy(spec.model))
            return copied if on_meta(copied) else copied.cpu()
        except (RuntimeError, TypeError) as error:
            raise PlanError(f"The model cannot be copied: {error}. Pass its factory instead.") from error
    try:
        model: object = spec.model(**spec.model_options)
    except (TypeError, ValueError) as error:
        remedy = _nearest_option(spec) + _with_new_head(spec)
        if spec.recipe is not None and options:
            remedy += (
                " A recipe's model_options are for its own model. For another model, replace all of them, e.g. "
                'model_options={"num_classes": 10}.'
            )
        reason = str(error).rstrip(".")
        raise PlanError(f"{spec.model_name}({options}) cannot be built: {reason}.{remedy}") from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"The factory {spec.model_name} returned a {type(model).__name__}, not a module.")
    return _not_compiled(model)


def _nearest_option(spec: PipelineSpec) -> str:
    try:
        known = inspect.signature(spec.model).parameters
    except (TypeError, ValueError):  # a factory written in C
        return ""
    wrong = [name for name in spec.model_options if name not in known]
    near = {name: difflib.get_close_matches(name, known, n=1) for name in wrong}
    return "".join(f" Did you mean {match[0]!r} by {name!r}?" for name, match in near.items() if match)


def _with_new_head(spec: PipelineSpec) -> str:
    """Return how to train published weights on other classes, which torchvision's own factories refuse; else ""."""
    factory: Any = spec.model
    weights, classes = (spec.model_options.get(name) for name in ("weights", "num_classes"))
    own = (getattr(factory, "__module__", None) or "").startswith("torchvision.models.")
    name = name_of_factory(factory) if own and weights is not None and classes not in (None, CLASSES) else None
    if name is None or ":" in name:  # one of torchvision's that do not classify images
        return ""
    published = f"{getattr(weights, 'name', weights)}".rpartition(".")[2]
    return (
        f' Published weights with a new last layer: Pipeline("pretrained", name="{name}", num_classes={classes!r}, '
        f'weights="{published}").'
    )


def _not_compiled(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        raise PlanError(
            "The model was returned by torch.compile, and its parameter names begin with '_orig_mod.'. Pass the "
            "original model; in a custom loop, model.compile() compiles it without changing names."
        )
    return model


def optimizer_factory(plan: ResolvedPlan, model: nn.Module | None = None) -> OptimizerFactory:
    """Return the factory, wrapped by the transforms. Groups by name need the model after surgery."""
    factory: OptimizerFactory = plan.optimization.factory
    for transform in plan.transforms:
        factory = transform.optimizer(factory)
    if not plan.optimization.groups:
        return factory
    assert model is not None
    return GroupedFactory(factory, plan.optimization.full_groups, model)


def _usable(factory: OptimizerFactory, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Call the factory. What a function of the user returns is known only now."""
    optimizer = factory(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):  # it may be something that only behaves like one
        refuse_unusable(type(optimizer))
    return optimizer


def training_loss(plan: ResolvedPlan, device: torch.device) -> TaskLoss:
    loss: LossFunction = plan.task.move(device)
    for transform in plan.transforms:
        if transform.kind == "loss":
            loss = transform.loss(loss)
    return TaskLoss(plan.task, loss, checked=isinstance(plan.task, Classification))
