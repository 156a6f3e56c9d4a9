"""`drivetrain job`: a job file for a cluster."""

import json
from pathlib import Path

import click

from .options import Command, Place, Text, argument, check_sources, option, recipe_arguments, say

SCHEDULERS = ("slurm", "kubernetes", "jobset", "ray", "skypilot")


@click.command(cls=Command)
@argument("scheduler", "slurm, kubernetes, jobset, ray or skypilot.", Text(*SCHEDULERS))
@recipe_arguments()
@option(
    "--out FOLDER",
    "Folder for the results, which all machines share, or an address; a restarted job resumes from it.",
    Place(),
)
@option("--nodes N", "Number of machines, or the smallest and the largest, MIN:MAX.", default="1")
@option(
    "--gpus-per-node N", "GPUs of each machine; processes, if the recipe trains on the CPU.", int,
    name="gpus", default=8,
)  # fmt: skip
@option("--cpus-per-gpu N", "CPU cores for each GPU, for the loaders.", int, name="cpus", default=8)
@option("--gpu-type NAME", "Name of the GPUs in the scheduler's words, e.g. H100; skypilot requires it.")
@option("--time TIME", "Time limit, for slurm, kubernetes and jobset: minutes, HH:MM:SS or DAYS-HH:MM:SS.")
@option("--image IMAGE", "Container image, for kubernetes and jobset, which require it, skypilot and slurm (pyxis).")
@option("--name NAME", "Name of the job, except for ray. Default: the recipe's.")
def job(
    scheduler: str, recipe: str, overrides: tuple[str, ...], train: str | None, val: str | None,
    out: Path | str | None, **options: str | int | None,
) -> None:  # fmt: skip
    """Print a job file for a cluster. Nothing is submitted.

    The file runs drivetrain train RECIPE on all machines, saves before the scheduler ends it, and resumes when it is
    started again. Read and adapt it before you submit it:

    \b
    drivetrain job slurm mine.yaml strategy=fsdp --nodes 1:4 --out /shared/runs/mine > mine.sbatch
    sbatch mine.sbatch
    """
    from ...recipes.files import json_or_text
    from ...recipes.presets import parse_overrides
    from ..jobs import schedulers

    sources = check_sources(parse_overrides(overrides), train, val)
    data = [f"{key}={each if json_or_text(key, each) == each else json.dumps(each)}" for key, each in sources.items()]
    text, made = schedulers.job_file(
        scheduler, recipe, [*overrides, *data], None if out is None else str(out), **options
    )
    if made.left_out and schedulers.SCHEDULERS[scheduler].elastic:
        numbers = ", ".join(map(str, made.left_out))
        say("Note", f"The batch cannot be divided among the GPUs of {numbers} nodes: a job that gets so many fails.")
    if lacking := schedulers.SCHEDULERS[scheduler].unmounted(made):
        in_slurm = scheduler == "slurm"
        there = [*["the folder where it is submitted"] * in_slurm, *filter(None, [made.top_folder])]
        mounted = f"only {' and '.join(there)}" if there else "nothing, because --out is an address"
        say(
            "Note",
            f"The {'containers' if in_slurm else 'machines'} do not have the data {', '.join(lacking[:3])}"
            f"{', …' * (len(lacking) > 3)}: the file mounts {mounted}. Pass the data's address, put it into the "
            "image, or mount its folder in the file.",
        )
    print(text, end="")
