"""`Callback`: the base class of what users run during `Pipeline.fit`, and `RunView`: what it sees of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from ...common.checks import is_number
from ...common.errors import DrivetrainError, PlanError
from ...strategies import Engine
from ..telemetry.history import Epoch
from ..telemetry.state import TrainState


@dataclass(frozen=True)
class RunOptions:
    """What a callback can check before any work.

    Attributes:
        metrics: names of the metrics of an evaluation, such as `"val_loss"`; empty without validation data.
        logs: whether the run has a logger, to which `RunView.log` passes values.
        higher_is_better: the direction of each metric and of the losses, by name, as the task or the torchmetrics class
            declares it; None if neither does.
        starts_ranks: whether `fit` starts the ranks in other processes, which get copies of the callbacks.

    Example::

        >>> class NeedsLogger(Callback):
        ...     def check(self, run: RunOptions) -> None:
        ...         if not run.logs:
        ...             raise PlanError("NeedsLogger needs fit(logger=…).")
    """

    metrics: tuple[str, ...]
    logs: bool
    higher_is_better: Mapping[str, bool | None] = field(default_factory=dict)
    starts_ranks: bool = False


class RunView:
    """A read-only view of a run on this rank.

    Attributes:
        epochs: epochs of the full run.
        out: the folder of the run; None without.

    Example::

        >>> class Count(Callback):
        ...     def on_step_end(self, view: RunView) -> None:
        ...         if view.step == view.total_steps:
        ...             print("the last step,", view.step)
        >>> result = pipeline.fit(epochs=1, callbacks=[Count()], progress=False)
        the last step, 2
    """

    def __init__(
        self, engine: Engine, position: Callable[[], TrainState], epochs: int, out: Path | None,
        log: Callable[[Mapping[str, float | torch.Tensor], int], None], echo: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.epochs, self.out = epochs, out
        self._engine, self._position, self._log, self._echo = engine, position, log, echo
        self._loss: torch.Tensor | None = None
        self._metrics: dict[str, float] = {}
        self._history: tuple[Epoch, ...] = ()
        self._gradients: dict[str, torch.Tensor] | None = None
        self._reason: str | None = None
        self._may_stop, self._failed = False, False

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self._position().epoch

    @property
    def step(self) -> int:
        """Completed optimizer steps of the full run."""
        return self._position().step

    @property
    def step_in_epoch(self) -> int:
        """Completed steps of the current epoch; 0 at the end of one."""
        return self._position().meter.steps

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the full run, with all samples in every epoch; InfoBatch makes fewer."""
        return self._position().total_steps

    @property
    def progress(self) -> float:
        """The completed fraction of training, 0 to 1."""
        return self._position().progress

    @property
    def images(self) -> int:
        """Images trained on so far in the full run, over all ranks."""
        return self._position().images

    @property
    def seconds(self) -> float:
        """Seconds of training so far in the full run, without evaluations; at the end of an epoch, those of its
        `images_per_s`."""
        return self._position().seconds

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._engine.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._engine.world_size

    @property
    def loss(self) -> float | None:
        """The loss of the last step on this rank's share of the batch; None before the first. Reading it waits for the
        device."""
        return None if self._loss is None else float(self._loss.item())

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of the optimizer's parameter groups."""
        return tuple(float(group["lr"]) for group in self._engine.optimizer.param_groups)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The results of the last evaluation of this process, over all ranks; empty before the first."""
        return MappingProxyType(self._metrics)

    @property
    def history(self) -> tuple[Epoch, ...]:
        """The finished epochs, including those before resuming."""
        return self._history

    @property
    def failed(self) -> bool:
        """Whether the run ends by an error or Ctrl-C: other ranks may be gone."""
        return self._failed

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded, so that no rank has the full model."""
        return self._engine.sharded

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of the model after surgery, by name, each in full; they must not be modified. Sharded
        parameters are gathered one at a time, so every rank must run through all of them."""
        self._check_alive()
        yield from self._gathered(dict(self._engine.plain_model.named_parameters()))

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of the last step, averaged over all ranks and before any clipping, by name and gathered
        like `named_parameters`; only in `on_step_end`, and after `Callback.needs_gradients` returned True. Parameters
        without a gradient are left out. A step that was skipped for its loss or its gradients has none."""
        self._check_alive()
        if self._gradients is None:
            raise DrivetrainError(
                "named_gradients: the gradients of this step were not kept. Let the callback's needs_gradients(step) "
                "return True for this step, and call it in on_step_end."
            )
        yield from self._gathered(self._gradients)

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's groups."""
        return self._engine.group_names()

    def log(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Pass numbers, or tensors of shape `()`, to the loggers of the run at the current step.

        Only rank 0 logs. Tensors on a GPU are copied asynchronously.

        Raises:
            PlanError: for another value.
        """
        for name, value in values.items():
            fits = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, float)
            if not (fits or is_number(value)):
                raise PlanError(f"RunView.log: {name!r} is {value!r:.60}, not a number or a tensor of one element.")
        if self.rank == 0:
            self._log(values, self.step)

    def echo(self, text: str) -> None:
        """Print a line on rank 0 above the progress bar, if the run shows one."""
        self._echo(text)

    def stop(self, reason: str) -> None:
        """Request the end of training: after this step, or after this evaluation or epoch. One rank is enough.

        The weights of that moment are evaluated and saved, with a checkpoint and `reason` (`FitResult.stopped`).

        Raises:
            PlanError: if `reason` is not a text, or in `on_fit_start` and `on_fit_end`, where nothing is to be stopped.
        """
        if not isinstance(reason, str) or not reason:
            raise PlanError(f"RunView.stop: {reason!r:.60} is not a reason. Pass a text that is not empty.")
        if not self._may_stop:
            raise PlanError(
                "RunView.stop: there is nothing to stop in on_fit_start and on_fit_end. Call it in on_step_end, "
                "on_evaluation_end or on_epoch_end; raise an error to refuse a run."
            )
        self._reason = self._reason or reason

    def _check_alive(self) -> None:
        if self._failed:
            raise DrivetrainError("The run has failed: its parameters cannot be read, as ranks may be gone.")

    def _gathered(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in tensors.items():
            with torch.no_grad():
                gathered = self._engine.gather(value)
            yield name, gathered.detach()


class Callback:
    """Base class of callbacks: `fit(callbacks=[…])`. Override the methods of interest; each does nothing.

    Every rank has its own copy, and calls the same methods in the same order with the same position, so a callback may
    call collectives, such as those of `RunView.named_parameters`. A method that raises on any rank ends the run on all
    ranks; if another rank does not return from the same method, because it waits in a collective, after 10 seconds.
    `RunView.stop` on any rank ends the run on all ranks after the same step.

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

    only_looks: ClassVar[bool] = False
    """Whether it changes no training: runs that are measured (`race`, `tune`, `ledger(accuracy=True)`), which have no
    loggers and no place for its files, leave it out."""

    _recipe_entry: Mapping[str, Any] | None = None  # `{name, …options}`, if it was given by its name

    def check(self, run: RunOptions) -> None:
        """Raise `PlanError` if this callback cannot work in such a run; called before any work."""

    def needs_gradients(self, step: int) -> bool:  # noqa: ARG002
        """Return whether `on_step_end` after step `step`, counted from 1, will read `RunView.named_gradients`. They are
        copied before the optimizer zeroes them, which takes the memory of the gradients. Must be the same on every
        rank. Default False."""
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

    def on_return(self) -> None:
        """Called in the process that called `fit`, when the run is over, its ranks have ended and all files are
        written. What it raises, `fit` raises instead of returning the result. Not called after an error or Ctrl-C."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: a dict of JSON values (texts, numbers, booleans, None, lists and
        dicts with texts as keys). Default: empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, that of this rank; with another number of ranks, that of rank 0."""
