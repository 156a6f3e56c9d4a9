"""A run's folder: its lock, the remains of earlier runs, and its recipe, plan and curves. If it is at an address, its
files are taken up when a run begins, and uploaded while it trains and when it ends."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ...common.errors import CheckpointError, DrivetrainError, RecipeError
from ...common.names import name_of
from ...common.signals import interrupts_held
from ...common.storage.files import acquire, release, write_file
from ...strategies.launching.group import is_main_process
from ..describe.plan import Plan
from ..describe.resolve import ResolvedPlan
from ..recipes.core_yaml import dump
from ..recipes.files import RECIPE, read_recipe
from ..recipes.flat import flattened
from ..recipes.script import FILES, modules_named, provide, recipe_and_files
from ..telemetry.history import HISTORY, Epoch, Evaluation, read_history
from ..telemetry.loggers import METRICS, PROMETHEUS, SERVICE_RUNS
from ..telemetry.observer import Observer
from ..telemetry.state import TrainState
from .checkpoints.directory import CheckpointDir
from .checkpoints.remote import CHECKPOINTS, RemoteRun, opened, shown

PLAN, CURVES = "plan.txt", "curves.png"
MODEL, UNLISTED = "model.safetensors", "model.unlisted.safetensors"
STACKS = "stacks.txt"
"""Stacks of ranks, with dates, if one of them hung, or at SIGQUIT. They stay when a new run begins: ranks may already
have written some."""
_PATIENCE = 3.0  # seconds that a failing run waits for an upload


@contextmanager
def lock_run_dir(folder: Path) -> Iterator[None]:
    """Lock the folder itself, so that no file is left, even after a crash; without effect if its file system cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # NFS can only lock what is open for writing
            if not acquire(descriptor, wait=False):
                raise DrivetrainError(
                    f"Another run is training in {shown(folder)}. Wait until it ends, or pass another folder: out=… "
                    "(--out)."
                )
        yield
    finally:
        release(descriptor)
        os.close(descriptor)


def check_recipe(folder: Path) -> None:
    """Refuse a folder whose recipe no run has written, e.g. the one that is trained: this run's would replace it."""
    if (folder / RECIPE).exists() and not any((folder / name).exists() for name in (PLAN, HISTORY, CHECKPOINTS)):
        raise DrivetrainError(
            f"{shown(folder / RECIPE)} was not written by a run, and that of this run would replace it. Move it, or "
            "pass another folder: out=… (--out)."
        )


def replaced(folder: Path, resume: str | Path | None) -> str:
    """Return a note on the earlier run that a new run replaces; "" if there is none, or it is resumed."""
    store = CheckpointDir(folder / "checkpoints")
    if resume == "auto" and store.run is not None:
        return ""
    if resume not in (None, "auto"):
        place = store.local(resume)
        if place.resolve() == folder.resolve() or store.holds(place):
            return ""
    hint = " (resume='auto', --resume, would continue it)" if store.checkpoints() else ""
    if not (folder / HISTORY).exists():
        return f"{shown(folder)} held an unfinished run; it is replaced{hint}." if hint else ""
    history, of = read_history(folder), ""
    if history is not None:
        of = f" of {len(history.epochs)} epoch{'s' * (len(history.epochs) != 1)}"
    return f"{shown(folder)} held a run{of}; it is replaced{hint}."


def clear_results(folder: Path) -> None:
    """Remove an earlier run's results, so that they are never next to another run's recipe."""
    for name in (MODEL, UNLISTED, HISTORY, CURVES, METRICS, PROMETHEUS, *SERVICE_RUNS.values()):
        _remove(folder / name)


def clear_gauges(folder: Path) -> None:
    _remove(folder / PROMETHEUS)


def descriptions(plan: ResolvedPlan) -> tuple[dict[str, str], str]:
    texts, note = {PLAN: f"{Plan(plan.steps).text(120)}\n"}, ""
    try:
        recipe, files = recipe_and_files(plan.spec)
    except RecipeError as error:  # e.g. a custom model
        note = (
            f"There is no {RECIPE}: {error} Without it, Pipeline.evaluate, init_from= and resume= still take the "
            f"folder of this run, and the model's load_state_dict its {MODEL}; only opening the result without the "
            "pipeline (load_run, drivetrain predict) needs it."
        )
    else:
        texts |= files | {RECIPE: dump(recipe)}
    return texts, note


def provide_code(place: str | Path, folder: Path, *, trust: bool) -> dict[str, Any]:
    """Make importable what the run's recipe names of its folder, and return the recipe."""
    recipe, _ = read_recipe(folder / RECIPE)
    if modules := modules_named(recipe):
        opened(place, *(f"{module}.py" for module in modules))
        provide(recipe, folder, place, trust=trust)
    return recipe


def hyperparameters(plan: ResolvedPlan, epochs: int) -> dict[str, Any]:
    """Return the values of the recipe by dotted key; of a pipeline that no recipe can express, those that are known."""
    try:
        values, _ = recipe_and_files(plan.spec)
    except RecipeError:
        data, optimization = plan.data, plan.optimization
        kind = optimization.optimizer
        name = kind if isinstance(kind, str) else name_of(kind) or repr(kind)
        values = {
            "model": plan.spec.model_name, "task": type(plan.task).__name__, "train": str(data.train),
            "val": None if data.val is None else str(data.val), "batch_size": data.batch_size,
            "image_size": data.image_size, "optimizer": {"name": name, **optimization.options},
            "transforms": [{"name": type(each).__name__, "value": repr(each)} for each in plan.transforms],
            "precision": plan.distribution.precision, "seed": plan.seed,
        }  # fmt: skip
    return flattened(values | {"epochs": epochs})


