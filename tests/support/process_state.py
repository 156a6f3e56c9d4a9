"""Processes of tests: running them, communication with servers, and whether all have ended."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from places import SUPPORT


def run(*command: str | Path, timeout: float = 240, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever that is; `options` are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)


def output_of(*command: str | Path, **options: Any) -> str:
    """Run a command that must succeed, and return what it prints."""
    done = run(*command, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_json(program: str, folder: Path | None = None) -> Any:
    """Return what a program prints as JSON on its last line; the package may be in `folder`."""
    paths = [str(folder)] if folder else [path for path in sys.path if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    printed = output_of(sys.executable, "-c", program, timeout=120, cwd=folder, env=environment)
    return json.loads(printed.splitlines()[-1])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start_ranks(started: list[subprocess.Popen[str]], folder: Path, code: str, argument: object) -> None:
    """Run `code` as two ranks with the variables of torchrun; append both to `started`."""
    script = folder / "script.py"
    script.write_text(code)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    common["MASTER_PORT"] = str(free_port())
    for rank in ("0", "1"):
        environment = {**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, str(script), str(argument)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))


def start_server(script: str) -> subprocess.Popen[str]:
    """A script of `support`, in a session of its own, that answers on stdout what it is asked on stdin."""
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen[Any] | None = None, seconds: float = 60
) -> None:
    """Return when the condition holds; fail if the process has ended before, or it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for at most so long, and return those that still run.

    A zombie counts as ended: in a container whose init process does not reap orphans, a grandchild stays one forever.
    """
    deadline, left = time.monotonic() + seconds, list(processes)
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def running_children(word: str, pid: int | None = None) -> list[psutil.Process]:
    """The children of a process, by default of this one, that run with that word in their command."""
    return [child for child in psutil.Process(pid).children() if word in _command(child)]


def _command(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # a ZombieProcess, too
        return " ".join(process.cmdline())
    return ""


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
