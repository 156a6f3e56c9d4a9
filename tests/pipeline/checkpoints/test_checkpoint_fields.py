"""An edited `state.json` with valid digests either raises a typed error or does not change the training."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import CheckpointError, Pipeline
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.checkpoints.content import _digest
from drivetrain.pipeline.checkpoints.format import Checkpoint
from drivetrain.pipeline.checkpoints.resume import ResumePoint
from drivetrain.pipeline.checkpoints.state import global_randomness_kept
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.runs.artifacts import FitJob, RankResult
from drivetrain.pipeline.runs.run import Run
from drivetrain.pipeline.telemetry.state import EpochMeter
from drivetrain.pipeline.training.build import build, fork_rng
from drivetrain.transforms import EMA, SWA, GyroDropout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_data import Toy, batch_norm_model
from torch import nn

EPOCHS = 3


class Missing:
    """A field that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()
MUTATIONS = [
    MISSING, None, True, "x", "", [], {}, [1], {"a": 1}, -1, -(2**40), 10**30, 2**53 + 1, 0.5, -0.5, math.nan, math.inf,
    1e308,
]  # fmt: skip
FREE = {"drivetrain", "strategy", "description", "run"}
"""What says where a checkpoint is from, not what the training does."""


def with_dropout() -> nn.Module:
    return nn.Sequential(*batch_norm_model()[:-1], nn.Dropout(0.3), batch_norm_model()[-1])


class Reader:
    """A run that is built once, and reads checkpoint after checkpoint without training."""

    def __init__(self, pipeline: Pipeline, out: Path, step: int) -> None:
        self._plan, self._stack = resolve(pipeline), ExitStack()
        pipeline.fit(
            epochs=EPOCHS,
            out=out,
            progress=False,
            checkpoints=Checkpoints(every_steps=1, keep=99, background=False),
        )
        self.path = out / "checkpoints" / f"step-{step:08d}"
        self.saved = json.loads((self.path / "state.json").read_text())
        del self.saved["sha256"]
        self._stack.enter_context(fork_rng(0))
        self._stack.enter_context(global_randomness_kept())
        self._built = self._stack.enter_context(build(self._plan))
        self._groups = [dict(group) for group in self._built.engine.optimizer.param_groups]
        self.whole = self.read(self.saved)

    def close(self) -> None:
        self._stack.close()

    def read(self, state: Any) -> dict[str, Any]:
        """What a training would start from."""
        (self.path / "state.json").write_text(json.dumps({**state, "sha256": _digest(state)}))
        checkpoint = Checkpoint(self.path)
        checkpoint.verify()
        for group, built in zip(self._built.engine.optimizer.param_groups, self._groups, strict=True):
            group.update(built)
        run = Run(
            self._plan,
            self._built,
            FitJob(epochs=EPOCHS, progress=False, resume=self.path, checkpoints=None),
            RankResult(),
        )
        run._begin(ResumePoint(checkpoint, "name", True))
        engine, hooks = self._built.engine, self._built.hooks
        m = hooks.state.meter
        optimizer = engine.export_optimizer()
        for group in optimizer.groups:
            group.pop("lr")  # which the schedule sets before the next step
        return {
            "finished": hooks.state.epoch, "model": engine.export_state(), "optimizer": asdict(optimizer),
            "methods": hooks.state_dict(), "step": hooks.state.step,
            "loader": self._built.train.state_dict(), "meter": [m.total, m.counted, m.skipped],
            "random": torch.get_rng_state(), "history": [asdict(e) for e in run._artifacts.history.epochs],
        }  # fmt: skip


@pytest.fixture(scope="module")
def readers(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Reader]]:
    """In the middle of an epoch, with averages and counters; at the end of one, with a mean."""
    plain = toy.pipeline(with_dropout).optimize("adamw", lr=0.01, schedule="constant")
    made = [
        Reader(
            plain.transform(EMA(half_life=3), GyroDropout(sigma=4, tau=1)),
            tmp_path_factory.mktemp("middle"),
            6,
        ),
        Reader(
            plain.optimize("sgd", lr=0.1, momentum=0.9).transform(SWA(0.1, 0.9)),
            tmp_path_factory.mktemp("end"),
            8,
        ),
    ]
    yield made
    for reader in made:
        reader.close()