def with_trained(texts: dict[str, str], facts: Mapping[str, Any]) -> dict[str, str]:
    if RECIPE not in texts or "inputs" not in facts:
        return texts
    trained = {"task": facts.get("task"), **facts["inputs"]}
    # Lists in one line: of 1,000 classes, one per line would hide the recipe.
    text = dump({"trained": trained}, default_flow_style=None, width=110)
    return {**texts, RECIPE: texts[RECIPE] + text}


def write(folder: Path, texts: dict[str, str]) -> None:
    for name in {PLAN, RECIPE, *(each.name for each in folder.glob(FILES))} - set(texts):
        _remove(folder / name)
    for name, text in texts.items():
        write_file(folder / name, text)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DrivetrainError(
            f"{path} is in the way of this run's results and cannot be removed: {error.strerror or error}. Move it, or "
            "pass another folder: out=… (--out)."
        ) from None
    if (remote := RemoteRun.at(path.parent)) is not None:
        remote.files.remove([path.name])


def draw_curves(folder: Path) -> str:
    """Draw `curves.png` on rank 0, or return a note on why not. It never raises: the run is worth more than a plot."""
    if not is_main_process() or not os.path.lexists(folder / HISTORY):
        return ""
    try:
        history = read_history(folder)
        if history is None:
            return f"There is no {CURVES}: {folder / HISTORY} is not the history of a run."
        if not history.epochs:
            return ""
        from ..telemetry.curves import draw

        write_file(folder / CURVES, draw(history))
    except Exception as error:
        what = "" if isinstance(error, DrivetrainError) else f"{type(error).__name__}: "
        return f"There is no {CURVES}: {what}{error}"
    return ""


def taken_up(folder: Path | None, resume: str | Path | None) -> str:
    """On rank 0, make a run's local copy what is at its address; leave other folders. Return a note, or ""."""
    remote = RemoteRun.at(folder) if is_main_process() else None
    if folder is None or remote is None:
        return ""
    note = "" if resume is None else CheckpointDir(folder / CHECKPOINTS).catch_up()
    resumed = () if resume is None else (MODEL, UNLISTED, METRICS, *SERVICE_RUNS.values())
    remote.pull([HISTORY, *resumed])
    return note


@contextmanager
def published(folder: Path | None) -> Iterator[None]:
    """On rank 0, upload what the block leaves in a run's local copy, and remove the copy; after an error, keep it."""
    remote = RemoteRun.at(folder) if is_main_process() else None
    if folder is None or remote is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            remote.files.close()  # an error should not wait for a store that does not answer
        try:
            remote.push()
        except (DrivetrainError, OSError) as reason:
            error.add_note(f"Not all results could be uploaded; they are in {folder}. {reason}")
        raise
    try:
        remote.push()
    except (DrivetrainError, OSError) as error:
        saved = len(CheckpointDir(folder / CHECKPOINTS).checkpoints()) > 0
        remedy = " The same command with --resume (resume='auto') on this machine uploads them." * saved
        raise _kept(folder, error, remedy) from error
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def uploading_from(address: str) -> Iterator[Path]:
    """Yield a folder whose files are uploaded after the block. It is removed, unless that fails."""
    with ExitStack() as removing:
        folder = Path(tempfile.mkdtemp(prefix="drivetrain-"))
        removing.callback(shutil.rmtree, folder, ignore_errors=True)
        remote = RemoteRun(folder, address)
        remote.files.probe()
        try:
            yield folder
        finally:
            try:
                remote.push()
            except (DrivetrainError, OSError) as error:
                removing.pop_all()
                raise _kept(folder, error) from error


def _kept(folder: Path, error: Exception, remedy: str = "") -> CheckpointError:
    """Return the error of results that could not be uploaded, with the place where they are."""
    return CheckpointError(f"{str(error).rstrip('.')}. The results are kept in {folder}.{remedy}")


class PublishResults(Observer):
    """Upload the files of a run in a thread, after each evaluation, epoch and checkpoint, and once more what comes
    during an upload; a failure is left to the next time."""

    def __init__(self, remote: RemoteRun) -> None:
        self._remote = remote
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._due = self._uploads = False  # whether an upload is to begin; whether the thread looks for that

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:  # noqa: ARG002
        self.begin()

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:  # noqa: ARG002
        self.begin()

    def on_end(self, *, failed: bool) -> None:
        """Wait for the upload in progress; after a failure, only briefly. `published` uploads the rest."""
        if self._thread is not None:
            if failed:
                self._remote.files.close()
            self._thread.join(_PATIENCE if failed else None)

    def begin(self) -> None:
        with interrupts_held(), self._lock:
            self._due = True
            if not self._uploads:
                self._uploads = True
                self._thread = threading.Thread(target=self._push, name="drivetrain-upload", daemon=True)
                self._thread.start()

    def _push(self) -> None:
        while self._is_due():
            with suppress(Exception):  # e.g. of a file that was replaced, or of a full disk; the next time
                self._remote.push()

    def _is_due(self) -> bool:
        with self._lock:
            self._uploads, self._due = self._due, False
            return self._uploads
