"""`drivetrain sweep`: one recipe with many values."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click.core import ParameterSource

from ....common.errors import PlanError
from .options import Command, File, check_sources, option, recipe_arguments


@click.command(cls=Command)
@recipe_arguments(
    "Values of the recipe: optimizer.lr=0.1,0.3 seed=0..4 epochs=16. Commas within JSON do not separate; 0..4 are the "
    "whole numbers from 0 to 4; with --random, 1e-4..1e-1 are all numbers between.",
    "KEY=VALUES...",
)
@option("--out FOLDER", "Folder of the sweep; each run has a folder in it.", File(), required=True)
@option(
    "--jobs N",
    "Runs at a time. They share the machine. Each gets an equal part of the GPUs, or one if there are more runs.",
    int,
    default=1,
)
@option("--random N", "Draw N combinations instead of all. Each is trained with every seed=….", int, name="count")
@option("--seed S", "Seed of --random.", int, default=0)
@option("--json", "Print one JSON object instead of the table.", name="as_json")
def sweep(
    recipe: str, overrides: tuple[str, ...], train: str | None, val: str | None, out: Path, jobs: int,
    count: int | None, seed: int, as_json: bool,
) -> int:  # fmt: skip
    """Train a recipe with many values, and compare them.

    The table has the mean and spread over the seeds, and the time.
    Every combination is a run of drivetrain train in a process of its own, in --out/NAME, with its output in output.txt
    there. The same command again skips the finished runs, resumes the interrupted ones, and repeats those that failed.
    A run that fails does not stop the others; the exit status is then 1. Ctrl-C lets the running ones save, and ends
    them.

    \b
    drivetrain sweep cifar10-quickstart optimizer.lr=0.1,0.3,1 seed=0..2 --out sweeps/lr
    drivetrain sweep mine.yaml optimizer.lr=0.01..1 --random 20 --out sweeps/random
    """
    from ....common.storage.json_files import to_json
    from ..sweeps.space import space
    from ..sweeps.sweep import sweep

    for name, value in (("--jobs", jobs), ("--random", 1 if count is None else count)):
        if value < 1:
            raise PlanError(f"{name} {value} must be 1 or more.")
    given = click.get_current_context().get_parameter_source("seed") is ParameterSource.COMMANDLINE
    if given and count is None:  # it would train from the recipe's seed
        raise PlanError(
            f"--seed {seed} is that of --random, which draws the combinations. Pass --random N, too; or seed={seed}, "
            "the seed of the trainings."
        )
    what = space(overrides, count, seed)
    if count is not None and (found := len(what.combinations)) < count:
        print(f"--random {count}: these values have only {found} combination(s).", file=sys.stderr, flush=True)
    sources = check_sources([pair.partition("=")[0] for pair in overrides], train, val)
    done = sweep(recipe, what, out, sources, jobs=jobs, said=lambda line: print(line, file=sys.stderr, flush=True))
    print(to_json(done.to_dict()) if as_json else done)
    return 1 if done.failed else 0
