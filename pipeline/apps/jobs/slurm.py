"""A batch script for SLURM."""

import shlex

from .job import SIGNALS, WARNING_SECONDS, Job, fill, stoppable

_SCRIPT = """\
#!/bin/bash
# Trains with Drivetrain; written by `drivetrain job slurm`. Submit it with: sbatch FILE
# Options of sbatch have priority over those below: sbatch --partition=gpu --account=team FILE
#SBATCH --job-name=@name@
#SBATCH --output=%x-%j.log
@note@
#SBATCH --nodes=@nodes@
# One task per node: torchrun, which starts a process for each GPU. Several tasks would be several trainings.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@cores@
@gpus@
@time@
# @warning@ seconds before the time limit, SLURM signals this script, which then requeues its job.
#SBATCH --signal=B:USR1@@warning@
#SBATCH --requeue
#SBATCH --open-mode=append

# Activate the environment that has Drivetrain here, e.g.: source /shared/venv/bin/activate

# The first node is where the nodes meet; the port follows from the job's number, so that no two jobs share one.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000))

# When torchrun ends on one node, the others have five minutes.
@run@
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""
_COMMAND = """\
srun --wait=300 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=@processes@ \\
    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$SLURM_JOB_ID" \\
    @signals@ \\
    -m drivetrain train @arguments@"""


def slurm(job: Job) -> str:
    command = fill(_COMMAND, processes=job.processes, signals=SIGNALS, arguments=shlex.join(job.arguments()))
    gpu_type = "" if job.gpu_type is None else f"{job.gpu_type}:"
    listed = ",".join(map(str, job.nodes))
    return fill(
        _SCRIPT, name=job.name, cores=job.cpus * job.processes, warning=WARNING_SECONDS,
        note="# Only numbers of nodes that divide the batch (such a list requires SLURM 23.02)." * bool(job.left_out),
        nodes=listed if job.left_out else job.nnodes.replace(":", "-"),
        gpus=f"#SBATCH --gpus-per-node={gpu_type}{job.processes}" if job.on_gpus else "",
        time="" if job.time is None else f"#SBATCH --time={job.time}",
        run=stoppable(command, "step", "USR1", "srun forwards it to torchrun"),
    )  # fmt: skip
