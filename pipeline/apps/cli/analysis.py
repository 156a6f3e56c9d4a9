"""`drivetrain errors | compare | show | plan | report`: what one would look at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .options import FILES, Command, File, Place, argument, option, pipeline_of, recipe_arguments, trust_code


@click.command(cls=Command)
@argument("run", "Folder or address of a finished run (train --out).", Place())
@option("--data FILE", "Data to judge. Default: the run's validation data.", FILES)
@option("--out FILE", "Also write a picture (.png, .svg, .pdf) with the worst samples, or .json.", File())
@option("--all", "Print all classes, not only the worst 20.", name="everything")
@option("--json", "Print one JSON object: the table, the worst and the least certain samples.", name="as_json")
@trust_code
def errors(
    run: Path | str, data: str | None, out: Path | None, everything: bool, as_json: bool, trust_code: bool
) -> None:  # fmt: skip
    """Show what a trained model gets wrong.

    It prints a table of the classes, the worst samples, and the calibration.
    Every validation sample is judged once, with the weights and the pixels of the run's evaluation.
    """
    from ....common.pictures import check_result
    from ....common.storage.json_files import to_json
    from ....strategies.launching.group import is_main_process
    from ...recipes.files import modules_of
    from ...runs.result import load_run

    if out is not None:
        check_result(out)  # before the pass over the data, not after it
    with modules_of():
        found = load_run(run, trust_code=trust_code).errors(data)
    if not is_main_process():  # under torchrun every rank runs this; only one prints
        return
    if as_json:
        print(to_json(found.to_dict()))
    else:
        print(found.table(None) if everything and found.heads else found)
    if out is not None:
        print(found.save(out), file=sys.stderr if as_json else sys.stdout)


@click.command(cls=Command)
@argument(
    "runs", "Folders or addresses of runs (train --out), any number.", Place(), nargs=-1, required=True,
    metavar="RUN...",
)  # fmt: skip
@option("--out FILE", "Also draw the curves: .png, .svg or .pdf.", File())
@option("--json", "Print one JSON object: the figures of each run, and what differs in its recipe.", name="as_json")
def compare(runs: tuple[Path | str, ...], out: Path | None, as_json: bool) -> None:
    """Compare runs, and show where their recipes differ.

    The table has epochs, best and last metric, and time.
    Unfinished and damaged runs are named. The curves are those of the monitored metric and of the loss, by epoch and by
    time.
    """
    from ....common.pictures import check_picture
    from ....common.storage.json_files import to_json
    from ...runs.analysis.compare import compare_runs

    if out is not None:
        check_picture(out)
    found = compare_runs(runs)
    print(to_json(found.to_dict()) if as_json else found)
    if out is not None:
        print(found.save(out), file=sys.stderr if as_json else sys.stdout)


@click.command(cls=Command)
@recipe_arguments()
@option("--out FILE", "The picture to write: .png, .svg or .pdf.", File(), default="batch.png")
@option("--epoch N", "The epoch, counted from 0, whose first batch is shown.", int, default=0)
@option("--samples N", "How many images of the batch, at most.", int, default=24)
def show(out: Path, epoch: int, samples: int, **recipe: Any) -> None:
    """Draw a batch as the training step gets it.

    The images are shown after crop, colors, policy, MixUp and CutMix, at the epoch's size, with class names and
    shares, masks and views. Nothing is trained.
    """
    from ....common.pictures import check_picture

    check_picture(out)
    with pipeline_of(**recipe) as pipeline:
        batch = pipeline.show_batch(epoch, samples=samples)
    print(f"{batch.save(out)}: {batch.title}")


@click.command(cls=Command)
@recipe_arguments()
@option("--summary", "Also print the model: parameters, what is frozen, operations, activations.")
def plan(summary: bool, **recipe: Any) -> None:
    """Print the plan of a run: each step, and its reason.

    What contradicts itself, and data that is missing, is rejected here; `train` also compares the labels with the task
    and the model, before its first step. Only the headers of data files are read.
    With --summary, the model is built.
    """
    with pipeline_of(**recipe) as pipeline:
        print(pipeline.plan())
        if summary:
            print(f"\n{pipeline.summary()}")


@click.command(cls=Command)
@argument("run", "Folder or address of a run (train --out).", Place())
@option("--out FILE", "The file to write, .html.", File(), default="report.html")
@option("--data FILE", "Data whose errors are shown. Default: the run's validation data.", FILES)
@trust_code
def report(run: Path | str, out: Path, data: str | None, trust_code: bool) -> None:
    """Write a report of a run, as one HTML file.

    It has the curves, metrics, errors with the worst samples, ledger, plan and recipe.
    The file needs no network and runs no scripts. An unfinished run is reported as such.
    """
    from ...recipes.files import modules_of
    from ..report import write_report

    with modules_of():
        print(write_report(run, out, data, trust_code=trust_code))
