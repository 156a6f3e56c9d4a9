"""What a rank runs in the interpreter that `launch` started for it.

The order and the pickled job are in a file in memory that all ranks share; the answer goes into one of the rank's own,
so that standard output and error are the user's. Standard input is a pipe that ends when the parent dies. Imports torch
as late as possible: the parent must be watched during the seconds that takes.
"""

import io
import mmap
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import Any

import cloudpickle

from ...common.signals import handlers_kept
from .meeting import is_echo
from .stacks import write_own

# The interpreter's `-c` program; its arguments are the descriptors of the job and of the answer.
BOOT = """
import json, mmap, os, sys
job, answer = mmap.mmap(int(sys.argv[1]), 0, prot=mmap.PROT_READ), int(sys.argv[2])
os.close(int(sys.argv[1]))
order = json.loads(job.readline())
sys.path[:], sys.argv[:] = order["path"], order["argv"]
import importlib
importlib.import_module(order["rank_main"]).main(order, job, answer)
"""

# The first bytes of an answer, which are written last. Then follow, pickled one by one, what is known of the end of the
# rank (the fields of `launcher.Report`), and the result or the exception.
COMPLETE = b"complete"


def main(order: dict[str, Any], job: mmap.mmap, answer: int) -> None:
    """Run the job, of which the order has been read, and write to the descriptor `answer`."""
    threading.Thread(target=_die_with_parent, args=(_take_stdin(), order["directory"]), daemon=True).start()
    # A parent started in the background has SIGINT ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    write_own(order["directory"], int(os.environ["RANK"]))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with open(answer, "wb") as file:
        try:
            kind = _run(order, job, file)
        except BaseException as error:  # SIGINT between two steps
            kind = _fail(file, "raised", error)
        # The answer is complete before any connection closes, so the first cause is the first to arrive.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        file.flush()
        os.pwrite(answer, COMPLETE, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    if kind != "result":
        os._exit(1)  # a clean exit may wait for ranks that never come
    _leave_group()


def _take_stdin() -> int:
    """Return the descriptor of the parent's pipe; the user's code gets an empty standard input instead."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return pipe


def _die_with_parent(pipe: int, directory: str) -> None:
    os.read(pipe, 1)
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _run(order: dict[str, Any], job: mmap.mmap, file: io.BufferedWriter) -> str:
    stage = "could not load the job:"
    try:
        with handlers_kept(), job:  # modules that the job imports may replace them
            function, args = pickle.load(job)
        stage = "could not join the other ranks:"
        _join(order["directory"], order["device"], order["timeout"])
        stage = "raised"
        result = function(*args)
    except BaseException as error:
        return _fail(file, stage, error)
    try:
        _write(file, {"kind": "result", "what": f"returned a {type(result).__name__}"}, result)
    except Exception as error:
        return _fail(file, f"returned a {type(result).__name__} that cannot be pickled:", error)
    return "result"


def _join(directory: str, device: str | None, timeout: float) -> None:
    import torch

    from ...common import machine
    from .group import join_group

    # Ranks that each use every core would only slow each other down.
    share = machine.cores() // int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, min(share, torch.get_num_threads())))
    join_group(f"file://{directory}/rendezvous", device, timeout)


def _fail(file: io.BufferedWriter, stage: str, error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    report = {
        "kind": "error",
        "what": f"{stage} {type(error).__name__}: {error}",
        "traceback": text,
        "echo": is_echo(error, text),
        "time": time.monotonic(),  # one clock for all processes of a machine
    }
    try:
        _write(file, report, error)
    except Exception:
        _write(file, report, None)
    return "error"


def _write(file: io.BufferedWriter, report: dict[str, Any], value: object) -> None:
    file.seek(len(COMPLETE))
    file.truncate()
    pickle.dump(report, file)
    cloudpickle.dump(value, file)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
