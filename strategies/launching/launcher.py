"""`launch`: run a function on several ranks, under torchrun or by starting the processes itself."""

from __future__ import annotations

import ctypes
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import cloudpickle
import psutil

from ...common.checks import check_whole, plain
from ...common.errors import StrategyError
from ...common.signals import handled, interrupts_held, is_unhandled
from .. import registry
from .group import COLLECTIVE_TIMEOUT, in_group, is_rank, join_group
from .meeting import LostRankError, lost_ranks_named
from .rank_main import BOOT, COMPLETE
from .stacks import Stacks

Result = TypeVar("Result")

_INTERRUPT_PATIENCE = 3.0  # seconds the ranks have to answer after Ctrl-C
_ECHO_PATIENCE = 2.0  # seconds to wait for the cause after a rank that only lost its connection
_EXIT_PATIENCE = 10.0  # seconds a rank that has answered may take to exit by itself
_ROUND = 0.02  # seconds between two looks for answers, and for ranks that died without one
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h


@dataclass(frozen=True)
class Report:
    kind: str  # `"result"`, `"error"` (it raised) or `"died"` (it ended without an answer)
    what: str  # the end of a sentence that begins with "rank 1 of 2"
    traceback: str = ""
    echo: bool = False  # whether it is probably a consequence of another rank's end
    time: float = field(default_factory=time.monotonic)  # a clock that all processes share


