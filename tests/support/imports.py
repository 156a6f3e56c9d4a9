"""Check that code shown to readers imports existing names."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable


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
