"""A pipeline that is trained in a process of its own: environment variables are read when Python starts, and a process
that the system kills for lack of memory must not be the user's."""

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

from ...common.errors import DrivetrainError
from ...strategies import registry
from ..describe.pipeline_spec import PipelineSpec
from ..ledger import data as identity
from ..ledger.runner import Loaders, VariantRunner, described
from ..ledger.variants import Variant
from ..measuring.budget import OutOfTime
from ..training.build import fork_rng

BOOT = """
import sys
sys.path[:] = {path!r}
from drivetrain.pipeline.tuning.separate import serve
serve({line})
"""
PATIENCE = 5.0
"""Seconds in which a process may end by itself."""
FIRST_TO_KILL = "1000"
"""What Linux adds to the score of a process by which it chooses whom to kill for lack of memory; 1000 is the most."""


class Failed(Exception):
    """A pipeline could not be built, or its training failed; the message has the reason."""


class Separate:
    """A contender in a process of its own; closing it ends the process.

    Args:
        name: the change that it has.
        spec: the pipeline.
        variables: environment variables that the process has in addition.
        batches: of the warm-up.
        deadline: in `perf_counter` time.

    Raises:
        Failed: if building the pipeline fails, or the process dies.
        PlanError, DataError, StrategyError: as `Pipeline.fit`.
        OutOfTime: at the deadline.
    """

    def __init__(
        self, name: str, spec: PipelineSpec, variables: Mapping[str, str], batches: int, deadline: float
    ) -> None:
        assert spec.data is not None
        self.name, self.batch_size, self._deadline = name, spec.data.batch_size, deadline
        self._line, theirs = Pipe()
        with theirs:
            boot = BOOT.format(path=sys.path, line=theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip
        try:
            job: Any = partial(_answer, spec, batches)
            if registry.REGISTERED:
                job = partial(registry.call_with, registry.REGISTERED, job)
            with suppress(BrokenPipeError):  # it died at once: the answer says so
                self._line.send_bytes(cloudpickle.dumps(job))
            self._received()
        except BaseException:
            self.close()
            raise

    @property
    def memory(self) -> int | None:
        """See `arena.Contender`: not measured."""
        return None

    def trial(self, number: int, batches: int) -> identity.Trial:
        """Train on these batches; `number` determines the samples. Raise Failed or OutOfTime."""
        with suppress(BrokenPipeError):
            self._line.send((number, batches))
        trial = self._received()
        assert isinstance(trial, identity.Trial)
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


def _answer(spec: PipelineSpec, batches: int, line: Connection) -> None:
    """Build the pipeline, and train it as asked: pairs of a round's number and a number of batches.

    Only the other side looks at the time.
    """
    one = identity.in_turn("")
    with ExitStack() as stack:
        stack.enter_context(fork_rng(spec.seed))
        try:
            runner = VariantRunner([Variant(one, spec)], Loaders(stack), batches)
        except Exception as error:
            line.send(error if isinstance(error, DrivetrainError) else described(error))
            return
        stack.callback(runner.close)
        line.send(None)
        while True:
            number, asked = line.recv()
            trials, failed = runner.run(number, asked, [one])
            line.send(failed[one] if failed else trials[one])
