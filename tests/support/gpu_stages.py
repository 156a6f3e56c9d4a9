"""Load the scripts of `.ci/gpu`, which are not a package, as modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from places import ROOT

FOLDER = ROOT / ".ci" / "gpu"


def load(name: str) -> ModuleType:
    """Import one of them; its folder is on the path meanwhile, since they import one another."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
