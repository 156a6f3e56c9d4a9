"""The benchmarks still run, and write their results; figures of such short runs mean nothing."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drivetrain import Pipeline
from drivetrain.loaders import convert
from drivetrain.pipeline.measuring.race.result import Point, RaceResult, RaceRun
from loader_pictures import jpeg_folder, raw_pictures
from machines import Cluster
from places import ROOT
from process_state import output_of, run, wait_until

ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
PEERS = ROOT / ".build/peers/bin/python"  # of `make bench-peers`; other environments have one of the peers
SMALL: dict[str, list[str]] = {
    "allocator": ["--rounds", "2", "--recipe", "small.yaml"],
    "beyond_memory": ["photos", "--gigabytes", "0.02", "--memory", "1", "--rounds", "2", "--batches", "2"],
    "charts": ["--check"],
    "checkpoints": ["--millions", "2", "--rounds", "2", "--steps", "1"],
    "cluster": ["--rounds", "2", "--steps", "1", "--ranks", "1", "--images", "100", "--latency", "0.005"],
    "fast": ["--small", "."],
    "faults": ["--rounds", "1", "--only", "different_recipes"],
    "features": [
        "--epochs", "1", "--label-epochs", "1", "--seeds", "2", "--train", "train.beton", "--val", "val.beton",
    ],
    "figures": ["--check"],
    "limits": ["small.yaml", "--rounds", "2", "--batches", "4"],
    "loaders": ["photos", "--rounds", "2"],
    "loop": ["--rounds", "2", "--steps", "50"],
    "methods": [
        "--recipe", "small.yaml", "--epochs", "2", "--seeds", "2", "--target", "0.01", "--only", "EMA", "Muon",
        "--runs", "runs.json",
    ],
    "muon": ["--recipe", "small.yaml", "--seeds", "2", "--lrs", "0.01", "0.02", "--tuning-epochs", "1"],
    "peers": ["photos", "--rounds", "2"] + (
        ["--python", str(PEERS)] if PEERS.exists() else ["--python", sys.executable, "--peers", "torchvision"]
    ),
    "raw_bandwidth": ["--images", "64", "--rounds", "2"],
    "revisions": ["photos", "--base", "HEAD", "--rounds", "2"],
    "scale": ["--rounds", "2", "--most", "200000", "--ranks", "100"],
    "selections": ["--rounds", "1", "--most", "1000000", "--ranks", "100"],
    "strategies": ["--rounds", "2", "--steps", "1", "--ranks", "1"],
    "streams": ["photos", "--rounds", "2", "--share", "0.9", "--only", "drivetrain"],
    "targets": ["photos", "--rounds", "2"],
    "threads": ["--synthetic", "--rounds", "2", "--workers", "1", "2", "--images", "1024"],
    "transforms": ["--rounds", "2", "--seconds", "0.02", "--mode", "eager"],
}  # fmt: skip
"""Each script, with all of its contenders, on little. A folder or file is in the folder where it runs."""
TUNING = "tuning"  # has a test of its own
STARTED = {"one_shot": "loaders", "peer_epochs": "peers", "stream_epochs": "streams"}  # by other scripts
IMPORTED = {"fast_plain": "fast", "loop_contenders": "loop", "measuring": "loop", "range_server": "cluster"}
RECIPE = """
model: cifar_resnet
model_options: {num_classes: 10, width: 4}
train: train.beton
val: val.beton
batch_size: 64
image_size: 32
optimizer: {name: sgd, lr: 0.05, momentum: 0.9}
epochs: 1
"""


def test_every_script_runs_small() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == SMALL.keys() | STARTED.keys() | IMPORTED.keys() | {TUNING}
    for other, script in STARTED.items():
        assert f'"{other}.py"' in (ROOT / f"benchmarks/{script}.py").read_text()
    for other, script in IMPORTED.items():
        assert f"from {other} import" in (ROOT / f"benchmarks/{script}.py").read_text()


def small(path: Path, count: int) -> Path:
    """A file of ten classes."""
    images, numbers = raw_pictures(count, 32)
    convert((images, numbers % 10), path, progress=False)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of photographs, two small files, and a recipe that trains on them."""
    folder = tmp_path_factory.mktemp("data")
    jpeg_folder(folder / "photos", per_class=90)
    for name in ("train", "val"):
        small(folder / f"{name}.beton", 640)
    (folder / "small.yaml").write_text(RECIPE)
    return folder


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SMALL)
def test_a_short_run(script: str, data: Path, tmp_path: Path) -> None:
    writes = [] if script in ("figures", "charts") else ["--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / f"benchmarks/{script}.py"), *SMALL[script], *writes]
    done = run(*command, cwd=data, timeout=560, env=ENVIRONMENT)
    if "A control group with a memory limit cannot be created" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert bool(results) == bool(writes)
    assert all("provenance" in each for each in results)
    assert not any(each.get("left_out") for each in results)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_peak_is_that_of_the_recipes_precision(data: Path, tmp_path: Path) -> None:
    """Of small matrices: without its instructions, a CPU takes minutes for bf16."""
    small = "import sys; sys.path.insert(0, sys.argv.pop(1)); import limits; limits.SIDE = 64; limits.main()"
    for precision in ("fp32", "bf16"):
        command = [sys.executable, "-c", small, str(ROOT / "benchmarks"), "small.yaml", f"precision={precision}",
                   "--rounds", "2", "--batches", "4", "--out", str(tmp_path)]  # fmt: skip
        done = run(*command, cwd=data, timeout=280, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads((tmp_path / "limits-small.json").read_text())["precision"] == precision


@pytest.mark.process
def test_processor_time_is_also_that_of_processes_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    limits = importlib.import_module("limits")
    before = limits.processor_seconds()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            wait_until(lambda: limits.processor_seconds() - before >= 0.5, busy, seconds=30)
        finally:
            busy.kill()
    assert limits.processor_seconds() - before >= 0.5  # it has ended


def test_every_method_can_be_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for group in importlib.import_module("methods").GROUPS.values():
        recipe = Pipeline.from_recipe(group.recipe, epochs=group.epochs, train="cifar10:train", val="cifar10:test")
        for name, change in group.methods.items():
            pipeline = change(recipe)
            assert pipeline != recipe, name
            assert pipeline.plan()


def test_a_method_is_compared_on_the_seeds_that_both_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither runs that fail, of a method or of the recipe, nor a method that always does, end three hours in vain."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    methods = importlib.import_module("methods")

    def run_of(variant: str, seed: int, accuracy: float | None) -> RaceRun:
        points = () if accuracy is None else (Point(1.0, 1, accuracy),)
        return RaceRun(variant, seed, points, failed="" if points else "out of memory")

    accuracies: dict[str, list[float | None]] = {
        "recipe": [0.5, None, 0.6], "better": [0.6, 0.9, 0.8], "failing": [None, None, None], "apart": [None, 0.9, None]
    }  # fmt: skip
    runs = [run_of(name, seed, one) for name, each in accuracies.items() for seed, one in enumerate(each)]
    race = RaceResult(0.9, tuple(accuracies), runs)
    found = methods.gain(race, "better")
    assert (found.value, found.n) == (pytest.approx(0.15), 2)
    assert methods.gain(race, "failing") is methods.gain(race, "apart") is None


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
    file, out = small(tmp_path / "small.beton", 2048), tmp_path / "results"
    command = [sys.executable, str(ROOT / "benchmarks/tuning.py"), str(tmp_path / "photos"), "--seconds", "60",
               "--rounds", "2", "--train", str(file), "--val", str(file), "--out", str(out)]  # fmt: skip
    output_of(*command, timeout=280, env=ENVIRONMENT | {"DRIVETRAIN_DATA": str(tmp_path / "cache")})
    recipes = json.loads((out / "tuning.json").read_text())["recipes"]
    assert recipes.keys() == {"cifar10-quickstart", "ffcv-resnet18-16"}
    for name, found in recipes.items():
        trials = found["tuning"]["trials"]
        assert {"workers=1", "allocator's variables", "compile=True"} <= {one["name"] for one in trials}
        if "budget" not in found["tuning"]["stopped"]:  # which a slow hour spends before the first round
            assert found["tuning"]["before"] > 0
            assert sum(one["rounds"] for one in trials) > 0
        assert found["measured afterwards"]["tuned"]["images/s"]["n"] == 2
        assert (out / f"tuning-{name}.png").stat().st_size > 1000
