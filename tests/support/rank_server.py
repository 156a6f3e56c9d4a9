"""Forks the programs of `forked_ranks.py`: it has imported what each would import for seconds, computed nothing.

torchmetrics alone takes seconds where transformers and matplotlib are installed, which it imports.

`python rank_server.py FD`: each message to that socket is an order, `{"command", "environment", "folder", "blocked",
"places"}`: the signals that are blocked, and where the program finds the descriptors that come with it. The reply is
its process id, sent when it has become a child of the process that asked (`PR_SET_CHILD_SUBREAPER` of prctl(2)).
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

import drivetrain.pipeline.apps.cli.training
import drivetrain.pipeline.runs.fit  # noqa: F401
import spared
import torchmetrics  # noqa: F401
import torchvision  # noqa: F401

FREE = 200  # this process itself has no descriptor from here on
LATE = (
    "drivetrain.loaders.decode.decoder", "matplotlib.backends.backend_agg", "matplotlib.figure",
    "matplotlib.font_manager", "torch.distributed.fsdp", "torch.distributed.tensor",
)  # fmt: skip
"""What trainings import when they need it."""
MOST = 100  # descriptors of a program
OURS = {sys.path[0], *os.environ.get("PYTHONPATH", "").split(os.pathsep)}


def serve(control: socket.socket) -> list[str]:
    """Answer orders until the one that gives them has ended; return in each program, with its command."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, 1 << 20, MOST)
        if not text:
            os._exit(0)
        end, start = os.pipe()
        middle = os.fork()
        if not middle:
            between, pid = os.getpid(), os.fork()
            if not pid:
                control.close()
                while os.getppid() == between:  # a worker of a DataLoader ends when its parent is another one
                    time.sleep(0.0005)
                order = json.loads(text)
                become(order, descriptors)
                return list(order["command"])
            os.write(start, str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        control.send(os.read(end, 100))
        for descriptor in (*descriptors, end, start):
            os.close(descriptor)


def become(order: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process what `subprocess.Popen` would have started."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    free = max(FREE, *order["places"]) + 1
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, free + number)
    os.closerange(3, free)
    for number, place in enumerate(order["places"]):
        os.dup2(free + number, place)
    os.closerange(free, free + len(descriptors))
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    tempfile.tempdir = None  # that of the environment before
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = named + [path for path in sys.path if path not in OURS]


def run(program: str, *arguments: str) -> None:
    """As the interpreter runs its command line."""
    first, *rest = arguments if program == sys.executable else (program, *arguments)
    if first == "-m":
        sys.argv[:], sys.path[:0] = rest, [str(Path.cwd())]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        sys.argv[:], sys.path[:0] = ["-c", *rest[1:]], [""]
        code = compile(rest[0], "<string>", "exec")
    else:
        file = Path(first).absolute()
        sys.argv[:], sys.path[:0] = [first, *rest], [str(file.resolve().parent)]
        main.__file__ = str(file)
        code = compile(file.read_bytes(), file, "exec")
    exec(code, vars(main))


def status(program: list[str]) -> int:
    """That with which an interpreter ends which has run it; below 0, a signal's number."""
    try:
        run(*program)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


for name in LATE:
    importlib.import_module(name)
for place, name, instead in spared.replaced():
    setattr(place, name, instead)
gc.freeze()  # else the first collection of each program copies all that was imported
code = status(serve(socket.socket(fileno=int(sys.argv[1]))))
# As an interpreter ends, but for freeing each of a million objects, which would take two seconds.
threading._shutdown()  # type: ignore[attr-defined]
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
