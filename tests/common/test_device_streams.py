"""Work on a GPU that is not the current one: which streams and devices are used, and what waits. Without a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drivetrain import Classification, NonFiniteError, strategies
from drivetrain.pipeline.telemetry import loggers
from drivetrain.pipeline.telemetry.host_copy import HostCopy
from drivetrain.pipeline.telemetry.loggers import LoggerWarning, Metrics
from drivetrain.pipeline.telemetry.observer import Observer
from drivetrain.pipeline.telemetry.progress import Progress
from drivetrain.pipeline.telemetry.state import TrainState
from drivetrain.pipeline.training import guard as nonfinite
from drivetrain.pipeline.training.guard import NonFiniteGuard
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import evaluate, train_epoch
from drivetrain.strategies.deepspeed.engine import DeepSpeedEngine
from drivetrain.transforms import EMA, SWA, Lookahead, Transform
from host_syncs import HostSyncs, SimulatedCuda
from pipeline_data import batch_norm_model
from places import ROOT
from torch import nn

SECOND = torch.device("cuda", 1)


def test_an_event_is_recorded_on_the_stream_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is another; the copy is queued first, to pinned memory, and nothing waits."""
    calls: list[Any] = []

    class Event:
        def record(self, stream: Any = "the current device's") -> None:
            calls.append(("record", stream))

        def query(self) -> bool:
            calls.append("query")
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    with SimulatedCuda() as copies:
        copy = HostCopy(torch.zeros((), device=SECOND))
        assert copies.found == []
        assert not copy.arrived
    assert calls == [("record", ("stream of", SECOND)), "query"]


def test_a_copy_on_the_cpu_is_there_and_stays() -> None:
    value = torch.tensor([1.0, 2.0])
    copy = HostCopy(value)
    value.zero_()
    assert copy.arrived
    assert copy.values() == [1.0, 2.0]


def test_the_loop_runs_on_its_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error the former one is current again."""
    stack = [torch.device("cuda", 0)]  # the current one last

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        stack.append(chosen)
        try:
            yield
        finally:
            stack.pop()

    engine = strategies.get("single", device="cpu").prepare(
        nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    engine.device = SECOND
    engine.reduce = lambda value, op="mean": value  # type: ignore[method-assign]  # noqa: ARG005
    batches = [(torch.zeros(2, 3, 1, 1), torch.zeros(2, dtype=torch.long))]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", device)
        seen: list[torch.device] = []
        engine.model.register_forward_hook(lambda *_: seen.append(stack[-1]))
        monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: torch.ones(*a, **k) * 0)  # noqa: ARG005
        train_epoch(engine, batches, nn.functional.cross_entropy)
        evaluate(engine, batches, task=Classification(metrics=()))
        assert seen == [SECOND, SECOND]
        assert stack == [torch.device("cuda", 0)]
        with pytest.raises(ZeroDivisionError):
            train_epoch(engine, batches, lambda *_: 1 / 0)  # type: ignore[arg-type]
        assert stack == [torch.device("cuda", 0)]


class Queued:
    """In the place of HostCopy: counts how often somebody waited."""

    waited: list[Any] = []  # noqa: RUF012

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor.tolist()

    def values(self) -> Any:
        self.waited.append(self._values)
        return self._values


class OnGpu:
    """A number that pretends to be on a GPU."""

    device = SECOND

    def __init__(self, value: float) -> None:
        self._value = value

    def tolist(self) -> float:
        return self._value


def late_guard(monkeypatch: pytest.MonkeyPatch) -> tuple[NonFiniteGuard, TrainState]:
    """Return a guard on a GPU whose copies are counted, and the position that it reads."""
    monkeypatch.setattr(nonfinite, "HostCopy", Queued)
    monkeypatch.setattr(Queued, "waited", [])
    return NonFiniteGuard(SimpleNamespace(world_size=1, device=SECOND), "raise", str), TrainState()


def step(guard: NonFiniteGuard, state: TrainState, loss: float, norm: float) -> None:
    state.step_loss, state.norm = torch.tensor(loss), OnGpu(norm)  # type: ignore[assignment]
    guard.should_step(state)
    guard.on_optimizer_step(state)
    state.step += 1


def test_the_norm_is_looked_at_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, state = late_guard(monkeypatch)
    step(guard, state, 0.5, 1.0)
    assert Queued.waited == []
    step(guard, state, 0.25, torch.inf)
    assert Queued.waited == [[0.5], 1.0]
    with pytest.raises(NonFiniteError, match="At step 2 the gradient norm is inf, with a finite loss"):
        step(guard, state, 0.1, 1.0)


def test_a_bad_loss_comes_before_its_norm_and_both_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, state = late_guard(monkeypatch)
    step(guard, state, torch.nan, torch.nan)
    with pytest.raises(NonFiniteError, match="At step 1 the loss is nan on rank 0"):
        step(guard, state, 0.5, 1.0)
    guard, state = late_guard(monkeypatch)
    step(guard, state, 0.5, torch.nan)
    with pytest.raises(NonFiniteError, match="At step 1 the gradient norm is nan"):
        guard.flush()


def test_the_bar_waits_for_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows the loss when it has arrived."""
    here = [False]

    class Slow(HostCopy):
        arrived = property(lambda _: here[0])  # type: ignore[assignment]

    monkeypatch.setattr("drivetrain.pipeline.telemetry.progress.HostCopy", Slow)
    state = TrainState(step_images=10)
    state.step_loss = torch.tensor(0.5)
    with Progress(1, 1, 30, show=True, file=sys.stderr) as bar:
        bar.on_step_end(state)
        assert "0.5000" not in str(bar._bar)
        here[0] = True
        state.step_loss = torch.tensor(0.25)
        bar.on_step_end(state)
        assert "0.5000" in str(bar._bar)


