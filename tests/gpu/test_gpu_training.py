"""Training on the GPU: it agrees with the CPU, never waits for the host, restores global state; and Muon's numbers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_device
import pytest
import torch
from drivetrain import RECIPES, Pipeline
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.optim.muon import Muon
from drivetrain.pipeline.runs.artifacts import FitJob, RankResult
from drivetrain.pipeline.runs.run import Run
from gpu_device import Device, agree, fitted
from pipeline_data import CLASSES, FailsAt, Toy, batch_norm_model, evaluated
from places import SUPPORT
from small_recipes import BATCH, shrunk, stand_ins
from torch import nn

pytestmark = gpu_device.MARKS


class Strict:
    """A loader whose steps may not wait for the device, from the second one on: the first one makes what stays."""

    def __init__(self, loader: Any, device: Device) -> None:
        self._loader, self._real, self.steps = loader, device.real, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            for number, batch in enumerate(self._loader):
                yield batch
                self.steps += number > 0
                self._mode("error")
        finally:
            self._mode("default")

    def _mode(self, mode: str) -> None:
        if self._real:
            torch.cuda.set_sync_debug_mode(mode)


def distinct() -> list[str]:
    """Recipes whose steps differ: those of one family that differ in their length alone have one."""
    by_steps = {}
    for name, recipe in RECIPES.items():
        methods = [entry["name"] for entry in recipe.get("transforms", [])]
        by_steps.setdefault(json.dumps([recipe["model"], methods, recipe.get("precision")]), name)
    return list(by_steps.values())


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return stand_ins(tmp_path_factory.mktemp("stand-in"), 4 * BATCH, 4 * BATCH)


@pytest.mark.parametrize("name", distinct())
def test_no_step_of_a_recipe_waits_for_the_device(
    device: Device, stand_in: dict[str, str], name: str, tmp_path: Path
) -> None:
    """Loader, forward, backward, optimizer, methods, guard, bar and logger: all of `fit` but an epoch's end.

    Of fp16 `shrunk` makes bf16: with fp16 a step waits by design.
    """
    if not device.real and name not in ("baseline", "cifar10-quickstart"):
        pytest.skip("too much for a CPU: rehearsed with two recipes")
    small = {**shrunk(name, stand_in), "strategy": "single", "strategy_options": {"device": device.name}}
    if not device.real:
        small |= {"precision": "fp32", "epochs": 1}  # not every CPU has bf16's instructions
    pipeline = Pipeline.from_recipe(name, **small)
    built = pipeline.build()
    strict: Any = Strict(built.train, device)
    job = FitJob(epochs=pipeline.epochs, out=tmp_path, checkpoints=None, logger=("csv",), log_every=2)
    Run(resolve(pipeline), replace(built, train=strict), job, RankResult()).train()
    assert strict.steps == 3 * pipeline.epochs
    device.holds(*built.engine.plain_model.parameters())


def test_training_takes_the_gpu_by_itself_and_agrees_with_the_cpu(device: Device, toy: Toy) -> None:
    gpu = toy.pipeline(batch_norm_model).fit(epochs=2, progress=False)
    agree(gpu, fitted(toy, batch_norm_model, device="cpu"), rel=1e-2)
    assert next(gpu.model.parameters()).device.type == "cpu"
    val_loss, accuracy = evaluated(gpu.model, toy.val)
    assert val_loss == pytest.approx(gpu.history.epochs[-1].val_loss, rel=1e-2)
    assert accuracy == pytest.approx(gpu.history.epochs[-1].accuracy, abs=0.05)
    assert device.name in ("cuda", "cpu")


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=gpu_device.TWO)])
def test_training_on_a_device_by_its_number(device: Device, toy: Toy, index: int) -> None:
    name = f"cuda:{index}" if device.real else "cpu"
    built = toy.pipeline(batch_norm_model).distribute("single", device=name).build()
    assert {parameter.device for parameter in built.engine.plain_model.parameters()} == {torch.device(name)}
    images, labels = next(iter(built.train))
    assert images.device == labels.device == torch.device(name)
    assert fitted(toy, batch_norm_model, device=name).history.epochs[0].loss > 0


def global_flags() -> tuple[Any, ...]:
    return (
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32,
        torch.is_autocast_enabled("cuda"), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@pytest.fixture
def flags_of_one_own() -> Iterator[None]:
    """What a user may have set, and no default is."""
    benchmark, precision = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = not benchmark
    torch.set_float32_matmul_precision("medium")
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.set_float32_matmul_precision(precision)


@pytest.mark.usefixtures("flags_of_one_own")
@pytest.mark.parametrize("recipe", [None, "cifar10-fast"])
def test_cudnn_and_matmul_flags_are_put_back(device: Device, toy: Toy, recipe: str | None) -> None:
    before = global_flags()
    pipeline = toy.pipeline(batch_norm_model)
    if recipe is not None:
        small = {"batch_size": 16, "image_size": 16, "workers": 1, "model_options.widths": [8, 8, 8]}
        small["model_options.num_classes"] = CLASSES
        pipeline = Pipeline.from_recipe(recipe, train=toy.train, val=toy.val, **small)
    pipeline.distribute("single", device=device.name).fit(epochs=1, progress=False)
    assert global_flags() == before
    with pytest.raises(ArithmeticError):
        fitted(toy, partial(FailsAt, 0, ArithmeticError), device=device.name)
    assert global_flags() == before
    if device.real:
        assert torch.cuda.get_sync_debug_mode() == 0
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.timeout(180)
def test_the_ledger_runs_and_keeps_near_its_time(device: Device, toy: Toy) -> None:
    start = time.monotonic()
    ledger = toy.pipeline(batch_norm_model, batch_size=16).ledger(seconds=20, progress=False)
    assert time.monotonic() - start < 120  # a hang or a forgotten limit, not a speed
    assert bool(ledger.facts["provenance"]["hardware"]["gpus"]) == device.real
    assert ledger.rows[0].ratio.value == 1.0
    assert all(row.images_per_s.value > 0 for row in ledger.rows)


SCRIPT = """
import sys
from drivetrain import Pipeline
import pipeline_data
if __name__ == "__main__":
    pipeline = Pipeline(pipeline_data.batch_norm_model).load(sys.argv[1], batch_size=16, image_size=16, workers=1)
    print("begins", flush=True)
    pipeline.distribute("single", device=sys.argv[2]).ledger(seconds=600, progress=False)
