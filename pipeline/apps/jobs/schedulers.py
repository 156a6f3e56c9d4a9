"""The schedulers by name, and the job file of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ....common.errors import PlanError, suggest
from ....common.storage.addresses import is_address
from .job import Job, make_job
from .kubernetes import jobset, kubernetes
from .ray import ray
from .skypilot import skypilot
from .slurm import slurm


@dataclass(frozen=True)
class Scheduler:
    text: Callable[[Job], str]
    options: Sequence[str] = ()  # that it uses, of those that not every scheduler has
    same_folder: bool = False  # a job starts in the folder where it is submitted, so `out` can be relative
    mounts: bool = False  # its machines have only what the file mounts: the first folder of `out`
    copies: bool = False  # they also have the working directory
    elastic: bool = False  # a job may get any number of machines in its range, dividing the batch or not

    def unmounted(self, job: Job) -> list[str]:
        if self.mounts:
            return job.unmounted(copied=self.copies)
        if not self.same_folder or job.image is None:
            return []
        # A container has the folder where the job is submitted, which is probably this one, and the first of `out`.
        here = Path.cwd()
        return [file for file in job.unmounted(copied=True) if not PurePosixPath(file).is_relative_to(here)]


SCHEDULERS = {
    "slurm": Scheduler(slurm, ("time", "image", "name"), same_folder=True),
    "kubernetes": Scheduler(kubernetes, ("image", "time", "name"), mounts=True, elastic=True),
    "jobset": Scheduler(jobset, ("image", "time", "name"), mounts=True, elastic=True),
    "ray": Scheduler(ray, elastic=True),
    "skypilot": Scheduler(skypilot, ("image", "name"), mounts=True, copies=True),
}


def job_file(scheduler: str, recipe: str, overrides: Sequence[str], out: str | None, **options: Any) -> tuple[str, Job]:
    if scheduler not in SCHEDULERS:
        raise PlanError(f"There are no job files for {scheduler!r:.80}.{suggest(scheduler, SCHEDULERS)}")
    chosen = SCHEDULERS[scheduler]
    for option in ("time", "image", "name"):
        if options.get(option) is not None and option not in chosen.options:
            raise PlanError(f"A job file for {scheduler} has no --{option}. Leave it out, or add it to the file.")
    job = make_job(recipe, overrides, out, **options)
    path = PurePosixPath(job.out)
    inside = path.is_absolute() and len(path.parts) > 1 and ".." not in path.parts
    if not (chosen.same_folder or is_address(job.out) or inside):
        raise PlanError(
            f"--out {job.out!r}: machines of {scheduler} start in a folder of their own. Pass an absolute path in a "
            "folder that all of them see, e.g. /shared/runs/mine, or an address."
        )
    return chosen.text(job), job
