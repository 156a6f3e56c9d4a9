"""From a pipeline to the things that train: loaders, model, engine, loss; in the plan's order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .. import strategies
from ..errors import PlanError
from ..loaders import FFCVLoader, TorchLoader, resolve
from ..loaders.epochs import EpochLoader
from ..strategies import Engine
from ..transforms import Loss, Report
from .builder import Data, Pipeline
from .plan import sort_transforms


@dataclass
class Built:
    """What one process trains with. Close it, or use it as a context manager, to end the loaders' threads.

    Attributes:
        engine: the wrapped model and its optimizer; see `strategies.Engine`.
        train, val: loaders of `(images (B, 3, H, W), labels (B,))`, B being this rank's share.
        loss: to train with; evaluation uses plain cross entropy.
        reports: what each transform changed.
    """

    engine: Engine
    train: EpochLoader
    val: EpochLoader | None
    loss: Loss
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


def build(pipeline: Pipeline, *, indices: Any = None) -> Built:
    """Builds everything for this process, which is a rank if a process group runs.

    Args:
        indices: train on these samples only (the ledger measures on a part); None: all.

    Raises:
        PlanError, DataError, StrategyError: before any training.
    """
    pipeline.plan()
    data = pipeline.data
    assert data is not None  # the plan has checked
    train = _loader(pipeline, data, data.train, train=True, indices=indices)
    val = None if data.val is None else _loader(pipeline, data, data.val, train=False)
    model, reports = build_model(pipeline)
    check_classes(model, train, val, data)
    how = pipeline.distribution
    engine = strategies.get(how.strategy, **how.options).prepare(
        model,
        pipeline.optimization.factory,
        precision=how.precision,
        clip_norm=how.clip_norm,
        accumulate=how.accumulate,
    )
    for loader in (train, val):
        if loader is not None:
            loader.device = engine.device
    return Built(engine, train, val, training_loss(pipeline), reports)


def _loader(pipeline: Pipeline, data: Data, source: str, *, train: bool, indices: Any = None) -> EpochLoader:
    in_group = dist.is_available() and dist.is_initialized()
    kind: Any = FFCVLoader if data.loader == "ffcv" else TorchLoader
    loader: EpochLoader = kind(
        resolve(source),
        batch_size=data.batch_size,
        image_size=data.image_size,
        train=train,
        seed=pipeline.seed,
        workers=data.workers,
        indices=indices,
        drop_last=train,  # a partial batch would weigh its samples more, and differently on each rank
        rank=dist.get_rank() if in_group else 0,
        world_size=dist.get_world_size() if in_group else 1,
        **data.settings,
    )
    return loader


def build_model(pipeline: Pipeline) -> tuple[nn.Module, tuple[Report, ...]]:
    """The model after surgery, on the CPU, and what each surgery changed. The global RNG is put back."""
    with seeded(pipeline.seed):
        if isinstance(pipeline.model, nn.Module):
            model = copy.deepcopy(pipeline.model)
        else:
            model = pipeline.model(**pipeline.model_options)
        if not isinstance(model, nn.Module):
            raise PlanError(f"The factory {pipeline.model_name} gave a {type(model).__name__}, not a module.")
        ordered = sort_transforms(pipeline.transforms)
        reports = tuple(transform.apply(model) for transform in ordered if transform.kind != "loss")
    return model, reports


def training_loss(pipeline: Pipeline) -> Loss:
    """Cross entropy, changed by the pipeline's loss transforms in the plan's order."""
    loss: Loss = F.cross_entropy
    for transform in sort_transforms(pipeline.transforms):
        if transform.kind == "loss":
            loss = transform.loss(loss)
    return loss


def check_classes(model: nn.Module, train: EpochLoader, val: EpochLoader | None, data: Data) -> None:
    """Compares the model's output with the number of classes of the data, by one forward of two images.

    Raises:
        PlanError: if they differ, or the model cannot take the images.
    """
    classes, side = train.num_classes, data.image_size
    if val is not None and val.num_classes != classes:
        raise PlanError(
            f"{data.train} has {classes} classes, {data.val} has {val.num_classes}; they must agree."
        )
    training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(torch.zeros(2, 3, side, side))
    except (RuntimeError, ValueError, TypeError) as error:
        raise PlanError(f"The model cannot take images of {side} × {side} pixels: {error}") from error
    finally:
        model.train(training)
    found = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if found != (2, classes):
        raise PlanError(
            f"The model gives {found} for 2 images, and {data.train} has {classes} classes. Build it with "
            f"num_classes={classes}, so that it gives (2, {classes})."
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's random numbers from `seed` on inside the block, and as before after it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