class Rank:
    def __init__(self, number: int, devices: int, job: int) -> None:
        self.number = number
        self.report: Report | None = None
        self.heard = 0.0  # when its answer last grew, by `time.monotonic`
        self.signals: list[str] = []  # names of those that this process has sent to it
        self._size = 0  # of the answer so far, in bytes
        self._file = _file_in_memory("answer")
        try:
            self.process = start_interpreter(_environment(number, devices), job, self._file.fileno())
        except BaseException:
            self._file.close()
            raise

    def look(self) -> None:
        if self.report is not None:
            return
        ended = self.exited()  # before the answer is looked for: it may come in between
        if os.pread(self._file.fileno(), len(COMPLETE), 0) == COMPLETE:
            self._file.seek(len(COMPLETE))
            self.report = Report(**pickle.load(self._file))
        elif ended:
            self.report = Report("died", _cause_of_death(self.process.pid))
        elif (size := os.fstat(self._file.fileno()).st_size) != self._size:
            self._size, self.heard = size, time.monotonic()

    def load(self) -> Any:
        """Return the result or exception of a rank that has answered; call it once."""
        return pickle.load(self._file)

    def exited(self) -> bool:
        """Whether the process has ended. It is not reaped, so that its process id is not reused."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped elsewhere: SIGCHLD is ignored, or another thread waits
            return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._file.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def _file_in_memory(name: str) -> IO[bytes]:
    """Return a file that only processes which inherit its descriptor see, and that takes no disk."""
    libc = ctypes.CDLL(None, use_errno=True)  # a Python built for older systems lacks `os.memfd_create`
    descriptor = libc.memfd_create(f"drivetrain {name}".encode(), 1)  # MFD_CLOEXEC
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return os.fdopen(descriptor, "w+b")


def _cause_of_death(pid: int) -> str:
    status = None
    with suppress(ChildProcessError):
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if status is None:
        return "ended before it returned"
    if status.si_code == os.CLD_EXITED:
        return f"exited with code {status.si_status} before it returned"
    name = signal.Signals(status.si_status).name
    hint = " (often the system ran out of memory: use fewer devices or a smaller batch)"
    return f"was killed by {name} before it returned" + (hint if name == "SIGKILL" else "")


def launch(
    function: Callable[..., Result],
    *args: Any,
    devices: int,
    timeout: float | None = None,
    device: str | None = None,
    patience: float = _INTERRUPT_PATIENCE,
    collective_timeout: float = COLLECTIVE_TIMEOUT,
    forward: Collection[signal.Signals] = (),
    saves: bool = False,
    stacks: Path | None = None,
) -> list[Result]:
    """Call `function(*args)` on `devices` ranks in one process group, and return their results.

    Outside torchrun every rank is a new interpreter (nothing is forked, and no main guard is needed). The function, its
    arguments and its result are pickled with cloudpickle, so they may be defined in a script or a notebook cell.
    Results should contain CPU tensors. The ranks share standard output and error. Starting takes 4 to 10 s (torch).

    Under torchrun, or in a process group, this process *is* a rank: it calls the function; exceptions stay unchanged.

    Ctrl-C is forwarded to the ranks, which have `patience` seconds to answer. If rank 0 answers with a
    KeyboardInterrupt (a subclass that carries what was finished), that object is raised. A rank in a collective
    receives Ctrl-C only when the collective returns.

    SIGQUIT to this process (Ctrl-\\) or to a rank appends the Python stacks of all ranks, or of that one, to a file,
    unless the signal has a handler; so does a rank that hangs until `timeout` or `collective_timeout`.

    Args:
        function: called on every rank.
        args: its arguments.
        devices: number of ranks.
        timeout: time limit in seconds, including the start. Default None: no limit. Ignored if this process is a rank.
        device: what the ranks compute on: `"cpu"`, for which only gloo is started and no GPU is used; `"cuda"`; or None
            (default) for CUDA if available. Ignored in an existing process group.
        patience: seconds that the ranks have to answer after Ctrl-C. Default 3; 0 if there is nothing to wait for.
        collective_timeout: seconds that each collective waits for the other ranks. Default 600. Ignored in a group.
        forward: signals to this process that are forwarded to the ranks instead of their usual effect. Ignored if this
            process is a rank, and in other threads than the main one.
        saves: whether ranks save at Ctrl-C: waits without limit, after a second one for `patience`. Default False.
        stacks: the file for stacks. Default None: `drivetrain-stacks-PID.txt` in the folder for temporary files.

    Returns:
        One result per rank, in order; under torchrun a list with only this rank's.

    Raises:
        StrategyError: if a rank raises or dies (the message names the first one and contains its traceback, and the
            exception is its `__cause__`), if the job or a result cannot be pickled, at the time limit, or if `devices`
            is not the number of ranks that torchrun started. No rank is left running.
        KeyboardInterrupt: after Ctrl-C.
    """
    check_whole("launch: devices", plain(devices), StrategyError, 1)
    if is_rank():
        return [_call_here(function, args, devices, device, collective_timeout, stacks)]
    job = _pickle_job(function, args)
    deadline = None if timeout is None else time.monotonic() + timeout
    with (
        _started(job, devices, device, collective_timeout) as (ranks, directory),
        handled(forward, lambda number, _: _signal(ranks, number)),
        _collected(Stacks(stacks, directory)) as collected,
    ):
        try:
            _wait_for_results(ranks, collected, deadline, timeout)
            end = time.monotonic() + _EXIT_PATIENCE  # for exit handlers
            while time.monotonic() < end and not all(rank.exited() for rank in ranks):
                time.sleep(0.01)
            return [_load_result(rank) for rank in ranks]
        except KeyboardInterrupt as interrupt:
            raise (_answer_to_interrupt(ranks, collected, patience, saves) or interrupt) from None


def _call_here(
    function: Callable[..., Result], args: tuple[Any, ...], devices: int, device: str | None, timeout: float,
    stacks: Path | None,
) -> Result:  # fmt: skip
    import torch.distributed as dist

    world_size = dist.get_world_size() if in_group() else int(os.environ["WORLD_SIZE"])
    if world_size != devices:
        raise StrategyError(
            f"launch: devices={devices}, but this process is one of {world_size} ranks that are already running. Pass "
            f"devices={world_size}, or start {devices} with torchrun."
        )
    if in_group():
        return function(*args)
    if os.environ["RANK"] == "0" and (why := blocked_growth()):
        warnings.warn(why, ElasticWarning, stacklevel=3)
    with killed_with_agent():
        meeting = join_group(device=device, timeout=timeout)
        assert meeting is not None
        with lost_ranks_named(dist.get_rank(), world_size, timeout, meeting.name, stacks):
            result = function(*args)
    # Not after an exception: leaving a broken group may wait for the others forever.
    dist.destroy_process_group()
    return result


def _pickle_job(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if registry.REGISTERED:
        function = partial(registry.call_with, registry.REGISTERED, function)
    try:
        return cloudpickle.dumps((function, args))  # type: ignore[no-any-return]
    except Exception as error:
        parts = {f"the function {getattr(function, '__name__', function)!r}": function}
        parts |= {f"argument {i} (a {type(arg).__name__})": arg for i, arg in enumerate(args, 1)}
        culprit = next((name for name, part in parts.items() if not _can_be_pickled(part)), "the job")
        raise StrategyError(
            f"launch: {culprit} cannot be sent to another process: {type(error).__name__}: {error}. "
            f"Create what cannot be pickled inside the function."
        ) from error


def _can_be_pickled(value: object) -> bool:
    with suppress(Exception):
        return bool(cloudpickle.dumps(value))
    return False


@contextmanager
def _started(job: bytes, devices: int, device: str | None, timeout: float) -> Iterator[tuple[list[Rank], str]]:
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as directory, _file_in_memory("job") as file:
        order = {
            "path": [str(entry) for entry in sys.path], "argv": sys.argv, "rank_main": f"{__package__}.rank_main",
            "directory": directory, "device": device, "timeout": timeout,
        }  # fmt: skip
        file.write(json.dumps(order).encode() + b"\n" + job)
        file.flush()
        try:
            for number in range(devices):
                with interrupts_held():  # Popen would forget a process that has just started
                    ranks.append(Rank(number, devices, file.fileno()))
            file.close()  # it is gone when the ranks have loaded it
            yield ranks, directory
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.close()


@contextmanager
def _collected(stacks: Stacks) -> Iterator[Stacks]:
    """Inside the block, SIGQUIT asks for the stacks of the ranks."""
    with handled([signal.SIGQUIT] * is_unhandled(signal.SIGQUIT), lambda *_: setattr(stacks, "wanted", True)):
        yield stacks


def _running(ranks: list[Rank]) -> dict[int, int]:
    return {rank.number: rank.process.pid for rank in ranks if rank.report is None}


def _look(ranks: list[Rank]) -> None:
    time.sleep(_ROUND)
    for rank in ranks:
        rank.look()


def _signal(ranks: list[Rank], number: int) -> None:
    for rank in ranks:
        if rank.report is None:
            rank.signals.append(signal.Signals(number).name)
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid, number)


def _wait_for_results(ranks: list[Rank], stacks: Stacks, deadline: float | None, timeout: float | None) -> None:
    waiting = ranks
    while waiting:
        _look(ranks)
        if any(_failed(rank) for rank in ranks):
            raise _first_cause(ranks, stacks)
        stacks.look(_running(ranks))
        waiting = [rank for rank in ranks if rank.report is None]
        if waiting and deadline is not None and time.monotonic() > deadline:
            raise StrategyError(
                f"launch: rank(s) {[rank.number for rank in waiting]} of {len(ranks)} did not return "
                f"within timeout={timeout:g} s; all ranks were terminated. Increase the timeout, or look for a "
                f"collective call that not every rank makes.{_stacks_of_all(ranks, stacks, 'the time limit passed')}"
            )


def _failed(rank: Rank) -> bool:
    return rank.report is not None and rank.report.kind != "result"


def _stacks_of_all(ranks: list[Rank], stacks: Stacks, why: str) -> str:
    known = {rank.number: rank.report.traceback for rank in ranks if rank.report and rank.report.traceback}
    path = stacks.collect(why, _running(ranks), known)
    return f" The stacks of all ranks are in {path}." if path else ""


def _first_cause(ranks: list[Rank], stacks: Stacks) -> StrategyError:
    """Return the error of the rank that failed first; one that only lost its connection comes last."""
    patience = time.monotonic() + _ECHO_PATIENCE
    failed: list[tuple[Rank, Report]] = []
    while not any(not report.echo for _, report in failed) and time.monotonic() < patience:
        _look(ranks)
        failed = [(rank, rank.report) for rank in ranks if rank.report and _failed(rank)]
    rank, report = min(failed, key=lambda pair: (pair[1].echo, pair[1].time))
    message = f"launch: rank {rank.number} of {len(ranks)} {report.what.removesuffix('.')}. All ranks were terminated."
    returned = [rank.number for rank in ranks if rank.report and not _failed(rank)]
    if report.echo and returned:
        message += f" Rank(s) {returned} had already returned: they made fewer collective calls."
    if report.kind == "died" and (text := stacks.take(rank.number)):
        report = rank.report = replace(report, traceback=text)
    # NCCL's watchdog aborts ranks that have waited for too long.
    if _running(ranks) and (report.echo or "SIGABRT" in report.what):
        message += _stacks_of_all(ranks, stacks, f"rank {rank.number} {report.what}")
    if report.traceback:
        message += f"\n\nTraceback of rank {rank.number}:\n{report.traceback}"
    error = (LostRankError if report.echo or report.kind == "died" else StrategyError)(message)
    if isinstance(error, LostRankError) and report.kind == "died":
        error.signal = next((name for name in rank.signals if f"by {name} " in report.what), "")
    error.__cause__ = _load_exception(rank)
    return error


def _answer_to_interrupt(ranks: list[Rank], stacks: Stacks, patience: float, saves: bool) -> KeyboardInterrupt | None:
    """Forward Ctrl-C and wait , as `launch` documents; return rank 0's KeyboardInterrupt if it sent one."""
    if saves:
        with suppress(KeyboardInterrupt):  # the second one, which the ranks receive, too
            return _wait_after_interrupt(ranks, stacks, patience, saves=True)
    return _wait_after_interrupt(ranks, stacks, patience, saves=False) if patience else None


