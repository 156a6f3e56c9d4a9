"""The result of training: load it from a folder, evaluate it, and predict with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ...common.errors import CheckpointError, DataError, PlanError
from ...common.model_state import ModelState, unlisted_tensors
from ...common.storage.addresses import local_path
from ...loaders.epochs import EpochLoader
from ...loaders.image_size import height_width
from ...loaders.sources import files_of
from ...strategies.launching.meeting import under_torchrun
from ...transforms import Report, Transform
from ..describe.config import DataConfig, DistributedConfig
from ..describe.inputs import Inputs
from ..describe.pipeline_spec import PipelineSpec, sort_transforms
from ..describe.plan import Plan
from ..describe.resolve import ResolvedPlan, resolve
from ..models.weights import weights_omitted
from ..recipes.convert import build_pipeline
from ..recipes.files import RECIPE
from ..tasks.standard import Classification, Segmentation
from ..tasks.task import Task
from ..telemetry.history import HISTORY, History, read_history
from ..training.build import Built, plain_torch, rebuild_model, resolve_data
from ..training.checks import TrainedOn
from ..training.loop import evaluate
from .analysis.errors import Errors
from .analysis.judge import judge
from .checkpoints.remote import opened
from .checkpoints.weights import load_model, plain_state
from .folder import MODEL, UNLISTED, provide_code
from .initial import InitialWeights, WeightsArg, check_source
from .prediction import BATCH, OnError, Predictions, listed, predicted
from .predictions import check_out, write_masks, write_table
from .ranks import built_here, on_ranks

if TYPE_CHECKING:
    from ...loaders.decode.preprocess import Evaluation

Result = TypeVar("Result")


@dataclass
class FitResult:
    """The result of `Pipeline.fit`.

    Attributes:
        model: the trained model, after surgery, on the CPU, in evaluation mode.
        history: one entry per epoch.
        reports: what each transform changed.
        plan: the steps of the run.
        transforms: the pipeline's transforms, in the plan's order.
        spec: the pipeline's description.
        folder: the run's folder or address; None without `fit(out=…)`.
        loaded: whether it is from `load_run`: it is then evaluated on one device.

    Example::

        >>> result = pipeline.fit(epochs=1, progress=False)
        >>> len(result.history.epochs), sorted(result.metrics)
        (1, ['top1', 'val_loss'])
    """

    model: nn.Module
    history: History
    reports: tuple[Report, ...]
    plan: Plan
    transforms: tuple[Transform, ...] = ()
    spec: PipelineSpec | None = None
    folder: str | Path | None = None
    loaded: bool = False

    def evaluate(self, data: str | Path | None = None) -> dict[str, float]:
        """Return the metrics of the model on data that `Pipeline.load` takes as `val`, by name; see
        `Pipeline.evaluate`. It does not open the training data, unless the validation data is a part of it
        (`val_split`, `folds`).

        Args:
            data: a `.beton` file or a data set by name, with the classes of the training data. Default None: the
                pipeline's validation data.

        Raises:
            PlanError, DataError: without data, or if it does not match the model.

        Example::

            >>> sorted(result.evaluate("val.beton"))
            ['top1', 'val_loss']
        """
        return self._judged(data, _metrics_of)

    def errors(self, data: str | Path | None = None) -> Errors:
        """Return what the model gets wrong on data that `Pipeline.load` takes as `val`, computed in one pass.

        For `Classification`: the `confusion` matrix, precision, recall and F1 per class with intervals, `calibration`;
        for `MultiLabel`: the same per label, and curves of precision and recall; for `Regression`: residuals; for
        `Segmentation`: intersection over union per class. For each: the loss of every sample, and the worst and the
        least certain with their pictures. Printed, it is a table; `save` writes a picture (`.png`) or JSON.

        Args:
            data: as `evaluate` takes it.

        Raises:
            PlanError, DataError: without data, or if it does not match the model.

        Example::

            >>> errors = result.errors("val.beton")
            >>> errors.confusion.shape
            (2, 2)
        """
        return self._judged(data, _errors_of)

    def report(self, out: str | Path, data: str | Path | None = None) -> Path:
        """Write the run as one HTML file without scripts that needs no network, as `drivetrain report` does, and return
        its path.

        It has the final metrics, curves and epochs, a training batch, the errors with the worst samples, the plan with
        its cautions, machine and versions, the recipe, and the ledger if `ledger.json` is in the run's folder. What
        cannot be shown is named, with the reason.

        Args:
            out: the file, `.html`.
            data: data whose errors are shown, as `evaluate` takes it. Default None: the pipeline's validation data.

        Raises:
            DrivetrainError: unless `out` ends in `.html`; for `data` that cannot be judged.

        Example::

            >>> result.report("report.html").name
            'report.html'
        """
        from .report import Report, check_report

        check_report(out)
        errors = None if data is None else self.errors(data)  # rejected here, and not in the report

        def judged() -> Errors:
            return errors or self.errors()

        if self.folder is not None:
            with suppress(CheckpointError):
                report = Report.of(self.folder, judged)
                if report.history.epochs == self.history.epochs:  # else another run has replaced it
                    return report.write(out)
        return Report.unsaved(self.history, self.plan, self.spec, judged).write(out)

    @property
    def task(self) -> Task:
        """What the model was trained for."""
        return Classification() if self.spec is None else self.spec.target

    @property
    def inputs(self) -> Inputs:
        """What an image must become before the model sees it, and the names of the classes.

        Raises:
            DataError: if the run ended before its data was opened.
        """
        saved = self.history.facts.get("inputs")
        if saved is None:
            raise DataError("This result does not know its preprocessing: its run was not trained by this version.")
        return Inputs.from_dict(saved)

    @property
    def preprocess(self) -> Evaluation:
        """The transform of an image that gives the pixels `(C, H, W)` of the run's evaluation, bit for bit: cropped as
        `eval_crop`, resized to `eval_image_size`, and normalized. It takes what `predict` takes, one at a time."""
        return self.inputs.transform()

    @plain_torch()
    def predict(
        self, images: Any, *, batch_size: int = BATCH, out: str | Path | None = None, on_error: OnError = "raise",
        progress: bool = False,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Return one dict per image: `image` (its path or number) and the prediction by name. A notebook shows the
        first with their images.

        Predictions are those of the run's evaluation: averages over the views of `TestTimeFlip`, in the run's precision
        (in float32 on a device that would have to emulate it).

        For `Classification`: `class`, `probability` and all `probabilities`; for `MultiLabel`: `labels` and
        `probabilities`; for `Regression`: `value`; for `Contrastive`: `embedding`; for other tasks: `prediction`. All
        are JSON values.

        Args:
            images: a path, a PIL image, an array `(H, W, 3)` of uint8, or several of these. A path may be that of an
                image, a folder (all images below it, sorted), a pattern (`photos/**/*.jpg`), or a `.beton` file, whose
                samples are named `val.beton[0]`. For a model of other images, those that `convert` takes with their
                `image_mode`; others are refused.
            batch_size: images at once. Default 32: enough for speed, with little memory.
            out: also write them: a table (`.csv`, or `.parquet`, which needs pyarrow), or, for `Segmentation`, a new
                folder of PNG masks of each image's size, in the colors of the training data's masks if `convert` kept
                them, else PASCAL VOC's; the rows have `mask`, its path, instead of the prediction, and pixels that the
                model did not see are 255. What exists is complete.
            on_error: `"raise"`, the default, or `"skip"`: a damaged image has `error` instead of a prediction.
            progress: show a bar in a terminal or a notebook. Default False, because single images take no time.

        Raises:
            DataError: for a file that is not an image, or an `out` that does not suit the task.
            MissingExtra: for Parquet, without pyarrow.

        Example::

            >>> (row,) = result.predict("photos/cat/0.jpg")
            >>> sorted(row)
            ['class', 'image', 'probabilities', 'probability']
        """
        task, inputs = self.task, self.inputs
        place = None if out is None else local_path(out, "out", DataError)
        if place is not None:
            check_out(place, task)
        given = listed(images, inputs.channels)
        found = predicted(self, given, batch_size, on_error, progress)
        if place is not None and isinstance(task, Segmentation):
            return Predictions(write_masks(place, [str(each.name) for each in given], found, inputs))
        rows = Predictions(colors=inputs.colors)
        for one in found:
            rows.add(one, one.row(task, inputs))
        if place is not None:
            write_table(place, rows, inputs.classes)
        return rows

    def plain_state(self) -> dict[str, torch.Tensor]:
        """Return the weights by the names of the model before surgery, for use without Drivetrain.

        Weights that a surgery adds and a plain model cannot express keep their names; see each surgery's
        `Transform.to_plain`.

        Example::

            >>> torch.save(result.plain_state(), "plain.pt")
        """
        return dict(plain_state(self._state, self.model, self.transforms).weights)

    @plain_torch()
    def _judged(self, data: str | Path | None, judged: Callable[[Built, EpochLoader], Result]) -> Result:
        spec = self.spec
        if spec is None:
            raise PlanError("This result is not from Pipeline.fit. Use Pipeline.evaluate(weights).")
        if spec.data is not None:
            evaluated = spec.data.evaluated_on(data)
            spec = _on_one_device(spec, evaluated) if self.loaded else spec.replace(data=evaluated)
        return _on_validation_data(resolve(spec, files=False), self._state.all(), judged, self._trained_on())

    def _trained_on(self) -> TrainedOn:
        if "inputs" not in self.history.facts:
            return TrainedOn((), 0)
        inputs = self.inputs
        if self.task.kind != "class indices":
            return TrainedOn(inputs.classes, 0)
        count = len(inputs.classes)
        if not count:
            device = next((one.device for one in self.model.parameters()), None)
            image = torch.zeros(1, inputs.channels, *height_width(inputs.image_size), device=device)
            training = self.model.training
            self.model.eval()  # in training mode, BatchNorm's statistics would count this image
            try:
                with torch.no_grad():
                    outputs = self.task.outputs(self.model(image))
            finally:
                self.model.train(training)
            count = outputs.shape[1] if isinstance(outputs, torch.Tensor) and outputs.dim() == 2 else 0
        return TrainedOn(inputs.classes, count)

    @property
    def _state(self) -> ModelState:
        return ModelState(dict(self.model.state_dict()), unlisted_tensors(self.model))

    @property
    def accuracy(self) -> float | None:
        """Top-1 accuracy (0 to 1) of the last evaluation; None without validation data."""
        return self.history.accuracy

    @property
    def stopped(self) -> str | None:
        """Why a callback stopped the run before its last epoch ended; None if none did."""
        return self.history.stopped

    @property
    def metrics(self) -> dict[str, float]:
        """`val_loss` and the task's metrics of the last evaluation; empty without validation data."""
        last = self.history.last
        return {} if last is None or last.val_loss is None else {"val_loss": last.val_loss, **last.metrics}

    def __repr__(self) -> str:
        monitor, value = self.history.monitor, self.history.monitored
        return f"FitResult({monitor.name}={value}, epochs={len(self.history.epochs)})"

    def _repr_html_(self) -> str:
        changes = "<br>".join(report._repr_html_() for report in self.reports)
        folded = "".join(
            f"<details><summary>{name}</summary>{body}</details>"
            for name, body in (("what was changed", changes), ("the plan", self.plan._repr_html_()))
            if body
        )
        return self.history._repr_html_() + folded


