"""Checkpoints that are crafted, truncated or edited raise a typed error, also with valid digests; nothing is ever
unpickled."""

import ast
import json
import math
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from drivetrain import CheckpointError, Pipeline
from drivetrain.pipeline import Checkpoints, CheckpointWarning, export
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.runs.artifacts import FitJob, RankResult
from drivetrain.pipeline.runs.checkpoints.directory import ResumePoint
from drivetrain.pipeline.runs.checkpoints.format import Checkpoint, _digest, _measure
from drivetrain.pipeline.runs.checkpoints.state import global_randomness_kept, restoring
from drivetrain.pipeline.runs.run import Run
from drivetrain.pipeline.telemetry.state import EpochMeter
from drivetrain.pipeline.training.build import build, fork_rng
from drivetrain.transforms import EMA, SWA, GyroDropout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_data import Toy, batch_norm_model
from places import ROOT
from safetensors.torch import save_file
from torch import nn

EPOCHS = 3
EVERY_STEP = Checkpoints(every_steps=1, keep=99, background=False)


MISSING = type("Missing", (), {"__repr__": lambda _: "missing"})()  # a field that is not there
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
        pipeline.fit(epochs=EPOCHS, out=out, progress=False, checkpoints=EVERY_STEP)
        self.path = out / "checkpoints" / f"step-{step:08d}"
        self.saved = json.loads((self.path / "state.json").read_text())
        del self.saved["sha256"]
        self._stack.enter_context(fork_rng(0))
        self._stack.enter_context(global_randomness_kept())
        self._built = self._stack.enter_context(build(self._plan))
        self._groups = [dict(group) for group in self._built.engine.optimizer.param_groups]
        self.close = self._stack.close
        self.read(self.saved)

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
    plain, folder = toy.pipeline(with_dropout), tmp_path_factory.mktemp("readers")
    first = plain.optimize("adamw", lr=0.01, schedule="constant")
    first = first.transform(EMA(half_life=3), GyroDropout(sigma=4, tau=1))
    second = plain.optimize("sgd", lr=0.1, momentum=0.9).transform(SWA(0.1, 0.9))
    made = [Reader(first, folder / "middle", 6), Reader(second, folder / "end", 8)]
    yield made
    for reader in made:
        reader.close()


