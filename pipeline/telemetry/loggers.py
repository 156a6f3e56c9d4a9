"""Log a run's metrics and hyperparameters without waiting for the device. Runs of Weights & Biases and MLflow's module
need no adapter: `logger=wandb.init(project=…)`, `logger=mlflow`; by name, they are begun and ended here."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from time import perf_counter, sleep, time
from types import ModuleType
from typing import Any, Protocol

import torch

from ...common.checks import check_picklable
from ...common.errors import PlanError, require, suggest
from ...common.frozen import FrozenDict
from ...common.storage.files import write_file
from ...common.transfer import to_device
from .history import COLUMNS, Epoch, Evaluation
from .host_copy import HostCopy
from .observer import Observer
from .otel import OpenTelemetryLogger
from .otel import modules as otel_modules
from .rank_times import GAUGES, RankTimes
from .state import TrainState

Values = dict[str, float]
"""Metrics by name. Of a step: `step/loss` and so on; of an epoch: the fields of its `Epoch` that are not None."""

METRICS, PROMETHEUS = "metrics.csv", "metrics.prom"
RANK_GAUGES = tuple(f"drivetrain_rank_{name}" for name in GAUGES)
"""Prometheus' names of the fields of `RankTimes`."""
_SERVICES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
SERVICE_RUNS = {name: f"{name}-run.txt" for name in _SERVICES}
"""Files in the folder of a run with the services' runs, which a resumed run continues."""
STEP = ("step/loss", "step/lr", "step/images_per_s", "step/data_wait_fraction")
_PATIENCE, _ROUND = 1.0, 0.01  # seconds in which values may arrive after a failure, and between two looks


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
"""The `logger` of `fit`: None, a name in `BY_NAME`, an object with `log` or `log_metrics`, or a list of them."""


class LoggerWarning(UserWarning):
    """A logger failed, and is disabled for the rest of the run; or the last values of a run that failed are lost."""


def check(choice: LoggerArg, folder: Path | None, *, pickled: bool) -> tuple[object, ...]:
    """Validate the `logger` of `fit` before any work, and return its loggers, which may have to be `pickled`."""
    chosen = () if choice is None else tuple(choice) if isinstance(choice, list | tuple) else (choice,)
    names = [one for one in chosen if isinstance(one, str)]
    if len(set(names)) < len(names):
        raise PlanError(f"logger={chosen!r:.80} names one twice, which would duplicate its entries. Remove one.")
    for one in chosen:
        if isinstance(one, str):
            _check_name(one, folder)
        elif _method(one) is None:
            raise PlanError(
                f"logger={one!r:.80} cannot log: it has neither log(dict, step) nor log_metrics(dict, step). Pass "
                f"{' or '.join(map(repr, BY_NAME))}, or an object with one of these methods."
            )
        elif pickled:
            remedy = "Create it on ranks that torchrun starts, make it picklable, or use 'csv' or 'tensorboard'."
            check_picklable(f"logger={one!r:.80}", one, "the process of rank 0", remedy, PlanError)
    return chosen


def _check_name(name: str, folder: Path | None) -> None:
    if name not in BY_NAME:
        raise PlanError(f"No logger is named {name!r}.{suggest(name, BY_NAME)}")
    if name in _SERVICES:
        _service(name)
        return
    if name == "otel":
        otel_modules()
        return
    if folder is None:
        raise PlanError(f"logger={name!r} writes to the folder of the run. Pass fit(out=…) (--out).")
    if name == "tensorboard":
        require("torch.utils.tensorboard", "tensorboard", "write files for TensorBoard")


def _method(one: object) -> Any:
    methods = (getattr(one, name, None) for name in ("log", "log_metrics"))
    return next((method for method in methods if callable(method)), None)


