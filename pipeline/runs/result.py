"""What training gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...transforms import Report, Transform
from ..checkpoints.weights import plain_state
from ..spec.plan import Plan
from ..telemetry.history import History


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

    def plain_state(self) -> dict[str, torch.Tensor]:
        """The weights under the names of the model before surgery, for use without Drivetrain.

        What a surgery adds and a plain model cannot express keeps a name of its own; `Transform.to_plain` of
        each surgery says which.
        """
        return plain_state(self.model.state_dict(), self.model, self.transforms)

    @property
    def accuracy(self) -> float | None:
        """Top-1 (0 to 1) on the validation data after the last epoch; None if there is none."""
        return self.history.accuracy

    def __repr__(self) -> str:
        return f"FitResult(accuracy={self.accuracy}, epochs={len(self.history.epochs)})"

    def _repr_html_(self) -> str:
        """The history; what each transform changed, and the plan, are there to be opened."""
        parts = [("what was changed", "<br>".join(report._repr_html_() for report in self.reports))]
        parts += [("the plan", self.plan._repr_html_())]
        folded = "".join(
            f"<details><summary>{name}</summary>{body}</details>" for name, body in parts if body
        )
        return self.history._repr_html_() + folded


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
