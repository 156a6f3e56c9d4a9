"""Checkpoints that are crafted, truncated or modified raise a typed error; nothing is ever unpickled."""

from __future__ import annotations

import ast
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import CheckpointError
from drivetrain.pipeline import Checkpoints, export
from drivetrain.pipeline.checkpoints.format import Checkpoint, _digest, _measure
from pipeline_data import Toy, batch_norm_model
from places import ROOT
from safetensors.torch import save_file


class Crafted:
    """Unpickling it makes a file."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._proof),)


@pytest.fixture(scope="module")
def saved(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the middle of an epoch."""
    out = tmp_path_factory.mktemp("saved")
    how = Checkpoints(every_steps=1, keep=100, background=False)
    toy.pipeline(batch_norm_model).optimize("adamw", lr=0.01, schedule="constant").fit(
        epochs=1, out=out, progress=False, checkpoints=how
    )
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
    pipeline = toy.pipeline(batch_norm_model).optimize("adamw", lr=0.01, schedule="constant")
    return pipeline.fit(epochs=1, resume=place, progress=False)


def test_a_crafted_pickle_is_refused_or_never_looked_at(toy: Toy, saved: Path, tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    crafted = pickle.dumps(Crafted(proof))
    pickle.loads(crafted)
    assert proof.exists()  # it is one that works
    proof.rmdir()
    for name in (
        "model.safetensors",
        "optimizer.safetensors",
        "methods.safetensors",
        "rank.safetensors",
        "state.json",
    ):
        for digests in (False, True):
            place = copy_of(saved, tmp_path / "in place")
            for write in (
                lambda path: path.write_bytes(crafted),
                lambda path: torch.save(Crafted(proof), path),
            ):
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
    for name in (
        ".metadata",
        "model.pt",
        "optimizer.pt",
        "rng.pt",
        "pytorch_model.bin",
        "__0_0.distcp",
        "model.pkl",
    ):
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
    for path in [
        *ROOT.glob("*.py"),
        *(
            p
            for stage in ("common", "loaders", "pipeline", "strategies", "transforms")
            for p in (ROOT / stage).rglob("*.py")
        ),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("dcp.load", "joblib.load"), path
            if called == "torch.load":
                assert path.relative_to(ROOT).as_posix() == "pipeline/models/weights.py", path
                assert "weights_only=True" in ast.unparse(node), path
            if called == "np.load":
                assert "allow_pickle=False" in ast.unparse(node), path
            if called in ("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"):
                assert path.name in ("launcher.py", "rank_main.py", "process.py"), path


def test_fuzz(saved: Path, tmp_path: Path) -> None:
    """Any byte changed, any file shortened, lengthened or gone: noticed, before anything is loaded."""
    dice = random.Random(0)
    names = sorted(path.name for path in saved.iterdir())
    noticed = 0
    for _ in range(300):
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
    assert noticed > 290


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
