"""What makes the ledger's figures honest: interleaving, warm-up, synchronization, intervals, separate costs."""

import json
import os
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
from command_line import call
from drivetrain import Classification, Pipeline, PlanError
from drivetrain.pipeline.describe.config import DistributedConfig
from drivetrain.pipeline.describe.cuda_settings import uses_gpu
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.comparison import differences
from drivetrain.pipeline.ledger.data import Accuracies, Trained  # fmt: skip
from drivetrain.pipeline.ledger.ledger import Ledger
from drivetrain.pipeline.ledger.variant import (
    COPY,
    LOADER,
    MODEL,
    PLAIN,
    SPLIT,
    Costs,
    Trial,
    VariantId,
    in_turn,
    only,
    without,
)
from drivetrain.pipeline.measuring import runner as ledger_runner
from drivetrain.pipeline.measuring import trials as ledger_trials
from drivetrain.pipeline.measuring.ledger import seconds_to, train_each
from drivetrain.pipeline.measuring.runner import (
    MIN_BATCHES,
    Loaders,
    Variant,
    VariantRunner,
    build_variant,
    largest,
    resident_peak,
)
from drivetrain.pipeline.measuring.trials import mean_trial, run_trial
from drivetrain.pipeline.measuring.variants import possible, variants
from drivetrain.pipeline.telemetry.history import Epoch, Monitor
from drivetrain.pipeline.telemetry.provenance import provenance
from drivetrain.strategies import Single
from drivetrain.transforms import LabelSmoothing, ProgressiveResizing, Transform
from ledgers import (
    BATCH,
    TRAIN,
    Acting,
    built,
    in_process,
    measurement_of,
    of_speeds,
    small_recipe,
    trials_of,
)
from pipeline_data import Toy, plain_model
from torch import nn
from torchmetrics import MeanMetric

SLOW = 0.5  # seconds: far more than a trial of the tiny model takes


class SlowAtFirst(Acting):
    """Of its forwards in training, on whole batches, those of these numbers, from 1 on, take `SLOW` seconds."""

    def __init__(self, *slow: int) -> None:
        super().__init__()
        self.slow = slow

    def act(self, _: torch.Tensor) -> None:
        time.sleep(SLOW * (self.forwards in self.slow))


@pytest.mark.long
def test_warm_up_is_left_out(toy: Toy) -> None:
    # It trains twice for one batch once it is built, and again to see how long a batch and rounds take.
    pipeline = in_process(toy, SlowAtFirst(1, 3))
    ledger = pipeline.ledger(seconds=12 * SLOW, within=0.99, progress=False)
    assert not ledger.notes  # there are rounds
    assert max(trial.seconds for trials in ledger.rounds for trial in trials.values()) < SLOW


def test_compiling_is_told_and_not_counted(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is slow at first stands for one that is compiled then, which would take a minute."""
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    pipeline = in_process(toy, SlowAtFirst(1))
    with ExitStack() as stack:
        _, costs = build_variant(resolve(pipeline.distribute("single", compile=True)), Loaders(stack), stack)
    assert costs.compile_seconds is not None
    assert costs.compile_seconds > SLOW / 2
    held = dict.fromkeys(("parameters", "gradients", "optimizer"), 2**20)
    plain = Costs(held, 300 * 2**20, None)
    compiled = Costs(held, None, 12.34)
    speeds = {PLAIN: 100.0, in_turn("compile"): 150.0}
    text = str(of_speeds(speeds, speeds, costs={PLAIN: plain, in_turn("compile"): compiled}))
    assert "Compile time, before the measurement: + compile 12.3 s." in text
    assert "Peak memory per rank: plain PyTorch 300 MiB." in text
    (row,) = (line for line in text.splitlines() if line.startswith("│ + compile "))
    assert row.split("│")[-2].strip() == "3.0"  # MiB held


def test_the_compile_time_is_that_of_all_sizes(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size of a schedule is compiled, whatever its share of the run; here the first two of three are slow."""
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)
    pipeline = in_process(toy, SlowAtFirst(1, 1 + MIN_BATCHES)).transform(ProgressiveResizing())
    with ExitStack() as stack:
        _, costs = build_variant(resolve(pipeline.distribute("single", compile=True)), Loaders(stack), stack)
    assert costs.compile_seconds is not None
    assert costs.compile_seconds > 1.5 * SLOW


