"""The benchmarks still run, and write their results; figures of such short runs mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drivetrain.loaders import convert
from loader_pictures import jpeg_folder, raw_pictures
from machines import Cluster
from places import ROOT

ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
OURS = ["by hand", "Drivetrain", "Drivetrain, no guard", "Drivetrain, all extras"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("loop", ["--rounds", "2", "--steps", "50", "--only", *OURS]),
        ("transforms", ["--rounds", "2", "--seconds", "0.05", "--mode", "eager", "--only", "BlurPool"]),
        ("strategies", ["--rounds", "2", "--steps", "1", "--ranks", "1"]),
        (
            "cluster",
            ["--rounds", "2", "--steps", "1", "--ranks", "1", "--images", "100", "--latency", "0.005"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_short_run(script: str, arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments, "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert results
    assert all("provenance" in each for each in results)


@pytest.mark.slow
@pytest.mark.process
def test_bytes_on_the_wire(cluster: Cluster, tmp_path: Path) -> None:
    """On a machine whose network nothing else uses."""
    command = [sys.executable, str(ROOT / "benchmarks/cluster.py"), "--only", "steps", "--ranks", "2", "--rounds", "1",
               "--steps", "2", "--out", str(tmp_path)]  # fmt: skip
    process = cluster.machines[0].start(*command, env=ENVIRONMENT, stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    results = json.loads((tmp_path / "cluster.json").read_text())["steps"]["by_strategy"]
    for strategy, expected in (("ddp", 1), ("fsdp", 4 / 3)):  # gloo's reduce-scatter is an all-reduce
        figures = results[strategy]["2"]
        for sizes in figures["bytes_per_step_and_rank"].values():
            assert sizes["median"] / figures["formula"] == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
@pytest.mark.process
def test_two_recipes_are_tuned(tmp_path: Path) -> None:
    """cifar10-quickstart and a recipe for photographs, each for 60 s; then both pipelines are measured again."""
    jpeg_folder(tmp_path / "photos", per_class=20)
    small = tmp_path / "small.beton"
    images, numbers = raw_pictures(2048, 32)
    convert((images, numbers % 10), small, progress=False)
    out = tmp_path / "results"
    command = [sys.executable, str(ROOT / "benchmarks/tuning.py"), str(tmp_path / "photos"), "--seconds", "60",
               "--rounds", "2", "--train", str(small), "--val", str(small), "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    recipes = json.loads((out / "tuning.json").read_text())["recipes"]
    assert recipes.keys() == {"cifar10-quickstart", "ffcv-resnet18-16"}
    for name, found in recipes.items():
        trials = found["tuning"]["trials"]
        assert {"workers=1", "allocator's variables", "compile=True"} <= {one["name"] for one in trials}
        assert found["tuning"]["before"] > 0
        assert sum(one["rounds"] for one in trials) > 0 or "budget" in found["tuning"]["stopped"]
        assert found["measured afterwards"]["tuned"]["images/s"]["n"] == 2
        assert (out / f"tuning-{name}.png").stat().st_size > 1000
