"""`drivetrain race`: variants of a recipe train to an accuracy in turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....common.errors import MissingExtra, PlanError
from .options import Command, File, Text, completed_recipe, option, pipeline_of, quiet, recipe_arguments

if TYPE_CHECKING:
    from ...describe.pipeline_spec import PipelineSpec

PLAIN, NONE = "plain", "none"


@click.command(cls=Command)
@recipe_arguments()
@option("--target SHARE", "The accuracy to reach, 0 to 1, of the monitored metric.", float, required=True)
@option("--seeds N", "Seeds, from that of the recipe on.", int, default=3)
@option(
    "--against VARIANT",
    "What to race against: plain is plain PyTorch; 'KEY=VALUE …' the recipe with these values, too; "
    "'RECIPE KEY=VALUE …' another recipe, by name or file; none races the recipe's own seeds. May be repeated. "
    "Default: plain.",
    Text(PLAIN, NONE, files=True),
    multiple=True,
)
@option(
    "--give-up K",
    "Stop a run that has trained K times as long as the fastest so far needed on the same seed. 0: stop none.",
    float,
    default=5,
)
@option("--out FOLDER", "Folder for race.json (all runs) and race.png, created if missing.", File())
@option("--seconds SECONDS", "Time budget, in seconds, for everything. Default: none.", float)
@quiet
def race(
    recipe: str, overrides: tuple[str, ...], train: str | None, val: str | None, target: float, seeds: int,
    against: tuple[str, ...], give_up: float, out: Path | None, seconds: float | None, quiet: bool,
) -> None:  # fmt: skip
    """Train a recipe and its variants to an accuracy, from several seeds in turns, and compare the times.

    Every run goes to its last epoch; times are of training without evaluations, to the first evaluation that reaches
    the target. --train and --val are those of every variant. With --out, a second call continues, also with more seeds.

    \b
    drivetrain race cifar10-quickstart --target 0.8 --out races/quickstart
    drivetrain race cifar10-quickstart --target 0.8 --against plain --against "batch_size=512 compile=true"
    """
    variants = {text: _words(text) for text in against or (PLAIN,)}
    if [NONE] in variants.values():
        if len(variants) > 1:
            raise PlanError(f"--against {NONE} excludes {' and '.join({*variants} - {NONE})}. Remove one of them.")
        variants = {}
    others = {text: _recipe_of(words, recipe, overrides) for text, words in variants.items() if words != [PLAIN]}
    for one in ((recipe, overrides), *others.values()):
        completed_recipe(*one, train, val)  # all of them before torch is imported
    from ...describe.resolve import resolve
    from ...ledger.variant import PLAIN as PLAIN_PYTORCH
    from ...measuring.race.result import RaceInterrupted
    from ...measuring.variants import plain

    with ExitStack() as stack:
        pipeline = stack.enter_context(pipeline_of(recipe, overrides, train, val))
        named: dict[str, PipelineSpec] = {}
        if [PLAIN] in variants.values():
            named[str(PLAIN_PYTORCH)] = plain(resolve(pipeline))
        named |= {text: stack.enter_context(pipeline_of(*one, train, val)) for text, one in others.items()}
        try:
            result = pipeline.race(
                target=target, seeds=seeds, against=named, give_up=give_up or None, seconds=seconds, progress=not quiet,
                out=None if out is None else out / "race.json",
            )  # fmt: skip
        except RaceInterrupted as interrupt:
            print(interrupt.race)
            if out is not None:
                interrupt.add_note("Run the same command again to continue from its runs.")
            raise
    print(result)
    if out is not None and any(run.points for run in result.runs):
        with suppress(MissingExtra):
            result.save(out / "race.png")


def _words(variant: str) -> list[str]:
    """Split before each KEY=, so that values and files may contain spaces, as JSON does."""
    return re.split(r"\s+(?=[\w.]+=)", variant.strip()) if variant.strip() else []


def _recipe_of(words: Sequence[str], recipe: str, overrides: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the recipe and the values of a variant: its own ones replace the command's, which other recipes lack."""
    if not words:
        raise PlanError("--against is empty. Pass plain, or values such as batch_size=256, or a recipe.")
    if seeds := [word for word in words if word.startswith("seed=")]:
        raise PlanError(f"--against: all variants are trained from the same seeds. Pass {seeds[0]} next to the recipe.")
    if "=" not in words[0]:
        return words[0], words[1:]
    keys = {pair.partition("=")[0] for pair in words}

    def stays(pair: str) -> bool:
        key = pair.partition("=")[0]
        return keys.isdisjoint((key, key.partition(".")[0]))  # optimizer={…} replaces optimizer.lr, too

    return recipe, [*filter(stays, overrides), *words]
