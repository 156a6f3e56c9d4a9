"""The ledger's estimator: speeds and ratios come from one fit, so that they cannot contradict each other."""

import json
import math
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from drivetrain.pipeline import Ledger
from drivetrain.pipeline.ledger.picture import caption
from drivetrain.pipeline.ledger.statistics import Levels, Ratio, ratio, speed_text
from drivetrain.pipeline.ledger.variant import LOADER, MODEL, PLAIN, VariantId, in_turn, only
from ledgers import trials_of

A, B, C = map(in_turn, "abc")
NAMES = (PLAIN, A, B, C, only("b"), LOADER)


def rounds_of(random: np.random.Generator, rounds: int, noise: float) -> list[dict[VariantId, float]]:
    """Rounds on a machine whose speed drifts a lot, with now and then a trial that takes several times as long."""
    true = np.exp(random.normal(5, 0.02, len(NAMES)))  # variants that hardly differ: signs are easily wrong
    drift = np.exp(np.cumsum(random.normal(0, 0.5, rounds)))
    speeds = true * drift[:, None] * np.exp(random.normal(0, noise, (rounds, len(NAMES))))
    speeds[random.random(speeds.shape) < 0.05] /= 4
    return [dict(zip(NAMES, row, strict=True)) for row in speeds.tolist()]


def as_ledger(rounds: list[dict[VariantId, float]], stopped: str = "") -> Ledger:
    return Ledger([trials_of(speeds) for speeds in rounds], {"recipe": None}, stopped=stopped)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_a_speed_and_its_ratio_never_contradict_each_other(seed: int) -> None:
    random = np.random.default_rng(seed)
    for count in (1, 2, 3, 4, 5, 8, 13):
        rounds = rounds_of(random, count, noise=0.05)
        ledger = as_ledger(rounds)
        for one, two in permutations(NAMES, 2):
            over, speeds = ledger.ratio(one, two), (ledger.speed(one).value, ledger.speed(two).value)
            assert over.value == pytest.approx(speeds[0] / speeds[1], rel=1e-9)
            assert (over.value > 1) == (speeds[0] > speeds[1])
            assert over.low <= over.value <= over.high
        rows = ledger.rows
        for before, row in pairwise(rows):
            assert row.ratio
            assert row.gain
            assert before.ratio
            assert row.ratio.value == pytest.approx(before.ratio.value * row.gain.value, rel=1e-9)
        assert all(row.images_per_s and row.images_per_s.low <= row.images_per_s.value for row in rows)


def test_medians_and_ratios_of_rounds_would_contradict() -> None:
    """The flaw that the common fit removes, on a machine that changes its speed: it is not made up by the test."""
    random, found = np.random.default_rng(0), 0
    for _ in range(200):
        rounds = rounds_of(random, 4, noise=0.05)
        one, two = ([speeds[name] for speeds in rounds] for name in (PLAIN, A))
        over = ratio([b / a for a, b in zip(one, two, strict=True)]).value
        found += (np.median(two) > np.median(one)) != (over > 1)
    assert found > 10


def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(3)
    for count in (3, 5, 8, 12):
        held = []
        for _ in range(250):
            noise = np.exp(random.normal(0, 0.1, (count, len(NAMES))))
            drift = np.exp(np.cumsum(random.normal(0, 0.3, count)))
            rows = (np.linspace(100, 160, len(NAMES)) * noise * drift[:, None]).tolist()
            levels = Levels([dict(zip(NAMES, row, strict=True)) for row in rows])
            held += [levels.ratio(A, PLAIN).holds(112 / 100), levels.ratio(C, A).holds(136 / 112)]
        assert np.mean(held) == pytest.approx(0.95, abs=0.025), count


def test_one_odd_turn_moves_nobody() -> None:
    random = np.random.default_rng(5)
    calm = [{name: 100.0 * (1 + number) * math.exp(random.normal(0, 0.01)) for number, name in enumerate(NAMES)}
            for _ in range(6)]  # fmt: skip
    shaken = [dict(speeds) for speeds in calm]
    shaken[2][B] /= 10
    before, after = Levels(calm), Levels(shaken)
    for one, two in permutations(NAMES, 2):
        assert after.ratio(one, two).value == pytest.approx(before.ratio(one, two).value, rel=0.02)


def test_what_an_interval_leaves_open_is_not_printed_as_a_number(tmp_path: Path) -> None:
    """8.62 × ± 8,000 % after two rounds; and one round, which has no interval at all."""
    wide = as_ledger(
        [
            {PLAIN: 100, A: 2000, B: 150, only("b"): 110, LOADER: 900, MODEL: 400},
            {PLAIN: 100, A: 400, B: 160, only("b"): 112, LOADER: 900, MODEL: 400},
        ],
        stopped="Stopped at the 2 s budget",
    )
    single = as_ledger([{PLAIN: 100, A: 862, LOADER: 900, MODEL: 400}], stopped="Interrupted (Ctrl-C)")
    for ledger, value in ((wide, "8.94"), (single, "8.62")):
        ledger.save(tmp_path / "ledger.json")
        for text in (str(ledger), ledger._repr_html_(), " ".join(caption(ledger).split())):
            assert value not in text
            assert "not resolved" in text.lower()
            assert "increase seconds" in text
        assert "000%" not in str(ledger)
        written = json.loads((tmp_path / "ledger.json").read_text(), parse_constant=pytest.fail)
        assert any(line.startswith("Not resolved") for line in written["caveats"])
        assert Ledger.load(tmp_path / "ledger.json").rows == ledger.rows
    assert "one round has no interval" in str(single)
    assert wide.compound.startswith("Whether the speedups compound is not resolved: 2 rounds that differ")
    assert single.rows[1].ratio == Ratio(pytest.approx(8.62), 0.0, math.inf, 1)  # type: ignore[arg-type]
    assert [row.ratio.resolved for row in single.rows if row.ratio] == [True, False]


def test_two_rounds_that_differ_beyond_what_a_float_holds() -> None:
    found = ratio([1e-60, 1e60])
    assert (found.low, found.high, found.resolved) == (0.0, math.inf, False)


@pytest.mark.parametrize(("speed", "text"), [(1418.4, "1,418"), (100.4, "100"), (61.0, "61"), (0.4214, "0.421")])
def test_slow_speeds_have_digits_too(speed: float, text: str) -> None:
    assert speed_text(speed) == text
