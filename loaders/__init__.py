"""Stage one: any image data set to one `.beton` file, and loaders that are exact and fast.

Names are imported at first use: torchvision and numba take seconds, which not every rank needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Beton": "beton",
    "ConvertReport": "conversion",
    "FFCVLoader": "ffcv_loader",
    "Inspection": "inspection",
    "TorchLoader": "torch_loader",
    "Verification": "inspection",
    "contact_sheet": "inspection",
    "convert": "conversion",
    "inspect": "inspection",
    "open_beton": "beton",
    "resolve": "datasets",
    "verify": "inspection",
}

__all__ = [
    "Beton",
    "ConvertReport",
    "FFCVLoader",
    "Inspection",
    "TorchLoader",
    "Verification",
    "contact_sheet",
    "convert",
    "inspect",
    "open_beton",
    "resolve",
    "verify",
]

if TYPE_CHECKING:
    from .beton.reader import Beton, open_beton
    from .conversion.convert import ConvertReport, convert
    from .datasets.names import resolve
    from .ffcv_loader import FFCVLoader
    from .inspection import Inspection, Verification, contact_sheet, inspect, verify
    from .torch_loader import TorchLoader


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
