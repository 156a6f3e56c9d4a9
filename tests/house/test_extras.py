"""A missing optional package raises MissingExtra, which names the extra, wherever it is needed."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from drivetrain import MissingExtra
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.pipeline.ledger.data import LOADER, MODEL, PLAIN, Trial
from drivetrain.pipeline.ledger.ledger import Ledger
from places import ROOT


def operate(folder: Path) -> None:
    path = folder / "a.beton"
    convert((np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)), path, progress=False)
    FFCVLoader(path, batch_size=2, image_size=8, operations=[1])


def save(folder: Path) -> None:
    Ledger([dict.fromkeys([PLAIN, LOADER, MODEL], Trial(1, 1.0, 0.0))]).save(folder / "a.png")


@pytest.mark.parametrize(
    ("blocked", "use", "extra"),
    [("numba", operate, "ffcv"), ("ffcv", operate, "ffcv"), ("matplotlib.figure", save, "plot")],
)
def test_missing_extra(
    blocked: str, use: Callable[[Path], None], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = {name for name in sys.modules if name.startswith(f"{blocked}.")}
    for name in (blocked, *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=re.escape(f"pip install 'drivetrain[{extra}]'")):
        use(tmp_path)
    assert not (tmp_path / "a.png").exists()


def test_every_extra_has_its_row_in_the_docs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(extras)
