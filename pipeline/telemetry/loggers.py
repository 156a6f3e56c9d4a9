"""Where the figures of a training go while it runs: CSV, TensorBoard, or any object that takes them.

Weights & Biases and MLflow need nothing more: `logger=wandb.init(project=…)`, `logger=mlflow`.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from ...checks import check_whole
from ...errors import PlanError, require, suggest
from ...files import atomic_file
from .history import COLUMNS

Values = dict[str, float]
"""Of a step: `step/loss` and the like; of an epoch: the numbers of its `Epoch`, those that there are."""

LOG_EVERY = 50
"""Optimizer steps between two entries: so few that they cost nothing to speak of."""
NAMES, METRICS = ("csv", "tensorboard"), "metrics.csv"
EPOCH = tuple(COLUMNS)
STEP = ("step/loss", "step/lr", "step/images_per_s", "step/data_wait_fraction")


class Logger(Protocol):
    """Anything that takes figures: a run of Weights & Biases is one, and so is what you write yourself."""

    def log(self, values: Values, step: int) -> object:
        """`values` by name, after `step` optimizer steps of the whole training."""
        ...


LoggerArg = str | object | None
"""What `fit(logger=…)` takes: None, a name in `NAMES`, an object with `log` or `log_metrics`, or a list of them."""


class LoggerWarning(UserWarning):
    """A logger that failed, and gets nothing more."""


def check(choice: LoggerArg, log_every: object, folder: Path | None, *, travels: bool) -> tuple[object, ...]:
    """The loggers of a choice, checked before any work.

    Args:
        choice: what `fit` was given.
        log_every: steps between two entries.
        folder: of the run.
        travels: whether they are sent to other processes.

    Raises:
        PlanError: naming the one that cannot be used.
        MissingExtra: for `"tensorboard"` without the package.
    """
    check_whole("log_every", log_every, PlanError, 1, also=" of steps")
    chosen = () if choice is None else tuple(choice) if isinstance(choice, list | tuple) else (choice,)
    names = [one for one in chosen if isinstance(one, str)]
    if len(set(names)) < len(names):
        raise PlanError(
            f"logger={chosen!r:.80} names one twice, which would double its entries. Leave one out."
        )
    for one in chosen:
        if isinstance(one, str):
            _check_name(one, folder)
        elif _method(one) is None:
            raise PlanError(
                f"logger={one!r:.80} cannot log: it has neither log(dict, step) nor log_metrics(dict, step). Give "
                f"one of {', '.join(map(repr, NAMES))}, or an object that has."
            )
        elif travels:
            _check_travels(one)
    return chosen


def _check_name(name: str, folder: Path | None) -> None:
    if name not in NAMES:
        raise PlanError(f"No logger is named {name!r}.{suggest(name, NAMES)}")
    if folder is None:
        raise PlanError(f"logger={name!r} writes into the folder of the run; give fit(out=…) (--out).")
    if name == "tensorboard":
        require("torch.utils.tensorboard", "tensorboard", "write files for TensorBoard")


def _check_travels(one: object) -> None:
    try:
        cloudpickle.dumps(one)
    except Exception as error:  # whatever the object's own code raises
        raise PlanError(
            f"logger={one!r:.80} cannot be sent to the process of rank 0 ({type(error).__name__}: {error}). Start the "
            "ranks by torchrun and make it there, make it so that it can be pickled, or use 'csv' or 'tensorboard'."
        ) from error


def _method(one: object) -> Any:
    """Its `log`, which Weights & Biases has, or `log_metrics`, which MLflow and Lightning's loggers have."""
    found = (getattr(one, name, None) for name in ("log", "log_metrics"))
    return next((method for method in found if callable(method)), None)


class Loggers:
    """The loggers of one run, on rank 0. One that fails is left out from then on, with one warning.

    Args:
        chosen: names and objects, from `check`.
        folder: of the run; `metrics.csv` and `tensorboard/` go there.
        step: the step that the run goes on from. What the folder has of later steps is not of this run.
    """

    def __init__(self, chosen: tuple[object, ...], folder: Path | None, step: int) -> None:
        self._all: list[tuple[object, Any]] = []
        for one in chosen:
            if isinstance(one, str):
                assert folder is not None  # `check` has seen to it
                one = (CSVLogger if one == "csv" else TensorBoardLogger)(folder, step)
            self._all.append((one, _method(one)))

    def __bool__(self) -> bool:
        return bool(self._all)

    def log(self, values: Values, step: int) -> None:
        """Gives them to each logger."""
        for pair in list(self._all):
            one, method = pair
            try:
                method(dict(values), step=step)
            except Exception as error:  # a training of days must not end because a server is away
                self._all.remove(pair)
                warnings.warn(
                    f"{type(one).__name__} failed at step {step} and gets nothing more in this run: "
                    f"{type(error).__name__}: {error}",
                    LoggerWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Ends those that were made here; an object of the user's stays open."""
        for one, _ in self._all:
            if isinstance(one, TensorBoardLogger):
                one.close()


class CSVLogger:
    """`metrics.csv`: a line per entry; what an entry does not have is empty. Lines are there at once.

    Args:
        folder: where the file goes. One that is there keeps its lines up to `step`.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / METRICS
        text = io.StringIO()
        writer = csv.DictWriter(text, self.COLUMNS)
        writer.writeheader()
        with suppress(OSError, csv.Error):  # what is not a table of ours has no lines to keep
            writer.writerows(row for row in self._earlier() if int(row["step"]) <= step)
        with atomic_file(self._path) as file:
            file.write(text.getvalue().encode())

    COLUMNS = ("step", *EPOCH, *STEP)

    def _earlier(self) -> Iterator[dict[str, str]]:
        if not self._path.exists():
            return
        with self._path.open(newline="", errors="replace") as file:
            for row in csv.DictReader(file):
                # A last line that was cut off by the end of its process is not whole.
                if set(row) == set(self.COLUMNS) and None not in row.values() and _is_step(row["step"]):
                    yield row

    def log(self, values: Values, step: int) -> None:
        """Adds a line."""
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self.COLUMNS).writerow({"step": step, **values})


def _is_step(text: str) -> bool:
    return text.isdecimal() and len(text) < 19


class TensorBoardLogger:
    """Event files in `tensorboard/`; look at them with `tensorboard --logdir OUT`.

    Args:
        folder: of the run. TensorBoard leaves out what the folder has of steps after `step`.
    """

    def __init__(self, folder: Path, step: int) -> None:
        module = require("torch.utils.tensorboard", "tensorboard", "write files for TensorBoard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, values: Values, step: int) -> None:
        """Adds a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if "epoch" in values:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is left and ends the writer's thread."""
        self._writer.close()


__all__ = ["Logger", "LoggerArg", "LoggerWarning", "Loggers", "check"]
