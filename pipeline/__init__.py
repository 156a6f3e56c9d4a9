"""The builder and what drives it: plan, recipes, loop, ledger, command line."""

from .build import Built
from .builder import Pipeline
from .loop import evaluate, train_epoch
from .plan import Plan, Step
from .recipes import RECIPES
from .result import Epoch, FitResult, History, TrainingInterrupted

__all__ = [
    "RECIPES",
    "Built",
    "Epoch",
    "FitResult",
    "History",
    "Pipeline",
    "Plan",
    "Step",
    "TrainingInterrupted",
    "evaluate",
    "train_epoch",
]
