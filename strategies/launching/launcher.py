"""`launch`: run a function on several ranks, under torchrun or by starting the processes itself."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import cloudpickle

from ...common.errors import StrategyError
from ...common.signals import handled
from .. import registry
from .agent import killed_with_agent, warn_of_blocked_growth
from .group import COLLECTIVE_TIMEOUT, in_group, is_rank, join_group
from .peers import LostRankError, lost_ranks_named
from .ranks import Rank, Ranks, Report

Result = TypeVar("Result")

_INTERRUPT_PATIENCE = 3.0  # seconds the ranks have to answer after Ctrl-C
_ECHO_PATIENCE = 2.0  # seconds to wait for the cause after a rank that only lost its connection


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
) -> list[Result]:
    """Call `function(*args)` on `devices` ranks in one process group, and return their results.

    Outside torchrun every rank is a new interpreter (nothing is forked, and no main guard is needed). The function, its
    arguments and its result are pickled with cloudpickle, so they may be defined in a script or a notebook cell.
    Results should contain CPU tensors. The ranks share standard output and error. Starting takes as long as importing
    torch, 4 to 10 s.

    Under torchrun, or in an existing process group, this process *is* a rank: the function is called here, and its
    exceptions are raised unchanged.

    Ctrl-C is forwarded to the ranks, which have `patience` seconds to answer. If rank 0 answers with a
    KeyboardInterrupt (a subclass that carries what was finished), that object is raised. A rank in a collective
    receives Ctrl-C only when the collective returns.

    Args:
        function: called on every rank.
        args: its arguments.
        devices: number of ranks.
        timeout: time limit of the launch in seconds, including the start. Default None: no limit, because training may
            take days. Ignored if this process is a rank.
        device: what the ranks compute on: `"cpu"`, for which only gloo is started and no GPU is used; `"cuda"`; or None
            (default) for CUDA if available. Ignored in an existing process group.
        patience: seconds that the ranks have to answer after Ctrl-C. Default 3; 0 if there is nothing to wait for.
        collective_timeout: seconds that each collective waits for the other ranks. Default 600. Ignored in an existing
            process group, which has its own.
        forward: signals to this process that are forwarded to the ranks instead of their usual effect. Ignored if this
            process is a rank, and in other threads than the main one.
        saves: whether the ranks save at Ctrl-C, and then answer: it is waited for without a limit; at a second Ctrl-C
            for `patience` seconds. Default False.

    Returns:
        One result per rank, in order; under torchrun a list with only this rank's.

    Raises:
        StrategyError: if a rank raises or dies (the message names the first one and contains its traceback, and the
            exception is its `__cause__`), if the job or a result cannot be pickled, at the time limit, or if `devices`
            is not the number of ranks that torchrun started. No rank is left running.
        KeyboardInterrupt: after Ctrl-C.
    """
    if devices < 1:
        raise StrategyError(f"launch: devices={devices} must be a positive integer.")
    if is_rank():
        return [_call_here(function, args, devices, device, collective_timeout)]
    job = _pickle_job(function, args)
    deadline = None if timeout is None else time.monotonic() + timeout
    with (
        Ranks(job, devices, device, collective_timeout) as ranks,
        handled(forward, lambda number, _: ranks.signal(number)),
    ):
        try:
            _wait_for_results(ranks, deadline, timeout)
            ranks.wait_for_exit()
            return [_load_result(rank) for rank in ranks.all]
        except KeyboardInterrupt as interrupt:
            raise (_answer_to_interrupt(ranks, patience, saves) or interrupt) from None


def _call_here(
    function: Callable[..., Result],
    args: tuple[Any, ...],
    devices: int,
    device: str | None,
    collective_timeout: float,
) -> Result:
    import torch.distributed as dist

    world_size = dist.get_world_size() if in_group() else int(os.environ["WORLD_SIZE"])
    if world_size != devices:
        raise StrategyError(
            f"launch: devices={devices}, but this process is one of {world_size} ranks that are already running. Pass "
            f"devices={world_size}, or start {devices} with torchrun."
        )
    if in_group():
        return function(*args)
    warn_of_blocked_growth()
    with killed_with_agent():
        meeting = join_group(device=device, timeout=collective_timeout)
        assert meeting is not None
        with lost_ranks_named(dist.get_rank(), world_size, collective_timeout, meeting.name):
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
        culprit = "the job"
        parts = {f"the function {getattr(function, '__name__', function)!r}": function}
        parts |= {f"argument {i} (a {type(arg).__name__})": arg for i, arg in enumerate(args, 1)}
        for name, part in parts.items():
            try:
                cloudpickle.dumps(part)
            except Exception:
                culprit = name
                break
        raise StrategyError(
            f"launch: {culprit} cannot be sent to another process: {type(error).__name__}: {error}. "
            f"Create what cannot be pickled inside the function."
        ) from error


def _wait_for_results(ranks: Ranks, deadline: float | None, timeout: float | None) -> None:
    """Wait until every rank has a result; if one fails, raise the error of the first cause."""
    waiting = ranks.all
    while waiting:
        ranks.look()
        if any(_failed(rank) for rank in ranks.all):
            raise _first_cause(ranks)
        waiting = [rank for rank in ranks.all if rank.report is None]
        if waiting and deadline is not None and time.monotonic() > deadline:
            raise StrategyError(
                f"launch: rank(s) {[rank.number for rank in waiting]} of {len(ranks.all)} did not return "
                f"within timeout={timeout:g} s; all ranks were terminated. Increase the timeout, or look for a "
                f"collective call that not every rank makes."
            )


def _failed(rank: Rank) -> bool:
    return rank.report is not None and rank.report.kind != "result"


def _first_cause(ranks: Ranks) -> StrategyError:
    """Return the error of the rank that failed first; one that only lost its connection comes last."""
    patience = time.monotonic() + _ECHO_PATIENCE
    failed: list[tuple[Rank, Report]] = []
    while not any(not report.echo for _, report in failed) and time.monotonic() < patience:
        ranks.look()
        failed = [(rank, rank.report) for rank in ranks.all if rank.report and _failed(rank)]
    rank, report = min(failed, key=lambda pair: (pair[1].echo, pair[1].time))
    message = f"launch: rank {rank.number} of {len(ranks.all)} {report.what}. All ranks were terminated."
    returned = [rank.number for rank in ranks.all if rank.report and not _failed(rank)]
    if report.echo and returned:
        message += f" Rank(s) {returned} had already returned: they made fewer collective calls."
    if report.traceback:
        message += f"\n\nTraceback of rank {rank.number}:\n{report.traceback}"
    error = (LostRankError if report.echo or report.kind == "died" else StrategyError)(message)
    error.__cause__ = _load_exception(rank)
    return error


def _answer_to_interrupt(ranks: Ranks, patience: float, saves: bool) -> KeyboardInterrupt | None:
    """Forward Ctrl-C and wait for `patience` seconds, of ranks that save until one has died; return rank 0's
    KeyboardInterrupt if it sent one. See `launch`."""
    if saves:
        with suppress(KeyboardInterrupt):  # the second one, which the ranks receive, too
            return _wait_after_interrupt(ranks, patience, saves=True)
    return _wait_after_interrupt(ranks, patience) if patience else None


def _wait_after_interrupt(ranks: Ranks, patience: float, *, saves: bool = False) -> KeyboardInterrupt | None:
    ranks.signal(signal.SIGINT)
    first = ranks.all[0]
    deadline = math.inf if saves else time.monotonic() + patience
    # An answer that is arriving (large weights) is worth waiting for.
    while time.monotonic() < max(deadline, first.heard + 1.0):
        ranks.look()
        if all(rank.report for rank in ranks.all):
            break
        if any(rank.report and rank.report.kind == "died" for rank in ranks.all):
            deadline = min(deadline, time.monotonic() + patience)
    error = _load_exception(first) if first.report and first.report.kind == "error" else None
    return error if isinstance(error, KeyboardInterrupt) else None


def _load_exception(rank: Rank) -> BaseException | None:
    """Return the rank's exception, or None if it cannot be unpickled; its text is in the message."""
    try:
        error = rank.load()
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def _load_result(rank: Rank) -> Any:
    try:
        return rank.load()
    except Exception as error:
        assert rank.report is not None
        raise StrategyError(
            f"launch: rank {rank.number} {rank.report.what}, which cannot be loaded here: "
            f"{type(error).__name__}: {error}. Return tensors and plain values instead."
        ) from error
