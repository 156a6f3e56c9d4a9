"""Train a pipeline in this process, or on the ranks that the strategy requires."""

import sys
from contextlib import nullcontext
from pathlib import Path

from ...common.errors import PlanError, StrategyError
from ...common.storage.addresses import is_address
from ...common.storage.files import make_folder
from ...common.terminal import in_cell
from ...strategies.launching.group import is_main_process, is_rank
from ...strategies.launching.meeting import LostRankError, failures_posted
from ..describe.pipeline_spec import PipelineSpec
from ..describe.plan import Plan
from ..describe.resolve import ResolvedPlan, resolve
from ..describe.rules import check_split_seed
from ..telemetry.loggers import check as check_loggers
from ..telemetry.progress import echo
from ..training.agreement import Requests
from ..training.build import plain_torch, rebuild_model, resolve_data
from .artifacts import FitJob, RankResult
from .callbacks import check_callbacks, check_measured, run_options
from .checkpoints.directory import CheckpointDir, kept_precision
from .checkpoints.remote import RemoteRun, shown
from .checkpoints.writer import UPLOAD_PATIENCE
from .config import FitConfig, recorded
from .folder import STACKS, check_recipe, descriptions, draw_curves, lock_run_dir, published, replaced, taken_up
from .initial import InitialWeights, check_source
from .preflight import preflight
from .ranks import built_here, on_ranks, trains_here
from .result import FitResult, TrainingInterrupted, TrainingPreempted
from .run import Run


@plain_torch()
@failures_posted()
def fit(spec: PipelineSpec, config: FitConfig, *, show_plan: bool = False, each_rank: bool = True) -> FitResult:
    """Train; see `Pipeline.fit`. With `show_plan`, print the plan once everything is checked and built. Without
    `each_rank`, of ranks that have called this, only rank 0 needs the trained weights."""
    spec, plan, loggers = checked(spec, config)
    folder, progress = config.folder, config.progress
    if folder is not None:  # only now, so that invalid options do not create a folder
        folder = folder.absolute()  # a callback may change the working directory
        make_folder(folder)
        if is_address(config.out):
            RemoteRun.create(folder, str(config.out))
    if spec.distributed.precision == "auto":
        assert not isinstance(config.resume, bool)  # they are "auto" and None by now
        plan = resolve(spec, precision=kept_precision(config.resume, folder))
    texts, note = descriptions(plan) if folder is not None else ({}, "")
    where = config.out if is_address(config.out) else folder
    job = FitJob(
        **vars(config) | {"epochs": spec.epochs, "logger": loggers, "out": where}, texts=texts, in_cell=in_cell(),
        plan=f"{Plan(plan.steps)!r}" if show_plan else "", each_rank=each_rank and is_rank(),
    )  # fmt: skip
    with lock_run_dir(folder) if folder is not None and is_main_process() else nullcontext():
        plan = resolve_data(plan, progress, names=True)
        uploaded = taken_up(folder, job.resume)
        for text in (note, uploaded, "" if folder is None else replaced(folder, job.resume)):
            _echo(text, progress)
        with published(folder):
            result = _fit(plan, job)
    for one in config.callbacks:
        one.on_return()
    return result


def checked(spec: PipelineSpec, config: FitConfig) -> tuple[PipelineSpec, ResolvedPlan, tuple[object, ...]]:
    """Raise for what a training with these options would raise for before it begins. Return the pipeline with them, its
    plan and its loggers."""
    epochs = spec.epochs if config.epochs is None else config.epochs
    if epochs is None:
        raise PlanError("Number of epochs not set. Pass fit(epochs=…), or set epochs=… in the recipe or the command.")
    spec = spec.replace(epochs=epochs, fit_options=recorded(config))
    plan, folder = resolve(spec), config.folder
    pickled = not trains_here(plan)
    loggers = check_loggers(config.logger, folder, pickled=pickled)
    if config.callbacks:
        check_callbacks(config.callbacks, run_options(plan, bool(loggers)), pickled=pickled)
    _check_needs(plan, config)
    if config.init_from is not None and config.resume is None:  # else it may be needed no longer
        check_source(config.init_from)
    if folder is not None and not is_address(config.out):
        check_recipe(folder)
    return spec, plan, loggers


