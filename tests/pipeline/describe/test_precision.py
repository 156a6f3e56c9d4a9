"""precision="auto": what is taken, the plan's reason, what a checkpoint keeps, and what a resume does elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drivetrain import CheckpointError, Pipeline, StrategyError, strategies
from drivetrain.common import machine
from drivetrain.pipeline.checkpoints.directory import find
from drivetrain.pipeline.describe.resolve import resolve
from pipeline_data import Toy

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
def test_on_a_cpu(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, instructions: str | None, taken: str, why: str
) -> None:
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
        ("auto", tmp_path / "run"),
        (tmp_path / "run", tmp_path / "other"),
        (tmp_path / "other", None),
    ):
        result = auto(toy).fit(epochs=2, out=out, resume=resume, progress=False)
        assert [epoch.loss for epoch in result.history.epochs] == [
            epoch.loss for epoch in whole.history.epochs
        ]
        assert any("precision auto: as in the checkpoint" in step.why for step in result.plan.steps)
    assert Pipeline.from_recipe(tmp_path / "run/recipe.yaml").distributed.precision == taken
    other = "bf16" if taken == "fp32" else "fp32"
    with pytest.raises(CheckpointError, match=f"precision = '{taken}'"):
        toy.pipeline().distribute("single", precision=other, device="cpu").fit(  # type: ignore[arg-type]
            epochs=2, out=tmp_path / "run", resume="auto", progress=False
        )


def test_the_ledger_and_the_ranks_see_what_was_taken(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.pipeline.ledger.variants import stages
    from drivetrain.pipeline.runs.artifacts import FitJob
    from drivetrain.pipeline.runs.preflight import facts

    on_cpu(monkeypatch, "amx_bf16")
    plan = resolve(auto(toy))
    assert "bf16" in [stage.name for stage in stages(plan)]
    assert facts(plan, FitJob(epochs=1))["precision"] == "'bf16'"  # ranks that differ stop, naming both
