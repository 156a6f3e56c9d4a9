"""cudnn_benchmark= and matmul_precision=: chosen, shown in the plan, set for the run, and restored. Without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drivetrain import Pipeline, PlanError
from drivetrain.common import machine
from drivetrain.pipeline.describe.cuda_settings import cuda_settings, matmul_precision
from drivetrain.transforms import ProgressiveResizing
from pipeline_data import Toy, plain_model


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports a GPU; nothing here computes on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def settings() -> tuple[Any, ...]:
    places = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return (
        torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32,
        *(getattr(place, "fp32_precision", None) for place in places),
    )  # fmt: skip


def on_gpu(**how: Any) -> Pipeline:
    return Pipeline(plain_model).distribute("single", device="cuda", **how)


@pytest.mark.parametrize("precision", [None, "highest", "high", "medium"])
@pytest.mark.parametrize("benchmark", [None, True, False])
def test_set_for_the_run_and_put_back(precision: Any, benchmark: bool | None) -> None:
    """Also when it fails."""
    before = settings()
    made = on_gpu(cudnn_benchmark=benchmark, matmul_precision=precision)

    def run() -> None:
        with cuda_settings(made.distribution, made.transforms):
            assert torch.backends.cudnn.benchmark is (benchmark is not False)
            assert torch.get_float32_matmul_precision() == (precision or "highest")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert settings() == before


def test_a_process_with_torchs_newer_switches() -> None:
    """Which the older ones refuse to read."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the older switches only")
    before = settings()
    own = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with cuda_settings(on_gpu(matmul_precision="highest").distribution, ()):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
        assert matmul_precision() == "tf32"
    finally:
        matmul.fp32_precision = own
    assert settings() == before


def test_on_the_cpu_nothing_is_touched(toy: Toy) -> None:
    before = settings()
    made = toy.pipeline().distribute("single", device="cpu", cudnn_benchmark=True, matmul_precision="high")
    with cuda_settings(made.distribution, made.transforms):
        assert settings() == before
    assert "cuDNN" not in repr(made.plan())


@pytest.mark.usefixtures("one_gpu")
def test_the_plan_says_why(toy: Toy) -> None:
    def steps(pipeline: Pipeline) -> dict[str, tuple[str, str]]:
        return {step.what: (step.asked_by, step.why) for step in pipeline.plan().steps}

    fixed = steps(toy.pipeline().distribute("single"))
    assert fixed["cuDNN benchmark on"][0] == "default"
    assert "all images have one size" in fixed["cuDNN benchmark on"][1]
    resized = steps(toy.pipeline().transform(ProgressiveResizing()).distribute("single"))
    assert "ProgressiveResizing" in resized["cuDNN benchmark off"][1]
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in steps(toy.pipeline())["cuDNN benchmark off"][1]
    finally:
        torch.use_deterministic_algorithms(False)
    asked = steps(toy.pipeline().distribute("single", cudnn_benchmark=False, matmul_precision="high"))
    assert asked["cuDNN benchmark off"][0] == ".distribute()"
    assert "TF32" in asked["float32 matrix multiplications: high"][1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"cudnn_benchmark": "yes"}, "cudnn_benchmark='yes' must be True, False, or None"),
        ({"cudnn_benchmark": 1}, "cudnn_benchmark=1 must be True"),
        ({"matmul_precision": "hihg"}, "matmul_precision='hihg' is not known.*Did you mean 'high'"),
        ({"matmul_precision": 2}, "matmul_precision=2 is not known"),
        ({"matmul_precision": ["high"]}, "is not known"),
    ],
)
def test_what_means_nothing_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        on_gpu(**how)


def test_in_a_recipe(toy: Toy) -> None:
    made = toy.pipeline(plain_model).distribute("single", cudnn_benchmark=False, matmul_precision="high")
    recipe = made.replace(model=plain_model).distribution
    assert (recipe.cudnn_benchmark, recipe.matmul_precision) == (False, "high")
    small = {"model": "cifar_resnet", "train": toy.train, "batch_size": 32, "image_size": 16}
    read = Pipeline.from_recipe({**small, "cudnn_benchmark": False, "matmul_precision": "high"})
    assert read.distribution.cudnn_benchmark is False
    again = Pipeline.from_recipe(read.to_recipe())
    assert again.distribution == read.distribution


@pytest.mark.parametrize(
    ("precision", "lacks", "warned"), [("bf16", True, True), ("bf16", False, False), ("fp32", True, False)]
)
def test_the_plan_warns_of_bf16_without_instructions(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, precision: str, lacks: bool, warned: bool
) -> None:
    monkeypatch.setattr(machine, "bf16_instructions", lambda: "" if lacks else "avx512_bf16")
    plan = toy.pipeline().distribute("single", precision=precision, device="cpu").plan()
    assert any("no bf16 instructions" in step.why for step in plan.steps) is warned
