"""Load the scripts of `.ci`, which are not a package, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from places import ROOT

FOLDER = ROOT / ".ci"
GPU = FOLDER / "gpu"


def load(name: str, folder: Path = FOLDER) -> ModuleType:
    """Import one of them; its folder is on the path meanwhile, since they import one another."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