def _wait_after_interrupt(ranks: list[Rank], stacks: Stacks, patience: float, saves: bool) -> KeyboardInterrupt | None:
    _signal(ranks, signal.SIGINT)
    first = ranks[0]
    deadline = math.inf if saves else time.monotonic() + patience
    # An answer that is arriving (large weights) is worth waiting for.
    while time.monotonic() < max(deadline, first.heard + 1.0):
        _look(ranks)
        if all(rank.report for rank in ranks):
            break
        stacks.look(_running(ranks))  # SIGQUIT: of a rank that hangs while it saves
        if any(rank.report and rank.report.kind == "died" for rank in ranks):
            deadline = min(deadline, time.monotonic() + patience)
    error = _load_exception(first) if first.report and first.report.kind == "error" else None
    return error if isinstance(error, KeyboardInterrupt) else None


def _load_exception(rank: Rank) -> BaseException | None:
    """Return the rank's exception, or None if it cannot be unpickled; its text is in the message."""
    with suppress(Exception):
        error = rank.load()
        return error if isinstance(error, BaseException) else None
    return None


def _load_result(rank: Rank) -> Any:
    try:
        return rank.load()
    except Exception as error:
        assert rank.report is not None
        raise StrategyError(
            f"launch: rank {rank.number} {rank.report.what}, which cannot be loaded here: "
            f"{type(error).__name__}: {error}. Return tensors and plain values instead."
        ) from error


