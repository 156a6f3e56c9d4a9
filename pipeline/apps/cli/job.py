"""`drivetrain job`: a job file for a cluster."""

from __future__ import annotations

import json
from typing import Annotated

from .parser import Place, say
from .training import RECIPE, Overrides, Train, Val, check_sources

SCHEDULERS = ("slurm", "kubernetes", "ray", "skypilot")


def job(
    scheduler: Annotated[str, "slurm, kubernetes, ray or skypilot.", None, SCHEDULERS],
    recipe: Annotated[str, RECIPE, None, "recipes"],
    overrides: Overrides = (),
    *,
    train: Train = None,
    val: Val = None,
    out: Annotated[
        Place | None,
        "Folder for the results, which all machines share, or an address; a restarted job resumes from it.",
        "FOLDER",
    ] = None,
    nodes: Annotated[str, "Number of machines, or the smallest and the largest, MIN:MAX.", "N"] = "1",
    gpus_per_node: Annotated[
        int, "GPUs of each machine; processes, if the recipe trains on the CPU.", "N"
    ] = 8,
    cpus_per_gpu: Annotated[int, "CPU cores for each GPU, for the loaders.", "N"] = 8,
    gpu_type: Annotated[
        str | None, "Name of the GPUs in the scheduler's words, e.g. H100; skypilot requires it.", "NAME"
    ] = None,
    time: Annotated[str | None, "Time limit, for slurm: minutes, HH:MM:SS or DAYS-HH:MM:SS.", "TIME"] = None,
    image: Annotated[
        str | None, "Container image, for kubernetes, which requires it, and skypilot.", "IMAGE"
    ] = None,
    name: Annotated[str | None, "Name of the job. Default: the recipe's.", "NAME"] = None,
) -> None:
    """Print a job file for a cluster. Nothing is submitted.

    The file runs drivetrain train RECIPE on all machines, saves before the scheduler ends it, and resumes when it is
    started again. Read and adapt it before you submit it:

      drivetrain job slurm mine.yaml strategy=fsdp --nodes 1:4 --out /shared/runs/mine > mine.sbatch
      sbatch mine.sbatch
    """
    from ...recipes.files import json_or_text
    from ...recipes.presets import parse_overrides
    from ..jobs import schedulers

    sources = check_sources(parse_overrides(overrides), train, val)
    texts = {
        key: each if json_or_text(key, each) == each else json.dumps(each) for key, each in sources.items()
    }
    overrides = [*overrides, *(f"{key}={text}" for key, text in texts.items())]
    text, made = schedulers.job_file(
        scheduler, recipe, overrides, None if out is None else str(out), nodes=nodes, gpus=gpus_per_node,
        cpus=cpus_per_gpu, name=name, gpu_type=gpu_type, time=time, image=image,
    )  # fmt: skip
    if made.left_out and schedulers.SCHEDULERS[scheduler].elastic:
        numbers = ", ".join(map(str, made.left_out))
        say(
            "Note",
            f"The batch cannot be divided among the GPUs of {numbers} nodes: a job that gets so many fails.",
        )
    if lacking := schedulers.SCHEDULERS[scheduler].unmounted(made):
        mounted = f"only {made.top_folder}" if made.top_folder else "nothing, because --out is an address"
        say(
            "Note",
            f"The machines do not have the data {', '.join(lacking[:3])}{', …' * (len(lacking) > 3)}: the file mounts "
            f"{mounted}. Pass the data's address, put it into the image, or mount its folder in the file.",
        )
    print(text, end="")
