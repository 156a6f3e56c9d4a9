"""The training commands: `drivetrain train | tune | predict | export | ledger`."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from ....common.errors import CheckpointError, DataError, LedgerError, MissingExtra, PlanError
from ....common.options.config import options_of
from ....common.storage.addresses import is_address
from ....common.table import Table, lines_of
from ...runs.config import FitConfig
from .options import (
    FILES,
    Command,
    F,
    File,
    Json,
    Place,
    Text,
    argument,
    option,
    out_folder,
    pipeline_of,
    quiet,
    recipe_arguments,
    say,
    trust_code,
)

if TYPE_CHECKING:
    from ...ledger.ledger import Ledger
    from ...pipeline import Pipeline
    from ...runs.result import TrainingInterrupted
    from ...telemetry.history import History

LONGEST = 200  # characters of a prediction of a custom task, in the table
TUNED = "tuned.json"  # the trials of a tuning, in --out
SECONDS_HELP = "Time budget of the ledger, in seconds: building, warm-up and all rounds."
# Options of `fit` that the command line has in a form of its own, or sets itself.
_OTHERWISE = (
    "epochs", "out", "init_from", "resume", "logger", "callbacks", "progress", "checkpoints", "stop_on",
)  # fmt: skip


def fit_options(function: F) -> F:
    for one in reversed(options_of(FitConfig).values()):
        if one.name in _OTHERWISE:
            continue
        metavar = "" if isinstance(one.default, bool) else " VALUE"
        default = "" if one.default in (None, False) else f" Default: {one.default}."
        text = one.help.replace("`", "").replace('"', "")
        function = option(
            f"--{one.name.replace('_', '-')}{metavar}", f"{text[0].upper()}{text[1:]}.{default}",
            Json(*map(str, one.choices)), default=None,
        )(function)  # fmt: skip
    return function


@click.command(cls=Command)
@recipe_arguments()
@out_folder
@option(
    "--init-from RUN_OR_FILE",
    "Begin with these weights: the folder of a run or of a checkpoint, or a file (.safetensors, .pth, .pt, .bin).",
    Place(),
)
@option("--resume", "Resume from the newest checkpoint in --out, if there is one.")
@option("--every-steps N", "Save a checkpoint after every N steps, too, not only after each epoch.", int)
@option("--every-minutes N", "Save a checkpoint N minutes after the last one, too.", float)
@option(
    "--logger NAME",
    "Log the metrics of steps and epochs: csv, prometheus or tensorboard, to --out; wandb, mlflow or otel. May be "
    "repeated.",
    Text("csv", "prometheus", "otel", "tensorboard", "wandb", "mlflow"), multiple=True,
)  # fmt: skip
@option(
    "--tune N",
    "Tune for N seconds first, and train the tuned pipeline; with --out, write tuned.json and tuned.yaml there.",
    float,
    name="tune_seconds",
)
@option(
    "--callback NAME",
    'Run this callback, by name, or as JSON with its options: \'{"name": "EarlyStopping", "monitor": "top1"}\'. May '
    "be repeated.", Json("EarlyStopping", "GradientNorms", "Profile"), name="callbacks", multiple=True,
)  # fmt: skip
@fit_options
@option("--ledger", "Measure the ledger after training.")
@option("--ledger-seconds SECONDS", SECONDS_HELP, float, default=90)
@quiet
@option("--verbose", "Print the names of all modules that the transforms changed.")
def train(
    recipe: str, overrides: tuple[str, ...], train: str | None, val: str | None, every_steps: int | None,
    every_minutes: float | None, tune_seconds: float | None, ledger: bool, ledger_seconds: float, quiet: bool,
    verbose: bool, **options: Any,
) -> None:  # fmt: skip
    """Train a recipe and print the result.

    With --out, plan.txt and recipe.yaml are written first; history.json, model.safetensors and a checkpoint
    after every epoch; curves.png at the end; with --ledger, also ledger.json and ledger.png. Ctrl-C, and SIGTERM and
    SIGUSR1, which schedulers send before they end a job, save a checkpoint after the current step, and end with the
    exit status 130 or 75. --resume continues from it. A second Ctrl-C stops at once; the finished epochs are kept.

    Paths in a recipe file are relative to the working directory, not to the file; a custom model
    (model: module:factory) is imported from the working directory or the file's folder. On several devices:

    \b
    torchrun --nproc-per-node=8 -m drivetrain train RECIPE strategy=ddp devices=auto
    """
    source = click.get_current_context().get_parameter_source
    if not ledger and source("ledger_seconds") is ParameterSource.COMMANDLINE:
        raise PlanError("--ledger-seconds is the time budget of --ledger. Pass both or neither.")
    with pipeline_of(recipe, overrides, train, val) as pipeline:
        from ....strategies.launching.group import is_main_process
        from ...runs.checkpoints.directory import Checkpoints
        from ...runs.fit import checked, fit
        from ...telemetry.history import shown

        _check_budgets(ledger_seconds if ledger else None, tune_seconds)  # before training, not after it
        callbacks = [{"name": one} if isinstance(one, str) else one for one in options.pop("callbacks")]
        # Null and false are values, too: they replace those of the recipe, or are refused.
        given = {key: one for key, one in options.items() if source(key) is ParameterSource.COMMANDLINE}
        options = pipeline.fit_defaults() | given | ({"callbacks": callbacks} if callbacks else {})
        out = options.get("out")
        if out is None and (every_steps is not None or every_minutes is not None):
            raise PlanError("--every-steps and --every-minutes save checkpoints, which need a folder. Pass --out, too.")
        config = FitConfig(
            progress=not quiet, checkpoints=Checkpoints(every_steps=every_steps, every_minutes=every_minutes),
            stop_on=("SIGTERM", "SIGUSR1"), **options,
        )  # fmt: skip
        if tune_seconds is not None:
            if is_address(out):
                raise PlanError("--tune writes its files to a local folder. Pass --out as a folder.")
            checked(pipeline, config)  # before tuning, not after it
            folder = None if out is None else Path(out)
            before = _tuned_before(pipeline, folder, resumes=bool(options.get("resume")))
            pipeline = before or _tuned(pipeline, tune_seconds, folder, quiet, printed=not quiet)
        with _end_reported(out, quiet):
            result = fit(pipeline, config, show_plan=not quiet, each_rank=False)
        if not is_main_process():  # under torchrun every rank runs this; only one prints
            return
        for report in () if quiet else result.reports:
            print(report.text(verbose=verbose))
        if result.metrics:
            metrics = ", ".join(shown(result.metrics, result.history.units))
            print(f"{metrics} after {_trained(result.history)}{_better(result.history)}")
        if ledger:
            measure(pipeline, ledger_seconds, out, quiet)
        if out is not None and not quiet:
            print(f"{out}: " + ", ".join(_files_in(out)))
            print("Next:\n" + lines_of(_next_commands(str(out), evaluated=bool(result.metrics)), 10**6))


def _check_budgets(*given: float | None) -> None:
    for seconds in given:
        if seconds is not None:
            from ...measuring.runner import check_measurable

            check_measurable(seconds)


def _trained(history: History) -> str:
    """Return how long the weights were trained: also within an epoch, where a callback has stopped the run."""
    epochs, (_, and_, steps) = len(history.epochs), history.moment.partition(" and ")
    return f"{epochs} epoch{'s' * (epochs != 1)}{and_}{steps}"


def _better(history: History) -> str:
    """Return which epoch was better than the last evaluation, if one was."""
    from ...tasks.metrics import format_metric

    best, last, monitor = history.best, history.last, history.monitor
    if best is None or last is None or (value := monitor.of(best)) is None:
        return ""
    if (own := monitor.of(last)) is not None and monitor.reaches(own, value):
        return ""
    return f"; best: {monitor} {format_metric(value, monitor.unit)} after epoch {best.epoch}"


def _next_commands(out: str, *, evaluated: bool) -> list[tuple[str, str]]:
    run = shlex.quote(out)
    shown = [(f"drivetrain errors {run}", "what the model gets wrong")] if evaluated else []
    return [
        *shown,
        (f"drivetrain report {run}", "the run as one HTML file"),
        (f"drivetrain predict {run} FOLDER", "predict images"),
    ]


def _tuned(
    pipeline: Pipeline, seconds: float, out: Path | None, quiet: bool, *, printed: bool, **options: Any
) -> Pipeline:
    from ...measuring.tuning.result import TuneInterrupted

    if pipeline.fit_options is not None:  # tuned.yaml shall not replace the run of the recipe
        pipeline = pipeline.replace(fit_options=replace(pipeline.fit_options, out=None))
    try:
        file = None if out is None else out / TUNED
        tuned = pipeline.tune(seconds=seconds, out=file, progress=not quiet, **options)
    except TuneInterrupted as interrupt:
        print(interrupt.tuned)
        if out is not None:
            interrupt.add_note("Run the same command again to continue from its trials.")
        raise
    if printed:
        print(tuned)
    if out is not None:
        tuned.save(out / "tuned.yaml")
        with suppress(MissingExtra):
            tuned.save(out / "tuned.png")
    return cast("Pipeline", tuned.pipeline)


def _tuned_before(pipeline: Pipeline, out: Path | None, *, resumes: bool) -> Pipeline | None:
    """Return the pipeline with the changes that the run in `out` was begun with; None if there is no run to resume."""
    from ...measuring.tuning.tune import recalled
    from ...runs.checkpoints.directory import CheckpointDir

    if out is None or not resumes or not CheckpointDir(out / "checkpoints").checkpoints():
        return None
    return cast("Pipeline", recalled(pipeline, out / TUNED))


@click.command(cls=Command)
@recipe_arguments()
@option(
    "--out FOLDER",
    "Folder for tuned.yaml (the recipe), tuned.json (all trials), tuned.png and converted data, created if missing.",
    File(),
)
@option("--seconds SECONDS", "Time budget, in seconds, for everything.", float, default=600)
@option(
    "--allow CHANGE",
    "Also try changes of what the training computes: precision, resolution, surgery, batch_size or storage. They "
    "are accepted only if short runs show that they keep the accuracy. May be repeated. With --target also methods "
    "and epochs, without storage; all of them if none is given.",
    Text("precision", "resolution", "surgery", "batch_size", "storage", "methods", "epochs"),
    multiple=True,
)
@option("--target SHARE", "Tune the time to this accuracy, 0 to 1, instead of the speed.", float)
@option("--epochs N", "Epochs of each of these short runs, 1 unless given; with --target, of each run.", int)
@option("--again", "Measure again what is kept of this tuning on this machine, or in --out.")
@quiet
def tune(
    recipe: str, overrides: tuple[str, ...], train: str | None, val: str | None, out: Path | None, seconds: float,
    quiet: bool, **options: Any,
) -> None:  # fmt: skip
    """Find the fastest way to run a recipe on this machine.

    Without --allow, only changes that keep what the training computes are tried: workers, batches ahead, raw pixels
    in place of JPEGs (with --out), memory format, compiling, strategies with the same numbers, the allocator's
    environment variables; microbatches if the batch does not fit. Each is trained in turns with the best so far, and
    accepted only if its interval shows that it is faster. With --target, changes race to an accuracy instead, in full
    runs. A second call is answered from what is kept on this machine, or continues it.
    """
    with pipeline_of(recipe, overrides, train, val) as pipeline:
        from ...measuring.runner import check_measurable

        check_measurable(seconds)
        _tuned(pipeline, seconds, out, quiet, printed=True, **options)  # of this command, it is the result


def _files_in(out: Path | str) -> list[str]:
    if is_address(out):
        from ....common.storage.addresses import RemoteFolder

        return sorted(name for name in RemoteFolder(str(out), CheckpointError).versions() if "/" not in name)
    return sorted(path.name for path in Path(out).iterdir() if path.is_file())


@contextmanager
def _end_reported(out: Path | str | None, quiet: bool) -> Iterator[None]:
    from ...runs.result import TrainingInterrupted

    try:
        with _stop_reported(quiet):
            yield
    except TrainingInterrupted as interrupt:
        interrupt.add_note(what_is_left(interrupt, out))
        raise


@contextmanager
def _stop_reported(quiet: bool) -> Iterator[None]:
    """Print how a run continues that a signal has stopped, if the run is too quiet to have done so."""
    from ....strategies.launching.group import is_main_process
    from ...runs.result import TrainingPreempted

    try:
        yield
    except TrainingPreempted as preempted:
        if quiet and is_main_process():  # else the run has printed it
            print(preempted.message)
        for note in getattr(preempted, "__notes__", ()):  # what could not be uploaded: nobody else prints it
            say("Note", note)
        raise


def what_is_left(interrupt: TrainingInterrupted, out: Path | str | None) -> str:
    if interrupt.checkpoint is not None:
        return f"Saved {interrupt.checkpoint}. Run the same command with --resume to continue from there."
    if not interrupt.epochs:
        return "No epoch finished."
    remedy = "" if out is None else " Run the same command with --resume to continue from there."
    return f"Epoch {interrupt.epochs} was the last to finish.{remedy}"


@click.command(cls=Command)
@recipe_arguments()
@option("--folds N", "Parts of the training data, of which each is held out once.", int, default=5)
@out_folder
@option(
    "--json", "Print one JSON object: the metrics of each fold, mean and spread, and the pooled errors.", name="as_json"
)
@quiet
def folds(
    recipe: str, overrides: tuple[str, ...], train: str | None, val: str | None, folds: int, out: Path | str | None,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Cross-validate a recipe.

    It trains once for each part of the training data, which is held out.
    Validation data of the recipe is not used. With --out, each fold is a run in a folder of its own, fold-0, fold-1, …;
    the same command again continues where it was stopped.
    """
    from ....common.storage.json_files import to_json

    with pipeline_of(recipe, overrides, train, val) as pipeline:
        from ....strategies.launching.group import is_main_process

        out = pipeline.fit_defaults().get("out") if out is None else out
        given: dict[str, Any] = {"stop_on": ("SIGTERM", "SIGUSR1")}  # as in `train`
        given |= {} if out is None else {"out": out, "resume": "auto"}
        with _stop_reported(quiet or as_json):
            found = pipeline.cross_validate(folds, progress=not quiet and not as_json, **given)
    if is_main_process():  # as in `train`
        print(to_json(found.to_dict()) if as_json else found)


