"""The ledger: its arithmetic on made-up rounds, and measured on tiny data with a known bottleneck."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from drivetrain import DrivetrainError, Pipeline, PlanError
from drivetrain.loaders import convert
from drivetrain.pipeline.ledger import MIN_ROUNDS, variants
from drivetrain.pipeline.ledger_result import LOADER, MODEL, PLAIN, Ledger, Turn
from drivetrain.transforms import ChannelsLast, LabelSmoothing
from pipeline_data import BATCH, CLASSES, SIDE, TRAIN, Sleepy, Toy, plain_model, surroundings
from torch import nn

WHOLE = "+ FFCV loader"


def made_up(*, model: float = 900, loader: float = 4000) -> Ledger:
    """Three rounds on a machine that gets slower; the FFCV loader is 2, 2.5 and 3 times as fast."""
    rounds = []
    for speed, ratio in ((400, 2), (200, 2.5), (100, 3)):
        turns = {PLAIN: speed, WHOLE: speed * ratio, LOADER: loader, MODEL: model}
        rounds.append(
            {name: Turn(1200, 1200 / images, 0.25 * 1200 / images) for name, images in turns.items()}
        )
    return Ledger(rounds, {"recipe": "made <up>"})


def test_rows_hold_medians_and_quartiles_of_ratios_within_rounds() -> None:
    plain, whole = made_up().rows
    assert (plain.name, whole.name) == (PLAIN, WHOLE)
    assert (plain.ratio.median, plain.ratio.low, plain.ratio.high) == (1.0, 1.0, 1.0)
    assert (plain.images_per_s.median, plain.images_per_s.low, plain.images_per_s.n) == (200, 150, 3)
    # 500 / 200 would be 2.5 as well; the quartiles show that the ratios were taken round by round.
    assert (whole.ratio.low, whole.ratio.median, whole.ratio.high) == pytest.approx((2.25, 2.5, 2.75))
    assert whole.images_per_s.median == pytest.approx(500)
    assert whole.gain == whole.ratio
    assert made_up().waiting == pytest.approx(0.25)


def test_a_gain_is_over_the_row_before() -> None:
    rounds = [
        {
            **turns, "+ more": Turn(1200, turns[WHOLE].seconds / 1.5, 0),
            LOADER: turns[LOADER], MODEL: turns[MODEL],
        }
        for turns in made_up().rounds
    ]  # fmt: skip
    rows = Ledger(rounds, {}).rows
    assert [row.name for row in rows] == [PLAIN, WHOLE, "+ more"]
    assert rows[-1].gain.median == pytest.approx(1.5)
    assert rows[-1].ratio.median == pytest.approx(3.75)


@pytest.mark.parametrize(
    ("speeds", "start"),
    [
        ({"model": 900, "loader": 4000}, "The model binds: "),
        ({"model": 900, "loader": 600}, "The loader binds: "),
        ({"model": 900, "loader": 950}, "Loader and model bind alike: "),
        ({"model": 900, "loader": 850}, "Loader and model bind alike: "),
    ],
)
def test_the_bound_names_the_lower_ceiling(speeds: dict[str, float], start: str) -> None:
    bound = made_up(**speeds).bound
    assert bound.startswith(start)
    whole, low = 500, min(speeds.values())
    assert f"the whole reaches 500 images/s, {whole / low:.0%} of" in bound
    assert f"{speeds['loader']:,.0f} images/s" in bound
    assert f"{speeds['model']:,.0f}" in bound


def test_a_ledger_prints_and_is_json(tmp_path: Path) -> None:
    ledger = made_up()
    text = str(ledger)
    assert "× 2.50" in text
    assert text.endswith(ledger.bound)
    assert text.index(PLAIN) < text.index(WHOLE) < text.index(LOADER)
    assert "2.50  (2.25 to 2.75)" in ledger._repr_html_()
    ledger.save(tmp_path / "ledger.json")
    written = json.loads((tmp_path / "ledger.json").read_text())
    assert written == json.loads(json.dumps(ledger.to_dict()))
    assert [row["name"] for row in written["rows"]] == [PLAIN, WHOLE]
    assert written["rounds"][2][PLAIN] == {"images": 1200, "seconds": 12.0, "waited": 3.0}
    assert (written["recipe"], written["waiting"]) == ("made <up>", pytest.approx(0.25))


@pytest.mark.parametrize("name", ["ledger.txt", "ledger", "ledger.jpg"])
def test_an_ending_that_means_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match=r"saved as \.json, \.png, \.svg or \.pdf"):
        made_up().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match=r"no/ledger\.json could not be written: No such file"):
        made_up().save(tmp_path / "no" / "ledger.json")


def test_without_matplotlib(tmp_path: Path) -> None:
    """In a process of its own, where matplotlib cannot be imported."""
    code = """
