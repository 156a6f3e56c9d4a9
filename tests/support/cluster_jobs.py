"""What ranks do in the tests of clusters. A module, because ranks import it."""

import dataclasses
import io
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from drivetrain import Callback, Checkpoints, DrivetrainError, Pipeline, RunView
from drivetrain.common import machine
from drivetrain.pipeline.apps.cli import doctor
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.runs.artifacts import FitJob
from drivetrain.pipeline.runs.preflight import preflight
from drivetrain.strategies.launching import health
from drivetrain.strategies.launching.meeting import meet
from pipeline_data import attempt, numbers
from process_state import free_port as free_port


class Signals(Callback):
    """Sends a signal to its own process after step `step`, on rank `rank`."""

    def __init__(self, step: int, rank: int = 0, name: str = "SIGUSR1") -> None:
        self.step, self.rank, self.name = step, rank, name

    def on_step_end(self, view: RunView) -> None:
        if view.step == self.step and view.rank == self.rank:
            os.kill(os.getpid(), signal.Signals[self.name])


class Slow(Callback):
    """Gives a signal time to arrive."""

    def on_step_end(self, view: RunView) -> None:  # noqa: ARG002
        time.sleep(0.1)


class SignalsWhileLoaded(Callback):
    """In ranks that load it: sends SIGUSR1 to the process that has started them. They cannot note it yet."""

    def __init__(self) -> None:
        self.parent = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        while os.getpid() != self.parent:
            os.kill(self.parent, signal.SIGUSR1)
            time.sleep(0.05)


Case = tuple[Pipeline, Pipeline, dict[str, Any], dict[str, Any]]
"""The pipelines of ranks 0 and 1, and their options of `fit`."""


def compare_before_training(cases: dict[str, Case]) -> dict[str, str]:
    rank, said = dist.get_rank(), dict.fromkeys(cases, "")
    with mock.patch("drivetrain.pipeline.runs.preflight._LAG", 1.0):  # no file system here is slow
        for name, case in cases.items():
            try:
                preflight(dataclasses.replace(resolve(case[rank])), FitJob(**{"epochs": 1} | case[2 + rank]))
            except DrivetrainError as error:
                said[name] = str(error)
    return said


@contextmanager
def as_torchrun(port: int) -> Iterator[int]:
    """On each rank that `launch` has started: outside of its process group, with the variables of torchrun. Yields the
    rank."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables["COLUMNS"] = "600"  # no line is wrapped
    with mock.patch.dict(os.environ, variables):
        yield rank


def meet_repeatedly(port: int) -> list[str]:
    """On each rank: the names of several meetings in one store, as after torchrun's restarts. One rank is late in each,
    so that the others find what is left of the meeting before."""
    names = []
    with as_torchrun(port) as rank:
        for late in (0, 1, 0, 0):
            time.sleep(0.2 * (rank == late))
            names.append(meet(20, {"own": rank}).name)
        if rank == 1:  # leaves an answer to an old name, as a rank that was killed
            store = meet(20).store
            store.set("left", "behind")
        else:
            assert meet(20).store.get("left") == b"behind"
        assert not meet(20).store.check(["left"])
    return names


def doctor_of_ranks(port: int) -> dict[str, tuple[Any, str]]:
    """On each rank: what `doctor --ranks` returns or raises, and prints, by case. It measures with little data, so that
    a tenth of a second more is slow."""
    ends: dict[str, tuple[Any, str]] = {}
    small = mock.patch.multiple(health, _SIDE=256, _SENT=1 << 20, _PATTERN=1 << 20)
    with as_torchrun(port) as rank, mock.patch.object(doctor, "SIZES", (1 << 20,)), small:
        other = rank == 1
        cases: dict[str, Any] = {
            "alike": mock.patch.dict(os.environ),
            "another torch": mock.patch.object(torch, "__version__", "2.9.1" if other else "2.15.0+cpu"),
            "another host": mock.patch.object(socket, "gethostname", return_value=f"node{rank}"),
            "slow": mock.patch.multiple(health, wait_for=lambda _: time.sleep(0.1 * other), _SECONDS=0.1),
            "no interface": mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "nix0" if other else "lo"}),
            "missing": mock.patch.dict(os.environ),
        }
        for name, case in cases.items():
            if name == "missing" and other:
                continue
            patience = 1 if name in ("missing", "no interface") else 20
            host = mock.patch.object(socket, "gethostname", return_value=f"node{rank}")
            apart = host if name == "slow" else nullcontext()
            with case, apart, redirect_stdout(io.StringIO()) as printed:
                end = attempt(partial(doctor.examine_ranks, patience))
                if dist.is_initialized():
                    dist.destroy_process_group()
            ends[name] = end, printed.getvalue()
    return ends


@contextmanager
def own_machine(folder: Path) -> Iterator[Path]:
    """On each rank: as on a machine of its own, whose cache this yields. An address, here a folder, is asked often."""
    cache = folder / f"machine {dist.get_rank()}"
    often = mock.patch("drivetrain.pipeline.runs.checkpoints.writer._REMOTE_ROUND", 0.05)
    with mock.patch.dict(os.environ, {"DRIVETRAIN_DATA": str(cache)}), often:
        yield cache


def train_apart(pipeline: Pipeline, folder: Path, out: str) -> tuple[list[Any], list[Any], list[str]]:
    """On each rank, as on a machine of its own that shares nothing: train three epochs, and the same in two runs, of
    which the first ended within the upload of its last checkpoint, and the second begins on empty machines. Return the
    numbers of both, and the files that are left on this machine."""
    with own_machine(folder) as cache:
        expected = numbers(pipeline.fit(epochs=3, progress=False))
        pipeline.fit(epochs=2, out=out, progress=False, checkpoints=Checkpoints(every_steps=3))
        shutil.rmtree(cache)
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(out.removeprefix("file://")) / "checkpoints/step-00000008/state.json").unlink()
        dist.barrier()
        resumed = pipeline.fit(epochs=3, out=out, progress=False, resume="auto")
        assert resumed.history.facts["resumed"][0]["step"] == 6
    return expected, numbers(resumed), sorted(path.name for path in cache.rglob("*") if path.is_file())


def resume_apart(pipeline: Pipeline, folder: Path, out: str, instructions: str) -> None:
    """On each rank, as on a machine of its own whose CPU has these instructions for bf16: resume for a second epoch."""
    with own_machine(folder), mock.patch.object(machine, "bf16_instructions", return_value=instructions):
        pipeline.fit(epochs=2, out=out, progress=False, resume="auto")


def restart_apart(pipeline: Pipeline, folder: Path, out: str) -> list[str]:
    """On each rank, as on a machine of its own: resume after each epoch. Return the checkpoints left on it."""
    one = Checkpoints(keep=1, keep_best=False)
    with own_machine(folder) as cache:
        for epochs in (1, 2):
            pipeline.fit(epochs=epochs, out=out, progress=False, resume="auto", checkpoints=one)
            for place in cache.glob("runs/*/checkpoints"):
                (place / f".step-{epochs:08d}.partial").mkdir()  # as after a kill
        pipeline.fit(epochs=3, out=out, progress=False, resume="auto", checkpoints=one)
    return sorted(path.name for path in cache.rglob("*step-*"))


def apart(trained: Pipeline, restarted: Pipeline, folder: Path) -> tuple[Any, list[str]]:
    return (
        train_apart(trained, folder / "trained", f"file://{folder}/store/trained"),
        restart_apart(restarted, folder / "restarted", f"file://{folder}/store/restarted"),
    )
