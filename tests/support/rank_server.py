"""Forks the ranks of `forked_ranks.py`: it has imported what each of them would import for seconds, computed nothing.

torchmetrics alone takes seconds where transformers and matplotlib are installed, which it imports.

`python rank_server.py FD`: each message to that socket is an order, `{"environment", "folder"}`, with the descriptors
of the rank's stdin, stdout and stderr, and of its job and its answer. The reply is the rank's process id, sent when the
rank has become a child of the process that asked (`PR_SET_CHILD_SUBREAPER` of prctl(2)).
"""

import atexit
import gc
import importlib
import json
import os
import socket
import sys
import threading
from typing import Any

import spared
import torchmetrics  # noqa: F401
import torchvision  # noqa: F401
from drivetrain.pipeline.runs import fit  # noqa: F401
from drivetrain.strategies.launching.rank_main import BOOT

FREE = 200  # this process itself has no descriptor from here on
PLACES = 5  # of the descriptors in a rank: 0 to 4
LATE = (
    "drivetrain.loaders.decode.decoder", "matplotlib.backends.backend_agg", "matplotlib.figure",
    "matplotlib.font_manager", "pytest", "torch.distributed.fsdp", "torch.distributed.optim",
    "torch.distributed.tensor",
)  # fmt: skip
"""What trainings import when they need it; and pytest, which most files have that define what ranks run."""


def serve(control: socket.socket) -> None:
    """Answer orders until the one that gives them has ended; return in each rank, to run it."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, 1 << 20, PLACES)
        if not text:
            os._exit(0)
        end, start = os.pipe()
        middle = os.fork()
        if not middle:
            pid = os.fork()
            if not pid:
                control.close()
                become(json.loads(text), descriptors)
                return
            os.write(start, str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        control.send(os.read(end, 100))
        for descriptor in (*descriptors, end, start):
            os.close(descriptor)


def become(order: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process what `subprocess.Popen` would have started."""
    os.setsid()
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, FREE + place)
    os.closerange(3, FREE)
    for place in range(PLACES):
        os.dup2(FREE + place, place)
    os.closerange(FREE, FREE + PLACES)
    sys.argv = ["-c", "3", "4"]
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])


for name in LATE:
    importlib.import_module(name)
for place, name, instead in spared.replaced():
    setattr(place, name, instead)
gc.freeze()  # else the first collection of each rank copies all that was imported
serve(socket.socket(fileno=int(sys.argv[1])))
exec(BOOT)
# As an interpreter ends, but for freeing each of a million objects, which would take two seconds.
threading._shutdown()  # type: ignore[attr-defined]
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
