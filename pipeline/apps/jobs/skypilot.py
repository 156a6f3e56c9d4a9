"""A task for SkyPilot's managed jobs."""

import shlex

from ....common.errors import PlanError
from .job import SIGNALS, TORCHRUN_PORT, Job, fill, literal, scalar, stoppable

_TASK = """\
# Trains with Drivetrain; written by `drivetrain job skypilot`. Submit it with: sky jobs launch FILE
name: @name@
@fewer@
num_nodes: @most@

resources:
  @gpus@
  cpus: @cores@+
  @image@
  # Preemptible machines, which are cheaper; SkyPilot replaces those that the cloud takes away:
  # use_spot: true
  job_recovery:
    max_restarts_on_errors: 3
    recover_on_exit_codes: [75]  # stopped and saved; without limit

@shared@

# The recipe and modules of your own are in this folder, which is copied to the machines.
workdir: .

# Variables that the machines need and nobody else may see, from yours: sky jobs launch --secret AWS_ACCESS_KEY_ID FILE
# secrets: {AWS_ACCESS_KEY_ID: null, AWS_SECRET_ACCESS_KEY: null}

# Install Drivetrain here, unless the image has it: from a folder beside the recipe, or a wheel. `doctor` ends with 1
# if something that training needs is missing, and the job ends before it costs more.
setup: |
  # -P: not the folder drivetrain itself, which Python would take for the package, but which is not built; -e builds it.
  if ! python -P -c "import drivetrain" 2>/dev/null; then pip install -e ./drivetrain; fi
  python -m drivetrain doctor

@run@
"""
_SHARED = """\
# What all machines share, with the data and the run's folder: a volume that several machines can mount, from
# `sky volumes apply`.
volumes:
  @folder@: @name@
"""
_AT_AN_ADDRESS = """\
# The results are at an address, and so should the data be, which is read from there. To have it as files instead:
# file_mounts: {/data: {source: s3://bucket/data, mode: COPY}}
"""
_SCRIPT = """\
# The first machine is where the machines meet.
address=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then first=true; else first=false; fi
@run@
exit "$status"
"""
_COMMAND = """\
torchrun --nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node=@processes@ \\
  --rdzv-backend=c10d --rdzv-endpoint="$address:@port@" --rdzv-id="$SKYPILOT_TASK_ID" \\
  --rdzv-conf="is_host=$first" \\
  @signals@ \\
  -m drivetrain train @arguments@"""


def skypilot(job: Job) -> str:
    if job.on_gpus and job.gpu_type is None:
        raise PlanError("SkyPilot chooses machines by their GPUs. Pass --gpu-type, e.g. H100 (see: sky show-gpus).")
    file = job.recipe_file
    if file is not None and (file.is_absolute() or ".." in file.parts):
        raise PlanError(
            f"SkyPilot copies the working directory to the machines, and the recipe {job.recipe!r} is not in it. Go to "
            "a folder above the recipe, and pass the relative path."
        )
    command = fill(
        _COMMAND, processes=job.processes, port=TORCHRUN_PORT, signals=SIGNALS,
        arguments=shlex.join(job.arguments()),
    )  # fmt: skip
    fewer = " or ".join(map(str, job.nodes[:-1]))
    folder = job.top_folder
    return fill(
        _TASK, name=job.name, most=job.most, cores=job.cpus * job.processes,
        fewer=f"# SkyPilot starts all machines or none. The run also resumes on {fewer}." if fewer else "",
        gpus=f"accelerators: {{{scalar(f'{job.gpu_type}')}: {job.processes}}}" if job.on_gpus else "",
        image="" if job.image is None else f"image_id: {scalar(f'docker:{job.image}')}",
        shared=fill(_SHARED, folder=scalar(folder), name=job.name) if folder else _AT_AN_ADDRESS,
        run=literal("run", fill(_SCRIPT, run=stoppable(command, "agent", "TERM"))),
    )  # fmt: skip
