"""The commands about training: `drivetrain train | export | ledger`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from ...errors import CheckpointError, LedgerError, PlanError

if TYPE_CHECKING:
    from ..ledger.ledger import Ledger
    from ..pipeline import Pipeline
    from ..runs.result import TrainingInterrupted

RECIPE = "Name of a recipe (see: drivetrain recipes), or a .yaml or .json file."
SECONDS = "Time for the ledger, in seconds: building, warm-up and all rounds."
Overrides = Annotated[
    Sequence[str],
    "Values of the recipe to replace, e.g. epochs=36 batch_size=512 optimizer.lr=0.5. Values are read as JSON where "
    "they are JSON. The keys: drivetrain recipes --keys.",
    "KEY=VALUE",
]
Train = Annotated[str | None, "Training data: a .beton file, or a name such as cifar10:train.", "DATA"]
Val = Annotated[str | None, "Validation data, likewise.", "DATA"]
Out = Annotated[Path | None, "Folder for the results; made if it is not there.", "FOLDER"]


def train(
    recipe: Annotated[str, RECIPE],
    overrides: Overrides = (),
    *,
    train: Train = None,
    val: Val = None,
    out: Out = None,
    resume: Annotated[bool, "Go on from the newest checkpoint in --out, if there is one."] = False,
    logger: Annotated[
        Sequence[str], "Write the figures of steps and epochs to --out: csv or tensorboard. May be repeated."
    ] = (),
    ledger: Annotated[bool, "Measure the ledger after training."] = False,
    ledger_seconds: Annotated[float, SECONDS, "SECONDS"] = 90,
) -> None:
    """Train a recipe, and say what came out.

    With --out, plan.txt and recipe.yaml are written first, history.json, model.safetensors and a checkpoint
    after every epoch, curves.png at the end; with --ledger, also ledger.json and ledger.png. Ctrl-C stops, and
    keeps the epochs that were finished; --resume goes on.

    Paths in a recipe's file are relative to the working directory, not to the file; a custom model
    (model: module:factory) is imported from there or from the file's folder. On several devices:

      torchrun --nproc-per-node=8 -m drivetrain train RECIPE devices=8
    """
    changes = _checked(recipe, overrides, train, val)
    from ...strategies.launching.group import is_main_process
    from ..pipeline import Pipeline
    from ..recipes.importing import modules_of
    from ..runs.config import FitConfig
    from ..runs.fit import fit
    from ..runs.result import TrainingInterrupted

    if ledger:
        from ..ledger.measure import check_asked

        check_asked(ledger_seconds)  # first: a training would be over by then
    with modules_of(recipe):
        pipeline = Pipeline.from_recipe(recipe, **changes)
        try:
            config = FitConfig(out=out, resume=resume, logger=list(logger) or None)
            result = fit(pipeline, config, show_plan=True)
        except TrainingInterrupted as interrupt:
            interrupt.add_note(what_is_left(interrupt, out))
            raise
        if not is_main_process():  # under torchrun every rank is here, and one of them tells
            return
        for report in result.reports:
            print(report)
        if result.accuracy is not None:
            epochs = len(result.history.epochs)
            print(f"top-1 accuracy {result.accuracy:.2%} after {epochs} epoch{'s' * (epochs != 1)}")
        if ledger:
            measure(pipeline, ledger_seconds, out)
        if out is not None:
            print(f"{out}: " + ", ".join(sorted(path.name for path in out.iterdir() if path.is_file())))


def what_is_left(interrupt: TrainingInterrupted, out: Path | None) -> str:
    """Return what an interrupted training has kept, and how it goes on."""
    if not interrupt.epochs:
        return "No epoch was finished."
    goes_on = "" if out is None else " The same command with --resume goes on from there."
    return f"Epoch {interrupt.epochs} was the last to be finished.{goes_on}"


def export(
    place: Annotated[Path, "Folder of a run, or of one checkpoint.", "RUN_OR_CHECKPOINT"],
    out: Annotated[Path, "The .safetensors file to write."],
    *,
    names: Annotated[str, "Names of the weights: plain (before surgery) or trained (after it)."] = "plain",
    best: Annotated[bool, "The checkpoint of the highest accuracy, not the newest."] = False,
    model: Annotated[
        str | None,
        "The model before surgery, where it is your own. Its module is imported, which runs its code; a checkpoint "
        "alone imports none.",
        "MODULE:FACTORY",
    ] = None,
) -> None:
    """Write the weights of a checkpoint as a plain state dict, which loads without Drivetrain.

    Where weights were averaged (EMA, SWA), the averages. In Python:

      model.load_state_dict(safetensors.torch.load_file(OUT))
    """
    from ..checkpoints.export import export as run
    from ..recipes.importing import modules_of

    if names not in ("plain", "trained"):
        raise CheckpointError(f"--names {names} is not known; use plain or trained.")
    with modules_of():
        taken = run(place, out, names=cast(Literal["plain", "trained"], names), best=best, model=model)
    print(f"{out}: {taken.path.name}")


def ledger(
    recipe: Annotated[str | None, RECIPE] = None,
    overrides: Overrides = (),
    *,
    train: Train = None,
    val: Val = None,
    out: Out = None,
    seconds: Annotated[float | None, f"{SECONDS} Default: 120."] = None,
    accuracy: Annotated[
        bool, "Also train each variant, once, for its accuracy. This takes time of its own."
    ] = False,
    epochs: Annotated[int | None, "Epochs of each with --accuracy. Default: those of the recipe."] = None,
    compare: Annotated[
        tuple[Path, Path] | None, "Do not measure: compare two ledger.json files.", ("A.JSON", "B.JSON")
    ] = None,
) -> None:
    """Measure what each stage of a recipe brings on this machine, and which stage is the bottleneck.

    Plain PyTorch is 1.00; each stage is added in turn, measured alone, and left out of the full pipeline. All
    variants run interleaved in one process, until the confidence intervals are within 2 % or the time is
    spent; what does not fit into the time is left out. With --out, ledger.json and ledger.png are written there,
    also after Ctrl-C with what was measured by then.
    """
    if compare is not None:
        from ..ledger.comparison import compare as run

        measured = {"recipe": recipe, "KEY=VALUE": overrides, "--train": train, "--val": val, "--out": out,
                    "--seconds": seconds, "--accuracy": accuracy, "--epochs": epochs}  # fmt: skip
        if given := ", ".join(name for name, value in measured.items() if value):
            raise PlanError(f"--compare measures nothing. Leave out what is for a measurement: {given}.")
        print(run(*compare))
        return
    if recipe is None:
        raise PlanError(
            "Give the name of a recipe to measure (drivetrain recipes), or --compare A.JSON B.JSON."
        )
    if epochs is not None and not accuracy:
        raise PlanError("--epochs is of the trainings that --accuracy asks for. Give both, or neither.")
    changes = _checked(recipe, overrides, train, val)
    from ..pipeline import Pipeline
    from ..recipes.importing import modules_of

    with modules_of(recipe):
        pipeline = Pipeline.from_recipe(recipe, **changes)
        measure(pipeline, 120 if seconds is None else seconds, out, accuracy=accuracy, epochs=epochs)


def measure(pipeline: Pipeline, seconds: float, out: Path | None, **accuracy: Any) -> None:
    """Measure a ledger, print it and write it to `out`; so, too, what there is of one that is stopped or fails."""
    from ..ledger.ledger import LedgerInterrupted
    from ..ledger.measure import check_asked
    from ..runs.fit import make_folder

    check_asked(seconds)  # what is refused leaves no folder
    pipeline.plan()
    folder = None if out is None else make_folder(out)  # first: a ledger that cannot be written is time lost
    if folder is not None:
        with suppress(ImportError):  # now, and not after Ctrl-C, when each second counts
            importlib.import_module("matplotlib.figure")
    try:
        measured = pipeline.ledger(seconds=seconds, **accuracy)
    except LedgerInterrupted as interrupt:
        interrupt.add_note(_what_is_measured(interrupt.ledger, folder))
        raise
    except LedgerError as error:
        _show(error.ledger, folder)
        raise
    _show(measured, folder)


def _what_is_measured(measured: Ledger | None, folder: Path | None) -> str:
    """Show what an interrupted ledger has; return where it is, in words."""
    if measured is None:
        return "Plain PyTorch and the full pipeline did not have a trial each: there is no ledger yet."
    _show(measured, folder)
    rounds = f"{len(measured.rounds)} round{'s' * (len(measured.rounds) != 1)}"
    where = "" if folder is None else f" is in {folder / 'ledger.json'}"
    return f"The ledger of {rounds}{where or ' is above'}."


def _show(measured: Ledger | None, folder: Path | None) -> None:
    """Print a ledger and write it; the file with all figures first."""
    from ..runs.interrupts import interrupts_held

    if measured is None:
        return
    with interrupts_held():  # a second Ctrl-C loses nothing
        if folder is not None:
            measured.save(folder / "ledger.json")
        print(measured)
        if folder is not None:
            measured.save(folder / "ledger.png")


def _checked(recipe: str, pairs: Sequence[str], train: str | None, val: str | None) -> dict[str, Any]:
    """Return the overrides of a recipe that, with them, is one: its mistakes are shown before torch is imported."""
    from ..recipes.presets import complete, parse_overrides

    found = parse_overrides(pairs)
    for key, value in (("train", train), ("val", val)):
        if value is not None:
            if key in found:
                raise PlanError(f"--{key} and {key}= are both given. Leave one of the two out.")
            found[key] = value
    complete(recipe, found)
    return found
