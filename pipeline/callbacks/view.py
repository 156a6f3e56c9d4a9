"""`RunView`: what callbacks see of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from ...common.checks import is_number
from ...common.errors import DrivetrainError, PlanError
from ...strategies import Engine
from ..telemetry.history import Epoch
from ..telemetry.state import TrainState


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
        self,
        engine: Engine,
        position: Callable[[], TrainState],
        epochs: int,
        out: Path | None,
        log: Callable[[Mapping[str, float | torch.Tensor], int], None],
        echo: Callable[[str], None],
    ) -> None:
        self.epochs, self.out = epochs, out
        self._engine, self._position = engine, position
        self._log, self._echo = log, echo
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
        """Optimizer steps of the full run."""
        return self._position().total_steps

    @property
    def progress(self) -> float:
        """The completed fraction of training, 0 to 1."""
        return self._position().progress

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
        """Yield the parameters of the model after surgery, by name, each in full; they must not be modified.

        Sharded parameters are gathered one at a time, so every rank must run through all of them.
        """
        self._check_alive()
        yield from self._gathered(dict(self._engine.plain_model.named_parameters()))

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of the last step, averaged over all ranks and before the engine's clipping, by name and
        gathered like `named_parameters`; only in `on_step_end`, and after `Callback.needs_gradients` returned True.

        Parameters without a gradient are left out. A step that was skipped for its loss has none.
        """
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
                raise PlanError(
                    f"RunView.log: {name!r} is {value!r:.60}, not a number or a tensor of one element."
                )
        if self.rank == 0:
            self._log(values, self.step)

    def echo(self, text: str) -> None:
        """Print a line on rank 0 above the progress bar, if the run shows one."""
        self._echo(text)

    def stop(self, reason: str) -> None:
        """Ask for the end of training: after this step, or after this evaluation or epoch. One rank's wish is enough.

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
                found = self._engine.gather(value)
            yield name, found.detach()
