"""Detect non-finite losses and gradients, on all ranks at the same step."""

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from ...common.errors import NonFiniteError
from ...common.model_state import BufferCopies
from ...strategies import Engine
from ...transforms.common.tensors import locals_of, total_norm
from ..describe.config import OnNonFinite
from ..telemetry.host_copy import HostCopy
from ..telemetry.observer import Observer
from ..telemetry.rank_times import RankClock
from ..telemetry.state import TrainState
from .agreement import Requests

OVERFLOWS = 50
"""Consecutive steps that fp16 may skip: each halves the loss scale, and fp16's range is only 2^-24 to 2^16."""


class NonFiniteGuard(Observer):
    """Raise, or skip the step, if any rank's loss or gradients are not finite. `"raise"` checks the loss before the
    step on the CPU; on CUDA one step later, so that the device never waits. Non-finite gradients show in their norm,
    with `clip_norm`; else in the next loss, those of the last step in the weights, which `check_weights` reads before
    anything keeps them. `"skip"` waits for loss and norm, and restores buffers (BatchNorm's, which a bad batch would
    corrupt). Steps that fp16's loss scaler skips (`scaled`) are expected, up to `OVERFLOWS`. `advice` returns the end
    of an error message; `requests` are agreed on, and the numbers of `clock` are sent, in the same exchange."""

    def __init__(
        self,
        engine: Engine,
        how: OnNonFinite,
        advice: Callable[[], str],
        requests: Requests | None = None,
        *,
        scaled: bool = False,
        clock: RankClock | None = None,
    ) -> None:
        self._clock = clock
        self._engine, self._skip = engine, how == "skip"
        self._requests = requests or Requests()
        self._advice, self._scaled = advice, scaled
        self._at_once = self._skip or engine.device.type != "cuda"
        # Checks of what is still on the device: each with its step, and the copy of its numbers.
        self._late: list[tuple[Callable[[int, Any], object], int, HostCopy]] = []
        self._overflows = 0

    def on_step_start(self, state: TrainState) -> None:  # noqa: ARG002
        if self._skip:
            self._buffers = BufferCopies(self._engine.plain_model)

    @torch.no_grad()
    def should_step(self, state: TrainState) -> bool:
        """On CUDA, raise for the previous step. Every rank must call it."""
        numbers = self._of_all_ranks(state.step_loss, state.step + 1)
        if self._at_once:
            self.flush()
            return self._judged(state.step + 1, numbers.tolist())
        now, start = (self._judged, state.step + 1, HostCopy(numbers)), perf_counter()
        self.flush()
        if self._clock is not None:
            self._clock.ran_ahead(perf_counter() - start)
        self._late.append(now)
        return True

    @torch.no_grad()
    def should_apply(self, state: TrainState) -> bool:  # noqa: ARG002
        """Every rank must call it."""
        if not self._skip or self._scaled or self._finite_gradients():
            return True
        self._buffers.restore()
        return False

    def check_weights(self, state: TrainState) -> None:
        """Every rank must call it."""
        self.flush()
        if self._spoiled():
            raise NonFiniteError(
                f"After step {state.step} the weights are not finite; they were not saved. {self._remedies()}"
            )

    def _of_all_ranks(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        """Return the losses of all ranks, then their requests, `(2 · world_size,)`, and the numbers of their clocks,
        if due; of one rank only its loss."""
        ranks, flags = self._engine.world_size, self._requests.flags()
        if ranks == 1:
            self._requests.agree([flags])
            return loss.reshape(1)
        record = () if self._clock is None else self._clock.numbers(step)
        numbers = torch.zeros((2 + len(record)) * ranks, device=self._engine.device)
        numbers[self._engine.rank] = loss
        for at, number in enumerate(record, 2 * ranks + len(record) * self._engine.rank):
            numbers[at] = number
        if flags:
            numbers[ranks + self._engine.rank] = flags
        return self._engine.reduce(numbers, "sum")

    def on_optimizer_step(self, state: TrainState) -> None:
        self._overflows = self._overflows + 1 if state.overflowed else 0
        step, norm = state.step + 1, state.norm
        if self._overflows == OVERFLOWS:
            self._fail(
                f"At step {step} the gradients overflowed in fp16 for the {OVERFLOWS}th consecutive step, at "
                f"every loss scale: they are not finite, with a finite loss. {self._advice()}"
            )
        if norm is not None and norm.device.type == "cuda":
            self._late.append((self._check_norm, step, HostCopy(norm)))
        elif norm is not None:
            self._check_norm(step, norm.item())

    def flush(self) -> None:
        late, self._late = self._late, []
        for check, step, copy in late:
            check(step, copy.values())

    def _check_norm(self, step: int, value: float) -> None:
        if math.isfinite(value):
            return
        self.flush()  # if the loss is not finite, it is the cause, and raises the better message
        self._fail(
            f"At step {step} the gradient norm is {value}, with a finite loss; the weights are corrupted. "
            f"{self._remedies()}"
        )

    def _judged(self, step: int, numbers: list[float]) -> bool:
        ranks = self._engine.world_size
        losses = numbers[:ranks]
        self._requests.agree(numbers[ranks : 2 * ranks])
        if self._clock is not None:
            self._clock.receive(step, numbers[2 * ranks :])
        bad = {rank: value for rank, value in enumerate(losses) if not math.isfinite(value)}
        if not bad:
            return True
        where = ", ".join(f"{value} on rank {rank}" for rank, value in list(bad.items())[:8])
        if self._skip and not self._spoiled():
            self._buffers.restore()
            return False
        spoiled = " The weights are no longer finite: skipping would not help." * self._skip
        self._fail(f"At step {step} the loss is {where}.{spoiled} {self._remedies()}")
        return True

    def _fail(self, text: str) -> None:
        raise NonFiniteError(text)

    def _remedies(self) -> str:
        skipping = "" if self._skip else " Or skip such steps with fit(on_nonfinite='skip')."
        return f"{self._advice()}{skipping}"

    def _finite_gradients(self) -> bool:
        own = [p.grad for p in self._engine.plain_model.parameters() if p.grad is not None]
        count, infinite = self._engine.reduce(_counted(own), "sum").tolist()
        if not count:  # DeepSpeed has moved them
            infinite = _counted(list(self._engine.gradients().values())).tolist()[1]
        return not infinite

    @torch.no_grad()
    def _spoiled(self) -> bool:
        parameters = [p.detach() for p in self._engine.plain_model.parameters()]
        mine = any(not bool(shard.isfinite().all()) for shard in locals_of(parameters))
        return bool(self._engine.reduce(torch.tensor(float(mine)), "sum").item())


def _counted(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the number of gradients, and 1 if their norm is not finite, else 0."""
    infinite = not math.isfinite(total_norm(gradients).item())
    return torch.tensor([len(gradients), infinite], dtype=torch.float32)
