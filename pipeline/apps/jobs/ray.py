"""A Python file for Ray Train."""

import json
from math import ceil

from ...recipes.presets import parse_overrides
from .job import CHECKPOINT_MINUTES, Job, fill

_SCRIPT = '''\
"""Trains with Drivetrain; written by `drivetrain job ray`.

Run it in a folder that all machines of the Ray cluster see, from which paths in the recipe are relative: python FILE
"""

import os

from drivetrain import Callback, Pipeline
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.recipes.files import modules_of
from ray.train import FailureConfig, RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer

RECIPE = @recipe@
OVERRIDES = @overrides@
OUT = @out@


class Report(Callback):
    """Passes the metrics of each epoch to Ray, for its dashboard and results; every worker has to."""

    def on_epoch_end(self, view):
        report(view.history[-1].values())


def train(config):
    """Train on each worker, as a rank of the process group that Ray has made."""
    os.chdir(config["folder"])  # Ray starts workers in a folder of its own
    with modules_of(RECIPE):
        pipeline = Pipeline.from_recipe(RECIPE, **{**OVERRIDES, "devices": "auto"})
        # A lost worker costs what came after the last checkpoint. Ray forwards no signals that could announce it.
        checkpoints = Checkpoints(every_minutes=@minutes@)
        callbacks = [*pipeline.fit_defaults().get("callbacks", ()), Report()]
        pipeline.fit(out=OUT, resume="auto", checkpoints=checkpoints, callbacks=callbacks)


if __name__ == "__main__":
    TorchTrainer(
        train,
        train_loop_config={"folder": os.getcwd()},
        @note@
        scaling_config=ScalingConfig(
            num_workers=@workers@, use_gpu=@on_gpus@, @accelerator@resources_per_worker=@resources@
        ),
        @backend_note@
        torch_config=TorchConfig(backend="@backend@", timeout_s=@timeout@),
        # The number of times that Ray starts the workers again; they resume from the newest checkpoint.
        run_config=RunConfig(
            storage_path=os.path.join(OUT, "ray"), failure_config=FailureConfig(max_failures=10)
        ),
    ).fit()
'''
_NOTE = """\
# Ray starts as many workers as it finds resources for, and more when they become available.
# The batch is divided among @others@ or @last@ of them; any other number fails."""


def ray(job: Job) -> str:
    *others, last = (f"{nodes * job.processes}" for nodes in job.nodes)
    return fill(
        _SCRIPT, recipe=repr(job.recipe), overrides=repr(parse_overrides(job.overrides)), out=repr(job.out),
        minutes=CHECKPOINT_MINUTES, on_gpus=job.on_gpus, timeout=ceil(job.timeout),
        note=fill(_NOTE, others=", ".join(others), last=last) if others else "",
        workers=f"({others[0]}, {last})" if others else last,
        accelerator="" if job.gpu_type is None else f"accelerator_type={job.gpu_type!r}, ",
        resources=json.dumps({"CPU": job.cpus, **({"GPU": 1} if job.on_gpus else {})}),
        backend_note="# Drivetrain exchanges a few numbers on the CPU." if job.on_gpus else "",
        backend="cpu:gloo,cuda:nccl" if job.on_gpus else "gloo",
    )  # fmt: skip