@click.command(cls=Command)
@argument("run", "Folder or address of a finished run (train --out).", Place())
@argument("image", "Images, folders of images, patterns, or .beton files.", FILES, nargs=-1)
@option("--out PLACE", "Write a table (.csv, .parquet), or a new folder of masks (segmentation).", File())
@option("--on-error HOW", "raise (default), or skip: a damaged image gets a row with the error.", Text("raise", "skip"))
@option("--json", "Print one JSON object per image, with all probabilities.", name="as_json")
@trust_code
def predict(
    run: Path | str, image: tuple[str, ...], out: Path | None, on_error: str | None, as_json: bool,
    trust_code: bool,
) -> None:  # fmt: skip
    """Predict images with a trained model.

    Each image is cropped, resized and normalized as in the run's evaluation.
    """
    from ....common.storage.json_files import to_json
    from ...recipes.files import modules_of
    from ...runs.result import load_run
    from ...tasks.standard import Segmentation

    if not image:
        raise DataError("predict needs at least one image: drivetrain predict RUN image.jpg …")
    if on_error not in (None, "raise", "skip"):
        raise PlanError(f"--on-error {on_error} must be raise or skip.")
    with modules_of():
        result = load_run(run, trust_code=trust_code)
    rows = result.predict(list(image), out=out, on_error="skip" if on_error == "skip" else "raise", progress=True)
    if as_json:
        for row in rows:
            print(to_json(row))
    elif out is None:
        mask = isinstance(result.task, Segmentation)
        print(Table(("image", "prediction"), [(str(row["image"]), _prediction_text(row, mask=mask)) for row in rows]))
    else:
        failed = sum("error" in row for row in rows)
        print(f"{out}: {len(rows):,} images" + (f", {failed:,} of them damaged" if failed else ""))


