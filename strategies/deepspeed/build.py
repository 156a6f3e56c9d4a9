"""The compiled part of DeepSpeed's CPU Adam: built in a process with a time limit, and cached."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO

import torch

from ...common.errors import StrategyError
from ...common.storage.files import atomic_file

NAME = "cpu_adam"
"""DeepSpeed's names of the operation and of the compiled module."""
SECONDS = 300.0
"""Time limit of a compilation; it has two C++ files and takes two minutes on one busy core."""
_log = logging.getLogger(__name__)

# The compiler's process: it ends with its descendants as soon as the parent's end of the pipe closes. They are killed
# one by one, because ninja gives compilers their own process groups. DeepSpeed requires psutil too.
PROGRAM = """
import json, os, signal, sys, threading
sys.path[:] = json.loads(sys.argv[1])
import psutil
def end_with_parent():
    os.read(0, 1)
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end_with_parent, daemon=True).start()
from deepspeed.ops.op_builder import CPUAdamBuilder
CPUAdamBuilder().load(verbose=False)
"""


def compiled(version: str) -> Path:
    """Return the compiled module, built first if it is not cached; other ranks and runs wait for the one that builds.

    The cache is the folder `drivetrain` in torch's extension folder, but nothing in it is ever incomplete: the module
    is built in a temporary folder and moved. The system releases the lock that others wait for when its owner ends.

    Args:
        version: DeepSpeed's.

    Raises:
        StrategyError: if it cannot be compiled, or takes longer than `SECONDS`.
        OSError: if the cache cannot be written.
    """
    made = _cache() / f"{NAME}-{_key(version)}.so"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("a+") as file, _turn(file) as waited:
        if made.exists():
            return made
        file.seek(0)
        if waited and (
            reason := file.read()
        ):  # the failure of the process waited for: do not retry on each rank
            raise StrategyError(reason)
        file.truncate(0)
        try:
            _build(made)
        except (StrategyError, OSError) as error:
            file.write(short(error))
            file.flush()
            raise
    return made


def load(path: Path) -> ModuleType:
    """Return the loaded module.

    Raises:
        StrategyError: if it cannot be loaded.
    """
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None  # a name that ends in .so has a spec, and a loader
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise StrategyError(f"{path} cannot be loaded ({short(error)}). Delete it") from error
    return module


def short(error: BaseException) -> str:
    """Return an error's first line, at most 300 characters, without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0][:300] if lines else type(error).__name__).rstrip(".")


def _cache() -> Path:
    kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(kept) / "torch_extensions") / "drivetrain"


def _key(version: str) -> str:
    """Return what a compiled module depends on, including the CPU, for which it is optimised."""
    cpu = [platform.machine()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu += next(([line] for line in lines if line.lower().startswith(("flags", "features"))), [])
    facts = [version, torch.__version__, sys.implementation.cache_tag, cpu]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@contextmanager
def _turn(file: IO[str]) -> Iterator[bool]:
    """Hold the lock on an open file; yield whether another process held it before.

    Raises:
        StrategyError: if that process holds it for longer than a compilation may take.
    """
    waited, end = False, time.monotonic() + 1.1 * SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise StrategyError(f"another process has been compiling it for {SECONDS:.0f} s") from error
            waited = True
            time.sleep(0.2)
        except OSError:  # a file system without locks: each process builds its own, and the last one wins
            break
    yield waited  # closing the file releases the lock


def _build(made: Path) -> None:
    """Compile the module with DeepSpeed's and torch's own tools, in a separate process and folder."""
    _log.info("Compiling DeepSpeed's Adam for the CPU, once for this machine, for at most %.0f s.", SECONDS)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as work:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
        environment |= {
            "TORCH_EXTENSIONS_DIR": work,
            "DS_ACCELERATOR": "cpu",  # it is the same on all, and no GPU is touched
            "CUDA_VISIBLE_DEVICES": "",
            # ninja of the environment that Python is run from, which may not be active.
            "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]),
        }
        log = Path(work) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(sys.path)],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                cwd=work, env=environment, start_new_session=True,
            )  # fmt: skip
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired as error:
            raise StrategyError(f"compiling it took longer than {SECONDS:.0f} s") from error
        finally:
            if process.stdin is not None:
                process.stdin.close()  # which ends it, if it is still running
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        built = Path(work) / NAME / f"{NAME}.so"
        if code != 0 or not built.exists():
            raise StrategyError(f"it cannot be compiled here ({_cause(log)})")
        with atomic_file(made) as file:
            file.write(built.read_bytes())


def _cause(log: Path) -> str:
    """Return the compiler's first error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line.lower() or line.endswith(": not found")]
    compilers = [line for line in errors if not line.startswith(("RuntimeError", "subprocess."))]
    return ([*compilers, *lines[-1:], "no message"])[0].rstrip(".")[:200]
