"""Run a variant in a process of its own: environment variables are read when Python starts, and a process that the
system kills for lack of memory must not be the user's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import perf_counter
from typing import Any

import cloudpickle

from ...common.budget import OutOfTime
from ...common.errors import DrivetrainError
from ...strategies import registry
from ..training.build import fork_rng
from .runner import Loaders, Variant, VariantRunner, describe_error
from .variant import Costs, Trial

BOOT = """
import sys
sys.path[:] = {path!r}
from drivetrain.pipeline.measuring.process import serve
serve({line})
"""
PATIENCE = 5.0
"""Seconds in which a process may end by itself."""
FIRST_TO_KILL = "1000"
"""What Linux adds to the score of a process by which it chooses whom to kill for lack of memory; 1000 is the most."""


class Failed(Exception):
    """A pipeline could not be built, or its training failed; the message has the reason."""


class ProcessRunner:
    """Runs a variant in a process of its own; closing it ends the process.

    Args:
        variant: the variant.
        variables: environment variables that the process has in addition.
        batches: of the warm-up.
        deadline: in `perf_counter` time.

    Attributes:
        costs: not measured.

    Raises:
        Failed: if building the pipeline fails, or the process dies.
        PlanError, DataError, StrategyError: as `Pipeline.fit`.
        OutOfTime: at the deadline.
    """

    def __init__(self, variant: Variant, variables: Mapping[str, str], batches: int, deadline: float) -> None:
        self._deadline, self.costs = deadline, Costs()
        self._line, theirs = Pipe()
        with theirs:
            boot = BOOT.format(path=sys.path, line=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip
        try:
            job: Any = partial(_answer, variant, batches)
            if registry.REGISTERED:
                job = partial(registry.call_with, registry.REGISTERED, job)
            with suppress(BrokenPipeError):  # it died at once: the answer says so
                self._line.send_bytes(cloudpickle.dumps(job))
            self._received()
        except BaseException:
            self.close()
            raise

    def trial(self, epoch: int, batches: int) -> Trial:
        """Train on these batches; `epoch` determines the samples. Raise Failed or OutOfTime."""
        with suppress(BrokenPipeError):
            self._line.send((epoch, batches))
        trial = self._received()
        assert isinstance(trial, Trial)
        return trial

    def close(self) -> None:
        """End the process, and the processes that it started."""
        self._line.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE if perf_counter() < self._deadline else 0)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _received(self) -> Any:
        """Return the process's next answer."""
        if not self._line.poll(max(self._deadline - perf_counter(), 0)):
            raise OutOfTime
        try:
            answer = self._line.recv()
        except (EOFError, ConnectionResetError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)
            if self._process.returncode == -signal.SIGKILL:
                why = "out of memory: the system killed its process (SIGKILL)"
            else:
                why = f"its process ended with status {self._process.returncode}"
            raise Failed(f"{why} before it answered") from None
        if isinstance(answer, DrivetrainError):
            raise answer
        if isinstance(answer, str):
            raise Failed(answer)
        return answer


def serve(line: int) -> None:
    """Answer on this descriptor until the other side closes it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_KILL)
    with Connection(line) as connection, suppress(EOFError, BrokenPipeError):
        job = cloudpickle.loads(connection.recv_bytes())
        job(connection)


def _answer(variant: Variant, batches: int, line: Connection) -> None:
    """Build the pipeline, and train it as requested: pairs of an epoch and a number of batches.

    Only the other side looks at the time.
    """
    with ExitStack() as stack:
        stack.enter_context(fork_rng(variant.spec.seed))
        try:
            runner = VariantRunner([variant], Loaders(stack), batches)
        except Exception as error:
            line.send(error if isinstance(error, DrivetrainError) else describe_error(error))
            return
        stack.callback(runner.close)
        line.send(None)
        while True:
            epoch, count = line.recv()
            trials, failed = runner.run(epoch, count, [variant.id])
            line.send(failed[variant.id] if failed else trials[variant.id])