class Loggers:
    """The loggers of one run, on rank 0; one that fails is disabled, with a warning. The run resumes from `step`:
    `metrics.csv` loses its lines of later steps, and TensorBoard ignores them."""

    def __init__(
        self, chosen: tuple[object, ...], folder: Path | None, step: int, values: Mapping[str, Any] = FrozenDict()
    ) -> None:  # fmt: skip
        self._all: list[tuple[object, Any]] = []
        self._created: list[Any] = []  # of those that are disabled, too
        for one in chosen:
            try:
                if isinstance(one, str):
                    one = BY_NAME[one](folder, step)
                    self._created.append(one)
                if values:
                    _give(one, values)
            except Exception as error:  # as in `log`
                name = one if isinstance(one, str) else type(one).__name__
                _warn(f"{name} did not take the hyperparameters{' and is disabled' * isinstance(one, str)}", error)
            if not isinstance(one, str):
                self._all.append((one, _method(one)))

    def __bool__(self) -> bool:
        return bool(self._all)

    def log(self, values: Values, step: int) -> None:
        for pair in list(self._all):
            one, method = pair
            try:
                method(dict(values), step=step)
            except Exception as error:  # a run of days must not fail because a server is unreachable
                self._all.remove(pair)
                _warn(f"{type(one).__name__} failed at step {step} and is disabled for the rest of this run", error)

    def log_ranks(self, times: Sequence[RankTimes], step: int) -> None:
        """Log the median and the slowest rank; those that have labels receive all ranks."""
        for one, _ in self._all:
            if isinstance(one, PrometheusLogger | OpenTelemetryLogger):
                one.ranks = times
        slowest = max(range(len(times)), key=lambda rank: times[rank].own)
        middle = median_low(each.own for each in times)
        values = {"slowest": slowest, "slowest_own_s": times[slowest].own, "median_own_s": middle}
        self.log({f"ranks/{name}": value for name, value in values.items()}, step)

    def close(self, *, failed: bool) -> None:
        """Close the loggers created here; the user's own objects stay open. Services show a `failed` run as such."""
        enabled = [one for one, _ in self._all]
        for one in self._created:
            if isinstance(one, TensorBoardLogger | WandbLogger | MLflowLogger | OpenTelemetryLogger):
                try:
                    one.close(**({"failed": failed} if isinstance(one, WandbLogger | MLflowLogger) else {}))
                except Exception as error:  # as in `log`
                    if one not in enabled:  # its failure is known
                        continue
                    _warn(f"{type(one).__name__} failed at its end; its last entries may be missing", error)


def _warn(what: str, error: Exception) -> None:
    warnings.warn(f"{what}: {type(error).__name__}: {error}", LoggerWarning, stacklevel=3)


def _give(one: object, values: Mapping[str, Any]) -> None:
    """Give a logger the hyperparameters, by the first method that it has: those of Lightning's loggers, of MLflow's
    module, or of a run of Weights & Biases. Another logger gets none."""
    for name in ("log_hyperparams", "log_params"):
        if callable(method := getattr(one, name, None)):
            method(dict(values))
            return
    config = getattr(one, "config", None)
    if callable(update := getattr(config, "update", None)):
        update(dict(values), **({} if isinstance(config, dict) else {"allow_val_change": True}))


class CSVLogger:
    """Writes `metrics.csv`, one line per entry, without buffering; the file is written again for a new column. The
    hyperparameters are in the folder's `recipe.yaml`."""

    COLUMNS = ("step", *COLUMNS, *STEP)

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / METRICS
        self._columns = self.COLUMNS
        # Of a run that was left after the last step of an epoch, which it evaluates when it is resumed.
        self._epochs = {row["epoch"] for row in self._rewrite(step) if row["epoch"].isdecimal()}

    def _rewrite(
        self, step: float = math.inf, new: tuple[str, ...] = (), without: str | None = None
    ) -> list[dict[str, str]]:
        """Keep the lines up to a step, without that of an epoch, and return them."""
        rows: list[dict[str, str]] = []
        # A foreign file has no lines to keep.
        with suppress(OSError, csv.Error), self._path.open(newline="", errors="replace") as file:
            rows = [row for row in csv.DictReader(file) if self._is_entry(row) and int(row["step"]) <= step]
        rows = [row for row in rows if row["epoch"] != without]
        own = tuple(key for row in rows[:1] for key in row if key not in self._columns)
        self._columns = (*self._columns, *own, *new)
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_file(self._path, text.getvalue())
        return rows

    def _is_entry(self, row: dict[str, str]) -> bool:
        """Return whether a line is complete, which the last is not if its process was killed."""
        whole = {*row} >= {*self.COLUMNS} and None not in {*row, *row.values()}
        return whole and row["step"].isdecimal() and len(row["step"]) < 19

    def log(self, values: Values, step: int) -> None:
        new = tuple(name for name in values if name not in self._columns)
        again = self._epochs & {str(values.get("epoch"))}
        if new or again:
            self._rewrite(new=new, without=next(iter(again), None))
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({**values, "step": step})