def _prediction_text(row: dict[str, Any], *, mask: bool) -> str:
    from ....common.storage.json_files import to_json

    match row:
        case {"error": error}:
            return f"error: {error}"
        case {"prediction": prediction} if mask:
            size = f"{len(prediction)} × {len(prediction[0])}"
            return f"a mask of {size} pixels: write it with --out, or print it with --json"
        case {"class": _, "probabilities": dict(shares)}:  # the three most probable ones
            return ", ".join(f"{name} {share:.1%}" for name, share in [*shares.items()][:3])
        case {"labels": list(labels), "probabilities": dict(shares)}:
            return ", ".join(f"{name} {shares[name]:.1%}" for name in labels) or "none"
        case {"values": dict(values)}:
            return ", ".join(f"{name} {each:.4g}" for name, each in values.items())
        case {"value": value} | {"prediction": value}:
            numbers = value if isinstance(value, list) else [value]
            if all(isinstance(each, int | float) for each in numbers):
                return ", ".join(f"{each:.4g}" for each in numbers)
    text = to_json({name: each for name, each in row.items() if name != "image"})  # of a custom task: anything
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … (--json prints all)"


@click.command(cls=Command)
@argument("place", "Folder or address of a run or of one checkpoint.", Place(), metavar="RUN_OR_CHECKPOINT")
@argument("out", "The file to write: .safetensors, .pt2 or .onnx.", File())
@option(
    "--format FORMAT",
    "safetensors: the weights; torch-export: a program for torch.export.load; onnx: one for any ONNX runtime. "
    "Default: by the suffix of OUT.",
    Text("safetensors", "torch-export", "onnx"),
)
@option(
    "--names NAMES", "Names of the weights in safetensors: plain (before surgery) or trained (after it).",
    Text("plain", "trained"), default="plain",
)  # fmt: skip
@option("--best", "Export the checkpoint of the best monitored metric instead of the newest.")
@option(
    "--model MODULE:FACTORY",
    "Factory of the model before surgery, if it is a custom one. Importing its module runs its code; a checkpoint "
    "alone imports nothing.",
)
@option(
    "--data FILE",
    "A .beton file, to compare a program with the model on its images. Default: the run's validation data if it "
    "is there, else its training data, else random images.",
    File(),
)
@option(
    "--tolerance X", "Largest difference of a program's outputs, relative to the largest one. Default: 0.001.", float
)
@trust_code
@quiet
def export(place: Path | str, out: Path, names: str, tolerance: float | None, quiet: bool, **options: Any) -> None:
    """Write a trained model as one file, with a model card.

    With weight averaging (EMA, SWA), the averages are written. Safetensors is a plain state dict; the programs contain
    the model after surgery and take any number of images. Each is run before it is written: its outputs must be the
    model's. To load them in Python:

    \b
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
    model = torch.export.load("model.pt2").module()
    session = onnxruntime.InferenceSession("model.onnx")
    """
    from ...recipes.files import modules_of
    from ..exports.export import Names
    from ..exports.export import export as run

    if tolerance is not None:
        options["tolerance"] = tolerance
    with modules_of():
        exported = run(place, out, names=cast(Names, names), **options)
    print(f"{exported}".partition("\n")[0] if quiet else exported)