def start_interpreter(environment: dict[str, str], job: int, answer: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: not with modules of this folder, such as a json.py, before the standard library.
        [sys.executable, "-P", "-c", BOOT, str(job), str(answer)],
        stdin=subprocess.PIPE,
        pass_fds=[job, answer],
        env=environment,
        start_new_session=True,  # the terminal's Ctrl-C reaches the parent only
        bufsize=0,
    )


def _environment(number: int, devices: int) -> dict[str, str]:
    ours = dict.fromkeys(("RANK", "LOCAL_RANK"), str(number))
    ours |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(devices))
    # All ranks are on this machine; looking up its host name can hang or return a foreign address.
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **ours}


@contextmanager
def killed_with_agent() -> Iterator[None]:
    """Inside the block, let the system (Linux) kill this process when torchrun's agent dies: an agent that is killed
    cannot end its workers, which would go on training, and disturb the ranks that replace them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(before))
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PDEATHSIG, before.value)


class ElasticWarning(UserWarning):
    """torchrun was started so that the number of machines cannot change as it should."""


def blocked_growth() -> str:
    """Return why a machine cannot join this job later, and the remedy; "" if it can, or the number is fixed. Since
    torch 2.15, the agents keep the address of their workers' store; one that joins waits for it in vain."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return ""
    nodes = nodes_of(command) or os.environ.get("PET_NNODES", "1")
    fewest, _, most = nodes.partition(":")
    if not most or fewest == most:
        return ""
    return (
        f"torchrun --nnodes={nodes} shares its store with the workers: the job survives the loss of a machine, but one "
        "that joins stops it for minutes. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun on "
        "each machine."
    )


def nodes_of(command: Sequence[str]) -> str:
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--nnodes":
            return value or following
        if word == "-m" and following.startswith("drivetrain"):
            break  # what follows is not torchrun's
    return ""
