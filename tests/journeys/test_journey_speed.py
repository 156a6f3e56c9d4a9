"""Job 13: the ledger and the tuning, with short budgets: what binds, and what was tried."""

import json
from pathlib import Path

import pytest
from command_line import call
from drivetrain import Pipeline


@pytest.mark.long
@pytest.mark.alone
def test_the_ledger_names_the_bottleneck() -> None:
    transforms = 'transforms=[{"name": "BlurPool"}, {"name": "LabelSmoothing"}]'
    end = call("ledger", "mine.yaml", "--seconds", "10", "--out", "ledgers/mine", transforms)
    assert end.code == 0, end
    ledger = json.loads(Path("ledgers/mine/ledger.json").read_text())
    names = [row["name"] for row in ledger["rows"]]
    assert names[0].startswith("plain PyTorch")
    assert [name for name in names if name.startswith("+ ")]
    assert "bottleneck" in end.out
    assert Path("ledgers/mine/ledger.png").exists()
    end = call("ledger", "--compare", "ledgers/mine/ledger.json", "ledgers/mine/ledger.json")
    assert end.code == 0, end


@pytest.mark.long
@pytest.mark.alone
def test_tuning_reports_every_change() -> None:
    end = call("tune", "mine.yaml", "--seconds", "10", "--out", "tuned", "batch_size=4")
    assert end.code == 0, end
    found = json.loads(Path("tuned/tuned.json").read_text())
    assert {"workers=1", "compile=True"} & {trial["name"] for trial in found["trials"]}
    assert all(trial["outcome"] for trial in found["trials"])
    assert "bottleneck" in end.out
    tuned = Pipeline.from_recipe("tuned/tuned.yaml").fit(progress=False)
    given = Pipeline.from_recipe("mine.yaml", batch_size=4).fit(progress=False)
    losses = [[epoch.loss for epoch in result.history.epochs] for result in (tuned, given)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
