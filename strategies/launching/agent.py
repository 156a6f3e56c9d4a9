"""torchrun's agent, which starts this process and must not be outlived by it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""A variable of torchrun's: with 1, every start of the workers has a store of its own."""
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h


@contextmanager
def killed_with_agent() -> Iterator[None]:
    """Inside the block, let the system kill this process when torchrun's agent dies.

    An agent that is killed cannot end its workers, which would go on training, and disturb the ranks that replace them.
    Nothing happens without an agent, or on other systems than Linux.
    """
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
    """Return why a machine cannot join this job later, and the remedy; "" if it can, or the number is fixed.

    Since torch 2.15, the agents keep the address of their workers' store. One that joins waits for it in vain, and so
    do the others' workers for its ranks. Only the agent's environment can change that, not a worker.
    """
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
        f"that joins stops it for minutes. Set {NO_SHARED_STORE}=1 in the environment of torchrun on each machine."
    )


def nodes_of(command: Sequence[str]) -> str:
    """Return the value of `--nnodes` in a command of torchrun's; "" if it is not given."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--nnodes":
            return value or following
        if word == "-m" and following.startswith("drivetrain"):
            break  # what follows is not torchrun's
    return ""
