"""The command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.lazy import exports

if TYPE_CHECKING:
    from .app import main as main

__getattr__, __dir__, __all__ = exports(__name__, __file__)