def load_run(folder: str | Path, *, trust_code: bool = False) -> FitResult:
    """Return the result of a run, from `recipe.yaml`, `model.safetensors` and `history.json` in its folder.

    It evaluates on one device of this machine, whatever the run's devices and strategy were; for a model that is too
    large for one, `Pipeline.evaluate(folder)` uses the pipeline's.

    The recipe may name a model in a module, which is imported: load only runs that you trust. What the training script
    itself defined is in the folder, in a file `script_….py`; if the running script defines the same, that is taken.

    Args:
        folder: the run's folder, or its address.
        trust_code: whether to execute that file. Default False: a folder may come from somebody else, so its code is
            executed only when you have read it.

    Raises:
        CheckpointError: if one of these files is missing or damaged, or they are not of one run; if code of the folder
            is needed without `trust_code`.
        RecipeError: if the recipe cannot be built.

    Example::

        >>> result = load_run("runs/photos")
        >>> sorted(result.metrics)
        ['top1', 'val_loss']
    """
    place, folder = folder, opened(folder, RECIPE, HISTORY, MODEL, UNLISTED)
    history = read_history(folder)
    if history is None or not (history.epochs or "stopped" in history.facts):
        raise CheckpointError(
            f"{place} has no finished epoch of a run: its {HISTORY} is missing or damaged. Pass the folder of a "
            "run (fit(out=…), --out)."
        )
    if not (folder / RECIPE).exists():
        raise CheckpointError(
            f"{place} has no {RECIPE}, because its pipeline could not be written as one. Build the pipeline again, "
            "and load model.safetensors into its model."
        )
    provide_code(place, folder, trust=trust_code)
    spec = build_pipeline(folder / RECIPE, {}, PipelineSpec)
    transforms = sort_transforms(spec.transforms)
    state = load_model(folder / MODEL, epochs=history.moment)
    if not state:
        raise CheckpointError(
            f"{folder / MODEL} is damaged, or does not have the weights after epoch {history.moment}, the last in "
            f"{HISTORY}. Resume the run (--resume), which writes them again."
        )
    try:
        model, reports = rebuild_model(spec, transforms, state)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / MODEL} does not fit the model of {folder / RECIPE}: {error}") from error
    return FitResult(model.eval(), history, reports, Plan(()), transforms, spec, place, loaded=True)


