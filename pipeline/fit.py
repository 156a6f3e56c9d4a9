"""Training from a pipeline: in this process, or on the ranks that the strategy wants."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from .. import strategies
from ..errors import DrivetrainError, PlanError, StrategyError
from ..strategies.group import under_torchrun
from ..transforms import NothingChanged
from .build import Built, build, build_model, seeded, source_file
from .builder import Pipeline
from .loop import evaluate, train_epoch
from .optimizers import Schedule
from .plan import sort_transforms
from .progress import Progress
from .provenance import provenance
from .result import Epoch, FitResult, History, TrainingInterrupted, save_weights
from .rules import check_epochs
from .stages import is_whole


@dataclass
class Outcome:
    """What a rank sends back: weights on the CPU by plain names (after the last whole epoch) and history."""

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    history: History = field(default_factory=History)


def fit(pipeline: Pipeline, *, epochs: int | None, out: str | Path | None, progress: bool) -> FitResult:
    """See `Pipeline.fit`."""
    epochs = pipeline.epochs if epochs is None else epochs
    if epochs is None:
        raise PlanError("The pipeline does not say how long to train; give fit(epochs=…).")
    if not is_whole(epochs, 1):
        raise PlanError(f"epochs={epochs!r} must be an integer from 1 on.")
    pipeline.plan()
    check_epochs(pipeline, epochs)
    pipeline = with_files(pipeline, progress)
    folder = None if out is None else make_folder(Path(out))
    try:
        outcome = _run(pipeline, epochs, folder, progress)
    except KeyboardInterrupt as interrupt:
        interrupted = TrainingInterrupted(None, _finish(pipeline, getattr(interrupt, "outcome", None)))
    else:
        result = _finish(pipeline, outcome)
        assert result is not None
        return result
    # Raised here, it does not hold the frames of the loop, and with them the loaders' processes.
    raise interrupted


def _run(pipeline: Pipeline, epochs: int, folder: Path | None, progress: bool) -> Outcome:
    """Trains here or on ranks; an error of Drivetrain on a rank is raised as if it were here."""
    how = pipeline.distribution
    devices, strategy = how.devices, strategies.get(how.strategy, **how.options)
    if devices == 1 and not getattr(strategy, "needs_group", False) and not _in_ranks():
        return train_rank(pipeline, epochs, folder, progress)
    try:
        return strategies.launch(train_rank, pipeline, epochs, folder, progress, devices=devices)[0]
    except StrategyError as error:
        if isinstance(error.__cause__, DrivetrainError):
            raise error.__cause__ from None
        raise


def _in_ranks() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def with_files(pipeline: Pipeline, progress: bool) -> Pipeline:
    """The pipeline with named data sets replaced by their files, fetched and converted now if need be."""
    data = pipeline.data
    assert data is not None  # the plan has checked
    train = str(source_file(data, data.train, progress=progress))
    val = None if data.val is None else str(source_file(data, data.val, progress=progress))
    return pipeline._with(data=dataclasses.replace(data, train=train, val=val))


def make_folder(folder: Path) -> Path:
    """The folder, made if it is not there, with its parents; it is sure that files can be written there.

    Raises:
        DrivetrainError: if not, before anything was spent on what would be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise DrivetrainError(f"{folder} cannot be a folder: it, or a part of it, is a file.") from None
    except OSError as error:
        raise DrivetrainError(f"Nothing can be written to the folder {folder}: {error.strerror}.") from None
    return folder


def train_rank(pipeline: Pipeline, epochs: int, folder: Path | None, progress: bool) -> Outcome:
    """Trains on this rank; rank 0 shows progress, saves after each epoch, and returns the weights."""
    outcome = Outcome()
    try:
        with seeded(pipeline.seed), build(pipeline) as built:
            _train(pipeline, built, epochs, folder, progress, outcome)
    except KeyboardInterrupt:
        raise TrainingInterrupted(outcome) from None
    return outcome


def _train(
    pipeline: Pipeline, built: Built, epochs: int, folder: Path | None, progress: bool, outcome: Outcome
) -> None:
    engine, methods, lead = built.engine, built.methods, built.engine.rank == 0
    schedule = Schedule(pipeline.optimization, engine.optimizer, epochs * len(built.train))
    methods.begin(engine, epochs * len(built.train))
    batch_size, image_size = built.train.settings.batch_size, built.train.settings.image_size
    outcome.history.facts = {"recipe": pipeline.recipe, "seed": pipeline.seed, "provenance": provenance()}
    for number in range(1, epochs + 1):
        start = perf_counter()
        methods.begin_epoch(engine, built.train, image_size)
        with Progress(number, epochs, len(built.train) * batch_size, show=progress and lead) as bar:
            stats = train_epoch(engine, built.train, built.loss, schedule.advance, bar.update, methods)
            val_loss, accuracy, state = _evaluate(built, export=lead or under_torchrun())
            if not math.isfinite(stats.loss) or not math.isfinite(val_loss or 0.0):
                raise DrivetrainError(
                    f"In epoch {number} the loss is {stats.loss}, in validation {val_loss}. Lower the learning "
                    f"rate ({pipeline.optimization.describe()}), add a warm-up, or set clip_norm."
                )
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
            _keep(outcome, epoch, state, folder if lead else None)
            bar.line(str(epoch))
    methods.finish()


def _evaluate(built: Built, export: bool) -> tuple[float | None, float | None, dict[str, torch.Tensor]]:
    """Validation loss and accuracy, and the weights that have them, by plain names."""
    engine, methods = built.engine, built.methods
    engine.sync_buffers()
    with methods.evaluating():
        engine.sync_buffers()  # averages of buffers (EMA, SWA) are each rank's own, too
        loss, accuracy = evaluate(engine, built.val, methods) if built.val else (None, None)
        state = engine.export_state()  # on every rank, which all hold a part of sharded weights
        return loss, accuracy, state if export else {}


def _keep(outcome: Outcome, epoch: Epoch, state: dict[str, torch.Tensor], folder: Path | None) -> None:
    """Adds a finished epoch; weights and history are of the same one, in memory and on disk."""
    history = History([*outcome.history.epochs, epoch], outcome.history.facts)
    with interrupts_held():
        if folder is not None:
            save_weights(state, folder / "model.safetensors")
            history.save(folder / "history.json")
        outcome.state, outcome.history = state, history


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C inside the block takes effect at its end. Only the main thread is ever interrupted."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _finish(pipeline: Pipeline, outcome: Outcome | None) -> FitResult | None:
    """The trained model, built anew in this process from the weights that came back."""
    if outcome is None or not outcome.history.epochs:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingChanged)  # the rank has warned already
        model, reports = build_model(pipeline)
    if outcome.state:
        model.load_state_dict(outcome.state)
    ordered = sort_transforms(pipeline.transforms)
    return FitResult(model.eval(), outcome.history, reports, pipeline.plan(), ordered)
