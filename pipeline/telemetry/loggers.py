"""Log the metrics of a run to CSV, TensorBoard, or any object with a log method.

Weights & Biases and MLflow need no adapter: `logger=wandb.init(project=…)`, `logger=mlflow`.
"""

from __future__ import annotations

import csv
import io
import math
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ...common.checks import check_picklable, check_whole
from ...common.errors import PlanError, require, suggest
from ...common.storage.files import atomic_file
from .history import COLUMNS

Values = dict[str, float]
"""Metrics by name. Of a step: `step/loss` and so on; of an epoch: the fields of its `Epoch` that are not None."""

NAMES, METRICS = ("csv", "tensorboard"), "metrics.csv"
EPOCH = tuple(COLUMNS)
STEP = ("step/loss", "step/lr", "step/images_per_s", "step/data_wait_fraction")


class Logger(Protocol):
    """Protocol of a logger, which Weights & Biases runs and custom objects satisfy.

    Example::

        >>> class Print:
        ...     def log(self, metrics, step):
        ...         print(step, "val_loss" in metrics)
        >>> result = pipeline.fit(epochs=1, logger=Print(), progress=False)
        2 True
    """

    def log(self, values: Values, step: int) -> object:
        """Log `values` by name, after `step` optimizer steps of the full run."""
        ...


LoggerArg = str | object | None
"""The `logger` of `fit`: None, a name in `NAMES`, an object with `log` or `log_metrics`, or a list of them."""


class LoggerWarning(UserWarning):
    """A logger failed, and is disabled for the rest of the run."""


def check(choice: LoggerArg, log_every: object, folder: Path | None, *, pickled: bool) -> tuple[object, ...]:
    """Validate the `logger` of `fit` before any work, and return its loggers, which may be `pickled` for another
    process.

    Raises:
        PlanError: naming the invalid one.
        MissingExtra: for `"tensorboard"` if the package is not installed.
    """
    check_whole("log_every", log_every, PlanError, 1, also=" of steps")
    chosen = () if choice is None else tuple(choice) if isinstance(choice, list | tuple) else (choice,)
    names = [one for one in chosen if isinstance(one, str)]
    if len(set(names)) < len(names):
        raise PlanError(
            f"logger={chosen!r:.80} names one twice, which would duplicate its entries. Remove one."
        )
    for one in chosen:
        if isinstance(one, str):
            _check_name(one, folder)
        elif _method(one) is None:
            raise PlanError(
                f"logger={one!r:.80} cannot log: it has neither log(dict, step) nor log_metrics(dict, step). Pass "
                f"{' or '.join(map(repr, NAMES))}, or an object with one of these methods."
            )
        elif pickled:
            remedy = (
                "Create it on ranks that torchrun starts, make it picklable, or use 'csv' or 'tensorboard'."
            )
            check_picklable(f"logger={one!r:.80}", one, "the process of rank 0", remedy, PlanError)
    return chosen


def _check_name(name: str, folder: Path | None) -> None:
    if name not in NAMES:
        raise PlanError(f"No logger is named {name!r}.{suggest(name, NAMES)}")
    if folder is None:
        raise PlanError(f"logger={name!r} writes to the folder of the run. Pass fit(out=…) (--out).")
    if name == "tensorboard":
        require("torch.utils.tensorboard", "tensorboard", "write files for TensorBoard")


def _method(one: object) -> Any:
    """Return its `log` (Weights & Biases) or `log_metrics` (MLflow, Lightning's loggers); None if it has neither."""
    methods = (getattr(one, name, None) for name in ("log", "log_metrics"))
    return next((method for method in methods if callable(method)), None)


class Loggers:
    """The loggers of one run, on rank 0. A logger that fails is disabled, with one warning.

    Args:
        chosen: names and objects, from `check`.
        folder: folder of the run, for `metrics.csv` and `tensorboard/`.
        step: the step from which the run resumes. Entries of later steps in the folder are not from this run: an
            existing `metrics.csv` keeps its lines up to it, and TensorBoard ignores the others.
    """

    def __init__(self, chosen: tuple[object, ...], folder: Path | None, step: int) -> None:
        self._all: list[tuple[object, Any]] = []
        for one in chosen:
            if isinstance(one, str):
                assert folder is not None  # `check` ensures it
                one = (CSVLogger if one == "csv" else TensorBoardLogger)(folder, step)
            self._all.append((one, _method(one)))

    def __bool__(self) -> bool:
        return bool(self._all)

    def log(self, values: Values, step: int) -> None:
        """Pass `values` to each logger."""
        for pair in list(self._all):
            one, method = pair
            try:
                method(dict(values), step=step)
            except Exception as error:  # a run of days must not fail because a server is unreachable
                self._all.remove(pair)
                warnings.warn(
                    f"{type(one).__name__} failed at step {step} and is disabled for the rest of this run: "
                    f"{type(error).__name__}: {error}",
                    LoggerWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Close the loggers created here; the user's own objects stay open."""
        for one, _ in self._all:
            if isinstance(one, TensorBoardLogger):
                one.close()


class CSVLogger:
    """Write `metrics.csv`: one line per entry, without buffering; missing values are empty. A name that is new adds a
    column, for which the file is written again."""

    COLUMNS = ("step", *EPOCH, *STEP)

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / METRICS
        self._columns = self.COLUMNS
        self._rewrite(step)

    def _rewrite(self, step: float = math.inf, new: tuple[str, ...] = ()) -> None:
        """Write the file again with `new` columns and its lines up to `step`."""
        rows: list[dict[str, str]] = []
        # A foreign file has no lines to keep.
        with suppress(OSError, csv.Error), self._path.open(newline="", errors="replace") as file:
            rows = [row for row in csv.DictReader(file) if self._is_entry(row) and int(row["step"]) <= step]
        own = tuple(key for row in rows[:1] for key in row if key not in self._columns)
        self._columns = (*self._columns, *own, *new)
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        with atomic_file(self._path) as file:
            file.write(text.getvalue().encode())

    def _is_entry(self, row: dict[str, str]) -> bool:
        """Return whether a line is complete, which the last is not if its process was killed."""
        whole = {*row} >= {*self.COLUMNS} and None not in {*row, *row.values()}
        return whole and row["step"].isdecimal() and len(row["step"]) < 19

    def log(self, values: Values, step: int) -> None:
        """Append a line; values of new names, such as a callback's, get a column each."""
        if new := tuple(name for name in values if name not in self._columns):
            self._rewrite(new=new)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({"step": step, **values})


class TensorBoardLogger:
    """Write event files to `tensorboard/`; view them with `tensorboard --logdir OUT`."""

    def __init__(self, folder: Path, step: int) -> None:
        module = require("torch.utils.tensorboard", "tensorboard", "write files for TensorBoard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, values: Values, step: int) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if "epoch" in values:
            self._writer.flush()

    def close(self) -> None:
        """Flush, and end the writer's thread."""
        self._writer.close()
