"""The rule by which a rank is a straggler, and what a rank on a GPU measures without waiting for it."""

import socket
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drivetrain.pipeline.telemetry import rank_times
from drivetrain.pipeline.telemetry.rank_times import RankClock, RankTimes, StragglerWarning
from drivetrain.pipeline.telemetry.state import TrainState


def clock(device: str = "cpu", ranks: int = 4, every: int = 10, *, apart: bool = True) -> tuple[RankClock, list[Any]]:
    engine: Any = SimpleNamespace(rank=0, world_size=ranks, device=torch.device(device), accumulate=2)
    named: list[Any] = []
    return RankClock(engine, every, apart=apart, received=lambda *_: None, named=named.append), named


def receive(taken: RankClock, step: int, *owns: float) -> None:
    taken.receive(step, [number for own in owns for number in RankTimes(1.0, own, 0.0, 0.0)])


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("intervals", "named"),
    [
        ([(0.2, 0.2, 0.4, 0.2)] * 2, []),
        ([(0.2, 0.2, 0.4, 0.2)] * 5, [(2, 30)]),  # once
        ([(0.2, 0.2, 0.4, 0.2)] * 2 + [(0.2, 0.2, 0.2, 0.2)] + [(0.2, 0.2, 0.4, 0.2)] * 2, []),
        ([(0.4, 0.4, 0.55, 0.4)] * 5, []),  # below 1.5 times the median
        ([(0.01, 0.01, 0.1, 0.01)] * 5, []),  # ten times the median, but less than a tenth of a step longer
        ([(0.2, 0.4)] * 3, [(1, 30)]),  # of two ranks the other one is the median
        ([(0.9, 0.2, 0.2, 0.8)] * 4, [(0, 30), (3, 30)]),
    ],
)  # fmt: skip
def test_the_rule(intervals: list[tuple[float, ...]], named: list[tuple[int, int]]) -> None:
    taken, found = clock(ranks=len(intervals[0]))
    for rank in range(len(intervals[0])):
        rank_times.group_store("hosts").set(str(rank), f"host-{rank}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, owns in enumerate(intervals, 1):
            receive(taken, 10 * number, *owns)
    assert [(one["rank"], one["step"]) for one in found] == named
    assert [one["host"] for one in found] == [f"host-{rank}" for rank, _ in named]
    assert [one.category for one in caught] == [StragglerWarning] * len(named)
    for one, (rank, _) in zip(caught, named, strict=True):
        assert f"Rank {rank} (host-{rank}) is slow" in str(one.message)


@pytest.mark.usefixtures("one_process_group")
def test_a_rank_leaves_its_host() -> None:
    taken, _ = clock()
    taken.on_start(TrainState())
    assert rank_times.group_store("hosts").get("0").decode() == socket.gethostname()


@pytest.mark.parametrize(("every", "due"), [(50, [50, 100]), (3, [12, 24]), (10, [10, 20])])
def test_an_interval_has_ten_steps_at_least(every: int, due: list[int]) -> None:
    taken, _ = clock(every=every)
    state = TrainState()
    taken.on_epoch_start(state)
    steps = []
    for step in range(1, due[1] + 1):
        if taken.numbers(step):
            steps.append(step)
        taken.on_step_end(state)
    assert steps == due


class Time:
    """The host's clock, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(rank_times, "perf_counter", lambda: self.now)


def steps(taken: RankClock, time: Time, number: int, *, data: float, ahead: float) -> Sequence[float]:
    """Run steps of a second each: waiting for data, two microbatches of a tenth, and waiting for the device."""
    state = TrainState()
    taken.on_epoch_start(state)
    for _ in range(number):
        time.now += data
        state.meter.data_wait_s += data
        taken.on_step_start(state)
        for _ in range(2):
            taken.before_forward(state)
            time.now += 0.1
            taken.after_forward(state)
        taken.ran_ahead(ahead)
        time.now += 0.8 - data
        taken.on_step_end(state)
    return taken.numbers(10)


@pytest.mark.parametrize(("apart", "own"), [(True, 0.5), (False, 0.3)])
def test_on_the_cpu(monkeypatch: pytest.MonkeyPatch, apart: bool, own: float) -> None:
    taken, _ = clock(apart=apart)
    times = RankTimes(*steps(taken, Time(monkeypatch), 9, data=0.3, ahead=0.0))
    assert times[:3] == pytest.approx((1.0, own, 0.3))
    assert times.memory > 1e7


def test_on_a_gpu_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the forwards of an interval one is timed, by events that are read once they have happened; waiting for data
    counts as far as the host does not wait for the device after it."""
    made: list[Any] = []
    arrived = [False]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)

        def record(self, stream: Any) -> None:
            assert stream == ("stream of", torch.device("cuda"))

        def query(self) -> bool:
            return arrived[0]

        def elapsed_time(self, end: Any) -> float:
            assert arrived[0]
            assert made.index(end) == made.index(self) + 1
            return 50.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3e9 if device.type == "cuda" else 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    taken, _ = clock("cuda")
    time = Time(monkeypatch)
    assert steps(taken, time, 9, data=0.3, ahead=0.25) == pytest.approx((1.0, 0.05, 0.3, 3e9))
    arrived[0] = True
    assert steps(taken, time, 9, data=0.3, ahead=0.5) == pytest.approx((1.0, 0.05 * 2, 0.3, 3e9))
    assert len(made) == 2
    steps(taken, time, 9, data=0.3, ahead=0.0)
    assert len(made) == 4