class PrometheusLogger:
    """Writes `metrics.prom`: the newest value of each metric as a gauge, in Prometheus' text format
    (https://prometheus.io/docs/instrumenting/exposition_formats/). node_exporter's textfile collector reads it, from a
    link `*.prom` in its folder; the file is replaced as a whole, as that asks for. `drivetrain_updated_seconds`, of the
    last entry, tells a running job from one that hangs. `ranks` have gauges with a label `rank`."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path, self._values = folder / PROMETHEUS, dict[str, float]()
        self._names = dict[str, str]()  # in the file, by name
        for name in (*STEP, *COLUMNS):  # before any of the user's metrics
            self._name(name)
        escaped = str(folder).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._run = f'run="{escaped}"'
        self.ranks: Sequence[RankTimes] = ()
        self.log({}, step)

    def log(self, values: Values, step: int) -> None:
        self._values |= {**values, "step": step, "updated_seconds": time()}
        lines = []
        for name, value in self._values.items():
            own = self._name(name)
            lines += [f"# TYPE {own} gauge", f"{own}{{{self._run}}} {_number(value)}"]
        lines += self._of_ranks()
        write_file(self._path, "\n".join([*lines, ""]))

    def _name(self, name: str) -> str:
        """Return a metric's name in the file. Of names that differ only in characters that Prometheus does not allow,
        later ones end in a number: a file that has one twice is refused as a whole."""
        if name not in self._names:
            own = plain = f"drivetrain_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            number, taken = 2, {*self._names.values(), *RANK_GAUGES}
            while own in taken:
                own, number = f"{plain}_{number}", number + 1
            self._names[name] = own
        return self._names[name]

    def _of_ranks(self) -> Iterator[str]:
        for name, values in zip(RANK_GAUGES, zip(*self.ranks, strict=True), strict=False):
            yield f"# TYPE {name} gauge"
            for rank, value in enumerate(values):
                yield f'{name}{{{self._run},rank="{rank}"}} {_number(value)}'


def _number(value: float) -> str:
    """Return a number as Prometheus writes it."""
    value = float(value)
    return repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class TensorBoardLogger:
    def __init__(self, folder: Path, step: int) -> None:
        module = require("torch.utils.tensorboard", "tensorboard", "write files for TensorBoard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log_params(self, values: Mapping[str, Any]) -> None:
        rows = [f"| {name} | {value} |" for name, value in values.items()]
        self._writer.add_text("hyperparameters", "\n".join(["| name | value |", "|---|---|", *rows]), 0)

    def log(self, values: Values, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if "epoch" in values:
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases, in the project of `$WANDB_PROJECT`, which a resumed run continues."""

    def __init__(self, folder: Path | None, step: int) -> None:
        module = _service("wandb")
        known = _known_run("wandb", folder, step)
        place = None if folder is None else str(folder)
        self._run = module.init(id=known, resume=None if known is None else "allow", dir=place)
        self.config = self._run.config
        _keep_run("wandb", folder, str(self._run.id))

    def log(self, values: Values, step: int) -> None:
        self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflowLogger:
    """A run of MLflow, in the experiment of `$MLFLOW_EXPERIMENT_NAME`, which a resumed run continues."""

    def __init__(self, folder: Path | None, step: int) -> None:
        self._module = _service("mlflow")
        run = self._module.start_run(run_id=_known_run("mlflow", folder, step), nested=True)
        _keep_run("mlflow", folder, run.info.run_id)
        self._known = run.data.params  # which MLflow does not let a resumed run change, such as `epochs`

    def log_params(self, values: Mapping[str, Any]) -> None:
        self._module.log_params({name: value for name, value in values.items() if name not in self._known})

    def log(self, values: Values, step: int) -> None:
        self._module.log_metrics(values, step=step)

    def close(self, *, failed: bool) -> None:
        self._module.end_run("FAILED" if failed else "FINISHED")


def _service(name: str) -> ModuleType:
    return require(name, name, f"log to {_SERVICES[name]}")


def _known_run(service: str, folder: Path | None, step: int) -> str | None:
    """Return the service's run of a run that is resumed, from the file in its folder."""
    if folder is not None and step:
        with suppress(OSError):
            return (folder / SERVICE_RUNS[service]).read_text().strip() or None
    return None


