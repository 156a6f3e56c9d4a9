"""Training from a pipeline: in this process, or on the ranks that the strategy wants."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from pathlib import Path

from .. import strategies
from ..errors import DrivetrainError, PlanError, StrategyError
from ..transforms import NothingChanged
from .build import build, build_model, seeded, source_file
from .builder import Pipeline
from .nonfinite import OnNonFinite, check_choice
from .plan import sort_transforms
from .result import FitResult, TrainingInterrupted
from .resume import global_randomness_kept
from .retention import Checkpoints
from .rules import check_epochs
from .run import Job, Outcome, Run
from .stages import is_whole


def fit(
    pipeline: Pipeline,
    *,
    epochs: int | None,
    out: str | Path | None,
    progress: bool,
    resume: str | Path | None = None,
    checkpoints: Checkpoints | None = None,
    on_nonfinite: OnNonFinite = "raise",
) -> FitResult:
    """See `Pipeline.fit`."""
    epochs = pipeline.epochs if epochs is None else epochs
    if epochs is None:
        raise PlanError("The pipeline does not say how long to train; give fit(epochs=…).")
    if not is_whole(epochs, 1):
        raise PlanError(f"epochs={epochs!r} must be an integer from 1 on.")
    if resume == "auto" and out is None:
        raise PlanError(
            "resume='auto' looks for checkpoints in out; give fit(out=…), or the checkpoint's path."
        )
    check_choice(on_nonfinite)
    pipeline.plan()
    check_epochs(pipeline, epochs)
    pipeline = with_files(pipeline, progress)
    folder = None if out is None else make_folder(Path(out))
    job = Job(epochs, folder, progress, resume, checkpoints, on_nonfinite)
    try:
        outcome = _run(pipeline, job)
    except KeyboardInterrupt as interrupt:
        interrupted = TrainingInterrupted(None, _finish(pipeline, getattr(interrupt, "outcome", None)))
    else:
        result = _finish(pipeline, outcome)
        assert result is not None
        return result
    # Raised here, it does not hold the frames of the loop, and with them the loaders' processes.
    raise interrupted


def _run(pipeline: Pipeline, job: Job) -> Outcome:
    """Trains here or on ranks; an error of Drivetrain on a rank is raised as if it were here."""
    how = pipeline.distribution
    devices, strategy = how.devices, strategies.get(how.strategy, **how.options)
    if devices == 1 and not getattr(strategy, "needs_group", False) and not _in_ranks():
        return train_rank(pipeline, job)
    try:
        return strategies.launch(train_rank, pipeline, job, devices=devices)[0]
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


def train_rank(pipeline: Pipeline, job: Job) -> Outcome:
    """Trains on this rank; rank 0 shows progress, saves after each epoch, and returns the weights."""
    outcome = Outcome()
    try:
        with seeded(pipeline.seed), global_randomness_kept(), build(pipeline) as built:
            Run(pipeline, built, job, outcome).train()
    except KeyboardInterrupt:
        raise TrainingInterrupted(outcome) from None
    return outcome


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
