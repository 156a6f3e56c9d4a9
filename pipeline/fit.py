"""Training from a pipeline: in this process, or on the ranks that the strategy wants."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from .. import strategies
from ..errors import DrivetrainError, PlanError
from ..loaders import resolve
from ..transforms import NothingChanged, Report
from .build import Built, build, build_model, seeded
from .builder import Pipeline
from .loop import evaluate, train_epoch
from .optimizers import Schedule
from .progress import Progress
from .provenance import provenance
from .result import Epoch, FitResult, History, TrainingInterrupted, save_weights


@dataclass
class Outcome:
    """What a rank sends back: weights on the CPU by plain names (after the last whole epoch) and history."""

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    history: History = field(default_factory=History)
    reports: tuple[Report, ...] = ()


def fit(pipeline: Pipeline, *, epochs: int | None, out: str | Path | None, progress: bool) -> FitResult:
    """See `Pipeline.fit`."""
    epochs = pipeline.epochs if epochs is None else epochs
    if epochs is None or epochs < 1:
        raise PlanError(f"epochs={epochs} must be at least 1; give fit(epochs=…).")
    pipeline.plan()
    pipeline = with_files(pipeline, progress)
    folder = None if out is None else make_folder(Path(out))
    how = pipeline.distribution
    try:
        if how.devices == 1 and not _in_ranks():
            outcome = train_rank(pipeline, epochs, folder, progress)
        else:
            outcome = strategies.launch(train_rank, pipeline, epochs, folder, progress, devices=how.devices)[
                0
            ]
    except TrainingInterrupted as interrupt:
        raise TrainingInterrupted(None, _finish(pipeline, interrupt.outcome)) from None
    result = _finish(pipeline, outcome)
    assert result is not None
    return result


def _in_ranks() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def with_files(pipeline: Pipeline, progress: bool) -> Pipeline:
    """The pipeline with named data sets replaced by their files, fetched and converted now if need be."""
    data = pipeline.data
    assert data is not None  # the plan has checked
    if data.loader == "torch" and Path(data.train).is_dir():
        return pipeline
    train = str(resolve(data.train, progress=progress))
    val = None if data.val is None else str(resolve(data.val, progress=progress))
    return pipeline._with(data=dataclasses.replace(data, train=train, val=val))


def make_folder(folder: Path) -> Path:
    """The folder, made if it is not there, with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DrivetrainError(f"The folder {folder} cannot be made: {error.strerror}.") from None
    return folder


def train_rank(pipeline: Pipeline, epochs: int, folder: Path | None, progress: bool) -> Outcome:
    """Trains on this rank; rank 0 shows progress, saves after each epoch, and returns the weights."""
    outcome = Outcome()
    try:
        with seeded(pipeline.seed), build(pipeline) as built:
            outcome.reports = built.reports
            _train(pipeline, built, epochs, folder, progress, outcome)
    except KeyboardInterrupt:
        raise TrainingInterrupted(outcome) from None
    return outcome


def _train(
    pipeline: Pipeline, built: Built, epochs: int, folder: Path | None, progress: bool, outcome: Outcome
) -> None:
    engine, lead = built.engine, built.engine.rank == 0
    schedule = Schedule(pipeline.optimization, engine.optimizer, epochs * len(built.train))
    batch_size = built.train.settings.batch_size
    outcome.history.facts = {"recipe": pipeline.recipe, "seed": pipeline.seed, "provenance": provenance()}
    for number in range(1, epochs + 1):
        start = perf_counter()
        with Progress(number, epochs, len(built.train) * batch_size, show=progress and lead) as bar:
            stats = train_epoch(engine, built.train, built.loss, schedule.advance, bar.update)
            if not math.isfinite(stats.loss):
                raise DrivetrainError(
                    f"The loss of epoch {number} is {stats.loss}. Lower the learning rate "
                    f"({pipeline.optimization.describe()}), add a warm-up, or set clip_norm."
                )
            engine.sync_buffers()
            val_loss, accuracy = evaluate(engine, built.val) if built.val else (None, None)
            epoch = Epoch(
                epoch=number,
                loss=stats.loss,
                val_loss=val_loss,
                accuracy=accuracy,
                images_per_s=stats.images / stats.seconds,
                waiting=stats.waited / stats.seconds,
                seconds=perf_counter() - start,
                lr=schedule.lr,
            )
            bar.line(str(epoch))
        if lead:
            state = engine.export_state()
            if folder is not None:
                save_weights(state, folder / "model.safetensors")
                History([*outcome.history.epochs, epoch], outcome.history.facts).save(folder / "history.json")
            outcome.state = state
        outcome.history.epochs.append(epoch)


def _finish(pipeline: Pipeline, outcome: Outcome | None) -> FitResult | None:
    """The trained model, built anew in this process from the weights that came back."""
    if outcome is None or not outcome.history.epochs:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingChanged)  # the rank has warned already
        model, reports = build_model(pipeline)
    if outcome.state:
        model.load_state_dict(outcome.state)
    return FitResult(model.eval(), outcome.history, reports, pipeline.plan())