def paths(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value inside; of a long list, the first two elements and the last."""
    children: Iterable[Any] = value if isinstance(value, dict) else ()
    if isinstance(value, list):
        children = sorted({0, 1, len(value) - 1} & {*range(len(value))})
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
    max_examples=60, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_any_edited_value_is_refused_by_its_digest_or_a_typed_error(readers: list[Reader], data: st.DataObject) -> None:
    reader = data.draw(st.sampled_from(readers))
    place = data.draw(st.sampled_from([*paths(reader.saved)]))
    state = mutated(reader.saved, place, data.draw(st.sampled_from(MUTATIONS)))
    digest = _digest(reader.saved)
    if _digest(state) != digest:
        reader.write(state, digest)
        with pytest.raises(CheckpointError, match="modified after it was written"):
            Checkpoint(reader.path)
    with suppress(CheckpointError), warnings.catch_warnings():  # and nothing else is raised
        warnings.simplefilter("ignore", CheckpointWarning)  # of other validation data
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
    words = r"is incomplete, or of another run|is of another run: These averages"
    with pytest.raises(CheckpointError, match=words):
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
    score = reader.saved["history"]["epochs"][-1]["metrics"]["top1"]
    assert Checkpoint(tmp_path / reader.path.name).score == score


class Crafted:
    """Unpickling it makes a file."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._proof),)


def adamw(toy: Toy) -> Pipeline:
    return toy.pipeline(batch_norm_model).optimize("adamw", lr=0.01, schedule="constant")


@pytest.fixture(scope="module")
def saved(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the middle of an epoch."""
    out = tmp_path_factory.mktemp("saved")
    adamw(toy).fit(epochs=1, out=out, progress=False, checkpoints=EVERY_STEP)
    return out / "checkpoints" / "step-00000003"


def copy_of(saved: Path, folder: Path) -> Path:
    target = folder / "step-00000003"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(saved, target)
    return target


def with_right_digests(folder: Path, **changes: Any) -> None:
    """What somebody does who knows the format."""
    state = json.loads((folder / "state.json").read_text())
    del state["sha256"]
    state |= changes
    if "files" not in changes:
        state["files"] = {name: _measure(folder / name) for name in state["files"]}
    (folder / "state.json").write_text(json.dumps({**state, "sha256": _digest(state)}))


def resume(toy: Toy, place: Path) -> Any:
    return adamw(toy).fit(epochs=1, resume=place, progress=False)


def test_a_crafted_pickle_is_refused_or_never_looked_at(toy: Toy, saved: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    crafted = pickle.dumps(Crafted(proof))
    pickle.loads(crafted)
    assert proof.exists()  # it is one that works
    proof.rmdir()
    files = [f"{kind}.safetensors" for kind in ("model", "optimizer", "methods", "rank")]
    writes = (lambda path: path.write_bytes(crafted), lambda path: torch.save(Crafted(proof), path))
    for name in (*files, "state.json"):
        for digests in (False, True):
            place = copy_of(saved, tmp_path / "in place")
            for write in writes:
                write(place / name)
                if digests and name != "state.json":
                    with_right_digests(place)
                if name == "methods.safetensors" and digests:
                    continue  # this run has no averages: the file is not opened
                with pytest.raises(CheckpointError):
                    resume(toy, place)
                if not digests or name == "model.safetensors":  # else it is not opened
                    with pytest.raises(CheckpointError):
                        export(place, tmp_path / "out.safetensors", names="trained")
                assert not proof.exists(), name
    beside = copy_of(saved, tmp_path / "beside")
    for name in [
        ".metadata",
        "model.pt",
        "optimizer.pt",
        "rng.pt",
        "pytorch_model.bin",
        "__0_0.distcp",
        "model.pkl",
    ]:
        (beside / name).write_bytes(crafted)
    resume(toy, beside)  # as without them
    assert not proof.exists()


def test_a_name_that_leads_out_of_the_folder_is_refused(saved: Path, tmp_path: Path) -> None:
    for name in ("../model.safetensors", "/etc/hostname", "model.pt", "model.safetensors/../x"):
        place = copy_of(saved, tmp_path)
        with_right_digests(place, files={name: {"bytes": 1, "sha256": ""}})
        with pytest.raises(CheckpointError, match="is not a file that checkpoints have"):
            Checkpoint(place)


def test_the_package_never_unpickles_a_file() -> None:
    """`pickle` serves our own processes alone; torch.load reads only tensors, of a user's file of weights."""
    stages = ("common", "loaders", "pipeline", "strategies", "transforms")
    for path in [*ROOT.glob("*.py"), *(each for stage in stages for each in (ROOT / stage).rglob("*.py"))]:
        text = path.read_text()
        if not re.search(r"(dcp|joblib|torch|np|pickle)[\s\\]*\.[\s\\]*loads?\b", text):  # parsing all takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("dcp.load", "joblib.load"), path
            if called == "torch.load":
                assert path.relative_to(ROOT).as_posix() == "pipeline/models/weights.py", path
                assert "weights_only=True" in ast.unparse(node), path
            if called == "np.load":
                assert "allow_pickle=False" in ast.unparse(node), path
            if called in ("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"):
                assert path.relative_to(ROOT).as_posix() in (
                    "strategies/launching/launcher.py",
                    "strategies/launching/rank_main.py",
                    "pipeline/measuring/runner.py",
                ), path


def test_fuzz(saved: Path, tmp_path: Path) -> None:
    """Any byte changed, any file shortened, lengthened or gone: noticed, before anything is loaded."""
    dice = random.Random(0)
    names = sorted(path.name for path in saved.iterdir())
    noticed = 0
    for _ in range(150):
        place = copy_of(saved, tmp_path)
        path = place / dice.choice(names)
        data = bytearray(path.read_bytes())
        how = dice.choice(["flip", "cut", "grow", "remove", "swap"])
        at = dice.randrange(len(data))
        if how == "flip":
            data[at] ^= 1 << dice.randrange(8)
        elif how == "cut":
            del data[at:]
        elif how == "grow":
            data += bytes(dice.randrange(1, 9))
        elif how == "swap":
            data = bytearray((place / dice.choice([n for n in names if n != path.name])).read_bytes())
        path.unlink() if how == "remove" else path.write_bytes(data)
        try:
            checkpoint = Checkpoint(place)
            checkpoint.verify()
        except CheckpointError:
            noticed += 1
        else:  # JSON that says the same in other bytes
            assert path.name == "state.json", (how, path.name, at)
            assert checkpoint.content == Checkpoint(saved).content
    assert noticed > 145


def test_values_that_do_not_belong_are_typed_errors(toy: Toy, saved: Path, tmp_path: Path) -> None:
    """Although every digest is right."""
    for changes in (
        {"format": 99}, {"run": 1}, {"files": {}, "ranks": []}, {"optimizer": {}}, {"optimizer": {"groups": [{}]}},
        {"meter": {"total": "much"}}, {"history": {"epochs": [{"epoch": 1}]}}, {"facts": {}},
        {"loader": {"epoch": -1}}, {"methods": {"counts": 1}}, {"ranks": [{}]},
        {"ranks": [{"random": 1, "numbers": 2}]},
    ):  # fmt: skip
        place = copy_of(saved, tmp_path)
        with_right_digests(place, **changes)
        if changes in ({"methods": {"counts": 1}}, {"files": {}, "ranks": []}):
            continue
        with pytest.raises(CheckpointError, match="step-00000003"):
            resume(toy, place)
    for name, tensors in {
        "model.safetensors": {"0.weight": torch.zeros(1)},
        "rank.safetensors": {"random.cpu": torch.zeros(3, dtype=torch.uint8), "loss": torch.zeros(())},
    }.items():
        place = copy_of(saved, tmp_path)
        save_file(tensors, place / name)
        with_right_digests(place)
        with pytest.raises(CheckpointError, match="step-00000003"):
            resume(toy, place)


def test_a_device_that_is_too_small_is_not_the_checkpoints_fault() -> None:
    """As when a run resumes on fewer GPUs."""
    checkpoint = cast("Checkpoint", SimpleNamespace(place="runs/a/checkpoints/step-00000001"))
    words = "step-00000001 needs more memory than a device here has free: CUDA out of memory.*is not damaged"
    with pytest.raises(CheckpointError, match=words), restoring(checkpoint):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
