"""Checkpoints from every strategy and world size to every other: the remaining training is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import outcome, resume_all, train_all, train_and_move
from deepspeed_methods import options_of
from drivetrain import Pipeline
from drivetrain.strategies import launch
from drivetrain.transforms import EMA
from pipeline_data import Toy, plain_model

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]
ON_RANKS = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "fairscale_oss"]
AVERAGED = ["averaged deepspeed_stage_2", "averaged fairscale_oss"]
"""With averages of the weights, which the third stage cannot keep; those of ddp and fsdp move elsewhere."""
MIDDLE = "checkpoints/step-00000003"
"""Of the first of two epochs of four steps."""


def pipeline(toy: Toy, name: str, ranks: int) -> Pipeline:
    model, _, strategy = name.rpartition(" ")
    made = toy.pipeline(plain_model).optimize("adamw", lr=0.01, warmup=0.2)
    if model == "averaged":
        made = made.transform(EMA(half_life=3))
    return made.distribute(strategy, devices=ranks, device="cpu", **options_of(strategy))


def on_ranks(job: Any, toy: Toy, names: list[str], ranks: int, *given: Any, timeout: float) -> dict[Any, Any]:
    """Rank 0's outcomes, for only its model has the trained weights; their numbers are of all ranks."""
    asked = {name: pipeline(toy, name, ranks) for name in names}
    return launch(job, asked, *given, devices=ranks, timeout=timeout)[0]


def check(found: dict[Any, Any], whole: dict[str, Any], count: int) -> None:
    """`whole` by model."""
    assert len(found) == count
    for move, one in found.items():
        name = move[0] if isinstance(move, tuple) else move
        expected = whole[name.rpartition(" ")[0]]
        assert not isinstance(one, str), (move, one)
        for left, right in zip(one[0], expected[0], strict=True):
            assert left == pytest.approx(right, abs=1e-5), move
        torch.testing.assert_close(
            one[1], expected[1], rtol=1e-4, atol=1e-5, msg=lambda m, at=move: f"{at}: {m}"
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def whole(toy: Toy, root: Path) -> dict[str, Any]:
    """One device's outcomes, uninterrupted; its checkpoints are in `root / "1" / name`."""
    found = train_all({name: pipeline(toy, name, 1) for name in ("single", "averaged single")}, root / "1")
    return {name.rpartition(" ")[0]: one for name, one in found.items()}


def test_to_every_strategy_and_back(toy: Toy, root: Path, whole: dict[str, Any]) -> None:
    """One device to each strategy on two ranks, each to the next one, and each to one device."""
    names = [*ON_RANKS, *AVERAGED]
    alone = {name: f"{name.rpartition(' ')[0]} single".strip() for name in names}
    moves = [(name, "one device", root / "1" / alone[name] / MIDDLE) for name in names]
    for own in (ON_RANKS, AVERAGED):
        moves += [(to, at, root / "2" / at / MIDDLE) for at, to in zip(own, [*own[1:], own[0]], strict=True)]
    trained, moved = on_ranks(train_and_move, toy, names, 2, root / "2", moves, timeout=290)
    check(trained, whole, len(names))
    check(moved, whole, len(moves))
    back = {name: outcome(pipeline(toy, alone[name], 1), resume=root / "2" / name / MIDDLE) for name in names}
    check(back, whole, len(names))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_strategy_on_1_2_and_4_ranks_to_every_other(
    toy: Toy, root: Path, whole: dict[str, Any]
) -> None:
    names = {1: ["single", *ON_RANKS], 2: ON_RANKS, 4: ON_RANKS}
    for ranks, own in names.items():
        check(on_ranks(train_all, toy, own, ranks, root / f"from {ranks}", timeout=280), whole, len(own))
    for ranks, before in ((1, 4), (2, 4), (4, 2)):  # the test above has one and two
        sources = {f"{name} {before}": root / f"from {before}" / name / MIDDLE for name in names[before]}
        moves = [(name, label, place) for name in names[ranks] for label, place in sources.items()]
        check(on_ranks(resume_all, toy, names[ranks], ranks, moves, timeout=1200), whole, len(moves))
