"""From a pipeline to the things that train: loaders, model, engine, loss; in the plan's order."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ... import loaders
from ...errors import PlanError, StrategyError
from ...loaders.epochs import EpochLoader
from ...strategies import Engine, OptimizerFactory
from ...strategies.devices import rank_device
from ...strategies.launching.group import in_group
from ...transforms import CHANGES_MODEL, CutMix, Loss, MixUp, Report, Transform
from ..spec.config import DataConfig, DistributedConfig
from ..spec.pipeline_spec import PipelineSpec
from ..spec.resolve import ResolvedPlan
from .checks import check_loss, check_output, count_classes
from .hooks import TrainingHooks


@dataclass
class Built:
    """What one process trains with. Close it, or use it as a context manager, to end the loaders' threads.

    Attributes:
        engine: the wrapped model and its optimizer; see `strategies.Engine`.
        train, val: loaders of `(images (B, 3, H, W), labels (B,))`, B being this rank's share.
        loss: to train with; evaluation uses plain cross entropy.
        hooks: what else the loop does (mixed batches, averaged weights and the like), with the run's position.
        reports: what each transform changed.
    """

    engine: Engine
    train: EpochLoader
    val: EpochLoader | None
    loss: Loss
    hooks: TrainingHooks
    reports: tuple[Report, ...]

    def close(self) -> None:
        """Ends the loaders' threads and processes."""
        self.train.close()
        if self.val is not None:
            self.val.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def build(plan: ResolvedPlan) -> Built:
    """Build everything for this process, which is a rank if a process group runs.

    Raises:
        PlanError, DataError, StrategyError: before any training.
    """
    how = plan.distribution
    device = expected_device(how)
    train, val = make_loaders(plan, device)
    parts = make_parts(plan, train, val)
    engine = plan.strategy.prepare(
        parts.model,
        optimizer_factory(plan),
        **how.step_options,
    )
    if engine.device != device:
        for loader in (train, val):
            if loader is not None:
                loader.close()
        train, val = make_loaders(plan, engine.device)
    hooks = TrainingHooks(plan.transforms, plan.seed, parts.classes)
    return Built(engine, train, val, parts.loss(engine.device), hooks, parts.reports)


@dataclass(frozen=True)
class Parts:
    """The model and the loss of a training, in our loop or in Lightning's, checked against the data.

    Attributes:
        model: after surgery, on the CPU.
        reports: what each surgery changed.
        classes: of the data.
    """

    plan: ResolvedPlan
    model: nn.Module
    reports: tuple[Report, ...]
    classes: int

    def loss(self, device: torch.device) -> Loss:
        """The loss to train with, tried on the device of the training's logits.

        Raises:
            PlanError: if it cannot take the targets, or gives no single number.
        """
        loss, transforms = training_loss(self.plan), self.plan.transforms
        check_loss(loss, self.classes, device, soft=any(isinstance(t, MixUp | CutMix) for t in transforms))
        return loss


def make_parts(plan: ResolvedPlan, train: EpochLoader, val: EpochLoader | None) -> Parts:
    """Builds the model, and holds data, model and loss to each other.

    Raises:
        PlanError: if they do not go together.
    """
    data = plan.data
    classes = count_classes(train, val, data)
    model, reports = build_model(plan.spec, plan.transforms)
    for transform in plan.transforms:
        transform.begin(model, len(train))  # an epoch, until the training says how long it is
    with fork_rng(plan.seed):
        check_output(model, classes, data, plan.distribution.precision)
    return Parts(plan, model, reports, classes)


def expected_device(how: DistributedConfig) -> torch.device:
    """Return the device that this rank's strategy is expected to train on; the engine has the last word.

    A loader is made for a device, because what it keeps in memory depends on it, and before the model is prepared.
    """
    try:
        return rank_device(how.device)
    except StrategyError:  # the strategy's own error, if it has one, comes with `prepare`
        return torch.device("cpu")


def make_loaders(plan: ResolvedPlan, device: torch.device) -> tuple[EpochLoader, EpochLoader | None]:
    """The loaders of this rank's share, of the training data and of the validation data, if there are any."""
    data = plan.data
    train = make_loader(plan, data.train, train=True, device=device)
    if data.val is None:
        return train, None
    return train, make_loader(plan, data.val, train=False, device=device)