def paths(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value inside; of a long list, the first two elements and the last."""
    if isinstance(value, dict):
        children = list(value)
    else:
        children = sorted({0, 1, len(value) - 1}) if isinstance(value, list) and len(value) > 1 else []
        children = [0] if isinstance(value, list) and len(value) == 1 else children
    for child in children:
        yield (*place, child)
        yield from paths(value[child], (*place, child))


def mutated(state: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(state))
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return changed


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return set(left) == set(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def check(reader: Reader, place: tuple[Any, ...], value: Any) -> None:
    state = mutated(reader.saved, place, value)
    try:
        read = reader.read(state)
    except CheckpointError:
        return
    said = read.pop("history")  # what is said of epochs that are over stands for itself, if it can be true
    assert len(said) == len(state["history"]["epochs"])
    for epoch, entry in zip(said, state["history"]["epochs"], strict=True):
        assert {**epoch, **entry} == epoch
        assert all(map(math.isfinite, epoch["metrics"].values()))
        numbers = {key: value for key, value in epoch.items() if key not in ("metrics", "units")}
        assert all(v is None or (math.isfinite(v) and (v >= 0 or "loss" in k)) for k, v in numbers.items())
    expected = {key: kept for key, kept in reader.whole.items() if key != "history"}
    assert same(read, expected), f"{place} = {value!r} is accepted, and changes the training"


@pytest.mark.long
@settings(
    max_examples=250, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_any_edited_value_is_refused_or_makes_no_difference(
    readers: list[Reader], data: st.DataObject
) -> None:
    reader = data.draw(st.sampled_from(readers))
    places = [place for place in paths(reader.saved) if place[0] not in FREE]
    check(reader, data.draw(st.sampled_from(places)), data.draw(st.sampled_from(MUTATIONS)))


@pytest.mark.parametrize(("place", "value", "message"), [
    (("step",), -1, r"its step is -1, which is not an integer from 0"),
    (("epoch",), -2, r"its epoch is -2, which is not"),
    (("step",), 10**30, r"its step is 1000000000000000000000000000000, which is not an integer"),
    (("step",), 7, r"its step is 7, after 1 epochs and 2 steps of a run with 4 steps"),
    (("step_in_epoch",), 4, r"its step is 6, which is not possible after 1 epochs and 4 steps"),
    (("run",), 5, r"its run is 5, which is not a text"),
    (("loader", "position"), 10**6, r"its loader.position is 1000000, which is not 2"),
    (("optimizer", "groups", 0, "weight_decay"), -5, r"its optimizer.groups\[0\].weight_decay is -5, and this"),
    (("optimizer", "groups", 0, "betas"), [0.9, math.nan], r"its optimizer.groups\[0\].betas is"),
    (("ranks", 0, "random", "numpy", 2), 10**6, r"its ranks\[0\].random.numpy\[2\] is 1000000, which is not"),
    (("ranks", 0, "random", "python", 1, 624), 625, r"its ranks\[0\].random.python\[1\]\[624\] is 625"),
    (("meter", "total"), math.nan, r"its meter.total is nan, which is not a finite number"),
    (("meter", "counted"), 1, r"its meter.counted and skipped is 1, which is not 2"),
    (("history", "epochs", 0, "metrics"), 7, r"its history.epochs\[0\].metrics is 7, "),
    (("history", "epochs"), [], r"its number of history.epochs is 0, which is not 1"),
    (("history", "resumed"), 5, r"its history.resumed is 5, which is not a list"),
    (("methods", "EMA", "steps"), 7, r"its methods.EMA.steps is 7, which is not possible after 6 steps"),
    (("meter", "overflowed"), 3, r"its meter.overflowed is 3, which is not possible in 2 steps"),
    (("methods", "EMA", "averages"), 5, r"its methods.EMA.averages is 5"),
    (("files", "optimizer.safetensors"), MISSING, r"'optimizer.safetensors' is not among its files"),
    (("files", "model.safetensors", "bytes"), MISSING, r"its files.*bytes is None, which is not there"),
    (("facts", "epochs"), -3, r"its facts.epochs is -3, which is not"),
    (("meter", "surprise"), 1, r"its meter.surprise is 1, which is not a field"),
    (("loader", "batches"), -4, r"its loader.batches is -4, which is not"),
], ids=str)  # fmt: skip
def test_the_error_names_field_value_and_remedy(
    readers: list[Reader], place: tuple[Any, ...], value: Any, message: str
) -> None:
    reader = readers[0]
    with pytest.raises(CheckpointError, match=f"step-00000006 is damaged: {message}.*resume=None"):
        reader.read(mutated(reader.saved, place, value))


@pytest.mark.parametrize("edit", [
    lambda state: state["methods"]["SWA"].update(mean={}), lambda state: state["methods"]["SWA"].update(ended=True),
    lambda state: state["methods"]["SWA"].update(steps=99), lambda state: state["methods"]["SWA"].update(counted=9),
])  # fmt: skip
def test_a_mean_that_is_not_there_is_missed(readers: list[Reader], edit: Callable[[Any], None]) -> None:
    state = json.loads(json.dumps(readers[1].saved))
    edit(state)
    with pytest.raises(CheckpointError, match=r"methods\.SWA"):
        readers[1].read(state)


def test_a_state_that_could_not_be_read_is_not_written(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the checkpoints before it would be removed for one that nothing can resume from."""
    pipeline = toy.pipeline(batch_norm_model)
    pipeline.fit(epochs=1, out=tmp_path, progress=False)
    monkeypatch.setattr(EpochMeter, "state_dict", lambda self, engine: {"total": math.nan})  # noqa: ARG005
    with pytest.raises(CheckpointError, match=r"step-00000008 could not be written: its meter"):
        pipeline.fit(epochs=2, out=tmp_path, progress=False, resume="auto")
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]


def test_another_length_of_the_epochs_is_refused(readers: list[Reader], tmp_path: Path) -> None:
    """Numbers that agree with each other, but not with the run."""
    reader = readers[1]
    state = json.loads(json.dumps(reader.saved))
    state["step"], state["loader"]["position"] = 10, 5
    with pytest.raises(CheckpointError, match="of a run with 4 steps in an epoch"):
        reader.read(state)
    reader.read(reader.saved)
    shutil.copytree(reader.path, tmp_path / reader.path.name)
    assert (
        Checkpoint(tmp_path / reader.path.name).score
        == reader.saved["history"]["epochs"][-1]["metrics"]["top1"]
    )
