"""`drivetrain job`: a job file for a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .parser import say
from .training import RECIPE, Overrides

SCHEDULERS = ("slurm", "kubernetes", "ray", "skypilot")


def job(
    scheduler: Annotated[str, "slurm, kubernetes, ray or skypilot.", None, SCHEDULERS],
    recipe: Annotated[str, RECIPE, None, "recipes"],
    overrides: Overrides = (),
    *,
    out: Annotated[
        Path | None,
        "Folder for the results, which all machines share; a restarted job resumes from it.",
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
    from ..jobs.schedulers import job_file

    text, made = job_file(
        scheduler, recipe, overrides, None if out is None else str(out), nodes=nodes, gpus=gpus_per_node,
        cpus=cpus_per_gpu, name=name, gpu_type=gpu_type, time=time, image=image,
    )  # fmt: skip
    if made.left_out and scheduler in ("kubernetes", "ray"):
        numbers = ", ".join(map(str, made.left_out))
        say(
            "Note",
            f"The batch cannot be divided among the GPUs of {numbers} nodes: a job that gets so many fails.",
        )
    print(text, end="")