@click.command(cls=Command)
@recipe_arguments(required=False)
@out_folder
@option("--seconds SECONDS", f"{SECONDS_HELP} Default: 120.", float)
@option("--accuracy", "Also train each variant once, to measure its accuracy. This takes additional time.")
@option("--epochs N", "Epochs to train each variant with --accuracy. Default: the recipe's.", int)
@option(
    "--other-loader LOADER",
    "Also measure another loader, alone and in the full pipeline: ffcv_stock is FFCV's own.",
    Text("ffcv_stock"),
)
@option("--compare A.JSON B.JSON", "Do not measure: compare two ledger.json files.", File(), nargs=2)
@quiet
def ledger(
    recipe: str | None, overrides: tuple[str, ...], train: str | None, val: str | None, out: Path | str | None,
    seconds: float | None, epochs: int | None, compare: tuple[Path, Path] | None, quiet: bool, accuracy: bool,
    other_loader: str | None,
) -> None:  # fmt: skip
    """Measure what each stage contributes to the speed.

    It also shows which stage is the bottleneck.
    Plain PyTorch is 1.00; each stage is added in turn, measured alone, and left out of the full pipeline. All
    variants run interleaved in one process, until the confidence intervals are within 2 % or the time budget is
    spent; what does not fit into the budget is left out. With --out, ledger.json and ledger.png are written there;
    after Ctrl-C, with the results so far.
    """
    if compare is not None:
        from ...ledger.comparison import compare as run

        context = click.get_current_context()
        measured = [
            param.metavar if param.nargs == -1 else param.opts[-1]
            for param in context.command.params
            if param.name not in ("compare", "quiet")
            and context.get_parameter_source(f"{param.name}") is ParameterSource.COMMANDLINE
        ]
        if given := ", ".join(map(str, measured)):
            raise PlanError(f"--compare does not measure. Remove the options of a measurement: {given}.")
        print(run(*compare))
        return
    if recipe is None:
        raise PlanError("Pass the name of a recipe to measure (see: drivetrain recipes), or --compare A.JSON B.JSON.")
    if epochs is not None and not accuracy:
        raise PlanError("--epochs sets how long --accuracy trains each variant. Pass both or neither.")
    with pipeline_of(recipe, overrides, train, val) as pipeline:
        measure(
            pipeline, 120 if seconds is None else seconds, out, quiet, accuracy=accuracy, epochs=epochs,
            other_loader=other_loader,
        )  # fmt: skip


