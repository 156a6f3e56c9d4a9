"""The repository's files for tests: paths, the scripts of `.ci`, and code that is shown to readers."""

import ast
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
CI = ROOT / ".ci"
GPU = CI / "gpu"


def load_script(name: str, folder: Path = CI) -> ModuleType:
    """Import a script of `.ci`, whose folder is on the path meanwhile, since they import one another."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def import_ours(nodes: Iterable[ast.AST]) -> int:
    """Import each name that these nodes import `from drivetrain`, and return their number."""
    count = 0
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("drivetrain"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                count += 1
    return count
