"""Drivetrain: FFCV loading, model surgery and sharding behind one `Pipeline`, measured by a ledger.

Names are imported on first use, so `import drivetrain` costs nothing, and pytest can import this file under the name of
the clone's folder without side effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy import exports
from .common.version import __version__ as __version__

if TYPE_CHECKING:
    from .common.errors import BetonError as BetonError
    from .common.errors import CheckpointError as CheckpointError
    from .common.errors import DataError as DataError
    from .common.errors import DrivetrainError as DrivetrainError
    from .common.errors import ExportError as ExportError
    from .common.errors import LedgerError as LedgerError
    from .common.errors import MissingExtra as MissingExtra
    from .common.errors import NonFiniteError as NonFiniteError
    from .common.errors import PlanError as PlanError
    from .common.errors import RecipeError as RecipeError
    from .common.errors import StrategyError as StrategyError
    from .pipeline import RECIPES as RECIPES
    from .pipeline import Callback as Callback
    from .pipeline import Checkpoints as Checkpoints
    from .pipeline import Classification as Classification
    from .pipeline import Contrastive as Contrastive
    from .pipeline import EarlyStopping as EarlyStopping
    from .pipeline import GradientNorms as GradientNorms
    from .pipeline import MultiLabel as MultiLabel
    from .pipeline import OptunaPruning as OptunaPruning
    from .pipeline import Pipeline as Pipeline
    from .pipeline import Profile as Profile
    from .pipeline import RayReport as RayReport
    from .pipeline import Regression as Regression
    from .pipeline import RunView as RunView
    from .pipeline import Segmentation as Segmentation
    from .pipeline import Task as Task

__getattr__, __dir__, __all__ = exports(__name__, __file__)
