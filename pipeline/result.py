"""What training gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..transforms import Report, Transform
from .history import History
from .plan import Plan
from .weights import plain_state


@dataclass
class FitResult:
    """What `Pipeline.fit` gives.

    Attributes:
        model: the trained model, after surgery, on the CPU, in evaluation mode.
        history: one entry per epoch.
        reports: what each transform changed.
        plan: the steps it was built by.
        transforms: of the pipeline, in the plan's order.
    """

    model: nn.Module
    history: History
    reports: tuple[Report, ...]
    plan: Plan
    transforms: tuple[Transform, ...] = ()

    class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during training.

    Attributes:
        epochs: how many were finished, those of a run that was resumed included.
        result: a `FitResult` of them; None if there are none, or the weights after the last one are not in this
            process: it resumed in the middle of an epoch without the folder of the run, or is not rank 0.
    """

    def __init__(self, outcome: Any = None, result: FitResult | None = None, epochs: int = 0) -> None:
        finished = "before its first epoch was finished"
        if result is not None:
            finished = f"after epoch {epochs}, up to which this exception's result goes"
        elif epochs:
            finished = f"after epoch {epochs}, whose weights are not in this process: there is no result here"
        super().__init__(f"training was interrupted {finished}")
        self.outcome, self.result, self.epochs = outcome, result, epochs

    def __reduce__(self) -> Any:
        return type(self), (self.outcome, self.result, self.epochs)