def test_every_second_round_goes_backwards(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no variant always follows the same neighbour; the rows stay in order."""
    work, taken = ledger_runner.run_trial, []

    def noted(variant: Any, kind: Any, *more: Any) -> Any:
        taken.append((id(variant), kind))
        return work(variant, kind, *more)

    pipeline = in_process(toy)
    with ExitStack() as stack:
        loaders = Loaders(stack)
        whole = [Variant(in_turn("whole"), pipeline), Variant(LOADER, pipeline)]
        runners = [VariantRunner(group, loaders) for group in ([Variant(PLAIN, pipeline)], whole)]
        measurement = measurement_of(pipeline, PLAIN, in_turn("whole"), LOADER)
        monkeypatch.setattr(ledger_runner, "run_trial", noted)
        rounds = [list(measurement.round(runners, number, batches=1)) for number in (1, 2)]
    assert rounds == [[PLAIN, in_turn("whole"), LOADER]] * 2
    assert [kind for _, kind in taken] == ["train", "train", "loader", "loader", "train", "train"]
    assert taken[3:] == taken[:3][::-1]


@dataclass(frozen=True)
class Naps(Transform):
    """A batch transform that takes its time."""

    kind: ClassVar[Any] = "batch"

    def batch(self, images: torch.Tensor, labels: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.06)
        return images, labels


def napping(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    time.sleep(0.1)
    return nn.functional.cross_entropy(outputs, targets.long())


def test_transforms_and_loss_are_parts_of_their_own(toy: Toy) -> None:
    pipeline = in_process(toy).transform(Naps()).task(Classification(loss=napping))
    with built(pipeline) as variant:
        parts = run_trial(variant, "split", epoch=1, batches=2)[0].parts
    assert parts is not None
    assert 0.12 <= parts["transforms"] < 0.2 <= parts["loss"]
    assert parts["forward"] < 0.1


class InGroup(Single):
    """Trains on one device, in a process group."""

    needs_group = True


def test_a_strategy_that_needs_a_process_group_is_measured_on_a_rank(toy: Toy) -> None:
    with ExitStack() as stack:
        for strategy, on_ranks in ((InGroup("cpu"), True), (Single("cpu"), False)):
            pipeline = in_process(toy).distribute(strategy)
            runner = VariantRunner([Variant(PLAIN, pipeline)], Loaders(stack))
            assert runner.on_ranks == on_ranks
            runner.close()


@pytest.mark.usefixtures("one_process_group")
def test_a_rank_measures_no_ledger(toy: Toy) -> None:
    with pytest.raises(PlanError, match="Start it without torchrun, and outside a process group"):
        toy.pipeline().ledger(seconds=1)


def test_a_turn_ends_when_the_device_has_done_its_work(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that has still work to do: before the trial, at its end, within its parts."""
    pending: list[float] = []
    monkeypatch.setattr(ledger_trials, "wait_for", lambda _: time.sleep(pending.pop(0) if pending else 0))
    with built(in_process(toy)) as variant:
        pending[:] = [0.5]
        assert run_trial(variant, "train", epoch=1, batches=1)[0].seconds < 0.5
        pending[:] = [0, 0.3]
        assert run_trial(variant, "train", epoch=1, batches=1)[0].seconds >= 0.3
        pending[:] = [0, 0, 0, 0.1, 0, 0.15, 0, 0.2]  # before the trial; before and after each part
        parts = run_trial(variant, "split", epoch=1, batches=1)[0].parts
    assert parts is not None
    assert (parts["forward"] >= 0.1, parts["backward"] >= 0.15, parts["step"] >= 0.2) == (True,) * 3


def test_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in ("cpu", "cuda:1"):
        ledger_trials.wait_for(torch.device(device))
    assert waited == [torch.device("cuda:1")]


def test_it_ends_when_each_ratio_is_narrow_not_only_the_rows() -> None:
    calm = {
        PLAIN: 100.0, in_turn("a"): 200.0, in_turn("b"): 300.0, in_turn("c"): 400.0, only("b"): 150.0,
        without("a"): 350.0,
    }  # fmt: skip
    shaken = [calm | {in_turn("a"): 200 * by, in_turn("b"): 300 / by} for by in (1.0, 1.01, 0.99, 1.02)]
    ledger = of_speeds(*shaken)
    assert ledger.spread == ledger.stages[1].in_turn.spread  # twice what either row's is
    assert ledger.spread > 1.9 * max(row.ratio.spread for row in ledger.rows)
    for name in (only("b"), without("a")):
        ledger = of_speeds(*(calm | {name: 150 * by} for by in (1.0, 1.1, 0.9)))
        (moved,) = {gain for stage in ledger.stages for gain in (stage.alone, stage.last) if gain and gain.spread}
        assert ledger.spread == moved.spread > 0.1


def test_the_whole_is_the_pipeline_that_was_asked_for(toy: Toy) -> None:
    how = {"precision": "bf16", "compile": True, "accumulate": 2, "clip_norm": 1.0}
    pipeline = toy.pipeline().transform(LabelSmoothing(0.1)).distribute("single", **how)
    plain, *_, whole, _ = (one.spec for one in variants(resolve(pipeline)))
    for part in ("data", "transforms", "distribution"):
        assert getattr(whole, part) == getattr(pipeline, part)
    assert plain.data is not None
    assert (plain.data.loader, plain.transforms) == ("torch", ())
    one = plain.distribution
    assert (one.name, one.devices, one.precision, one.compile) == ("single", 1, "fp32", False)
    assert (one.accumulate, one.clip_norm) == (1, None)


def test_a_gpu_has_the_ceiling_of_its_copies(toy: Toy) -> None:
    for device, copies in (("cpu", False), ("cuda", True)):
        plan = resolve(toy.pipeline())
        assert uses_gpu(DistributedConfig(options={"device": device})) is copies
        kinds = {one.id: one.id.workload for one in variants(plan, copies=copies)}
        assert kinds.get(COPY) == ("copy" if copies else None)


def test_the_sentence_says_how_long_is_waited_and_what_a_slow_step_is() -> None:
    parts = {"forward": 2.0, "backward": 2.0, "step": 5.0}
    speeds = {PLAIN: 100.0, in_turn("a"): 200.0, LOADER: 1000.0, MODEL: 210.0}
    trials = trials_of(speeds, waited=0.25)
    trials[SPLIT] = Trial(1000, 10.0, 1.0, parts=parts)
    bound = Ledger([trials, trials], {"recipe": None}).bound
    assert "and waits for data 25% of the time" in bound
    assert bound.endswith("Next, make the training step faster: the optimizer's step takes 50% of the time.")
    slow = {
        PLAIN: 100.0, in_turn("a"): 80.0, in_turn("b"): 60.0, in_turn("c"): 50.0, without("a"): 62.5,
        without("b"): 75.0, LOADER: 1e3, MODEL: 51,
    }  # fmt: skip
    costly = of_speeds(slow, slow, slow)
    assert costly.bound.endswith("make the training step faster: without b it is 1.50 × as fast.")


def test_the_slowest_rank_counts_and_the_largest_cost() -> None:
    labels = [np.array([1, 2])]
    ranks = [(Trial(64, seconds, 0.1 * seconds), labels) for seconds in (1.0, 3.0, 2.0)]
    assert (merged := ledger_runner._merged(ranks)).seconds == 3.0
    assert (merged.images, merged.waited) == (64, pytest.approx(0.3))
    costs = [Costs({"parameters": held}, peak) for held, peak in ((1, 9), (5, 2))]
    assert largest(costs) == Costs({"parameters": 5}, 9)


def test_turns_of_a_schedule_are_weighed_by_their_shares() -> None:
    one, two = (Trial(8, 4.0 * by, 2.0 * by, "x", {"forward": 1.0 * by}) for by in (1, 3))
    assert mean_trial([one, two], [0.25, 0.75]) == Trial(8, 10.0, 5.0, "x", {"forward": 2.5})


def test_peak_memory_is_what_was_there_at_most() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("the system does not tell")
    before, size = psutil.Process().memory_info().rss, 400 * 2**20
    memory = bytearray(os.urandom(2**20) * (size // 2**20))
    after = resident_peak()
    assert after is not None
    assert before + 0.9 * len(memory) < after < psutil.virtual_memory().total


def test_a_variant_without_a_plan_is_not_trained(toy: Toy) -> None:
    found = possible([Variant(only("no data"), Pipeline(plain_model)), Variant(only("one"), toy.pipeline())])
    assert [one.id for one in found] == [only("one")]


def epoch(number: int, accuracy: float, seconds: float) -> Epoch:
    return Epoch(number, 1.0, 1.0, {"top1": accuracy}, 100.0, 0.0, seconds, 0.1)


def test_time_to_an_accuracy() -> None:
    history = [epoch(1, 0.3, 2.0), epoch(2, 0.6, 3.0), epoch(3, 0.5, 4.0)]
    found = [seconds_to(target, history, Monitor()) for target in (0.2, 0.3, 0.31, 0.6, 0.61)]
    assert found == [2.0, 2.0, 5.0, 5.0, None]


def test_each_variant_trains_as_long_and_its_last_accuracy_counts(
    toy: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.common.terminal.is_interactive", lambda: True)
    pipeline = in_process(toy).optimize("sgd", lr=0.005, momentum=0.9, schedule="constant")
    smooth = pipeline.transform(LabelSmoothing(0.9))
    one, two = only("one"), only("two")
    rows: dict[VariantId, Trained] = {}
    train_each([Variant(one, pipeline), Variant(two, smooth)], rows, 3, 0.01, progress=True)
    assert "ledger: accuracy, training 2/2: only two" in capsys.readouterr().err
    for name, trained in ((one, pipeline), (two, smooth)):
        row, epochs = rows[name], trained.fit(epochs=3, progress=False).history.epochs
        assert row.accuracy == epochs[-1].accuracy not in [epoch.accuracy for epoch in epochs[:-1]]
        assert row.seconds_to_target is not None
        assert row.seconds is not None
        assert row.seconds_to_target < row.seconds  # the first epoch has reached so little


class Undefined(MeanMetric):
    """A share without a value, as one over no sample."""

    higher_is_better = True
    unit = "fraction"

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:  # type: ignore[override]
        super().update((outputs.argmax(1) == targets).float())

    def compute(self) -> torch.Tensor:
        return torch.tensor(torch.nan)


def test_a_training_whose_metric_has_no_value_has_the_reason(toy: Toy) -> None:
    pipeline = in_process(toy).task(Classification(metrics={"undefined": Undefined()}))
    rows: dict[VariantId, Trained] = {}
    train_each([Variant(PLAIN, pipeline)], rows, 1, None, progress=False)
    assert (rows[PLAIN].accuracy, rows[PLAIN].seconds_to_target) == (None, None)
    assert rows[PLAIN].seconds is not None
    ledger = of_speeds({PLAIN: 100.0}, accuracy=Accuracies(1, None, rows, "undefined"))
    reason = f"Training failed: {PLAIN}: undefined has no value in its last evaluation."
    assert reason in ledger.caveats
    assert reason in " ".join(str(ledger).split())


def test_provenance_says_which_machine_revision_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/drivetrain", "ledger", "a b"])
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    found = provenance()
    assert found["environment"]["OMP_NUM_THREADS"] == "7"
    assert "LD_PRELOAD" not in found["environment"]
    other = {**found, "environment": {}}
    assert differences({"provenance": found}, {"provenance": other})[0].startswith("Different env")
    assert found["command"] == shlex.join(["drivetrain", "ledger", "a b"])
    checkout = (Path(ledger_trials.__file__).parents[2] / ".git").exists()
    assert bool(found["git_revision"]) is checkout
    assert found["hardware"]["torch_threads"] == torch.get_num_threads()
    assert found["versions"]["torch"] == torch.__version__.partition("+")[0]


@pytest.mark.long
@pytest.mark.slow
def test_the_command_measures_what_it_is_asked_for(toy: Toy, tmp_path: Path) -> None:
    file, out = small_recipe(tmp_path / "mine.yaml"), tmp_path / "out"
    more = ["--train", toy.train, "--val", toy.val, "--seconds", "30", "--out", str(out)]
    done = call("ledger", str(file), *more, "--accuracy", "--epochs", "1")
    assert done.code == 0, done
    found = json.loads((out / "ledger.json").read_text())
    assert found["seconds_asked"] == 30
    assert found["stopped"]
    assert (found["accuracy"]["epochs"], list(found["accuracy"]["rows"])) == (1, [str(PLAIN)])
    assert found["rounds"][0][str(PLAIN)]["images"] == BATCH * found["batches_per_trial"] <= TRAIN
    assert Ledger.load(out / "ledger.json").bound in " ".join(done.out.split())
    assert (out / "ledger.png").exists()
    assert "must be positive and finite" in call("ledger", str(file), *more[:4], "--seconds", "inf").line
