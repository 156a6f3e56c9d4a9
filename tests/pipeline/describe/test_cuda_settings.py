"""cudnn_benchmark=, matmul_precision= and precision="auto": chosen, shown in the plan, set for the run, restored, and
kept in checkpoints. Without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_jobs import resume_apart
from drivetrain import CheckpointError, Pipeline, PlanError, StrategyError, strategies
from drivetrain.common import machine
from drivetrain.common.matmul import matmul_precision
from drivetrain.pipeline.describe.cuda_settings import cuda_settings
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.runs.checkpoints.directory import find, kept_precision
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


@pytest.mark.parametrize(
    ("precision", "lacks", "warned"), [("bf16", True, True), ("bf16", False, False), ("fp32", True, False)]
)
def test_the_plan_warns_of_bf16_without_instructions(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, precision: str, lacks: bool, warned: bool
) -> None:
    monkeypatch.setattr(machine, "bf16_instructions", lambda: "" if lacks else "avx512_bf16")
    plan = toy.pipeline().distribute("single", precision=precision, device="cpu").plan()
    assert any("no bf16 instructions" in step.why for step in plan.steps) is warned


CPUS = [
    ("amx_bf16", "bf16", "the CPU has amx_bf16"),
    ("", "fp32", "no bf16 instructions"),
    (None, "fp32", "not list"),
]


def on_cpu(monkeypatch: pytest.MonkeyPatch, instructions: str | None) -> None:
    monkeypatch.setattr(machine, "bf16_instructions", lambda: instructions)


def auto(toy: Toy) -> Pipeline:
    return toy.pipeline().distribute("single", precision="auto", device="cpu")


@pytest.mark.parametrize(("instructions", "taken", "why"), CPUS)
def test_on_a_cpu(toy: Toy, monkeypatch: pytest.MonkeyPatch, instructions: str | None, taken: str, why: str) -> None:
    on_cpu(monkeypatch, instructions)
    plan = resolve(auto(toy))
    assert plan.distribution.precision == plan.spec.distributed.precision == taken
    (step,) = (step for step in plan.steps if step.what.startswith("wrap with"))
    assert f", {taken}, " in step.why
    assert f"precision auto: {why}" in step.why or why in step.why
    with auto(toy).build() as built, built.engine.forward_context():
        assert torch.is_autocast_enabled("cpu") is (taken == "bf16")


@pytest.mark.parametrize(
    ("capabilities", "taken", "why"),
    [([(8, 0)], "bf16", "A has bf16 units"), ([(9, 0), (7, 5)], "fp32", "B has no bf16 units")],
)
def test_on_gpus(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], taken: str, why: str
) -> None:
    """All that the process sees must have bf16 units."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capabilities[number])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number=0: "AB"[number])
    plan = resolve(toy.pipeline().distribute("single", precision="auto"))
    assert plan.distribution.precision == taken
    assert any(f"precision auto: {why}" in step.why for step in plan.steps)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device='cuda' needs a GPU, but torch finds none here. Set device='cpu'"),
        ("gpu", "device='gpu' is not a torch device. Use 'cpu' or 'cuda'"),
        (["cpu"], r"device=\['cpu'\] is not a torch device"),
    ],
)
def test_on_a_device_that_is_not_there(toy: Toy, monkeypatch: pytest.MonkeyPatch, device: Any, message: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(StrategyError, match=message):
        toy.pipeline().distribute("single", precision="auto", device=device).plan()


def test_a_recipe_keeps_auto_and_a_typo_is_an_error(toy: Toy) -> None:
    assert auto(toy).to_recipe()["precision"] == "auto"
    assert Pipeline.from_recipe("cifar10-quickstart").distributed.precision == "auto"
    hint = r"is not known\. Did you mean 'auto'\? Known: auto, bf16, fp16, fp32\."
    for typo in ("atuo", "Auto"):
        with pytest.raises(StrategyError, match=f"precision='{typo}' {hint}"):
            toy.pipeline().distribute("single", precision=typo)  # type: ignore[arg-type]
    # A strategy is given one that was decided.
    with pytest.raises(StrategyError, match=r"precision='auto' is not known\. Known: bf16, fp16, fp32\."):
        strategies.Options(precision="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "then", "taken"), [("", "amx_bf16", "fp32"), ("amx_bf16", "", "bf16")])
def test_a_resume_on_another_machine_keeps_to_it(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str, then: str, taken: str
) -> None:
    whole = toy.pipeline().distribute("single", precision=taken, device="cpu").fit(epochs=2, progress=False)  # type: ignore[arg-type]
    on_cpu(monkeypatch, first)
    auto(toy).fit(epochs=1, out=tmp_path / "run", progress=False)
    assert find(tmp_path / "run").content.facts["precision"] == taken
    on_cpu(monkeypatch, then)
    for resume, out in (
        ("auto", tmp_path / "run"), (tmp_path / "run", tmp_path / "other"), (tmp_path / "other", None),
    ):  # fmt: skip
        result = auto(toy).fit(epochs=2, out=out, resume=resume, progress=False)
        assert [epoch.loss for epoch in result.history.epochs] == [epoch.loss for epoch in whole.history.epochs]
        assert any("precision auto: as in the checkpoint" in step.why for step in result.plan.steps)
    assert Pipeline.from_recipe(tmp_path / "run/recipe.yaml").distributed.precision == taken
    other = "bf16" if taken == "fp32" else "fp32"
    with pytest.raises(CheckpointError, match=f"precision = '{taken}'"):
        toy.pipeline().distribute("single", precision=other, device="cpu").fit(  # type: ignore[arg-type]
            epochs=2, out=tmp_path / "run", resume="auto", progress=False
        )


def test_the_ledger_and_the_ranks_see_what_was_taken(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.pipeline.measuring.variants import stages
    from drivetrain.pipeline.runs.artifacts import FitJob
    from drivetrain.pipeline.runs.preflight import facts

    on_cpu(monkeypatch, "amx_bf16")
    plan = resolve(auto(toy))
    assert "bf16" in [stage.name for stage in stages(plan)]
    assert facts(plan, FitJob(epochs=1))["precision"] == "'bf16'"  # ranks that differ stop, naming both


def test_the_kept_precision_is_in_state_json(toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks do not verify the checkpoint for it."""
    on_cpu(monkeypatch, "")
    auto(toy).fit(epochs=1, out=tmp_path, progress=False)
    (weights,) = tmp_path.glob("checkpoints/*/model.safetensors")
    weights.unlink()
    assert kept_precision("auto", tmp_path) == "fp32"


@pytest.mark.parametrize(("first", "then"), [("", "amx_bf16"), ("amx_bf16", "")])
@pytest.mark.process
def test_a_resume_from_an_address_keeps_to_it(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str, then: str
) -> None:
    """By another machine, or by two that start together and share nothing."""
    out = tmp_path / "store/run"
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path / "one"))
    on_cpu(monkeypatch, first)
    auto(toy).fit(epochs=1, out=f"file://{out}", progress=False)
    taken = find(out).content.facts["precision"]
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path / "other"))
    on_cpu(monkeypatch, then)
    for resume in ("auto", f"file://{out}/checkpoints/step-00000004"):
        assert auto(toy).fit(epochs=1, out=f"file://{out}", resume=resume, progress=False).history.epochs
    pipeline = auto(toy).distribute("ddp", devices=2, precision="auto", device="cpu")
    strategies.launch(resume_apart, pipeline, tmp_path, f"file://{out}", then, devices=2)
    assert find(out).content.facts["precision"] == taken
    assert find(out).content.epoch == 2