"""


@pytest.mark.timeout(240)
def test_an_interrupted_ledger_ends_at_once(device: Device, toy: Toy, tmp_path: Path) -> None:
    """Long before its time, whatever the device is doing, and as Python ends on Ctrl-C."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, str(script), toy.train, device.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path}, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "begins\n"
        time.sleep(8)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)
        assert process.returncode in (-signal.SIGINT, 130, 1), errors
        assert "Interrupt" in errors
        assert "Segmentation" not in errors
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    torch.zeros(1, device=device.name)  # this process's own share of the device still works


SHAPES = [(64, 128), (128, 64), (64, 128), (96, 96)]


def stepped(kind: Any, device: Device, **options: Any) -> list[torch.Tensor]:
    """Matrices after three steps."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(device.name)) for shape in SHAPES]
    optimizer = kind(weights, lr=0.02, momentum=0.9, weight_decay=0.1, **options)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(device.name)
        optimizer.step()
    device.holds(*weights, *(state["momentum_buffer"] for state in optimizer.state.values()))
    return [weight.detach().cpu() for weight in weights]


def test_muon_has_torchs_numbers(device: Device) -> None:
    """Batched products round to bf16 elsewhere: an update of 0.02 differs by bf16's last digits."""
    expected = stepped(torch.optim.Muon, device)
    found = stepped(Muon, device, **({} if device.real else {"precision": "bf16"}))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    plain = stepped(Muon, device, precision="fp32")
    torch.testing.assert_close(plain, expected, rtol=0, atol=2e-3)
    assert not all(map(torch.equal, plain, found)), "on CUDA, bf16 is the default"


@pytest.mark.parametrize("optimizer", ["muon", torch.optim.NAdam])
def test_a_run_resumes(device: Device, toy: Toy, tmp_path: Path, optimizer: Any) -> None:
    pipeline = toy.pipeline(batch_norm_model).optimize(optimizer, lr=0.01, schedule="constant")
    pipeline = pipeline.distribute("single", device=device.name)
    whole = pipeline.fit(epochs=2, progress=False)
    pipeline.fit(epochs=1, progress=False, out=tmp_path)
    agree(pipeline.fit(epochs=2, progress=False, out=tmp_path, resume="auto"), whole, abs=1e-4)
