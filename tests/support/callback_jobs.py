"""What ranks do in the tests of callbacks. A module, because ranks import it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from drivetrain import Callback, Pipeline, PlanError, RunView
from drivetrain.pipeline.runs import callbacks, run
from drivetrain.pipeline.runs.callbacks import RunCallbacks
from pipeline_data import attempt


class Sums(Callback):
    """Keeps the norm of each parameter and each gradient after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def needs_gradients(self, step: int) -> bool:  # noqa: ARG002
        return True

    def on_step_end(self, view: RunView) -> None:
        found = {f"gradient {name}": value.float().norm().item() for name, value in view.named_gradients()}
        found |= {name: value.float().norm().item() for name, value in view.named_parameters()}
        self.steps.append(found | {"groups": sum(len(names) for names in view.group_names())})


class OnRankOne(Callback):
    """On rank 1 alone: asks for a stop, or raises, at one step; counts its steps on every rank."""

    def __init__(self, stop: int = 0, fail: int = 0) -> None:
        self.stop, self.fail, self.steps = stop, fail, 0

    def on_step_end(self, view: RunView) -> None:
        self.steps += 1
        if view.rank == view.world_size - 1 and view.step == self.stop:
            view.stop(f"rank {view.rank} has seen enough")
        if view.rank == view.world_size - 1 and view.step == self.fail:
            raise ZeroDivisionError("on the last rank")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class OwnState(Callback):
    """Has another state on each rank: its number."""

    def __init__(self) -> None:
        self.rank = self.restored = -1

    def on_step_end(self, view: RunView) -> None:
        self.rank = view.rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restored = state["rank"]


class Logs(Callback):
    """Changes no training, and needs a logger, which a run that is measured does not have."""

    only_looks = True

    def check(self, run: Any) -> None:
        if not run.logs:
            raise PlanError("There is no logger.")


class Collective(Callback):
    """Reduces something over the ranks at each step; at step `fail` the last rank raises instead."""

    def __init__(self, fail: int) -> None:
        self.fail = fail

    def on_step_end(self, view: RunView) -> None:
        if view.rank == view.world_size - 1 and view.step == self.fail:
            raise ZeroDivisionError("instead of a collective")
        dist.all_reduce(torch.ones(1000))


def fail_during_a_collective(pipeline: Pipeline, **fit: Any) -> None:
    callbacks.PATIENCE = 1.0
    pipeline.fit(epochs=1, progress=False, callbacks=[Collective(fail=3)], **fit)


class Unanswered(Sums):
    """Reads all gradients; before step `fail`, the last rank raises instead of answering whether it does."""

    def __init__(self, fail: int) -> None:
        super().__init__()
        self.fail = fail

    def needs_gradients(self, step: int) -> bool:
        if dist.get_rank() == dist.get_world_size() - 1 and step == self.fail:
            raise ZeroDivisionError("instead of an answer")
        return True


def fail_before_gradients(pipeline: Pipeline) -> None:
    pipeline.fit(epochs=1, progress=False, callbacks=[Unanswered(fail=2)])


def sums_of(pipelines: dict[str, Pipeline]) -> dict[str, list[dict[str, float]]]:
    """On each rank: what `Sums` sees in two epochs of each pipeline, evaluated within them."""
    torch.set_num_threads(1)
    found = {}
    for name, pipeline in pipelines.items():
        sums = Sums()
        pipeline.fit(epochs=1, progress=False, callbacks=[sums], eval_every_steps=2)
        found[name] = sums.steps
    return found


def stop_and_fail(pipeline: Pipeline, out: Path) -> dict[str, Any]:
    """On each rank: how a run ends that rank 1 stops at step 6, one that is resumed, and one that fails there."""
    torch.set_num_threads(1)
    one = OnRankOne(stop=6)
    stopped = pipeline.fit(epochs=3, progress=False, out=out, callbacks=[one, OwnState()])
    two, own = OnRankOne(), OwnState()
    kept: dict[str, Any] = {"out": out, "callbacks": [two, own], "resume": "auto", "continue_stopped": True}
    resumed = pipeline.fit(epochs=3, progress=False, **kept)
    whole = pipeline.fit(epochs=3, progress=False)
    return {
        "reason": stopped.stopped, "steps": one.steps, "epochs": len(stopped.history.epochs),
        "stopped": stopped.model.state_dict(), "resumed": resumed.model.state_dict(), "after": two.steps,
        "whole": whole.model.state_dict(), "error": failed(pipeline, 6), "late": stop_and_fail_late(pipeline),
        "restored": own.restored,
    }  # fmt: skip


def failed(pipeline: Pipeline, step: int) -> str:
    """The error of a run that fails there on rank 1."""
    error = attempt(lambda: pipeline.fit(epochs=2, progress=False, callbacks=[OnRankOne(fail=step)]))
    return str(error).removeprefix("DrivetrainError: ")


def stop_and_fail_late(pipeline: Pipeline) -> tuple[list[int], str]:
    """On each rank: the steps of runs that rank 1 stops at step 2 and at step 4, and the error of one that fails at
    step 2, with numbers that are read one step later, as on CUDA."""

    class Late(RunCallbacks):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._reads_late = True

    stopped = [OnRankOne(stop=stop) for stop in (2, 4)]
    with mock.patch.object(run, "RunCallbacks", Late):
        for one in stopped:
            pipeline.fit(epochs=2, progress=False, callbacks=[one])
        error = failed(pipeline, 2)
    return [one.steps for one in stopped], error


def both(pipelines: dict[str, Pipeline], stops: dict[str, Pipeline], out: Path) -> tuple[Any, Any]:
    return sums_of(pipelines), {name: stop_and_fail(p, out / name) for name, p in stops.items()}