def _on_one_device(spec: PipelineSpec, data: DataConfig) -> PipelineSpec:
    """Return the pipeline for an evaluation of `data` by this process, which may not have the run's devices, in batches
    that one of them has computed. Under torchrun, its devices stay."""
    how = spec.distributed
    if under_torchrun():
        return spec.replace(data=data)
    at_once = data.batch_size // (how.accumulate * (1 if how.devices == "auto" else how.devices))
    kept = {name: getattr(how, name) for name in ("precision", "cudnn_benchmark", "matmul_precision")}
    one = DistributedConfig(options={"device": "cpu"} if how.device == "cpu" else {}, **kept)
    return spec.replace(data=replace(data, batch_size=max(at_once, 1)), distribution=one)


@plain_torch()
def evaluate_weights(spec: PipelineSpec, weights: WeightsArg) -> dict[str, float]:
    return _on_validation_data(resolve(spec), weights, _metrics_of)


def _on_validation_data(
    plan: ResolvedPlan, weights: WeightsArg, judged: Callable[[Built, EpochLoader], Result],
    trained: TrainedOn | None = None,
) -> Result:  # fmt: skip
    if plan.data.val is None:
        raise PlanError(
            "There is no validation data to evaluate. Pass a second file to load(); or, of a result or run, the data: "
            "errors('val.beton') (--data)."
        )
    check_source(weights)
    named = resolve_data(plan, progress=False, names=True)
    found: Result = on_ranks(named, _of_rank, weights, judged, trained)
    return found


