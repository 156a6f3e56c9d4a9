"""Stage one: any image data set to one `.beton` file, and loaders that are exact and fast."""

from .beton import Beton, open_beton
from .convert import ConvertReport, convert
from .datasets import resolve
from .ffcv_loader import FFCVLoader
from .inspection import Inspection, Verification, contact_sheet, inspect, verify
from .torch_loader import TorchLoader

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
