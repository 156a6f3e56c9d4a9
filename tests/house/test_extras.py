"""A missing optional package raises MissingExtra, which names the extra, wherever it is needed."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from drivetrain.loaders import convert
from places import ROOT
from process_state import output_of

BLOCK = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
from drivetrain import MissingExtra
try:
    {statement}
except MissingExtra as error:
    print(error)
"""


SAVE = """from drivetrain.pipeline.ledger.data import LOADER, MODEL, PLAIN, Trial
    from drivetrain.pipeline.ledger.ledger import Ledger
    Ledger([dict.fromkeys([PLAIN, LOADER, MODEL], Trial(1, 1.0, 0.0))]).save('a.png')"""
OPERATE = "from drivetrain.loaders import FFCVLoader; FFCVLoader({path!r}, batch_size=2, image_size=8, operations=[1])"


@pytest.mark.process
@pytest.mark.parametrize(
    ("blocked", "statement", "extra"),
    [
        (["numba"], OPERATE, "ffcv"),
        (["ffcv"], OPERATE, "ffcv"),
        (["matplotlib.figure"], SAVE, "plot"),
    ],
)
def test_missing_extra(blocked: list[str], statement: str, extra: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.beton")
    convert((np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)), path, progress=False)
    program = BLOCK.format(blocked=blocked, statement=statement.format(path=path))
    assert f"pip install 'drivetrain[{extra}]'" in output_of(sys.executable, "-c", program, cwd=tmp_path)
    assert not (tmp_path / "a.png").exists()


def test_every_extra_has_its_row_in_the_docs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(extras)
