"""Measured ledgers: real training runs on tiny data, with a known bottleneck that sleeps."""

import dataclasses
import html
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from drivetrain import DrivetrainError, NonFiniteError, Pipeline, PlanError
from drivetrain import transforms as t
from drivetrain.loaders import FFCVLoader, TorchLoader, convert
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.ledger import Ledger
from drivetrain.pipeline.ledger.variant import (
    EXTRAS,
    LOADER,
    MODEL,
    PLAIN,
    SPLIT,
    VariantId,
    in_turn,
    only,
    without,
)
from drivetrain.pipeline.measuring import trials as measured_trials
from drivetrain.pipeline.measuring.ledger import TIGHT_ROUNDS
from drivetrain.pipeline.measuring.runner import Loaders, Variant, VariantRunner, groups
from drivetrain.pipeline.measuring.trials import phases, run_trial
from drivetrain.pipeline.measuring.variants import alone_and_without, stages, variants
from drivetrain.pipeline.telemetry import progress
from drivetrain.pipeline.telemetry.loggers import CSVLogger
from drivetrain.pipeline.telemetry.progress import Progress
from drivetrain.pipeline.training.guard import NonFiniteGuard
from host_syncs import SimulatedCuda
from ledgers import BATCH, TRAIN, Acting, built, in_process, measurement_of
from pipeline_data import CLASSES, SIDE, Sleepy, Toy, plain_model, surroundings, write_toy
from process_state import running_children
from torch import nn

OF_THE_WHOLE = [LOADER, MODEL, SPLIT, EXTRAS]
PARAMETERS = sum(parameter.numel() for parameter in plain_model().parameters())


def names(pipeline: Pipeline) -> list[VariantId]:
    return [variant.id for variant in variants(resolve(pipeline))]


def test_rows_follow_what_was_asked_for(toy: Toy) -> None:
    assert names(toy.pipeline(loader="torch")) == [PLAIN, *OF_THE_WHOLE]
    ddp = toy.pipeline().distribute("ddp", devices=2)
    assert names(ddp) == [PLAIN, in_turn("FFCV loader"), in_turn("ddp × 2"), *OF_THE_WHOLE]
    found = variants(resolve(toy.pipeline().distribute("ddp", devices=2, device="cpu", precision="bf16")))
    assert [variant.spec.distribution.options.get("device") for variant in found] == ["cpu"] * len(found)
    assert [variant.id.workload for variant in found[-5:]] == ["train", "loader", "model", "split", "extras"]
    flipped = variants(resolve(toy.pipeline().transform(t.TestTimeFlip())))
    # nothing of training
    assert [variant.id for variant in flipped] == [PLAIN, in_turn("FFCV loader"), *OF_THE_WHOLE]
    assert all(variant.spec.transforms == (t.TestTimeFlip(),) for variant in flipped)  # accuracies compare
    *_, group = groups(found)
    assert [variant.id for variant in group] == [in_turn("ddp × 2"), *OF_THE_WHOLE]
    checkpointed = toy.pipeline(loader="torch").distribute("single", activation_checkpointing=True)
    assert names(checkpointed)[1] == in_turn("activation checkpointing")
    nothing = toy.pipeline(loader="torch").distribute("single", devices="auto", timeout=60.0, device="cpu")
    assert names(nothing) == [PLAIN, *OF_THE_WHOLE]


def test_a_stage_alone_and_the_whole_without_one(toy: Toy) -> None:
    def measured(pipeline: Pipeline) -> dict[VariantId, list[str]]:
        found = {}
        for variant in alone_and_without(resolve(pipeline)):
            found[variant.id] = [stage.name for stage in stages(resolve(variant.spec))]
        return found

    two = toy.pipeline().transform(t.LabelSmoothing(0.1))
    assert measured(toy.pipeline()) == {}
    # and that is without the loader, too
    assert measured(two) == {only("LabelSmoothing"): ["LabelSmoothing"]}
    whole = two.distribute("ddp", devices=2, precision="bf16", device="cpu")
    rest = ["FFCV loader", "LabelSmoothing", "bf16", "ddp × 2"]
    assert [stage.name for stage in stages(resolve(whole))] == rest
    expected = {only(name): [name] for name in rest[1:]}
    expected |= {without(name): [other for other in rest if other != name] for name in rest[:-1]}
    assert measured(whole) == expected


