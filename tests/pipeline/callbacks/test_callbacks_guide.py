"""The lines of `docs/guide/callbacks.md` run as printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pipeline_data import Toy
from places import ROOT

GUIDE = (ROOT / "docs/guide/callbacks.md").read_text()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning:torch.profiler")
def test_the_guide_runs(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pipeline": toy.pipeline(), "__name__": "guide"}
    stopped = []
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(compile(block, "guide", "exec"), names)
        stopped.append(names["result"].stopped)
    assert stopped[0].startswith("val_loss is 0.0")
    assert stopped[1] != stopped[0]
    assert {event.get("name") for event in json.loads(Path("runs/look/trace.json").read_text())["traceEvents"]} >= {
        "step 6", "step 7", "step 8"
    }  # fmt: skip
    assert [each.step for each in names["result"].history.evaluations] == [6]
    assert [epoch.accuracy is None for epoch in names["result"].history.epochs] == [True, False, False, False]


def test_its_table_names_the_methods() -> None:
    from drivetrain import Callback

    named = set(re.findall(r"^\| `(on_\w+)`", GUIDE, re.MULTILINE))
    assert named == {name for name in vars(Callback) if name.startswith("on_")}
