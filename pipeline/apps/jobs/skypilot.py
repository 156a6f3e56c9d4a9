"""A task for SkyPilot's managed jobs."""

from __future__ import annotations

from ....common.errors import PlanError
from .job import Job
from .text import SIGNALS, TORCHRUN_PORT, literal, scalar, shell_words, stoppable

_RESTARTS = 3


def skypilot(job: Job) -> str:
    """Return a task for `sky jobs launch`.

    Raises:
        PlanError: without the type of the GPUs, by which SkyPilot chooses a machine, or if the recipe is outside the
            working directory, which SkyPilot copies to the machines.
    """
    if job.on_gpus and job.gpu_type is None:
        raise PlanError(
            "SkyPilot chooses machines by their GPUs. Pass --gpu-type, e.g. H100 (see: sky show-gpus)."
        )
    file = job.recipe_file
    if file is not None and (file.is_absolute() or ".." in file.parts):
        raise PlanError(
            f"SkyPilot copies the working directory to the machines, and the recipe {job.recipe!r} is not in it. Go to "
            "a folder above the recipe, and pass the relative path."
        )
    gpus = f"  accelerators: {{{scalar(f'{job.gpu_type}')}: {job.processes}}}\n" if job.on_gpus else ""
    image = "" if job.image is None else f"  image_id: {scalar(f'docker:{job.image}')}\n"
    return f"""\
# Trains with Drivetrain; written by `drivetrain job skypilot`. Submit it with: sky jobs launch FILE
name: {job.name}
{_fewer(job)}num_nodes: {job.most}

resources:
{gpus}  cpus: {job.cpus * job.processes}+
{image}  # For preemptible machines: use_spot: true. SkyPilot then replaces those that the cloud takes away.
  job_recovery:
    max_restarts_on_errors: {_RESTARTS}
    recover_on_exit_codes: [75]  # stopped and saved; without limit

{_shared(job)}
# The recipe and modules of your own are in this folder, which is copied to the machines.
workdir: .

# Install Drivetrain here, unless the image has it. This reports what is missing.
setup: |
  python -m drivetrain doctor

{literal("run", _script(job), "")}
"""


def _shared(job: Job) -> str:
    """Return where the results are."""
    if job.top_folder is None:
        return "# The results are at an address, and so should the data be. The machines need credentials for it.\n"
    return f"""\
# What all machines share, with the data and the run's folder: a volume that several machines can mount, from
# `sky volumes apply`.
volumes:
  {scalar(job.top_folder)}: {job.name}
"""


def _fewer(job: Job) -> str:
    if job.fewest == job.most:
        return ""
    fewer = " or ".join(map(str, job.nodes[:-1]))
    return f"# SkyPilot starts all machines or none. The run also resumes on {fewer}.\n"


def _script(job: Job) -> str:
    """Return the shell commands of each machine."""
    command = f"""\
torchrun --nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node={job.processes} \\
  --rdzv-backend=c10d --rdzv-endpoint="$address:{TORCHRUN_PORT}" --rdzv-id="$SKYPILOT_TASK_ID" \\
  --rdzv-conf="is_host=$first" \\
  {SIGNALS} \\
  -m drivetrain train {shell_words(job.arguments(), "  ")}
"""
    return f"""\
# The first machine is where the machines meet.
address=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then first=true; else first=false; fi
{stoppable(command, "agent", "TERM")}
exit "$status"
"""
