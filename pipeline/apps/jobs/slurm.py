"""A batch script for SLURM."""

from __future__ import annotations

from .job import WARNING_SECONDS, Job
from .text import SIGNALS, shell_words, stoppable


def slurm(job: Job) -> str:
    """Return a script for sbatch: one task per node, which is torchrun."""
    gpus = f"#SBATCH --gpus-per-node={'' if job.gpu_type is None else f'{job.gpu_type}:'}{job.processes}"
    optional = [
        *([gpus] if job.on_gpus else []),
        *([] if job.time is None else [f"#SBATCH --time={job.time}"]),
    ]
    lines = "".join(f"{line}\n" for line in optional)
    command = f"""\
srun --wait=300 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={job.processes} \\
    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$SLURM_JOB_ID" \\
    {SIGNALS} \\
    -m drivetrain train {shell_words(job.arguments(), "    ")}
"""
    return f"""\
#!/bin/bash
# Trains with Drivetrain; written by `drivetrain job slurm`. Submit it with: sbatch FILE
# Options of sbatch have priority over those below: sbatch --partition=gpu --account=team FILE
#SBATCH --job-name={job.name}
#SBATCH --output=%x-%j.log
{_nodes(job)}
# One task per node: torchrun, which starts a process for each GPU. Several tasks would be several trainings.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={job.cpus * job.processes}
{lines}# {WARNING_SECONDS} seconds before the time limit, SLURM signals this script, which then requeues its job.
#SBATCH --signal=B:USR1@{WARNING_SECONDS}
#SBATCH --requeue
#SBATCH --open-mode=append

# Activate the environment that has Drivetrain here, e.g.: source /shared/venv/bin/activate

# The first node is where the nodes meet; the port follows from the job's number, so that no two jobs share one.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000))

# When torchrun ends on one node, the others have five minutes.
{stoppable(command, "step", "USR1", "srun forwards it to torchrun")}
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""


def _nodes(job: Job) -> str:
    """Return the line with the numbers of nodes."""
    if job.left_out:
        return (
            "# Only numbers of nodes that divide the batch (such a list requires SLURM 23.02).\n"
            f"#SBATCH --nodes={','.join(map(str, job.nodes))}"
        )
    return f"#SBATCH --nodes={job.nnodes.replace(':', '-')}"
