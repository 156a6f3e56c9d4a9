"""A Python file for Ray Train."""

from __future__ import annotations

import json
from math import ceil

from ...recipes.presets import parse_overrides
from .job import CHECKPOINT_MINUTES, Job

_RESTARTS = 10


def ray(job: Job) -> str:
    """Return a script that trains in the process group of Ray's TorchTrainer."""
    fewest, most = job.fewest * job.processes, job.most * job.processes
    number = f"{most}" if fewest == most else f"({fewest}, {most})"
    accelerator = "" if job.gpu_type is None else f"accelerator_type={job.gpu_type!r}, "
    resources = {"CPU": job.cpus, **({"GPU": 1} if job.on_gpus else {})}
    backend = "cpu:gloo,cuda:nccl" if job.on_gpus else "gloo"
    return f'''\
"""Trains with Drivetrain; written by `drivetrain job ray`.

Run it in a folder that all machines of the Ray cluster see, from which paths in the recipe are relative: python FILE
"""

import os

from drivetrain import Pipeline
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.recipes.importing import modules_of
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

RECIPE = {job.recipe!r}
OVERRIDES = {parse_overrides(job.overrides)!r}
OUT = {job.out!r}


def train(config):
    """Train on each worker, as a rank of the process group that Ray has made."""
    os.chdir(config["folder"])  # Ray starts workers in a folder of its own
    with modules_of(RECIPE):
        pipeline = Pipeline.from_recipe(RECIPE, **{{**OVERRIDES, "devices": "auto"}})
        # A lost worker costs what came after the last checkpoint. Ray forwards no signals that could announce it.
        checkpoints = Checkpoints(every_minutes={CHECKPOINT_MINUTES})
        pipeline.fit(out=OUT, resume="auto", checkpoints=checkpoints)


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={{"folder": os.getcwd()}},
{_note(job)}        scaling_config=ScalingConfig(
            num_workers={number}, use_gpu={job.on_gpus}, {accelerator}resources_per_worker={json.dumps(resources)}
        ),
        {_backend_note(job)}torch_config=TorchConfig(backend="{backend}", timeout_s={ceil(job.timeout)}),
        # The number of times that Ray starts the workers again; they resume from the newest checkpoint.
        run_config=RunConfig(
            storage_path=os.path.join(OUT, "ray"), failure_config=FailureConfig(max_failures={_RESTARTS})
        ),
    ).fit()
'''


def _note(job: Job) -> str:
    """Return the comment on the number of workers."""
    if job.fewest == job.most:
        return ""
    text = "Ray starts as many workers as it finds resources for, and more when they become available."
    lines = [text, f"The batch is divided among {_listed(job)} of them; any other number fails."]
    return "".join(f"        # {line}\n" for line in lines)


def _listed(job: Job) -> str:
    *others, last = (f"{n * job.processes}" for n in job.nodes)
    return f"{', '.join(others)} or {last}"


def _backend_note(job: Job) -> str:
    return "# Drivetrain exchanges a few numbers on the CPU.\n        " if job.on_gpus else ""