def _keep_run(service: str, folder: Path | None, run: str) -> None:
    if folder is not None:
        write_file(folder / SERVICE_RUNS[service], f"{run}\n")


class Metrics(Observer):
    """Log every `every` steps and after each epoch; without loggers, as on all ranks but 0, do nothing. What is on CUDA
    is copied asynchronously, and logged in order once it has arrived: at the latest with an evaluation or epoch."""

    def __init__(
        self, chosen: tuple[object, ...], folder: Path | None, every: int, values: Mapping[str, Any] = FrozenDict()
    ) -> None:  # fmt: skip
        self._chosen, self._folder, self._every, self._values = chosen, folder, every, values
        self._loggers = Loggers((), None, 0)
        self._pending: list[tuple[int, list[str], HostCopy, Values]] = []  # the step, names, values, and further ones
        self._since = 0.0, 0, 0.0

    def on_start(self, state: TrainState) -> None:
        self._loggers = Loggers(self._chosen, self._folder, state.step, self._values)

    def on_epoch_start(self, state: TrainState) -> None:
        self._since = self._now(state)  # without the time of the preceding evaluation

    @staticmethod
    def _now(state: TrainState) -> tuple[float, int, float]:
        return perf_counter(), state.meter.images, state.meter.data_wait_s

    def log(self, values: Mapping[str, float | torch.Tensor], step: int) -> None:
        """Log additional values, numbers or tensors `()`, once they have arrived from the device."""
        if self._loggers and values:
            tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
            device = next((one.device for one in tensors if one.device.type != "cpu"), torch.device("cpu"))
            stacked = torch.stack([_on(device, value) for value in values.values()])
            self._pending.append((step, list(values), HostCopy(stacked), {}))
            self._arrive()

    def log_ranks(self, times: Sequence[RankTimes], step: int) -> None:
        if self._loggers:
            self._loggers.log_ranks(times, step)

    def _arrive(self, *, wait: bool = False) -> None:
        while self._pending and (wait or self._pending[0][2].arrived):
            step, names, copy, further = self._pending.pop(0)
            self._loggers.log(dict(zip(names, copy.values(), strict=True)) | further, step)

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:
        """Log an evaluation that is no epoch's; `on_epoch_end` logs those."""
        if self._loggers:
            self._arrive(wait=True)
            self._loggers.log(evaluation.results, state.step)
            self._since = self._now(state)

    def on_step_end(self, state: TrainState) -> None:
        if not self._loggers:
            return
        self._arrive()
        if state.step % self._every:
            return
        before, self._since = self._since, self._now(state)
        seconds, done, waited = (now - then for now, then in zip(self._since, before, strict=True))
        values = {
            "step/lr": state.lr,
            "step/images_per_s": done / seconds,
            "step/data_wait_fraction": waited / seconds,
        }
        self._pending.append((state.step, ["step/loss"], HostCopy(state.step_loss.reshape(1)), values))
        self._arrive()

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        if self._loggers:
            self._arrive(wait=True)
            self._loggers.log(epoch.values(), state.step)

    def on_end(self, *, failed: bool) -> None:
        if failed:
            self._arrive_soon()
        else:
            self._arrive(wait=True)
        self._loggers.close(failed=failed)
        if self._pending:
            warnings.warn(
                f"What was to be logged from step {self._pending[0][0]:,} on is lost: when the run failed, its values "
                "did not arrive from the device.",
                LoggerWarning,
                stacklevel=2,
            )

    def _arrive_soon(self) -> None:
        """After a failure, the device may never answer, or only with an error."""
        end = perf_counter() + _PATIENCE
        with suppress(RuntimeError):
            self._arrive()
            while self._pending and perf_counter() < end:
                sleep(_ROUND)
                self._arrive()


def _on(device: torch.device, value: float | torch.Tensor) -> torch.Tensor:
    """Numbers are filled in, and tensors pinned, because the host would wait for other copies to the device."""
    if not isinstance(value, torch.Tensor):
        return torch.full((), float(value), dtype=torch.float64, device=device)  # torch takes integers of 64 bits only
    own = value.detach().double().reshape(())
    return own if own.device == device else to_device(own, device)


BY_NAME: dict[str, Any] = {
    "csv": CSVLogger, "prometheus": PrometheusLogger, "otel": OpenTelemetryLogger, "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger, "mlflow": MLflowLogger,
}  # fmt: skip
"""Each is made with the run's folder, or None, and the step that the run resumes from."""