@pytest.mark.process
@pytest.mark.slow  # half a minute
def test_measured_on_a_model_that_sleeps(toy: Toy, tmp_path: Path) -> None:
    pipeline = (
        toy.pipeline(Sleepy(0.02))
        .transform(t.LabelSmoothing(0.1), t.ChannelsLast())
        .distribute("single", precision="bf16", accumulate=2, clip_norm=1.0)
    )
    at_first = surroundings()
    ledger = pipeline.ledger(seconds=95, within=0.9, progress=False)
    assert surroundings() == at_first
    rows = ["FFCV loader", "ChannelsLast", "LabelSmoothing", "bf16", "accumulate 2, clip_norm 1"]
    trials = [PLAIN, *map(in_turn, rows), *OF_THE_WHOLE]
    assert [row.id for row in ledger.rows] == trials[:6]
    further = [*map(only, rows[1:]), *map(without, rows[:-1])]
    assert [list(found) for found in ledger.rounds] == [trials + further] * len(ledger.rounds)
    assert len(ledger.rounds) >= TIGHT_ROUNDS
    # The data set has 4 batches and no trial can have more; no sample was lost, none counted twice.
    assert {trial.images for found in ledger.rounds for trial in found.values()} == {TRAIN}
    assert ledger.facts["batches_per_trial"] == TRAIN // BATCH
    assert ledger.rows[0].ratio.value == 1.0
    assert ledger.stopped == "Stopped because every interval is within ± 90.0%"
    assert not ledger.left_out
    assert list(ledger.missing_costs) == ["peak memory"]
    assert ledger.waiting is not None
    assert ledger.bound.startswith("The model is the bottleneck: ")
    assert ledger.ceilings[MODEL].value < BATCH / 0.04  # two microbatches, each sleeps 0.02 s
    assert 0 <= ledger.waiting < 1
    # The forward is what sleeps; the shares are of one whole.
    assert ledger.time_breakdown["forward"] == max(ledger.time_breakdown.values()) > 0.5
    assert sum(ledger.time_breakdown.values()) == pytest.approx(1.0)

    ledger.save(tmp_path / "ledger.json")
    ledger.save(tmp_path / "ledger.png")
    written = json.loads((tmp_path / "ledger.json").read_text())
    assert {"date", "command", "git_revision", "hardware", "versions"} <= set(written["provenance"])
    assert written["provenance"]["hardware"]["cores"] >= 1
    assert written["plan"][0]["asked_by"] == ".load()"
    assert Ledger.load(tmp_path / "ledger.json").bound == ledger.bound
    assert (tmp_path / "ledger.png").read_bytes().startswith(b"\x89PNG")
    assert not running_children("spawn_main")


