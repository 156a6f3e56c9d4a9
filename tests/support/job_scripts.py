"""Stand-ins for the programs of schedulers, which run a job file's commands on this machine."""

import os
import sys
from pathlib import Path

from places import SUPPORT

SRUN = """\
#!/bin/bash
# One task on this node, like srun's; it is replaced by its command, as which it receives the signals.
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0
exec "$@"
"""
SCONTROL = """\
#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then echo "$3"; elif [ "$1 $2" = "show node" ]; then [[ $3 != *gone* ]]
else echo "$*" >> "$REQUESTS"; fi
"""
TORCHRUN = """\
#!/bin/bash
printf '%s\\0' "$@" > "$REQUESTS"
"""


def programs(folder: Path, **texts: str) -> str:
    """Write programs into a folder, and return a PATH on which they are first."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


def surroundings(path: str, requests: Path) -> dict[str, str]:
    """Return the environment of a job of SLURM, Kubernetes or SkyPilot on one machine."""
    number = os.getpid()
    return {
        **os.environ, "PATH": path, "REQUESTS": str(requests),
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        "SLURM_JOB_ID": f"{number}", "SLURM_JOB_NAME": "mine", "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_PER_TASK": "2", "JOB_COMPLETION_INDEX": "0", "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_TASK_ID": f"task-{number}",
    }  # fmt: skip
