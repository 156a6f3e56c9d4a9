"""Random pipelines on 1 to 4 ranks against plain PyTorch on one device: models, losses, strategies, batches, dtypes."""

from __future__ import annotations

import os

import pytest
from drivetrain.strategies import launch
from parity_draws import COMPLEX, LOSSES, Draw, differences, draws, on_ranks, reference
from parity_jobs import NAMES
from pipeline_data import Toy

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process]
SEED = int(os.environ.get("DRIVETRAIN_PARITY_SEED", "0"))
"""Another one draws other cases."""


def check(drawn: list[Draw], ranks: int, toy: Toy, timeout: float) -> None:
    """Rank 0 has the results; a failure names each draw that differs, and what differs."""
    found = launch(on_ranks, drawn, toy.train, toy.val, devices=ranks, timeout=timeout)[0]
    assert len(found) == len(drawn)
    wrong = [
        f"{draw}: {'; '.join(said)}"
        for draw, one in zip(drawn, found, strict=True)
        if (said := differences(draw, one, reference(draw, ranks, toy.train, toy.val)))
    ]
    assert not wrong, f"{len(wrong)} of {len(drawn)} on {ranks} ranks:\n" + "\n".join(wrong)


@pytest.mark.long
def test_a_dozen_random_runs_on_two_ranks_equal_plain_pytorch(toy: Toy) -> None:
    check(draws(12, 2, SEED, NAMES), 2, toy, 120)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_two_hundred_random_runs_equal_plain_pytorch(toy: Toy, ranks: int) -> None:
    check(draws(50, ranks, SEED + 1), ranks, toy, 800)


def test_the_draws_have_every_part() -> None:
    """No part of the generator is switched off by its conditions."""
    drawn = [draw for ranks in (1, 2, 3, 4) for draw in draws(50, ranks, SEED + 1)]
    assert len(drawn) == 200
    assert {draw.loss for draw in drawn} == set(LOSSES)
    assert {draw.accumulate for draw in drawn} == {1, 2, 3, 4}
    assert {draw.norm for draw in drawn} == {"batch", "group", "none"}
    assert {draw.precision for draw in drawn} == {"fp32", "bf16"}
    assert {draw.strategy for draw in drawn} >= {"single", *NAMES}
    assert {draw.strategy for draw in drawn if draw.complex_parameter} == set(COMPLEX)
    for part in ("complex_parameter", "tied", "double"):
        assert sum(getattr(draw, part) for draw in drawn) > 10
    assert draws(5, 2, SEED) == draws(5, 2, SEED)