import sys
sys.modules["matplotlib"] = None
from drivetrain import MissingExtra
from drivetrain.pipeline.ledger_result import Ledger, LOADER, MODEL, PLAIN, Turn
try:
    Ledger([{name: Turn(1, 1, 0) for name in (PLAIN, LOADER, MODEL)}], {}).save(sys.argv[1])
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ledger.png")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "matplotlib is needed to draw the ledger" in done.stdout
    assert "pip install 'drivetrain[plot]'" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_measured_on_a_model_that_sleeps(toy: Toy, tmp_path: Path) -> None:
    pipeline = (
        toy.pipeline(Sleepy(0.03))
        .transform(LabelSmoothing(0.1), ChannelsLast())
        .distribute("single", precision="bf16", accumulate=2, clip_norm=1.0)
    )
    at_first = surroundings()
    ledger = pipeline.ledger(seconds=0.5, progress=False)
    assert surroundings() == at_first
    names = [PLAIN, WHOLE, "+ ChannelsLast", "+ LabelSmoothing", "+ bf16", "+ accumulate 2, clip_norm 1"]
    assert [row.name for row in ledger.rows] == names
    assert [list(turns) for turns in ledger.rounds] == [[*names, LOADER, MODEL]] * len(ledger.rounds)
    assert len(ledger.rounds) >= MIN_ROUNDS
    # The data set has 4 batches and no turn can have more; no sample was lost, none counted twice.
    assert {turn.images for turns in ledger.rounds for turn in turns.values()} == {TRAIN}
    assert ledger.facts["batches_per_turn"] == TRAIN // BATCH
    assert ledger.rows[0].ratio.median == 1.0
    assert ledger.bound.startswith("The model binds: ")
    assert ledger.ceilings[MODEL].median < BATCH / 0.06  # two microbatches, each sleeps 0.03 s
    assert 0 <= ledger.waiting < 1

    ledger.save(tmp_path / "ledger.json")
    ledger.save(tmp_path / "ledger.png")
    written = json.loads((tmp_path / "ledger.json").read_text())
    assert {"date", "command", "git_revision", "hardware", "versions"} <= set(written["provenance"])
    assert written["provenance"]["hardware"]["cores"] >= 1
    assert written["plan"][0]["asked_by"] == ".load()"
    assert (tmp_path / "ledger.png").read_bytes().startswith(b"\x89PNG")
    assert not [c for c in psutil.Process().children() if "spawn_main" in str(c.cmdline())]


def test_measured_on_large_images(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (12, 1600, 1600, 3), dtype=np.uint8)
    convert((images, np.arange(12) % CLASSES), tmp_path / "large.beton", progress=False)

    def tiny() -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES))

    pipeline = Pipeline(tiny).load(tmp_path / "large.beton", batch_size=4, image_size=SIDE, workers=1)
    ledger = pipeline.ledger(seconds=0.5, progress=False)
    assert ledger.facts["batches_per_turn"] == 3
    assert ledger.bound.startswith("The loader binds: ")
    assert ledger.waiting > 0.5


def test_rows_follow_what_was_asked_for(toy: Toy) -> None:
    def names(pipeline: Pipeline) -> list[str]:
        return [variant.name for variant in variants(pipeline)]

    assert names(toy.pipeline(loader="torch")) == [PLAIN, LOADER, MODEL]
    assert names(toy.pipeline().distribute("ddp", devices=2)) == [PLAIN, WHOLE, "+ ddp × 2", LOADER, MODEL]
    found = variants(toy.pipeline().distribute("ddp", devices=2, device="cpu", precision="bf16"))
    assert [variant.pipeline.distribution.options.get("device") for variant in found] == ["cpu"] * len(found)
    assert found[-1].pipeline is found[-2].pipeline is found[-3].pipeline
    assert [variant.kind for variant in found[-3:]] == ["train", "loader", "model"]


@pytest.mark.slow
def test_measured_on_two_ranks(toy: Toy) -> None:
    ledger = toy.pipeline(plain_model, loader="torch", workers=0).distribute("ddp", devices=2).ledger(
        seconds=0.1, progress=False
    )  # fmt: skip
    assert [row.name for row in ledger.rows] == [PLAIN, "+ ddp × 2"]
    assert {turn.images for turns in ledger.rounds for turn in turns.values()} == {TRAIN}


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_time_that_means_nothing(seconds: Any, toy: Toy) -> None:
    with pytest.raises(PlanError, match="must be positive"):
        toy.pipeline().ledger(seconds=seconds)
