"""Train a pipeline in this process, or on the ranks that the strategy requires."""

from __future__ import annotations

import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

from ... import strategies
from ...errors import DrivetrainError, PlanError, StrategyError
from ...strategies.launching.group import is_main_process, is_rank, under_torchrun
from ...transforms import NothingChanged
from ..callbacks.callback import RunOptions
from ..checkpoints.state import global_randomness_kept
from ..spec.cuda_settings import cuda_settings
from ..spec.pipeline_spec import PipelineSpec
from ..spec.plan import Plan
from ..spec.resolve import ResolvedPlan, resolve
from ..telemetry.loggers import check as check_loggers
from ..telemetry.progress import echo, in_cell
from ..training.build import build, build_model, fork_rng, source_file
from .artifacts import FitJob, RankResult
from .callbacks import check_callbacks
from .config import FitConfig
from .folder import descriptions, draw_curves, lock_run_dir, replaced
from .result import FitResult, TrainingInterrupted
from .run import Run


def fit(spec: PipelineSpec, config: FitConfig, *, show_plan: bool = False) -> FitResult:
    """Train; see `Pipeline.fit`. With `show_plan`, print the plan once everything is checked and built."""
    epochs = spec.epochs if config.epochs is None else config.epochs
    if epochs is None:
        raise PlanError("Number of epochs not set. Pass fit(epochs=…).")
    plan = resolve(spec.replace(epochs=epochs))
    folder, progress = config.folder, config.progress
    loggers = check_loggers(config.logger, config.log_every, folder, pickled=not _is_rank(plan))
    check_callbacks(
        config.callbacks, RunOptions(_metric_names(plan), bool(loggers)), pickled=not _is_rank(plan)
    )
    _check_evaluation(plan, config)
    if folder is not None:  # last, so that invalid options do not create a folder
        make_folder(folder)
    texts, note = descriptions(plan) if folder is not None else ({}, "")
    job = FitJob(
        **vars(config) | {"epochs": epochs, "logger": loggers}, texts=texts, in_cell=in_cell(),
        plan=f"{Plan(plan.steps)!r}" if show_plan else "", each_rank=is_rank(),
    )  # fmt: skip
    with lock_run_dir(folder) if folder is not None and is_main_process() else nullcontext():
        plan = resolve_data(plan, progress)
        for text in (note, "" if folder is None else replaced(folder, job.resume)):
            _echo(text, progress)
        return _fit(plan, job)


def _metric_names(plan: ResolvedPlan) -> tuple[str, ...]:
    """Return the names of the metrics of an evaluation; none without validation data."""
    return () if plan.data.val is None else ("val_loss", "accuracy")


def _check_evaluation(plan: ResolvedPlan, config: FitConfig) -> None:
    """Raise PlanError if evaluations are set without validation data."""
    for name in ("eval_every", "eval_every_steps"):
        if name in config.changed() and plan.data.val is None:
            raise PlanError(
                f"fit({name}={getattr(config, name)}) needs validation data. Pass a second file to load() (--val), or "
                "leave it out."
            )


def _fit(plan: ResolvedPlan, job: FitJob) -> FitResult:
    """Train, and draw the curves."""
    folder, progress = job.folder, job.progress
    interrupted: TrainingInterrupted | None = None
    try:
        outcome = _run(plan, job)
    except KeyboardInterrupt as interrupt:
        outcome = getattr(interrupt, "outcome", None) or RankResult()
        result = _finish(plan, outcome) if outcome.state else None
        interrupted = TrainingInterrupted(None, result, len(outcome.history.epochs))
    else:
        if not _is_rank(plan):  # the ranks had copies
            for one in job.callbacks:
                if state := outcome.callbacks.get(type(one).__name__):
                    one.load_state_dict(state)
        return _finish(plan, outcome)
    finally:
        if folder is not None and (interrupted is None or "matplotlib.figure" in sys.modules):
            _echo(draw_curves(folder), progress)  # after Ctrl-C, only if it takes no time
    # Raised here, so that it does not keep the frames of the loop alive, and with them the loaders' processes.
    raise interrupted


def _echo(note: str, progress: bool) -> None:
    if note and progress and is_main_process():
        echo(note)


def _run(plan: ResolvedPlan, job: FitJob) -> RankResult:
    """Train here or on ranks. Raise a rank's Drivetrain errors as if they occurred here."""
    if _is_alone(plan):
        return train_rank(plan, job)
    try:
        how = plan.distribution
        return strategies.launch(train_rank, plan, job, devices=how.devices, device=how.device)[0]
    except StrategyError as error:
        if isinstance(error.__cause__, DrivetrainError):
            raise error.__cause__ from None
        raise


def _is_alone(plan: ResolvedPlan) -> bool:
    """Return whether only this process trains."""
    return not plan.needs_ranks and not under_torchrun()


def _is_rank(plan: ResolvedPlan) -> bool:
    """Return whether this process trains itself, alone or as a rank, instead of launching ranks."""
    return _is_alone(plan) or is_rank()


def resolve_data(plan: ResolvedPlan, progress: bool) -> ResolvedPlan:
    """Return the plan with named data sets replaced by their files, downloaded and converted if necessary."""
    data = plan.data
    train = str(source_file(data, data.train, progress=progress))
    val = None if data.val is None else str(source_file(data, data.val, progress=progress))
    return plan.with_sources(train, val)


def make_folder(folder: Path) -> Path:
    """Create the folder and its parents if missing, check that it is writable, and return it.

    Raises:
        DrivetrainError: if it cannot be created or written, before time is spent on its contents.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise DrivetrainError(f"{folder} cannot be a folder: it or one of its parents is a file.") from None
    except OSError as error:
        raise DrivetrainError(f"The folder {folder} is not writable: {error.strerror}.") from None
    return folder


def train_rank(plan: ResolvedPlan, job: FitJob) -> RankResult:
    """Train on this rank; rank 0 shows progress, saves after each epoch, and returns the weights."""
    outcome = RankResult()
    try:
        with (
            fork_rng(plan.seed),
            global_randomness_kept(),
            cuda_settings(plan.distribution, plan.transforms),
            build(plan) as built,
        ):
            if job.plan and is_main_process():
                print(job.plan, flush=True)
            Run(plan, built, job, outcome).train()
    except KeyboardInterrupt:
        raise TrainingInterrupted(outcome) from None
    return outcome


def _finish(plan: ResolvedPlan, outcome: RankResult) -> FitResult:
    """Return the trained model, rebuilt in this process from the ranks' weights, with history and reports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingChanged)  # the rank has warned already
        model, reports = build_model(plan.spec, plan.transforms)
    if outcome.state:
        model.load_state_dict(outcome.state)
    return FitResult(model.eval(), outcome.history, reports, Plan(plan.steps), plan.transforms)
