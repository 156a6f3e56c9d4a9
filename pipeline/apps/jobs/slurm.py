"""A batch script for SLURM."""

import shlex
from pathlib import PurePosixPath

from ....common.errors import PlanError
from ....common.storage.addresses import is_address
from .job import CHECKPOINT_MINUTES, SIGNALS, WARNING_SECONDS, Job, fill, seconds_of, stoppable

_FAILURES = 20  # after so many, a failed job is not started again
_EXCLUSIONS = 3  # starts without further slow nodes: a cluster whose nodes differ would else run out of them
_SHORTEST = WARNING_SECONDS + 120  # a time limit: SLURM may signal a minute earlier, and the check takes one

_SCRIPT = """\
#!/bin/bash
# Trains with Drivetrain; written by `drivetrain job slurm`. Submit it with: sbatch FILE
# Options of sbatch have priority over those below: sbatch --partition=gpu --account=team FILE
#SBATCH --job-name=@name@
#SBATCH --output=%x-%j.log
@note@
#SBATCH --nodes=@nodes@
# One task per node: torchrun, which starts a process for each GPU. Several tasks would be several runs.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@cores@
# Memory of each node. 0: all that it has, for jobs with nodes of their own; where jobs share nodes, e.g. 200G.
#SBATCH --mem=0
@gpus@
@time@
# Nodes to leave out, such as those that the check below has named: remove the first # of the line.
##SBATCH --exclude=node07
# @warning@ seconds before the time limit, SLURM signals this script, which then requeues its job.
#SBATCH --signal=B:USR1@@warning@
#SBATCH --requeue
#SBATCH --open-mode=append

@environment@
# If the nodes find each other only through one of several network interfaces, or not at all:
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

# The first node is where the nodes meet; the port follows from the job's number, so that no two jobs share one.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 10000 * 2))

# Why the job has started again, a line each time.
again="$SLURM_JOB_NAME-$SLURM_JOB_ID.again"
touch "$again"

# Before training, for about a minute: do devices, versions and network agree? Is a node much slower than others?
# Then the job starts again without it, @exclusions@ times at most, if SLURM knows the node by its host's name.
# (tee -a: /dev/stderr is the log, which tee alone would empty.)
slow=$(@check@ | tee -a /dev/stderr | sed -n '/^Leave out: /{s///; s/\\.[^,]*//g; p}')
if [ -n "$slow" ] && [ "$(grep -c ^slow "$again")" -lt @exclusions@ ] && scontrol show node "$slow" > /dev/null; then
    echo "slow: $slow" >> "$again"
    before=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\\([^ (]*\\).*/\\1/p')
    trap '' TERM  # with which SLURM ends a script that requeues its job
    scontrol requeuehold "$SLURM_JOB_ID"
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$before${before:+,}$slow"
    scontrol release "$SLURM_JOB_ID"
    exit 1
fi

# When torchrun ends on one node, the others have five minutes. What each rank prints is also in a file of its own.
@run@
# Saved because of the time limit: again. Failed after more time than a checkpoint takes to come: again,
# @failures@ times at most, because that is rather a lost node than a mistake, which would show at once.
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$status" -ne 0 ] && [ "$SECONDS" -gt @seconds@ ] && [ "$(grep -c ^failed "$again")" -lt @failures@ ]; then
    echo "failed: $status" >> "$again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
# srun's options come first, torchrun's last.
_CHECK = """\
srun --cpus-per-task="$SLURM_CPUS_PER_TASK"@container@ \\
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=@processes@ \\
    --rdzv-backend=c10d --rdzv-endpoint="$first:$((port + 1))" --rdzv-id="check-$SLURM_JOB_ID" \\
    -m drivetrain doctor --ranks"""
_COMMAND = """\
srun --wait=300 --cpus-per-task="$SLURM_CPUS_PER_TASK"@container@ \\
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=@processes@ \\
    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$SLURM_JOB_ID" \\
    --log-dir="$SLURM_JOB_NAME-$SLURM_JOB_ID.ranks" --tee=3 \\
    @signals@ \\
    -m drivetrain train @arguments@"""
_ENVIRONMENT = "# Activate the environment that has Drivetrain here, e.g.: source /shared/venv/bin/activate\n"
_CONTAINER = "# srun starts the container by its plugin pyxis: what is below runs inside, this script does not.\n"


def slurm(job: Job) -> str:
    if job.time is not None and 0 < seconds_of(job.time) <= _SHORTEST:  # 0: no limit
        raise PlanError(
            f"--time {job.time} is too short: SLURM signals the job {WARNING_SECONDS // 60} minutes before the limit, "
            f"which would be before it trains. Pass more than {_SHORTEST // 60} minutes."
        )
    container = _container(job)
    command = fill(
        _COMMAND, processes=job.processes, signals=SIGNALS, arguments=shlex.join(job.arguments()), container=container
    )  # fmt: skip
    gpu_type = "" if job.gpu_type is None else f"{job.gpu_type}:"
    listed = ",".join(map(str, job.nodes))
    return fill(
        _SCRIPT, name=job.name, cores=job.cpus * job.processes, warning=WARNING_SECONDS,
        note="# Only numbers of nodes that divide the batch (such a list requires SLURM 23.02)." * bool(job.left_out),
        nodes=listed if job.left_out else job.nnodes.replace(":", "-"),
        gpus=f"#SBATCH --gpus-per-node={gpu_type}{job.processes}" if job.on_gpus else "",
        time="" if job.time is None else f"#SBATCH --time={job.time}",
        environment=_CONTAINER if job.image else _ENVIRONMENT, failures=_FAILURES, exclusions=_EXCLUSIONS,
        seconds=60 * CHECKPOINT_MINUTES,
        check=fill(_CHECK, processes=job.processes, container=container),
        run=stoppable(command, "step", "USR1", "srun forwards it to torchrun"),
    )  # fmt: skip


def _container(job: Job) -> str:
    """Return the options of pyxis: the image, with the folders that all machines share."""
    if job.image is None:
        return ""
    if not is_address(job.out) and ".." in PurePosixPath(job.out).parts:
        raise PlanError(
            f"--out {job.out!r} may be outside of the folder where the job is submitted, which the container has. Pass "
            "an absolute path without '..'."
        )
    shared = "" if job.top_folder is None else shlex.quote(f",{job.top_folder}:{job.top_folder}")
    folder = f'"$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"{shared}'
    return (
        f" \\\n    --container-image={shlex.quote(job.image)} --container-mounts={folder} "
        '--container-workdir="$SLURM_SUBMIT_DIR"'
    )
