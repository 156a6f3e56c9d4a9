"""Job 13: the ledger and the tuning, with short budgets: the bottleneck, and what was tried."""

import json
from pathlib import Path

import pytest
from command_line import done
from drivetrain import Pipeline

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.usefixtures("own_cache")]


def test_the_ledger_names_the_bottleneck() -> None:
    blurpool = 'transforms=[{"name": "BlurPool"}]'
    printed = done("ledger", "mine.yaml", "--seconds", "40", "--out", "ledgers/mine", blurpool)
    assert "bottleneck" in printed
    rows = json.loads(Path("ledgers/mine/ledger.json").read_text())["rows"]
    assert rows[0]["name"].startswith("plain PyTorch")
    assert any("BlurPool" in row["name"] for row in rows)
    assert Path("ledgers/mine/ledger.png").exists()
    done("ledger", "--compare", "ledgers/mine/ledger.json", "ledgers/mine/ledger.json")


def test_tuning_keeps_the_numbers() -> None:
    assert "bottleneck" in done("tune", "mine.yaml", "--seconds", "20", "--out", "tuned")
    trials = json.loads(Path("tuned/tuned.json").read_text())["trials"]
    assert {"workers=1", "compile=True", "ChannelsLast"} & {trial["name"] for trial in trials}
    assert all(trial["outcome"] for trial in trials)
    tuned = Pipeline.from_recipe("tuned/tuned.yaml").fit(progress=False)
    given = Pipeline.from_recipe("mine.yaml").fit(progress=False)
    losses = [result.history.epochs[0].loss for result in (tuned, given)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