def measure(pipeline: Pipeline, seconds: float, out: Path | str | None, quiet: bool = False, **options: Any) -> None:
    from ....common.storage.files import make_folder
    from ...describe.config import check_out
    from ...ledger.ledger import LedgerInterrupted
    from ...measuring.ledger import checked
    from ...measuring.runner import check_measurable
    from ...runs.folder import uploading_from

    check_measurable(seconds)  # invalid options must not create a folder
    check_out("--out", out)
    checked(pipeline, **options)
    # The folder is made before measuring, so that it fails then.
    local = nullcontext(None if out is None or is_address(out) else make_folder(Path(out)))
    with uploading_from(str(out)) if is_address(out) else local as folder:
        if folder is not None:
            with suppress(ImportError):  # now rather than after Ctrl-C, when each second counts
                importlib.import_module("matplotlib.figure")
        try:
            measured = pipeline.ledger(seconds=seconds, progress=not quiet, **options)
        except LedgerInterrupted as interrupt:
            interrupt.add_note(_what_is_measured(interrupt.ledger, folder, out))
            raise
        except LedgerError as error:
            _show(error.ledger, folder)
            raise
        _show(measured, folder)


def _what_is_measured(measured: Ledger | None, folder: Path | None, out: Path | str | None) -> str:
    """`folder` is that of `out`, or, if that is an address, one that is uploaded next, and removed."""
    if measured is None:
        return "There is no ledger yet: it requires one trial each of plain PyTorch and the full pipeline."
    _show(measured, folder)
    rounds = f"{len(measured.rounds)} round{'s' * (len(measured.rounds) != 1)}"
    where = "" if out is None else f" is in {str(out).rstrip('/')}/ledger.json"
    return f"The ledger of {rounds}{where or ' is above'}."


def _show(measured: Ledger | None, folder: Path | None) -> None:
    from ....common.signals import interrupts_held

    if measured is None:
        return
    with interrupts_held():  # so that a second Ctrl-C loses nothing
        try:
            if folder is not None:
                measured.save(folder / "ledger.json")
        finally:  # also if the disk is full
            print(measured)
        if folder is not None:
            try:
                measured.save(folder / "ledger.png")
            except MissingExtra as error:  # what was measured, or trained before, is worth more than its picture
                print(f"There is no ledger.png: {error}")