def _check_needs(plan: ResolvedPlan, config: FitConfig) -> None:
    if config.out is None and config.checkpoints is not None and "checkpoints" in config.changed():
        raise PlanError(f"checkpoints={config.checkpoints} are saved in the folder of the run. Pass fit(out=…), too.")
    for name in ("eval_every", "eval_every_steps"):
        if name in config.changed() and plan.data.val is None:
            raise PlanError(
                f"fit({name}={getattr(config, name)}) needs validation data. Pass a second file to load() (--val), or "
                "leave it out."
            )
    check_split_seed(plan.data)


def _fit(plan: ResolvedPlan, job: FitJob) -> FitResult:
    folder, progress = job.folder, job.progress
    interrupted: TrainingInterrupted | None = None
    try:
        patience = UPLOAD_PATIENCE if is_address(job.out) else None
        outcome = on_ranks(
            plan, train_rank, job, forward=job.stop_on, patience=patience, saves=job.saves,
            stacks=None if folder is None else folder / STACKS,
        )  # fmt: skip
    except KeyboardInterrupt as interrupt:
        outcome = getattr(interrupt, "outcome", None) or RankResult()
        result = _finish(plan, outcome, job.out) if outcome.state else None
        saved = getattr(interrupt, "checkpoint", None)
        interrupted = TrainingInterrupted(None, result, len(outcome.history.epochs), saved)
    except LostRankError as error:
        if error.signal:
            message = f"Stopped by {error.signal} while not every rank could save. {_how_to_go_on(job)}"
            _echo(message, progress)
            raise TrainingPreempted(error.signal, None, message) from None
        raise StrategyError(f"{error}\n{_how_to_go_on(job)}") from error.__cause__
    else:
        if not trains_here(plan):  # the ranks had copies
            for one in job.callbacks:
                if state := outcome.callbacks.get(type(one).__name__):
                    one.load_state_dict(state)
        return _finish(plan, outcome, job.out)
    finally:
        if folder is not None and (interrupted is None or "matplotlib.backends.backend_agg" in sys.modules):
            _echo(draw_curves(folder), progress)  # after Ctrl-C, only if it takes no time
    # Raised here, so that it does not keep the frames of the loop alive, and with them the loaders' processes.
    raise interrupted


def _how_to_go_on(job: FitJob) -> str:
    store = None if job.folder is None else CheckpointDir(job.folder / "checkpoints")
    last = None if store is None or store.run is None else store.last(store.run)
    if last is None:
        return "There is no complete checkpoint; start the training again."
    return f"The last complete checkpoint is {shown(last)}. Run {job.command_to_continue} to continue."


def _echo(note: str, progress: bool) -> None:
    if note and progress and is_main_process():
        echo(note)


def train_rank(plan: ResolvedPlan, job: FitJob) -> RankResult:
    outcome = RankResult()
    minutes = None if job.checkpoints is None or not is_main_process() else job.checkpoints.every_minutes
    requests = Requests(minutes)
    begins = preflight(plan, job)
    initial = InitialWeights(job.init_from, plan.transforms) if begins and job.init_from is not None else None
    try:
        resumes = job.resume is not None
        with requests.noted(job.stop_on), built_here(plan, initial, resumes=resumes) as built:
            if job.callbacks:
                check_measured(job.callbacks, run_options(plan, bool(job.logger)), built.metrics)
            if job.plan and is_main_process():
                print(job.plan, flush=True)
            run = Run(plan, built, job, outcome, None if initial is None else initial.matched, requests)
            shows = job.progress and is_main_process()
            try:
                with requests.interruptible(reports=shows) if job.saves else nullcontext():
                    run.train()
            finally:
                vars(run).clear()  # its observers refer to it: model and optimizer would stay for a while
    except KeyboardInterrupt as interrupt:
        raise TrainingInterrupted(outcome, checkpoint=getattr(interrupt, "checkpoint", None)) from None
    return outcome


def _finish(plan: ResolvedPlan, outcome: RankResult, folder: str | Path | None) -> FitResult:
    model, reports = rebuild_model(plan.spec, plan.transforms, outcome.state)
    return FitResult(model.eval(), outcome.history, reports, Plan(plan.steps), plan.transforms, plan.spec, folder)
