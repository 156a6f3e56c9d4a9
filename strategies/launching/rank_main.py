"""What a rank runs in the interpreter that `launch` started for it.

The parent writes one JSON line and the pickled job to the rank's standard input; the rank answers with one JSON line
and a pickled payload on a separate pipe, so that standard output and error are the user's. Imports torch as late as
possible: the parent must be watched during the seconds that takes.
"""

from __future__ import annotations

import faulthandler
import json
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
from .peers import is_echo

# The interpreter's `-c` program. Unbuffered, so that no byte of the job is lost to a buffer; a parent
# that died before it wrote the line leaves an empty one.
BOOT = """
import json, os, sys
line = open(0, "rb", buffering=0, closefd=False).readline()
if not line: sys.exit(1)
order = json.loads(line)
sys.path[:], sys.argv[:] = order["path"], order["argv"]
import importlib
importlib.import_module(order["rank_main"]).main(order)
"""

Answer = tuple[dict[str, Any], bytes]


def main(order: dict[str, Any]) -> None:
    """Read the job, run it, and answer.

    Args:
        order: the parent's first line: `bytes` (the job's length), `directory` (of the rendezvous, to be removed if the
            parent dies), `answer` (the file descriptor to write to), `device` and `timeout` (of `launch`).
    """
    orders = _take_stdin()
    # A parent started in the background has SIGINT ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()  # a segmentation fault leaves its Python stack on stderr
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        header, payload = _run(orders, order)
    except BaseException as error:  # SIGINT between two steps
        header, payload = _failure("raised", error)
    # The answer is sent before any connection closes, so the first cause is the first to arrive.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _send(order["answer"], header, payload)
    sys.stdout.flush()
    sys.stderr.flush()
    if header["kind"] != "result":
        os._exit(1)  # a clean exit may wait for ranks that never come
    _leave_group()


def _take_stdin() -> int:
    """Return the descriptor of the parent's pipe; the user's code gets an empty standard input instead."""
    orders = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return orders


def _read_exactly(descriptor: int, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        part = os.read(descriptor, min(size - len(data), 1 << 20))
        if not part:
            os._exit(1)  # the parent died while writing
        data += part
    return data


def _die_with_parent(orders: int, directory: str) -> None:
    """Terminate this rank and its children as soon as the parent's end of the pipe closes."""
    while os.read(orders, 1):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _run(orders: int, order: dict[str, Any]) -> Answer:
    job = _read_exactly(orders, order["bytes"])
    threading.Thread(target=_die_with_parent, args=(orders, order["directory"]), daemon=True).start()
    stage = "could not load the job:"
    try:
        with handlers_kept():  # modules that the job imports may replace them
            function, args = pickle.loads(job)
        del job  # it may hold a data set
        stage = "could not join the other ranks:"
        _join(order["directory"], order["device"], order["timeout"])
        stage = "raised"
        result = function(*args)
    except BaseException as error:
        return _failure(stage, error)
    try:
        payload = cloudpickle.dumps(result)
    except Exception as error:
        return _failure(f"returned a {type(result).__name__} that cannot be pickled:", error)
    return {"kind": "result", "what": f"returned a {type(result).__name__}"}, payload


def _join(directory: str, device: str | None, timeout: float) -> None:
    import torch

    from ...common import machine
    from .group import join_group

    # Ranks that each use every core would only slow each other down.
    share = machine.cores() // int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, min(share, torch.get_num_threads())))
    join_group(f"file://{directory}/rendezvous", device, timeout)


def _failure(stage: str, error: BaseException) -> Answer:
    text = "".join(traceback.format_exception(error))
    header = {
        "kind": "error",
        "what": f"{stage} {type(error).__name__}: {error}",
        "traceback": text,
        "echo": is_echo(error, text),
        "time": time.monotonic(),  # one clock for all processes of a machine
    }
    try:
        payload = cloudpickle.dumps(error)
    except Exception:
        payload = b""
    return header, payload


def _send(descriptor: int, header: dict[str, Any], payload: bytes) -> None:
    line = json.dumps({**header, "bytes": len(payload)}).encode() + b"\n"
    with open(descriptor, "wb", buffering=0) as pipe:
        for part in (line, payload):
            rest = memoryview(part)
            while rest:
                rest = rest[pipe.write(rest) :]


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
