"""The learning rate of each step of a run."""

import warnings
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ...common.checks import is_number, plain
from ...common.errors import PlanError
from ..optim.config import OptimizerConfig
from ..optim.schedules import label, refuse_plateau

_CHECK_LENGTH = "Check its total number of steps: it is stepped once per optimizer step."


class Schedule:
    """The optimizer's current learning rates are the peaks; `scale` is a factor of those of a torch scheduler."""

    def __init__(
        self, optimization: OptimizerConfig, optimizer: torch.optim.Optimizer, steps: int, scale: float = 1.0
    ) -> None:
        self._optimization, self._optimizer, self._steps = optimization, optimizer, steps
        self._scale = scale
        if not all("lr" in group for group in optimizer.param_groups):
            raise PlanError(
                f"{type(optimizer).__name__} has a parameter group without 'lr', which the schedule sets in each step. "
                "Give every group one."
            )
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if "peak_lr" in group:  # SGDW's
                group["peak_lr"] = group["lr"] * scale
        self._last: list[Any] = []  # the learning rates of the last step
        own = optimization.uses_torch_scheduler
        self._scheduler = _TorchScheduler(optimization, optimizer) if own else None

    def set_lr(self, step: float) -> float:
        """`step` counts from 0, or is a position (`Loop.position`), which a torch scheduler takes only if it is a step.
        Return the learning rate of the first parameter group."""
        factor = self._optimization.lr_factor(step, self._steps) * self._scale
        rates = self._peaks if self._scheduler is None else self._scheduler.rates(int(step))
        self._last = [rate * factor for rate in rates]
        for group, rate in zip(self._optimizer.param_groups, self._last, strict=True):
            group["lr"] = rate
        return float(self._last[0])

    def restore_peaks(self) -> None:
        """Set the learning rates from before the first step, except where the caller has set others since the last."""
        for group, peak, last in zip(self._optimizer.param_groups, self._peaks, self._last, strict=False):
            if group["lr"] is last:
                group["lr"] = peak
        if self._scheduler is not None:
            self._scheduler.remove_own()


def torch_scheduler(
    optimization: OptimizerConfig, optimizer: torch.optim.Optimizer, steps: int, scale: float = 1.0
) -> LRScheduler:
    """Return a torch scheduler for Lightning, stepped per optimizer step. Warm-up or `scale` of one given is rejected:
    it would scale learning rates that the scheduler computes from the previous ones."""
    if not optimization.uses_torch_scheduler:
        return LambdaLR(optimizer, lambda step: optimization.lr_factor(min(step, steps), steps))
    if optimization.warmup:
        raise PlanError(
            f"to_lightning() cannot combine the torch scheduler {label(optimization.schedule)} with "
            f"warmup={optimization.warmup}. Use torch's SequentialLR with LinearLR in the factory instead."
        )
    if scale != 1:
        raise PlanError(
            f"to_lightning() cannot combine the torch scheduler {label(optimization.schedule)} with scale_lr=True. "
            f"Multiply its learning rates by {scale:g} in the factory instead."
        )
    return _made(optimization, optimizer)


def _made(optimization: OptimizerConfig, optimizer: torch.optim.Optimizer) -> LRScheduler:
    factory = optimization.schedule
    assert not isinstance(factory, str)
    try:
        scheduler: object = factory(optimizer, **optimization.schedule_options)
    except Exception as error:
        raise PlanError(
            f"schedule={label(factory)} cannot create its scheduler for the optimizer {type(optimizer).__name__} with "
            f"{len(optimizer.param_groups)} parameter group(s): {error}."
        ) from error
    refuse_plateau(scheduler)
    if not isinstance(scheduler, LRScheduler):
        raise PlanError(
            f"schedule={label(factory)} returned {scheduler!r:.80}, which is not a scheduler of "
            "torch.optim.lr_scheduler. Return one; or if it is a function of the progress, do not name its parameter "
            "optimizer."
        )
    return scheduler


class _TorchScheduler:
    """A scheduler of torch, at any step. It only knows the next one, so for another (a run that resumes) it is created
    again and stepped as often: the same operations on the same numbers."""

    def __init__(self, optimization: OptimizerConfig, optimizer: torch.optim.Optimizer) -> None:
        self._optimization, self._optimizer = optimization, optimizer
        self._initial = self._values()
        self._scheduler: LRScheduler | None = None
        self._rates: list[Any] = []
        self._step = -1
        self._reset()  # a copy of a learning rate that is a tensor, which torch writes in place
        self._create()  # to fail now, before training
        self._reset()
        self._scheduler = None

    def rates(self, step: int) -> list[Any]:
        if self._scheduler is None or not self._step <= step <= self._step + 1:
            self._replay(step)
        elif step > self._step:
            self._next()
        return self._rates

    def _replay(self, step: int) -> None:
        """Hyperparameters that the scheduler does not change keep their current values."""
        current = self._values()
        self._reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that this optimizer has not stepped
            self._create()
            while self._step < step:
                self._next()
        for group, before, now in zip(self._optimizer.param_groups, self._initial, current, strict=True):
            for key, value in now.items():
                if key in before and group.get(key) == before[key]:
                    group[key] = value

    def _create(self) -> None:
        self._scheduler, self._step = _made(self._optimization, self._optimizer), 0
        self._record()

    def _next(self) -> None:
        assert self._scheduler is not None
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate  # without the warm-up's factor: many compute the next one from it
        try:
            self._scheduler.step()
        except ValueError as error:  # of OneCycleLR, after its last step
            raise PlanError(
                f"schedule={label(self._optimization.schedule)} ends at step {self._step}: {error}. {_CHECK_LENGTH}"
            ) from error
        self._step += 1
        self._record()

    def _record(self) -> None:
        self._rates = [plain(group["lr"]) for group in self._optimizer.param_groups]  # NumPy's are no floats
        for rate in self._rates:
            value = rate.item() if isinstance(rate, torch.Tensor) else rate
            if not is_number(value, "[0, inf)"):
                raise PlanError(
                    f"schedule={label(self._optimization.schedule)} sets the learning rate {value!r} at step "
                    f"{self._step}; it must be a finite number, 0 or more. {_CHECK_LENGTH}"
                )

    def _values(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{key: _copied(value) for key, value in group.items() if key != "params"} for group in groups]

    def _reset(self) -> None:
        self.remove_own()
        for group, own in zip(self._optimizer.param_groups, self._initial, strict=True):
            group.update({key: _copied(value) for key, value in own.items()})

    def remove_own(self) -> None:
        """Remove what schedulers add to the groups: the next one would begin with the `initial_lr` that it finds."""
        for group, own in zip(self._optimizer.param_groups, self._initial, strict=False):
            for key in [key for key in group if key not in own and key != "params"]:
                del group[key]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
