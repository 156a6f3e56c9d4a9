"""What the steps of each rank take, and which rank the others wait for.

In synchronous training all ranks' steps take equally long, because each waits for the slowest. What differs is the time
that a rank spends without waiting for another one: from the end of a step until the next batch is there (callbacks,
logging, checkpoints, data), and in the forward. It is measured on the host's clock; a forward on CUDA, of one
microbatch per interval, by two events on the device, which nothing waits for.

- A GPU's host runs up to a step ahead. What it then waits for the device is subtracted from the time between two steps:
  waiting for data that the device does not wait for delays nobody.
- The forward counts if nothing is exchanged in it: not with sharded parameters (FSDP, ZeRO-3) or synchronized
  BatchNorm, where the ranks wait for each other. There, a slow device is not seen; slow data and callbacks are.
- The backward does not count: the ranks exchange gradients in it.

Cost: a few readings of the clock per step (4 µs); once per interval, four numbers per rank more in the exchange in
which the ranks agree on non-finite losses anyway. There is no further collective, and no synchronization.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Sequence
from statistics import median_low
from time import perf_counter
from typing import Any, NamedTuple

import psutil
import torch

from ...strategies import Engine
from ...strategies.launching.group import group_store
from .observer import Observer
from .state import TrainState

FACTOR = 1.5
"""A straggler's own time is so many times the median's: more than equal machines differ by."""
SHARE = 0.1
"""And at least that share of a step longer: less costs the others little, however small the median is."""
INTERVALS = 3
"""In so many consecutive intervals: one may contain a checkpoint, or a cold cache."""
LEAST = 10
"""Steps of an interval, at least: it is `log_every` steps or the next multiple, since single steps differ by chance."""


class StragglerWarning(UserWarning):
    """One rank is slower than the others, which wait for it in each step.

    Example::

        >>> import warnings
        >>> warnings.simplefilter("error", StragglerWarning)  # end the run instead
    """


class RankTimes(NamedTuple):
    """The steps of one rank in an interval: means per step, in seconds."""

    step: float  # equal on all ranks, up to the host's running ahead
    own: float  # without waiting for other ranks, as far as it is measured
    data_wait: float
    memory: float  # bytes: the most that was allocated on the GPU; on the CPU the process's resident memory


GAUGES = ("step_seconds", "own_seconds", "data_wait_seconds", "memory_bytes")
"""Names of these numbers outside."""


class RankClock(Observer):
    """Measures this rank, and on rank 0 receives the times of all and names stragglers; the first of a run's observers.
    `NonFiniteGuard` exchanges what `numbers` returns. `every` is the run's `log_every`; `apart`: whether the forward
    exchanges nothing; `received` is called with the times of all ranks and the step, `named` with a new straggler."""

    def __init__(
        self, engine: Engine, every: int, *, apart: bool, received: Callable[[Sequence[RankTimes], int], None],
        named: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self._engine, self._every, self._apart = engine, -(-LEAST // every) * every, apart
        self._received, self._named = received, named
        self._cuda = engine.device.type == "cuda"
        self._sample: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._begun = self._sampled = 0.0  # a forward's begin; the newest forward on the device
        # The last step's end, where this one begins, and the data wait until then.
        self._end = self._mark = self._data = 0.0
        self._host = self._ahead = self._forward = 0.0  # of the current step
        self._steps, self._sums = 0, [0.0, 0.0, 0.0]  # of the interval: as in `RankTimes`
        self._slow = [0] * engine.world_size  # consecutive intervals

    def on_start(self, state: TrainState) -> None:  # noqa: ARG002
        group_store("hosts").set(str(self._engine.rank), socket.gethostname())

    def on_epoch_start(self, state: TrainState) -> None:
        self._end = self._mark = self._now(state)
        self._data = state.meter.data_wait_s

    @staticmethod
    def _now(state: TrainState) -> float:
        return perf_counter() - state.meter.evaluation_s

    def on_step_start(self, state: TrainState) -> None:
        self._host = self._now(state) - self._mark

    def waited(self, seconds: float) -> None:
        """Between two steps, this rank has waited for others."""
        self._mark += seconds

    def ran_ahead(self, seconds: float) -> None:
        """In this step, the host has waited for the device, which still computed the one before."""
        self._ahead += seconds

    def before_forward(self, state: TrainState) -> None:  # noqa: ARG002
        if not self._cuda:
            self._begun = perf_counter()
        elif self._apart and self._sample is None:
            self._sample = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._sample[0].record(torch.cuda.current_stream(self._engine.device))
            self._begun = 1.0

    def after_forward(self, state: TrainState) -> None:  # noqa: ARG002
        if not self._cuda:
            self._forward += perf_counter() - self._begun
        elif self._sample is not None and self._begun:
            self._sample[1].record(torch.cuda.current_stream(self._engine.device))
            self._begun = 0.0

    def on_step_end(self, state: TrainState) -> None:
        now, data = self._now(state), state.meter.data_wait_s
        own = max(self._host - self._ahead, 0.0) + self._forward * self._apart
        for at, seconds in enumerate((now - self._end, own, data - self._data)):
            self._sums[at] += seconds
        self._steps += 1
        self._host = self._ahead = self._forward = 0.0
        self._end = self._mark = now
        self._data = data

    def numbers(self, step: int) -> Sequence[float]:
        """Return this rank's `RankTimes` since the last ones, at the end of an interval, else nothing."""
        if step % self._every or not self._steps:
            return ()
        if self._sample is not None and not self._begun and self._sample[1].query():  # type: ignore[no-untyped-call]
            milliseconds = self._sample[0].elapsed_time(self._sample[1])
            self._sampled, self._sample = milliseconds / 1000 * self._engine.accumulate, None
        taken, own, data = (seconds / self._steps for seconds in self._sums)
        self._steps, self._sums = 0, [0.0, 0.0, 0.0]
        memory = (
            torch.cuda.max_memory_allocated(self._engine.device) if self._cuda else psutil.Process().memory_info().rss
        )
        return RankTimes(taken, own + self._sampled, data, memory)

    def receive(self, step: int, numbers: Sequence[float]) -> None:
        """Take the numbers of all ranks, one after the other."""
        if self._engine.rank or not numbers:
            return
        width = len(RankTimes._fields)
        times = [RankTimes(*numbers[at : at + width]) for at in range(0, len(numbers), width)]
        self._received(times, step)
        middle = median_low(each.own for each in times)  # of two ranks the faster one
        for rank, each in enumerate(times):
            is_slow = each.own > FACTOR * middle and each.own - middle > SHARE * each.step
            self._slow[rank] = self._slow[rank] + 1 if is_slow or self._slow[rank] >= INTERVALS else 0
            if self._slow[rank] == INTERVALS:
                self._name(rank, each, middle, step)

    def _name(self, rank: int, times: RankTimes, middle: float, step: int) -> None:
        host = group_store("hosts").get(str(rank)).decode()
        self._named(
            {"rank": rank, "host": host, "step": step, "own_s": times.own, "median_s": middle,
             "data_wait_s": times.data_wait}
        )  # fmt: skip
        remedy = "its callbacks, other processes on its machine, and its GPU's clocks"
        if times.data_wait > 0.5 * (times.own - middle):
            remedy = "its disk or network, and the processor cores for loading (doctor)"
        warnings.warn(
            f"Rank {rank} ({host}) is slow, and the other ranks wait for it: in {INTERVALS} consecutive intervals of "
            f"{self._every} steps, until step {step:,}, it takes {times.own:.3f} s of its own per step, of which "
            f"{times.data_wait:.3f} s are waiting for data; the ranks' median is {middle:.3f} s. Look at {remedy}.",
            StragglerWarning,
            stacklevel=2,
        )
