"""The pipeline builder, plan, recipes, training loop, ledger and command line.

Names are imported on first use: they take seconds to import, and the command line's `--help` needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy import exports

if TYPE_CHECKING:
    from .apps.exports.export import Exported as Exported
    from .apps.exports.export import export as export
    from .apps.serve import serve_app as serve_app
    from .callbacks.callback import Callback as Callback
    from .callbacks.callback import RunOptions as RunOptions
    from .callbacks.callback import RunView as RunView
    from .callbacks.early_stopping import EarlyStopping as EarlyStopping
    from .callbacks.gradient_norms import GradientNorms as GradientNorms
    from .callbacks.optuna_pruning import OptunaPruning as OptunaPruning
    from .callbacks.profile import Profile as Profile
    from .callbacks.ray_report import RayReport as RayReport
    from .describe.plan import Plan as Plan
    from .describe.plan import Step as Step
    from .ledger.comparison import compare as compare
    from .ledger.ledger import Ledger as Ledger
    from .ledger.ledger import LedgerInterrupted as LedgerInterrupted
    from .measuring.race.result import RaceInterrupted as RaceInterrupted
    from .measuring.race.result import RaceResult as RaceResult
    from .measuring.tuning.lr_range import LRRange as LRRange
    from .measuring.tuning.result import Tuned as Tuned
    from .measuring.tuning.result import TuneInterrupted as TuneInterrupted
    from .optim.groups import layerwise_decay as layerwise_decay
    from .pipeline import Pipeline as Pipeline
    from .recipes.presets import RECIPES as RECIPES
    from .runs.analysis.batch import ShownBatch as ShownBatch
    from .runs.analysis.compare import RunComparison as RunComparison
    from .runs.analysis.compare import compare_runs as compare_runs
    from .runs.analysis.errors import Errors as Errors
    from .runs.analysis.marks import Mark as Mark
    from .runs.checkpoints.directory import Checkpoints as Checkpoints
    from .runs.checkpoints.directory import CheckpointWarning as CheckpointWarning
    from .runs.folds import CrossValidation as CrossValidation
    from .runs.result import FitResult as FitResult
    from .runs.result import TrainingInterrupted as TrainingInterrupted
    from .runs.result import TrainingPreempted as TrainingPreempted
    from .runs.result import load_run as load_run
    from .tasks.contrastive import Contrastive as Contrastive
    from .tasks.standard import Classification as Classification
    from .tasks.standard import MultiLabel as MultiLabel
    from .tasks.standard import Regression as Regression
    from .tasks.standard import Segmentation as Segmentation
    from .tasks.task import Task as Task
    from .telemetry.history import Epoch as Epoch
    from .telemetry.history import Evaluation as Evaluation
    from .telemetry.history import History as History
    from .telemetry.loggers import Logger as Logger
    from .telemetry.loggers import LoggerWarning as LoggerWarning
    from .telemetry.rank_times import StragglerWarning as StragglerWarning
    from .training.build import Built as Built
    from .training.loop import evaluate as evaluate
    from .training.loop import train_epoch as train_epoch
    from .training.summary import ModelSummary as ModelSummary

__getattr__, __dir__, __all__ = exports(__name__, __file__)