def _of_rank(
    plan: ResolvedPlan, weights: WeightsArg, judged: Callable[[Built, EpochLoader], Result], trained: TrainedOn | None
) -> Result:
    initial = InitialWeights(weights, plan.transforms, strict=True)
    with weights_omitted(), built_here(plan, initial, trained=trained) as built:  # `initial` replaces all weights
        assert built.val is not None
        return judged(built, built.val)


def _metrics_of(built: Built, val: EpochLoader) -> dict[str, float]:
    return evaluate(built.engine, val, built.hooks, built.plan.task)


def _errors_of(built: Built, val: EpochLoader) -> Errors:
    return judge(built.engine, val, built.hooks, built.plan.task, str(files_of(built.plan.data.val or "")))


class TrainingPreempted(SystemExit):
    """A signal of `fit(stop_on=…)` ended the run after a step. Uncaught, it ends the process with the exit status 75,
    EX_TEMPFAIL of sysexits.h: run the same command again, and resume.

    Attributes:
        signal: the name of the signal; "" if another rank received it.
        checkpoint: path or address of the checkpoint that was saved; None without `out`, or without checkpoints.
        message: what happened, where it is saved, and how to continue, as a sentence.
    """

    def __init__(self, signal: str = "", checkpoint: str | Path | None = None, message: str = "") -> None:
        super().__init__(75)
        self.signal, self.checkpoint, self.message = signal, checkpoint, message

    def __reduce__(self) -> Any:
        return type(self), (self.signal, self.checkpoint, self.message)


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during training.

    With checkpoints, the run finishes its step and saves a checkpoint first, from which it resumes exactly. A second
    Ctrl-C stops at once.

    Attributes:
        checkpoint: path or address of the checkpoint that was saved; None if there is none of this moment.
        epochs: number of finished epochs, including those before resuming.
        result: a `FitResult` of them; None if there are none, or if this process does not have the weights after the
            last one: it resumed in the middle of an epoch without the run's folder, or it is not rank 0.
    """

    def __init__(
        self, outcome: Any = None, result: FitResult | None = None, epochs: int = 0, checkpoint: Any = None
    ) -> None:
        finished = "before its first epoch finished"
        if result is not None:
            finished = f"after epoch {epochs}; this exception's result contains all epochs up to it"
        elif epochs:
            finished = f"after epoch {epochs}, whose weights are not in this process: there is no result here"
        saved = "" if checkpoint is None else f"; fit(resume='auto') continues from {checkpoint}"
        super().__init__(f"training was interrupted {finished}{saved}")
        self.outcome, self.result, self.epochs, self.checkpoint = outcome, result, epochs, checkpoint

    def __reduce__(self) -> Any:
        return type(self), (self.outcome, self.result, self.epochs, self.checkpoint)
