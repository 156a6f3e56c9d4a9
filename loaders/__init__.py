"""Stage one: convert any image data set to one `.beton` file, and load it exactly and fast.

Names are imported at first use: torchvision and numba take seconds to import, and not every rank needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy import exports

if TYPE_CHECKING:
    from .advice.advise import advise as advise
    from .advice.report import Advice as Advice
    from .beton.inspection import Inspection as Inspection
    from .beton.inspection import Verification as Verification
    from .beton.inspection import contact_sheet as contact_sheet
    from .beton.inspection import inspect as inspect
    from .beton.inspection import verify as verify
    from .beton.reader import Beton as Beton
    from .beton.reader import open_beton as open_beton
    from .conversion.convert import ConvertReport as ConvertReport
    from .conversion.convert import convert as convert
    from .datasets.names import resolve as resolve
    from .ffcv_loader import FFCVLoader as FFCVLoader
    from .stock_loader import StockFFCVLoader as StockFFCVLoader
    from .torch_loader import TorchLoader as TorchLoader

__getattr__, __dir__, __all__ = exports(__name__, __file__)
