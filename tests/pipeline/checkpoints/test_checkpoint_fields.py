"""An edited `state.json` is refused; one with valid digests, too, unless its fields have their types."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from drivetrain import CheckpointError, Pipeline
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.checkpoints.format import Checkpoint, _digest
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
        self.read(self.saved)

    def close(self) -> None:
        self._stack.close()

    def write(self, state: Any, digest: str) -> None:
        (self.path / "state.json").write_text(json.dumps({**state, "sha256": digest}))

    def read(self, state: Any) -> None:
        """Restore what a training would start from, with a digest that is right."""
        self.write(state, _digest(state))
        checkpoint = Checkpoint(self.path)
        checkpoint.verify()
        for group, built in zip(self._built.engine.optimizer.param_groups, self._groups, strict=True):
            group.update(built)
        job = FitJob(epochs=EPOCHS, progress=False, resume=self.path, checkpoints=None)
        run = Run(self._plan, self._built, job, RankResult())
        run._begin(ResumePoint(checkpoint, "name", True))


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


@pytest.mark.long
@settings(
    max_examples=250, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_any_edited_value_is_refused_by_its_digest_or_a_typed_error(
    readers: list[Reader], data: st.DataObject
) -> None:
    reader = data.draw(st.sampled_from(readers))
    place = data.draw(st.sampled_from([*paths(reader.saved)]))
    state = mutated(reader.saved, place, data.draw(st.sampled_from(MUTATIONS)))
    digest = _digest(reader.saved)
    if _digest(state) != digest:
        reader.write(state, digest)
        with pytest.raises(CheckpointError, match="modified after it was written"):
            Checkpoint(reader.path)
    with suppress(CheckpointError):  # and nothing else is raised
        reader.read(state)


@pytest.mark.parametrize(("place", "value", "message"), [
    (("step",), -1, "its step: expected `int` >= 0"),
    (("epoch",), -2, "its epoch: expected `int` >= 0"),
    (("step",), 0.5, "its step: expected `int`, got `float`"),
    (("step",), 7, r"its step is 7, after 1 epochs and 2 steps of a run with 4 steps"),
    (("step_in_epoch",), 5, r"its step is 6, after 1 epochs and 5 steps of a run with 4 steps"),
    (("run",), 5, "its run: expected `str`, got `int`"),
    (("format",), 2, "its format: invalid enum value 2"),
    (("optimizer", "groups"), {}, "its optimizer.groups: expected `array`, got `object`"),
    (("optimizer", "loss_scale"), 1, "its optimizer.loss_scale: expected `object`, got `int`"),
    (("ranks", 0, "random"), None, r"its ranks\[(0|\.\.\.)\].random: expected `object`, got `null`"),
    (("ranks", 0, "numbers"), [], r"its ranks\[(0|\.\.\.)\].numbers: expected `object`, got `array`"),
    (("meter", "total"), "nan", "its meter.total: expected `float`, got `str`"),
    (("meter", "counted"), MISSING, "its meter: object missing required field `counted`"),
    (("history", "epochs", 0, "metrics"), 7, r"its epochs\[(0|\.\.\.)\].metrics: expected `object`, got `int`"),
    (("history", "epochs"), {}, "its epochs: expected `array`, got `object`"),
    (("history", "resumed"), 5, "its resumed: expected `array`, got `int`"),
    (("methods", "EMA"), 7, r"its methods\[\.\.\.\]: expected `object`, got `int`"),
    (("meter", "overflowed"), -3, "its meter.overflowed: expected `int` >= 0"),
    (("history", "monitor", "unit"), "inch", "its monitor.unit: invalid enum value 'inch'"),
    (("files", "optimizer.safetensors"), MISSING, r"'optimizer.safetensors' is not among its files"),
    (("files", "model.safetensors", "bytes"), MISSING, "its files.*: object missing required field `bytes`"),
    (("facts",), -3, "its facts: expected `object`, got `int`"),
    (("surprise",), 1, "object contains unknown field `surprise`"),
    (("loader",), None, "its loader: expected `object`, got `null`"),
], ids=str)  # fmt: skip
def test_the_error_names_field_value_and_remedy(
    readers: list[Reader], place: tuple[Any, ...], value: Any, message: str
) -> None:
    reader = readers[0]
    with pytest.raises(CheckpointError, match=f"step-00000006 is damaged: {message}.*resume=None"):
        reader.read(mutated(reader.saved, place, value))


@pytest.mark.parametrize(("method", "field", "value"), [
    ("SWA", "mean", MISSING), ("SWA", "ended", MISSING), ("SWA", "steps", MISSING), ("SWA", "mean", {"tensors": False}),
])  # fmt: skip
def test_the_state_of_a_method_that_is_not_whole_is_missed(
    readers: list[Reader], method: str, field: str, value: Any
) -> None:
    with pytest.raises(
        CheckpointError, match=r"is incomplete, or of another run|is of another run: These averages"
    ):
        readers[1].read(mutated(readers[1].saved, ("methods", method, field), value))


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