@pytest.mark.parametrize("method", [None, EMA(half_life=5), Lookahead(2), SWA(start=0.5, end=0.9)], ids=str)
def test_a_step_reads_nothing_from_the_device(method: Transform | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward, clipping, step and averages, with and without accumulation; fp16 reads one number."""
    monkeypatch.setattr("drivetrain.pipeline.training.loop._reads_are_free", lambda _: False)  # as on a GPU
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3, 16, 16), torch.arange(8) % 4) for _ in range(8)]
    for precision, reads in (("fp32", 0), ("bf16", 0), ("fp16", len(batches))):
        engine = strategies.get("single", device="cpu").prepare(
            batch_norm_model(), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            clip_norm=1.0, accumulate=2, precision=precision,
        )  # fmt: skip
        methods = TrainingHooks([] if method is None else [method])
        methods.begin(engine, len(batches))
        lines: list[str] = []

        class After(Observer):
            def on_step_end(self, *_: object) -> None:
                lines.extend(syncs.found)  # noqa: B023 — of this turn
                syncs.found.clear()

        with HostSyncs() as syncs:
            # What comes after the last step, once an epoch, may wait.
            train_epoch(engine, batches, nn.functional.cross_entropy, methods, observer=After())
        # SWA looks once, as it begins, which buffers are finite.
        lines = [line for line in lines if "averaging.py" not in line or method != SWA(start=0.5, end=0.9)]
        assert len(lines) == reads, lines
        assert all("engine.py" in line for line in lines)


@pytest.mark.parametrize(("stage", "name"), [(2, "reduction_stream"), (3, "reduce_and_partition_stream")])
def test_deepspeeds_gradients_are_dropped_after_their_reduction(
    monkeypatch: pytest.MonkeyPatch, stage: int, name: str
) -> None:
    """The stream of the engine's device waits for DeepSpeed's, then the gradients go."""
    calls: list[Any] = []
    zero = SimpleNamespace(
        zero_grad=lambda: calls.append("zero_grad"), _release_preflattened_grad_buffers=lambda: None,
        averaged_gradients={}, all_grad_tensors={}, micro_step_id=3, **{name: "DeepSpeed's stream"},
    )  # fmt: skip

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: calls.append((device, other)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    engine._zero, engine._stage, engine.device, engine._microbatches = zero, stage, SECOND, 1
    engine.zero_grad()
    assert calls == [(SECOND, "DeepSpeed's stream"), "zero_grad"]


def test_no_other_files_record_events() -> None:
    """Both do on the stream of a device that they name."""
    files = chain(*((ROOT / room).rglob("*.py") for room in ("pipeline", "transforms", "strategies")))
    names = sorted(path.name for path in files if ".record(" in path.read_text())
    assert names == ["host_copy.py", "rank_times.py"]


def test_numbers_next_to_tensors_are_logged_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, query=lambda: False))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    metrics = Metrics((SimpleNamespace(log=lambda *_, **__: None),), None, 1)
    metrics.on_start(TrainState())
    with SimulatedCuda() as copies:
        metrics.log({"norm": torch.ones((), device="cuda"), "rate": 0.1, "own": torch.ones(1)}, 1)
        assert copies.found == []
    ((_, names, copy, _),) = metrics._pending
    assert names == ["norm", "rate", "own"]
    assert copy._host.tolist() == pytest.approx([1.0, 0.1, 1.0])


@pytest.mark.parametrize("answer", ["late", "never", "an error"])
def test_after_a_failure_values_may_arrive_for_a_moment(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning has the step of those that do not."""
    looks: list[bool] = []

    class Slow(HostCopy):
        @property
        def arrived(self) -> bool:
            looks.append(answer == "late" and len(looks) > 2)
            if answer == "an error" and len(looks) > 1:
                raise RuntimeError("CUDA error: unspecified launch failure")
            return looks[-1]

    monkeypatch.setattr(loggers, "HostCopy", Slow)
    if answer == "never":
        monkeypatch.setattr(loggers, "_PATIENCE", 0.05)
    logged: list[int] = []
    metrics = Metrics((SimpleNamespace(log=lambda _, step: logged.append(step)),), None, 1)
    metrics.on_start(TrainState())
    metrics.log({"norm": 0.5}, 7)
    assert logged == []
    with nullcontext() if answer == "late" else pytest.warns(LoggerWarning, match="from step 7 on is lost"):
        metrics.on_end(failed=True)
    assert logged == [7] * (answer == "late")
