"""`Callback`: the base class of what users run during `Pipeline.fit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .view import RunView


@dataclass(frozen=True)
class RunOptions:
    """What a callback can check before any work.

    Attributes:
        metrics: names of the metrics of an evaluation, such as `"val_loss"`; empty without validation data.
        logs: whether the run has a logger, to which `RunView.log` passes values.
        higher_is_better: the direction of each metric and of the losses, by name, as the task or the torchmetrics class
            declares it; None if neither does.

    Example::

        >>> class NeedsLogger(Callback):
        ...     def check(self, run: RunOptions) -> None:
        ...         if not run.logs:
        ...             raise PlanError("NeedsLogger needs fit(logger=…).")
    """

    metrics: tuple[str, ...]
    logs: bool
    higher_is_better: Mapping[str, bool | None] = field(default_factory=dict)


class Callback:
    """Base class of callbacks: `fit(callbacks=[…])`. Override the methods of interest; each does nothing.

    Every rank has its own copy, and calls the same methods in the same order with the same position, so a callback may
    call collectives, such as those of `RunView.named_parameters`. A method that raises on any rank ends the run on all
    ranks; if another rank does not return from the same method, because it waits in a collective, after 10 seconds.
    What it asks for with `RunView.stop` holds on all ranks after the same step.

    A callback that overrides `on_step_end` costs one all-reduce of as many numbers as there are ranks per step, by
    which the ranks agree; the others cost a few per evaluation and epoch. Without callbacks there is none. On CUDA with
    several ranks the answer is read one step later, so that no step waits for it.

    If `fit` starts the ranks, callbacks are pickled to them, and at the end `load_state_dict` gives this process's
    objects the state of rank 0's.

    Example::

        >>> class StopBelow(Callback):
        ...     def on_evaluation_end(self, view: RunView) -> None:
        ...         if view.metrics["val_loss"] < 10:
        ...             view.stop("val_loss is below 10")
        >>> pipeline.fit(epochs=3, callbacks=[StopBelow()], progress=False).stopped
        'val_loss is below 10'
    """

    def check(self, run: RunOptions) -> None:
        """Raise `PlanError` if this callback cannot work in such a run; called before any work."""

    def needs_gradients(self, step: int) -> bool:  # noqa: ARG002
        """Return whether `on_step_end` after step `step`, counted from 1, will read `RunView.named_gradients`.

        They are copied before the optimizer zeroes them, which takes the memory of the gradients. Must be the same on
        every rank. Default False.
        """
        return False

    def on_fit_start(self, view: RunView) -> None:
        """Called once before the first step of a new or resumed run. Reset any state here: when a run resumes,
        `load_state_dict` is called afterwards."""

    def on_step_end(self, view: RunView) -> None:
        """Called after each optimizer step."""

    def on_evaluation_end(self, view: RunView) -> None:
        """Called after each evaluation, with its results in `view.metrics`. The model has the weights that were
        evaluated, i.e. averages with EMA or SWA."""

    def on_epoch_end(self, view: RunView) -> None:
        """Called after each epoch and its evaluation, if any; `view.history` has the epoch."""

    def on_fit_end(self, view: RunView) -> None:
        """Called once at the end, also after an error or Ctrl-C (`view.failed`). The model has the weights of the
        result."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: a dict of JSON values (texts, numbers, booleans, None, lists and
        dicts with texts as keys). Default: empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, that of this rank; with another number of ranks, that of rank 0."""