@pytest.mark.long
@pytest.mark.slow
def test_measured_on_a_loader_that_sleeps(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = TorchLoader._loaded

    def slowly(self: TorchLoader, epoch: int, start: int) -> Iterator[Any]:
        for batch in deliver(self, epoch, start):
            time.sleep(0.06)
            yield batch

    monkeypatch.setattr(TorchLoader, "_loaded", slowly)
    pipeline = in_process(toy).transform(t.LabelSmoothing(0.1))
    ledger = pipeline.ledger(seconds=90, within=0.9, progress=False)
    assert ledger.bound.startswith("The loader is the bottleneck: ")
    assert ledger.bound.endswith("Next, change the loader: loader='ffcv'.")
    assert ledger.ceilings[LOADER].value < BATCH / 0.06
    assert ledger.waiting > 0.5
    assert ledger.time_breakdown["waiting"] == max(ledger.time_breakdown.values())


@pytest.fixture(scope="module")
def full(toy: Toy) -> Ledger:
    """All that can be measured of three stages, in this process: with the torch loader's workers=0."""
    pipeline = in_process(toy)
    pipeline = pipeline.transform(t.ChannelsLast(), t.LabelSmoothing(0.1)).distribute("single", precision="bf16")
    return pipeline.ledger(seconds=95, within=0.99, accuracy=True, epochs=1, progress=False)


@pytest.mark.long
def test_every_stage_alone_and_without(full: Ledger) -> None:
    rows = ["ChannelsLast", "LabelSmoothing", "bf16"]
    further = [*map(only, rows[1:]), *map(without, rows[:-1])]
    assert list(full.rounds[0]) == [PLAIN, *map(in_turn, rows), *OF_THE_WHOLE, *further]
    assert all(gain.alone and gain.last for gain in full.stages)
    assert full.compound
    assert not full.left_out
    assert list(full.missing_costs) == ["peak memory"]


def test_it_ends_when_the_intervals_are_narrow(full: Ledger) -> None:
    """Next to other processes, steps of milliseconds may vary more than that, up to the last round."""
    narrow, limit = "Stopped because every interval is within ± 99.0%", "Stopped at the round limit"
    assert full.stopped == (narrow if full.spread <= 0.99 else limit)
    assert len(full.rounds) >= TIGHT_ROUNDS


def test_all_turns_of_a_round_have_the_same_samples(full: Ledger) -> None:
    for trials in full.rounds:
        found = {trial.samples for name, trial in trials.items() if name != MODEL}
        assert len(found) == 1
    # each an epoch of its own
    assert len({trials[PLAIN].samples for trials in full.rounds}) == len(full.rounds)


def test_what_a_variant_holds_in_memory(full: Ledger) -> None:
    assert set(full.costs) == {name for name in full.rounds[0] if name not in OF_THE_WHOLE}
    for costs in full.costs.values():
        held = costs.held_bytes
        assert held is not None
        # SGD with momentum: weights, gradients and momentum, 4 bytes each.
        assert (held["parameters"], held["gradients"], held["optimizer"]) == (4 * PARAMETERS,) * 3
        assert costs.compile_seconds is None


def test_accuracy_of_each_variant(full: Ledger, toy: Toy) -> None:
    found = full.accuracy
    assert found is not None
    assert found.metric == "top1"
    names = [gain.stage for gain in full.stages]
    others = [*map(only, names[1:]), *(map(without, names[:-1]) if len(names) > 2 else ())]
    assert list(found.rows) == [*(row.id for row in full.rows), *others]
    plain = in_process(toy).fit(epochs=1, progress=False)
    assert found.rows[PLAIN].accuracy == plain.accuracy == found.target
    assert 0 < found.rows[PLAIN].seconds_to_target <= found.rows[PLAIN].seconds
    assert f"{plain.accuracy:.2%}" in str(full)


@dataclass(frozen=True)
class Nothing(t.Transform):
    """A stage that changes nothing."""

    kind: ClassVar[Any] = "loss"
    source: ClassVar[str] = "here"

    def loss(self, loss: t.Loss) -> t.Loss:
        return loss


class NothingElse(Nothing):
    pass


@pytest.mark.slow
def test_a_variant_against_itself_is_one(toy: Toy) -> None:
    pipeline = in_process(toy, Sleepy(0.02)).transform(Nothing(), NothingElse())
    ledger = pipeline.ledger(seconds=15, within=1e-4, progress=False)
    assert [row.id for row in ledger.rows] == [PLAIN, in_turn("Nothing"), in_turn("NothingElse")]
    # Of so wide intervals one in a thousand misses; to two decimals, as it is shown, it is 1.00.
    for row in dataclasses.replace(ledger, level=0.999).rows:
        assert row.ratio.low <= 1.005, row
        assert row.ratio.high >= 0.995, row
        assert 0.5 < row.ratio.value < 2, row


@dataclass(frozen=True)
class Idle(t.Transform):
    """A surgery that changes nothing."""

    kind: ClassVar[Any] = "surgery"
    source: ClassVar[str] = "here"

    def apply(self, model: nn.Module) -> t.Report:  # noqa: ARG002
        return t.Report(type(self).__name__, ("",))


class Wakes(Idle):
    """A surgery after which the model sleeps less; a second such one brings nothing more."""

    def apply(self, model: nn.Module) -> t.Report:
        assert isinstance(model, Sleepy)
        model.seconds = 0.005
        return super().apply(model)


class WakesToo(Wakes):
    pass


@pytest.mark.slow  # test_ledger.py has it on trials that are made up
def test_of_two_stages_that_do_the_same_the_second_falls(toy: Toy) -> None:
    pipeline = in_process(toy, Sleepy(0.08)).transform(Idle(), Wakes(), WakesToo())
    ledger = pipeline.ledger(seconds=90, within=0.3, progress=False)
    assert ledger.compound.startswith("The speedups do not compound: ")
    assert "; WakesToo gives " in ledger.compound
    assert ledger.compound.endswith(" × after Idle and Wakes.")


def test_variants_on_other_samples_are_refused(toy: Toy) -> None:
    pipeline = in_process(toy)
    one, two, three = map(only, ("one", "two", "three"))
    with ExitStack() as stack:
        loaders = Loaders(stack)
        runners = [
            VariantRunner([Variant(name, pipeline.replace(seed=seed))], loaders)
            for name, seed in ((one, 0), (two, 0), (three, 1))
        ]
        measurement = measurement_of(pipeline, one, two, three)
        assert list(measurement.round(runners[:2], 1, batches=2)) == [one, two]
        with pytest.raises(DrivetrainError, match=r"'only one' had 16 images .*'only three' 16 "):
            measurement.round(runners, 1, batches=2)


def test_a_turn_costs_what_a_step_costs_on_average_over_the_schedule() -> None:
    def mean(resizing: t.ProgressiveResizing, side: int) -> float:
        points = (np.arange(20_000) + 0.5) / 20_000
        return float(np.mean([resizing.size(side, point) ** 2 for point in points]))

    delays = [{"delay": 0.0, "finetune": 0.0}, {"delay": 0.3, "finetune": 0.7}]
    for options in ({}, *delays, {"initial_scale": 0.3}):
        resizing = t.ProgressiveResizing(**options, size_increment=1)
        found = phases([resizing], 1000)
        assert sum(phase.share for phase in found) == pytest.approx(1.0)
        area = sum(phase.share * phase.image_size**2 for phase in found)
        assert area == pytest.approx(mean(resizing, 1000), rel=2e-3)
    (one,) = phases([t.LabelSmoothing(0.1)], 224)
    assert (one.image_size, one.share) == (224, pytest.approx(1.0))
    freezing = t.LayerFreezing(0.5, 1.0)
    both = phases([t.ProgressiveResizing(), freezing], 224)
    assert sum(phase.share for phase in both) == pytest.approx(1.0)
    frozen = sum(phase.share * freezing.level(phase.progress) for phase in both)
    assert frozen == pytest.approx(0.25)  # none in the first half, half on average in the second


class Watching(Acting):
    """Notes the side of the images, and how many of its parameters learn, in training."""

    seen: ClassVar[list[tuple[int, int]]] = []

    def act(self, images: torch.Tensor) -> None:
        self.seen.append((images.shape[-1], sum(parameter.requires_grad for parameter in self.parameters())))


def test_images_grow_and_layers_freeze_within_a_turn(toy: Toy) -> None:
    pipeline = toy.pipeline(Watching).transform(t.ProgressiveResizing(), t.LayerFreezing())
    with built(pipeline) as variant:
        Watching.seen.clear()
        trial, labels = run_trial(variant, "train", epoch=1, batches=2)
        assert {side for side, _ in Watching.seen} == {8, 12, SIDE}
        assert {learning for _, learning in Watching.seen} == {4, 2}  # of two layers, one freezes
        assert all(parameter.requires_grad for parameter in variant.built.engine.plain_model.parameters())
        assert trial.images == 2 * BATCH == sum(map(len, labels))  # each sample once, whatever the phases
        assert len(Watching.seen) == 2 * len(variant.phases)


def test_a_turn_has_each_bandwidth_at_its_share_of_the_steps(toy: Toy) -> None:
    with built(toy.pipeline(Watching).transform(t.EfficientTrain(size_increment=2))) as variant:
        Watching.seen.clear()
        trial, labels = run_trial(variant, "train", epoch=1, batches=1)
        assert [side for side, _ in Watching.seen] == [6, 12, SIDE]
        assert [phase.share for phase in variant.phases] == pytest.approx([0.479, 0.345, 0.176], abs=1e-3)
        assert trial.images == BATCH == sum(map(len, labels))


SLEEP = 0.2


@pytest.mark.long
def test_an_extra_that_takes_long_is_seen_in_the_row(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CSVLogger.log
    steps = []

    def slowly(self: CSVLogger, values: dict[str, float], step: int) -> None:
        time.sleep(SLEEP)
        log(self, values, step)
        steps.append(step)

    monkeypatch.setattr(CSVLogger, "log", slowly)
    ledger = in_process(toy).ledger(seconds=90, within=0.9, progress=False)
    # A trial is shorter than the log's interval, and logs once, at its end; before the rounds are the first trials.
    count = len(ledger.rounds)
    assert steps[-count:] == [ledger.facts["batches_per_trial"]] * count
    assert len(steps) == count + 1
    assert all(trials[EXTRAS].seconds > SLEEP for trials in ledger.rounds)
    assert ledger.extras is not None
    assert ledger.extras.value > 2
    assert ledger.extras_share is not None
    slept = SLEEP * len(ledger.rounds) / sum(trials[EXTRAS].seconds for trials in ledger.rounds)
    assert slept < ledger.extras_share < 1
    assert EXTRAS in {*ledger.rounds[0]}
    assert str(EXTRAS) in html.unescape(ledger._repr_html_())


@pytest.mark.parametrize("extra", [(Progress, "on_step_end"), (NonFiniteGuard, "should_step")])
def test_bar_and_guard_are_extras(extra: tuple[Any, str], toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name = extra
    work, calls = getattr(kind, name), []

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        time.sleep(SLEEP / 10)
        return work(self, *arguments)

    monkeypatch.setattr(kind, name, counted)
    with built(in_process(toy)) as variant:
        run_trial(variant, "train", epoch=1, batches=3)
        assert not calls
        trial, _ = run_trial(variant, "extras", epoch=1, batches=3)
        assert len(calls) == 3
        assert trial.parts is not None
        assert 3 * SLEEP / 10 < trial.parts["extras"] < trial.seconds


class Diverged(Sleepy):
    """Its loss is NaN in training."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) * (float("nan") if self.training else 1.0)


def test_losses_that_are_not_finite_do_not_stop_a_ledger(toy: Toy) -> None:
    """It has the peak learning rate at once, where a training would warm up."""
    pipeline = in_process(toy, Diverged(0.0)).distribute("single", clip_norm=1.0)
    with built(pipeline) as variant:
        trial, _ = run_trial(variant, "extras", epoch=1, batches=3)
        assert trial.images == 3 * BATCH
        with pytest.raises(NonFiniteError):
            pipeline.fit(epochs=1, progress=False)


def test_the_bar_that_is_timed_is_shown_to_nobody(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a notebook, too, where a bar is a widget of the cell and not written to standard error."""
    shown: list[Any] = []
    monkeypatch.setattr(progress, "tqdm", lambda **bar: shown.append(bar))
    with built(in_process(toy)) as variant:
        assert run_trial(variant, "extras", epoch=1, batches=3)[0].images == 3 * BATCH
    assert shown == []
    assert capsys.readouterr().err == ""


def test_copies_to_the_device_are_counted(toy: Toy) -> None:
    with built(in_process(toy)) as variant:
        trial, _ = run_trial(variant, "copy", epoch=1, batches=3)
        assert trial.images == 3 * BATCH
        assert 0 < trial.seconds < math.inf


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        *(({"seconds": seconds}, "must be positive") for seconds in (0, -1, float("nan"), math.inf, "5", None)),
        *(({"within": within}, f"within={within!r} must be between 0 and 1") for within in (0, "x", None)),
        ({"epochs": 3}, "training runs of accuracy=True"), ({"target": 0.5}, "training runs of accuracy=True"),
        ({"accuracy": True}, "Number of epochs not set"), ({"accuracy": True, "epochs": 0}, "epochs=0 must be"),
        ({"accuracy": True, "epochs": 1, "target": 80}, "target=80 is an accuracy"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_at_once(asked: dict[str, Any], message: str, toy: Toy) -> None:
    with pytest.raises(PlanError, match=message):
        toy.pipeline().ledger(**asked)


def test_accuracy_needs_validation_data(toy: Toy) -> None:
    pipeline = Pipeline(plain_model).load(toy.train, batch_size=BATCH, image_size=SIDE)
    with pytest.raises(PlanError, match="needs validation data"):
        pipeline.ledger(accuracy=True, epochs=1)


@pytest.mark.slow
def test_measured_on_two_ranks(toy: Toy) -> None:
    ledger = in_process(toy).distribute("ddp", devices=2).ledger(
        seconds=90, within=0.9, progress=False
    )  # fmt: skip
    assert [row.id for row in ledger.rows] == [PLAIN, in_turn("ddp × 2")]
    assert {trial.images for trials in ledger.rounds for trial in trials.values()} == {TRAIN}
    assert ledger.costs[in_turn("ddp × 2")].held_bytes["parameters"] == 4 * PARAMETERS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_peak_memory_and_compile_time(toy: Toy) -> None:
    def large() -> nn.Module:
        return nn.Sequential(plain_model(CLASSES), nn.Linear(CLASSES, 500_000), nn.Linear(500_000, CLASSES))

    pipeline = in_process(toy, large).transform(t.LabelSmoothing(0.1))
    ledger = pipeline.distribute("single", compile=True).ledger(seconds=100, within=0.9, progress=False)
    plain, _, whole = (ledger.costs[row.id] for row in ledger.rows)
    held = 3 * 4 * 500_000 * (2 * CLASSES + 1)
    assert plain.held_bytes["parameters"] * 3 >= held
    assert held < plain.peak_bytes < held + 2**31
    assert whole.peak_bytes > held
    assert whole.compile_seconds > 0
    assert "Peak memory per rank: plain PyTorch" in str(ledger)
    assert "Compile time, before the measurement: + compile" in str(ledger)


def test_trials_train_on_samples_of_the_pipeline(toy: Toy, tmp_path: Path) -> None:
    own = list(range(2, TRAIN, CLASSES))
    with built(in_process(toy, indices=own)) as variant:
        trial, labels = run_trial(variant, "train", epoch=1, batches=9)
    assert (trial.images, {*np.concatenate(labels).tolist()}) == (len(own) // BATCH * BATCH, {2})
    other = write_toy(tmp_path / "other.beton", TRAIN, seed=3)
    mix = in_process(toy).load(
        {toy.train: 3, str(other): 1}, toy.val, batch_size=BATCH, image_size=SIDE, loader="torch", workers=0
    )
    with built(mix) as variant:
        assert run_trial(variant, "train", epoch=1, batches=2)[0].images == 2 * BATCH
        loader = variant.loader(SIDE)
        assert {index >= TRAIN for index in loader.indices.tolist()} == {False, True}  # of both


def test_trials_of_a_mix_train_on_samples_of_all_its_data(toy: Toy, tmp_path: Path) -> None:
    """Also if a trial takes most of them."""
    other = write_toy(tmp_path / "other.beton", BATCH // 2, seed=3)
    mix = in_process(toy).load(
        {toy.train: 3, str(other): 1}, toy.val, batch_size=BATCH, image_size=SIDE, loader="torch", workers=0
    )
    with built(mix) as variant:
        assert run_trial(variant, "train", epoch=1, batches=4)[0].images == 4 * BATCH
        indices = variant.loader(SIDE).indices
    assert (len({*indices.tolist()}), indices.min(), indices.max()) == (4 * BATCH, 0, TRAIN + BATCH // 2 - 1)


@pytest.mark.parametrize(("mode", "dtype"), [("RGB", torch.uint8), ("RGB;16", torch.float32)])
def test_copies_are_those_of_the_loader(mode: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Images of 16 bits are normalized before."""
    pixels = np.zeros((8, 8, 8, 3), np.uint16 if mode.endswith("16") else np.uint8)
    convert((pixels, np.arange(8) % 4), tmp_path / "a.beton", image_mode=mode, write_mode="raw", progress=False)
    with FFCVLoader(tmp_path / "a.beton", batch_size=4, image_size=8, workers=1) as loader, SimulatedCuda():
        batch = torch.zeros(4, 3, 8, 8, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
        (images, there), _ = measured_trials._buffers(loader, batch)
    assert images.dtype == there.dtype == dtype
