"""The command line: `drivetrain convert | inspect | verify | train | export | recipes | ledger | doctor`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from ...errors import CheckpointError, DrivetrainError, LedgerError, PlanError
from ...version import __version__
from . import data as cli_data

if TYPE_CHECKING:
    from ..ledger.ledger import Ledger
    from ..pipeline import Pipeline
    from ..runs.result import TrainingInterrupted


class _Commands(TyperGroup):
    """The commands; here, because typer itself would end on Ctrl-C without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command. An error of Drivetrain, and Ctrl-C, become a line on stderr and an exit status."""
        try:
            with _plain_warnings():
                return super().invoke(ctx)
        except DrivetrainError as error:
            _say(type(error).__name__, str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            _say("Interrupted", " ".join(["on your wish.", *getattr(interrupt, "__notes__", [])]))
            raise typer.Exit(130) from None


class _Command(TyperCommand):
    """One command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses an option that is given twice, of which click would silently keep the last."""
        names = [arg.partition("=")[0] for arg in args[: args.index("--") if "--" in args else None]]
        for parameter in self.params:
            own = [name for name in names if name in parameter.opts and name.startswith("-")]
            if len(own) > 1 and not getattr(parameter, "multiple", False):
                raise PlanError(f"{own[0]} is given {len(own)} times. Leave all but one out.")
        return super().parse_args(ctx, args)


def _what_is_left(interrupt: TrainingInterrupted, out: Path | None) -> str:
    """What an interrupted training has kept, and how it goes on."""
    if not interrupt.epochs:
        return "No epoch was finished."
    goes_on = "" if out is None else " The same command with --resume goes on from there."
    return f"Epoch {interrupt.epochs} was the last to be finished.{goes_on}"


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Within the block a warning of Drivetrain is a line as an error is, without a line of source."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if category.__module__.startswith(f"{__package__.partition('.')[0]}."):
                _say(category.__name__, str(message))
            else:
                others(message, category, *place, **more)

        warnings.showwarning = show
        yield


def _say(head: str, text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(
        Text(f"{head}: ", style="bold red").append(text, style="not bold default")
    )


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _folder(text: str) -> Path:
    if not text:  # which would be this folder; from a script, it is a variable that was not set
        raise typer.BadParameter("it is empty. Give a folder, '.' for this one.")
    return Path(text)


Out = Annotated[
    Path | None,
    typer.Option(parser=_folder, metavar="FOLDER", help="Folder for the results; made if it is not there."),
]
Train = Annotated[
    str | None, typer.Option("--train", help="Training data: a .beton file, or a name such as cifar10:train.")
]
Val = Annotated[str | None, typer.Option(help="Validation data, likewise.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values of the recipe to replace, e.g. epochs=36 batch_size=512 optimizer.lr=0.5. Values are read "
        "as JSON where they are JSON. The keys: drivetrain recipes --keys.",
    ),
]
Seconds = Annotated[
    float, typer.Option(help="Time for the ledger, in seconds: building, warm-up and all rounds.")
]


def _show_version(asked: bool) -> None:
    if asked:
        print(f"drivetrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version, and exit."),
    ] = False,
) -> None:
    """Fast training of PyTorch image models: FFCV loading, model surgery and a distribution strategy behind one
    pipeline, and a ledger that measures what each brings."""


for _command in (cli_data.convert, cli_data.inspect, cli_data.verify):
    app.command(cls=_Command)(_command)


@app.command(cls=_Command)
def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe (see: drivetrain recipes), or a .yaml or .json file.")
    ],
    overrides: Overrides = None,
    data: Train = None,
    val: Val = None,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out, if there is one.")
    ] = False,
    logger: Annotated[
        list[str] | None,
        typer.Option(
            help="Write the figures of steps and epochs to --out, as csv or tensorboard. May be repeated."
        ),
    ] = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="Measure the ledger after training.")] = False,
    ledger_seconds: Seconds = 90.0,
) -> None:
    """Trains a recipe and says what came out.

    With --out, plan.txt and recipe.yaml are written first, history.json, model.safetensors and a checkpoint
    after every epoch, curves.png at the end; with --ledger, also ledger.json and ledger.png. Ctrl-C stops, and
    keeps the epochs that were finished; --resume goes on. Paths in a recipe's file are relative to the working
    directory, not to the file; a custom model (model: module:factory) is imported from there or from
    the file's folder. Under torchrun: torchrun --nproc-per-node=8 -m drivetrain train RECIPE devices=8.
    """
    changes = _checked(recipe, overrides, data, val)
    from ...strategies.launching.group import is_main_process
    from ..pipeline import Pipeline
    from ..runs.config import FitConfig
    from ..runs.fit import fit
    from ..runs.result import TrainingInterrupted

    if ledger:
        from ..ledger.measure import check_asked

        check_asked(ledger_seconds)  # first: a training would be over by then
    _find_modules(context, recipe)
    pipeline = Pipeline.from_recipe(recipe, **changes)
    try:
        config = FitConfig(out=out, resume=resume, logger=logger)
        result = fit(pipeline, config, show_plan=True)
    except TrainingInterrupted as interrupt:
        interrupt.add_note(_what_is_left(interrupt, out))
        raise
    if not is_main_process():  # under torchrun every rank is here, and one of them tells
        return
    for report in result.reports:
        print(report)
    if result.accuracy is not None:
        epochs = len(result.history.epochs)
        print(f"top-1 accuracy {result.accuracy:.2%} after {epochs} epoch{'s' * (epochs != 1)}")
    if ledger:
        _measure(pipeline, ledger_seconds, out)
    if out is not None:
        print(f"{out}: " + ", ".join(sorted(path.name for path in out.iterdir() if path.is_file())))


@app.command(cls=_Command)
def export(
    context: typer.Context,
    place: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder of a run, or of one checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    names: Annotated[
        str,
        typer.Option(help="Names of the weights. plain: before surgery; trained: as trained, after it."),
    ] = "plain",
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint of the highest accuracy, not the newest.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="The model before surgery, where it is your own. Its module is imported, which runs its code; "
            "a checkpoint alone imports none.",
        ),
    ] = None,
) -> None:
    """Writes the weights of a checkpoint as a plain state dict, which loads without Drivetrain.

    Where weights were averaged (EMA, SWA), the averages. In Python: model.load_state_dict(
    safetensors.torch.load_file(OUT)).
    """
    from ..checkpoints.export import export as run

    if names not in ("plain", "trained"):
        raise CheckpointError(f"--names {names} is not known; use plain or trained.")
    _find_modules(context)
    taken = run(place, out, names=cast(Literal["plain", "trained"], names), best=best, model=model)
    print(f"{out}: {taken.path.name}")


@app.command(cls=_Command)
def ledger(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(help="Name of a recipe (see: drivetrain recipes), or a .yaml or .json file."),
    ] = None,
    overrides: Overrides = None,
    data: Train = None,
    val: Val = None,
    out: Out = None,
    seconds: Seconds = 120.0,
    accuracy: Annotated[
        bool,
        typer.Option(
            "--accuracy",
            help="Also train each variant, once, for its accuracy. This takes time of its own.",
        ),
    ] = False,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of each with --accuracy. Default: the recipe's.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Instead of measuring, compare two ledger.json files.", metavar="A.JSON B.JSON"),
    ] = None,
) -> None:
    """Measures what each stage of a recipe brings on this machine, and which stage is the bottleneck.

    Plain PyTorch is 1.00; each stage is added in turn, measured alone, and left out of the full pipeline. All
    variants run interleaved in one process, until the confidence intervals are within 2 % or the time is
    spent; what does not fit into the time is left out. With --out, ledger.json and ledger.png are written there,
    also after Ctrl-C with what was measured by then.
    """
    if compare is not None:
        others = [name for name in _given(context) if name != "--compare"]
        if others:
            raise PlanError(
                f"--compare measures nothing. Leave out what is for a measurement: {', '.join(others)}."
            )
        from ..ledger.comparison import compare as run

        print(run(*compare))
        return
    if recipe is None:
        raise PlanError(
            "Give the name of a recipe to measure (drivetrain recipes), or --compare A.JSON B.JSON."
        )
    if epochs is not None and not accuracy:
        raise PlanError("--epochs is of the trainings that --accuracy asks for. Give both, or neither.")
    changes = _checked(recipe, overrides, data, val)
    from ..pipeline import Pipeline

    _find_modules(context, recipe)
    pipeline = Pipeline.from_recipe(recipe, **changes)
    _measure(pipeline, seconds, out, accuracy=accuracy, epochs=epochs)


@app.command(cls=_Command)
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this recipe, by name or file: each value, its meaning, and where it is from."
        ),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List the keys of a recipe.")] = False,
) -> None:
    """Lists the recipes, or shows one."""
    from ..recipes.table import keys_table, recipe_table, recipes_table

    table = keys_table() if keys else recipes_table() if name is None else recipe_table(name)
    Console().print(table)


@app.command(cls=_Command)
def doctor() -> None:
    """Says what is installed, which version, what is missing and how to get it.

    Exits with status 1 if something that the core needs is missing.
    """
    from .doctor import examine

    healthy, table = examine()
    Console().print(table)
    raise typer.Exit(0 if healthy else 1)


def _given(context: typer.Context) -> list[str]:
    """The names of the options and arguments that the command line has."""
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if getattr(context.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE"
    ]


def _find_modules(context: typer.Context, recipe: str | None = None) -> None:
    """Until the command ends, modules in the folder of a recipe's file and in the working directory can be imported."""
    from ..recipes.importing import modules_of

    context.with_resource(modules_of(recipe))