def make_loader(
    plan: ResolvedPlan,
    source: str,
    *,
    train: bool,
    device: torch.device,
    ranks: tuple[int, int] | None = None,
) -> EpochLoader:
    """A loader of this rank's share; `ranks` is its number and theirs, None: those of the process group."""
    data = plan.data
    if ranks is None:
        ranks = (dist.get_rank(), dist.get_world_size()) if in_group() else (0, 1)
    kind: Any = loaders.FFCVLoader if data.loader == "ffcv" else loaders.TorchLoader
    loader: EpochLoader = kind(
        source_file(data, source),
        batch_size=data.batch_size,
        image_size=data.image_size if train else data.eval_size,
        train=train,
        seed=plan.seed,
        workers=data.workers,
        device=device,
        drop_last=train,  # a partial batch would weigh its samples more, and differently on each rank
        rank=ranks[0],
        world_size=ranks[1],
        **(plan.train_settings if train else data.settings),
    )
    return loader


def source_file(data: DataConfig, source: str, *, progress: bool = True) -> Path:
    """The file (for the torch loader, also the folder) of a data source; made now if it is a named one."""
    if data.loader == "torch" and Path(source).is_dir():
        return Path(source)
    return loaders.resolve(source, progress=progress)


def build_model(spec: PipelineSpec, transforms: Sequence[Transform]) -> tuple[nn.Module, tuple[Report, ...]]:
    """The model after surgery, on the CPU, and what each surgery changed. The global RNG is put back.

    Args:
        spec: with the model and the seed.
        transforms: in order; only those that change the model are applied.
    """
    with fork_rng(spec.seed):
        model = _fresh_model(spec)
        reports = tuple(t.apply(model) for t in transforms if t.kind in CHANGES_MODEL)
    return model, reports


def _fresh_model(spec: PipelineSpec) -> nn.Module:
    options = ", ".join(f"{name}={value!r:.40}" for name, value in spec.model_options.items())
    if isinstance(spec.model, nn.Module):
        try:
            return _not_compiled(copy.deepcopy(spec.model)).cpu()
        except (RuntimeError, TypeError) as error:
            raise PlanError(f"Your model cannot be copied: {error}. Give its factory instead.") from error
    try:
        model: object = spec.model(**spec.model_options)
    except (TypeError, ValueError) as error:
        remedy = _nearest_option(spec)
        if spec.recipe is not None and options:
            remedy += (
                " The model_options of a recipe are for its own model; with another, replace them all, e.g. "
                'model_options={"num_classes": 10}.'
            )
        told = str(error).rstrip(".")
        raise PlanError(f"{spec.model_name}({options}) cannot be built: {told}.{remedy}") from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"The factory {spec.model_name} gave a {type(model).__name__}, not a module.")
    return _not_compiled(model)


def _nearest_option(spec: PipelineSpec) -> str:
    """For a model that cannot be built: its options that its factory does not name, each with the nearest that it
    does."""
    try:
        known = inspect.signature(spec.model).parameters
    except (TypeError, ValueError):  # a factory written in C
        return ""
    wrong = [name for name in spec.model_options if name not in known]
    near = {name: difflib.get_close_matches(name, known, n=1) for name in wrong}
    return "".join(f" Did you mean {found[0]!r} by {name!r}?" for name, found in near.items() if found)


def _not_compiled(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        raise PlanError(
            "The model is what torch.compile gives, and every name of its weights begins with '_orig_mod.'. Give the "
            "model itself; in a loop of your own, model.compile() compiles and keeps the names."
        )
    return model


def optimizer_factory(plan: ResolvedPlan) -> OptimizerFactory:
    """The factory of the optimizer, changed by the pipeline's optimizer transforms in the plan's order."""
    factory: OptimizerFactory = plan.optimization.factory
    for transform in plan.transforms:
        factory = transform.optimizer(factory)
    return factory


def training_loss(plan: ResolvedPlan) -> Loss:
    """Cross entropy, changed by the pipeline's loss transforms in the plan's order."""
    loss: Loss = F.cross_entropy
    for transform in plan.transforms:
        if transform.kind == "loss":
            loss = transform.loss(loss)
    return loss


@contextmanager
def fork_rng(seed: int) -> Iterator[None]:
    """Seed torch's generators inside the block, and restore their states after it."""
    # CUDA's generators are left out where CUDA has not started: naming them would start it.
    here = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=here):
        torch.manual_seed(seed)
        yield
