"""Load the scripts of `.ci/gpu`."""

from __future__ import annotations

from types import ModuleType

import ci_scripts

FOLDER = ci_scripts.FOLDER / "gpu"


def load(name: str) -> ModuleType:
    return ci_scripts.load(name, FOLDER)