def _measure(pipeline: Pipeline, seconds: float, out: Path | None, **accuracy: Any) -> None:
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
    """Shows what an interrupted ledger has; in words, where it is."""
    if measured is None:
        return "Plain PyTorch and the full pipeline did not have a trial each: there is no ledger yet."
    _show(measured, folder)
    rounds = f"{len(measured.rounds)} round{'s' * (len(measured.rounds) != 1)}"
    where = "" if folder is None else f" is in {folder / 'ledger.json'}"
    return f"The ledger of {rounds}{where or ' is above'}."


def _show(measured: Ledger | None, folder: Path | None) -> None:
    """Prints a ledger and writes it; the file with all figures first."""
    from ..runs.interrupts import interrupts_held

    if measured is None:
        return
    with interrupts_held():  # a second Ctrl-C loses nothing
        if folder is not None:
            measured.save(folder / "ledger.json")
        print(measured)
        if folder is not None:
            measured.save(folder / "ledger.png")


def _checked(recipe: str, pairs: list[str] | None, data: str | None, val: str | None) -> dict[str, Any]:
    """Return the overrides of a recipe that, with them, is one: its mistakes are shown before torch is imported."""
    from ..recipes.presets import complete, parse_overrides

    found = parse_overrides(pairs or [])
    for key, value in (("train", data), ("val", val)):
        if value is not None:
            if key in found:
                raise PlanError(f"--{key} and {key}= are both given. Leave one of the two out.")
            found[key] = value
    complete(recipe, found)
    return found


def main() -> None:
    """The entry point."""
    app(prog_name="drivetrain")  # also of python -m drivetrain
