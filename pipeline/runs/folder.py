"""A run's folder: whose it is, what an earlier run has left in it, and what goes there beside weights and
checkpoints: how the run was asked for, its plan, its curves."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from ...errors import DrivetrainError, RecipeError
from ...files import atomic_file
from ...strategies.launching.group import is_main_process
from ..checkpoints.directory import CheckpointDir
from ..recipes.export import to_recipe
from ..spec.plan import Plan
from ..spec.resolve import ResolvedPlan
from ..telemetry.history import History
from ..telemetry.loggers import METRICS

PLAN, RECIPE, HISTORY, CURVES = "plan.txt", "recipe.yaml", "history.json", "curves.png"
MODEL = "model.safetensors"


@contextmanager
def lock_run_dir(folder: Path) -> Iterator[None]:
    """Within the block no other run begins in the folder. The system ends the claim with the process.

    The lock is on the folder itself, so that it leaves no file. A file system without such locks has none.

    Raises:
        DrivetrainError: if another run is in the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DrivetrainError(
                f"Another run is training in {folder}. Wait for its end, or give this one a folder of its own: "
                f"out=… (--out)."
            ) from None
        except OSError:  # NFS refuses to lock what cannot be opened for writing
            pass
        yield
    finally:
        with suppress(OSError):  # said, because a process that was forked meanwhile would keep the lock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def replaced(folder: Path, resume: str | Path | None) -> str:
    """A note on the earlier run that a new one replaces, or "" if there is none, or it is resumed."""
    store = CheckpointDir(folder / "checkpoints")
    if resume == "auto" and store.run is not None:
        return ""
    if resume not in (None, "auto") and (
        Path(resume).resolve() == folder.resolve() or store.holds(Path(resume))
    ):
        return ""
    goes_on = " (resume='auto', --resume, goes on from it)" if store.checkpoints() else ""
    try:
        epochs = len(json.loads((folder / HISTORY).read_bytes())["epochs"])
    except FileNotFoundError:
        return f"{folder} held an unfinished run; it is replaced{goes_on}." if goes_on else ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{folder} held a run; it is replaced{goes_on}."
    return f"{folder} held a run of {epochs} epoch{'s' * (epochs != 1)}; it is replaced{goes_on}."


def clear_results(folder: Path) -> None:
    """Removes what an earlier run has reached, so that it never stands beside the recipe of another."""
    for name in (MODEL, HISTORY, CURVES, METRICS):
        _remove(folder / name)


def descriptions(plan: ResolvedPlan) -> tuple[dict[str, str], str]:
    """The text of `plan.txt` and `recipe.yaml` by their names, and a note on what cannot be written, or ""."""
    texts, note = {PLAN: f"{Plan(plan.steps)!r}\n"}, ""
    try:
        recipe = to_recipe(plan.spec)
    except RecipeError as error:  # a model of one's own, and the like
        note = f"There is no {RECIPE}: {error}"
    else:
        texts[RECIPE] = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    return texts, note


def write(folder: Path, texts: dict[str, str]) -> None:
    """Writes each text under its name. What an earlier run left under these names, and has not, goes."""
    for name in {PLAN, RECIPE} - set(texts):
        _remove(folder / name)
    for name, text in texts.items():
        with atomic_file(folder / name) as file:
            file.write(text.encode())


def _remove(path: Path) -> None:
    """Removes a file that an earlier run has left, if it is there.

    Raises:
        DrivetrainError: if it cannot be removed, such as a folder of that name.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DrivetrainError(
            f"{path} is in the way of the results of this run, and cannot be removed: {error.strerror or error}. Move "
            f"it, or give another folder: out=… (--out)."
        ) from None


def read_history(folder: Path) -> History | None:
    """The history in the folder; None if there is none, or the file is not one of ours."""
    try:
        return History.from_dict(json.loads((folder / HISTORY).read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def draw_curves(folder: Path) -> str:
    """Draws `curves.png` of the history that is in the folder; of several ranks, by the first.

    It never raises: the training's result, or its error, is worth more than its picture.

    Returns:
        A note on why there is no picture, or "": there is one, or nothing to draw.
    """
    if not is_main_process() or not os.path.lexists(folder / HISTORY):
        return ""
    try:
        history = read_history(folder)
        if history is None:
            return f"There is no {CURVES}: {folder / HISTORY} is not the history of a run."
        if not history.epochs:
            return ""
        from ..telemetry.curves import draw

        picture = draw(history)
        with atomic_file(folder / CURVES) as file:
            file.write(picture)
    except Exception as error:
        what = "" if isinstance(error, DrivetrainError) else f"{type(error).__name__}: "
        return f"There is no {CURVES}: {what}{error}"
    return ""
