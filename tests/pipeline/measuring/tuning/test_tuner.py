"""The search with known speeds: planted bottlenecks are found, nothing is gained from noise, and nothing gets lost."""

import json
import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import Contrastive, Pipeline, PlanError
from drivetrain.common import machine
from drivetrain.common.budget import OutOfTime
from drivetrain.common.machine import KEEPS_MEMORY
from drivetrain.pipeline.describe.pipeline_spec import PipelineSpec
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.statistics import LOOKS, MARGIN, TRIM, judge, judge_accuracy
from drivetrain.pipeline.measuring.race.result import Point, RaceResult, RaceRun
from drivetrain.pipeline.measuring.tuning.candidates import (
    ALLOW,
    VARIABLES,
    Candidate,
    _allocator,
    allowed,
    candidates,
    fitting,
    remembered,
)
from drivetrain.pipeline.measuring.tuning.result import Tried, Tuned, TuneInterrupted, read_trials, verdicts
from drivetrain.pipeline.measuring.tuning.to_target import PAIRS, judged
from drivetrain.pipeline.measuring.tuning.tune import Tuner, _allowed
from drivetrain.transforms import ChannelsLast, ProgressiveResizing
from pipeline_data import TRAIN, Toy, plain_model
from tuning_arenas import Simulated, slow_collective, slow_decode, slow_disk, slow_step, the_same


@pytest.fixture(scope="module")
def spec(toy: Toy) -> PipelineSpec:
    return Pipeline(plain_model).load(toy.train, batch_size=16, image_size=8, workers=1)


def tuned(spec: PipelineSpec, arena: Simulated, allow: Sequence[str] = (), **options: Any) -> Any:
    plan = resolve(spec)
    changes = [*candidates(plan), *allowed(plan, allow)]
    tuner = Tuner(spec, arena, changes, fitting(plan), {}, **options)
    try:
        tuner.run()
    except OutOfTime:
        tuner.stopped = "Stopped."
    finally:
        tuner.close()
    return tuner.result()


def test_ranks_share_the_cores(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of workers, a rank has one for each of its cores."""
    monkeypatch.setattr(machine, "cores", lambda: 16)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    spec = Pipeline(plain_model).load(toy.train, batch_size=16, image_size=8)

    def tried(one: PipelineSpec) -> list[str]:
        return [each.name.removeprefix("workers=") for each in candidates(resolve(one)) if "workers=" in each.name]

    assert tried(spec) == ["1", "8", "15", "32"]
    assert tried(spec.distribute("ddp", devices=4, device="cpu")) == ["1", "2", "3", "8"]


class Resolving(Simulated):
    """An arena that resolves a pipeline before it is built, as the real one does."""

    def open(self, name: str, spec: PipelineSpec, variables: Mapping[str, str] | None = None) -> Any:
        resolve(spec)
        return super().open(name, spec, variables)


def test_what_a_task_refuses_does_not_end_the_search_for_what_fits(toy: Toy) -> None:
    """Microbatches would change what a contrastive loss compares."""
    spec = Pipeline(plain_model).load(toy.train, batch_size=16, image_size=8, workers=1, views=2).task(Contrastive())
    result = tuned(spec, Resolving(the_same, fits=lambda one: bool(one.distributed.activation_checkpointing)))
    assert result.accepted[0].name == "activation_checkpointing=True"
    assert (result.trials[0].name, result.trials[0].outcome) == ("accumulate=2", "failed")
    assert "those of their microbatch" in result.trials[0].reason
    with pytest.raises(PlanError, match="fits into memory with no number of microbatches: out of memory"):
        tuned(spec, Resolving(the_same, fits=lambda _: False))


PLANTED: dict[str, Any] = {
    "slow decode": (slow_decode, {"workers=2", "workers=4"}, "data"),
    "slow disk": (slow_disk, {"batches_ahead=6"}, "data"),
    "slow step": (slow_step, {"ChannelsLast"}, "step"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_remedy_of_a_planted_bottleneck_is_found_first(name: str, spec: PipelineSpec) -> None:
    cost, remedies, binds = PLANTED[name]
    for seed in range(5):
        arena = Simulated(cost, seed=seed)
        result = tuned(spec, arena)
        assert {one.name for one in result.accepted} & remedies
        assert len(result.accepted) == 1
        assert result.gain == pytest.approx(arena.speed(result.pipeline) / arena.speed(spec), rel=0.05)
        assert result.trials[0].bottleneck == binds
        assert all(entry.closed for entry in arena.opened)


def test_a_slow_collective_is_answered_by_another_strategy(spec: PipelineSpec) -> None:
    result = tuned(spec.distribute("ddp", devices=2), Simulated(slow_collective))
    assert [one.name for one in result.accepted] == ["strategy='fsdp'"]
    assert result.pipeline.distributed.name == "fsdp"
    assert result.trials[0].bottleneck == "communication"  # before what makes the step faster
    assert "Exchanging gradients takes 13% of a step's time." in result.bound


def test_nothing_is_gained_from_noise(spec: PipelineSpec) -> None:
    """Ten runs of about eight changes each without an effect: at most one false gain."""
    false = [tuned(spec, Simulated(the_same, seed=seed, noise=0.05)).accepted for seed in range(10)]
    assert sum(map(len, false)) <= 1


@pytest.mark.parametrize(("times", "tried"), [(99.0, True), (101.0, False)])
def test_a_loader_that_is_much_faster_is_not_tuned(spec: PipelineSpec, times: float, tried: bool) -> None:
    """It has less to gain than what is worth a change."""
    arena = Simulated(lambda _: {"loader": 1.0 / times, "model": 1.0})
    rows = [one for one in tuned(spec, arena).trials if one.bottleneck == "data"]
    assert rows
    assert all((one.rounds > 0) is tried for one in rows)
    if not tried:
        assert rows[0].reason == "the loader alone is 101 times as fast as the model: less than 1% to gain"


class Format:
    """A storage format that is there at once."""

    def __init__(self, name: str) -> None:
        self.name, self.left = name, True

    def convert(self) -> str:
        return ""

    def accept(self) -> None:
        """Note nothing."""

    def discard(self) -> None:
        self.left = False


@pytest.mark.parametrize(
    ("training", "outcomes"),
    [(94.0, ["dropped", "accepted", "not tried"]), (96.0, ["not tried"] * 3)],
)
def test_a_format_is_tried_if_training_is_slower_than_the_model_alone(
    spec: PipelineSpec, training: float, outcomes: list[str]
) -> None:
    formats = [Format(name) for name in ("slow", "fast", "other")]

    class Shared(Simulated):
        def limits(self, contender: Any) -> dict[str, float]:  # noqa: ARG002
            return {"training": training, "loader": 1000.0, "model": 100.0}

    def cost(one: PipelineSpec) -> Mapping[str, float]:
        return {"loader": 0.1, "model": {0: 1.0, 1: 2.0, 2: 0.5}[one.seed]}

    changes = [
        Candidate(one.name, "data", lambda spec, seed=seed: spec.replace(seed=seed), storage=one)  # type: ignore[arg-type, misc]
        for seed, one in enumerate(formats, 1)
    ]
    tuner = Tuner(spec, Shared(cost), changes, [], {})  # type: ignore[arg-type]
    tuner.run()
    tuner.close()
    result = tuner.result()
    assert [one.outcome for one in result.trials] == outcomes
    if training < 95:
        assert [one.left for one in formats] == [False, True, True]
        assert result.trials[-1].reason == "another storage format is accepted"
    else:
        assert "training reaches 96% of the model alone" in result.trials[0].reason


def test_what_is_tuned_gains_nothing_more(spec: PipelineSpec) -> None:
    first = tuned(spec, Simulated(slow_step)).pipeline
    assert not any(tuned(first, Simulated(slow_step, seed=seed)).accepted for seed in range(1, 11))


def test_the_order_follows_the_bottleneck(spec: PipelineSpec) -> None:
    """Once the loader is fast enough, the step's changes come before the loader's others."""

    def cost(one: PipelineSpec) -> Mapping[str, float]:
        assert one.data is not None
        last = any(isinstance(each, ChannelsLast) for each in one.transforms)
        return {"loader": 4.0 if one.data.workers == 1 else 1.0, "model": 1.5 if last else 3.0}

    result = tuned(spec, Simulated(cost))
    names = [one.name for one in result.trials]
    assert [one.name for one in result.accepted] == ["workers=2", "ChannelsLast"]
    assert names[:2] == ["workers=2", "ChannelsLast"]
    assert names[-1] == "batches_ahead=6"
    assert result.limits["training"] == pytest.approx(1 / 1.5, rel=0.05)


def test_changes_that_cost_speed_are_dropped_after_few_rounds() -> None:
    ratios = [0.8, 0.81, 0.79, 0.8, 0.82, 0.8]
    assert next(rounds for rounds in LOOKS if judge(ratios[:rounds])[0] == "dropped") == 4


def accepted(gain: float, noise: float, looks: Sequence[int] = LOOKS, trim: float = TRIM) -> int:
    """How many of 1,000 changes with this gain are accepted."""
    random, found = np.random.default_rng(0), 0
    for _ in range(1000):
        ratios = gain * np.exp(random.normal(0, noise * 2**0.5, looks[-1]))
        verdicts = (judge(list(ratios[:rounds]), looks=looks, trim=trim)[0] for rounds in looks)
        found += next((one for one in verdicts if one != "undecided"), "") == "accepted"
    return found


@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("test", [(LOOKS, TRIM), (PAIRS, 0.0)])
def test_the_error_over_all_looks_is_below_what_is_promised(noise: float, test: tuple[Sequence[int], float]) -> None:
    """Of rounds, and of pairs of runs to a target."""
    assert accepted(1.0, noise, *test) <= 6  # 1,000 times 0.25 % are 2.5; 6 or fewer in 98.6 %


def test_eight_pairs_of_runs_suffice_for_a_quarter_less_time() -> None:
    """With runs that differ by 5 %: the error is divided over the looks that there are, and no pair is left out."""
    pairs = dict(zip(("best", "faster"), np.random.default_rng(0).normal(1, 0.05, (2, 200, 8)), strict=True))
    found = 0
    for best, own in zip(*pairs.values(), strict=True):
        for count in PAIRS:
            runs = [
                RaceRun(name, seed, (Point(seconds, 1, 1.0),))
                for name, times in (("best", 1.25 * best), ("faster", own))
                for seed, seconds in enumerate(times[:count].tolist())
            ]
            trial = judged(Tried("faster", "step", "not tried"), RaceResult(0.9, ("best", "faster"), runs))
            if trial.outcome != "undecided":
                break
        found += trial.outcome == "accepted"
    assert found > 190  # with the test of rounds, about 134


def test_microbatches_make_it_fit_and_checkpointing_only_after_them(spec: PipelineSpec) -> None:
    needs = Simulated(the_same, fits=lambda one: one.distributed.accumulate >= 4)
    result = tuned(spec, needs)
    assert [(one.name, one.outcome) for one in result.trials[:2]] == [
        ("accumulate=2", "failed"), ("accumulate=4", "accepted")
    ]  # fmt: skip
    assert result.pipeline.distributed.accumulate == 4
    last = tuned(spec, Simulated(the_same, fits=lambda one: bool(one.distributed.activation_checkpointing)))
    assert last.accepted[0].name == "activation_checkpointing=True"
    assert last.pipeline.distributed.accumulate == 1
    with pytest.raises(PlanError, match="fits into memory with no number of microbatches: out of memory"):
        tuned(spec, Simulated(the_same, fits=lambda _: False))


def test_the_fewest_microbatches_need_not_be_a_power_of_two(toy: Toy) -> None:
    spec = Pipeline(plain_model).load(toy.train, batch_size=24, image_size=8, workers=1)
    result = tuned(spec, Simulated(the_same, fits=lambda one: one.distributed.accumulate >= 3))
    assert [one.name for one in result.accepted] == ["accumulate=3"]
    assert [one.name for one in fitting(resolve(spec))][:5] == [
        f"accumulate={number}" for number in (2, 3, 4, 6, 8)
    ]  # fmt: skip


def larger(spec: PipelineSpec) -> Mapping[str, float]:
    """Larger batches are faster."""
    assert spec.data is not None
    return {"loader": 0.001, "model": 1 / spec.data.batch_size**0.5}


def batch_sizes(result: Tuned) -> dict[str, str]:
    prefix = "batch_size="
    return {one.name.removeprefix(prefix): one.outcome for one in result.trials if prefix in one.name}


def test_the_batch_grows_until_memory_ends_and_then_to_what_fits(validated: PipelineSpec) -> None:
    arena = Simulated(larger, fits=lambda one: one.data.batch_size <= 100)  # type: ignore[union-attr]
    result = tuned(validated, arena, ("batch_size",))
    assert batch_sizes(result) == {
        "32": "accepted", "64": "accepted", "128": "failed", "256": "not tried", "96": "accepted", "112": "failed",
        "104": "failed",
    }  # fmt: skip
    assert result.pipeline.data.batch_size == 96
    assert next(one for one in result.trials if one.name == "batch_size=256").reason == "batch_size=128 failed"
    # A second call begins where the first has ended.
    plan = resolve(validated)
    names = [one.name for one in result.trials]
    changes = [*candidates(plan), *allowed(plan, ("batch_size",)), *remembered(plan, ["batch_size=96"])]
    again = Tuner(validated, Simulated(larger), changes, fitting(plan), {}, verdicts(result.trials))
    again._recall()
    assert again.result().pipeline.data.batch_size == 96
    assert {"batch_size=96", "batch_size=64"} <= {*names}


def test_a_batch_size_that_gains_nothing_ends_the_search(validated: PipelineSpec) -> None:
    result = tuned(validated, Simulated(the_same), ("batch_size",))
    assert batch_sizes(result) == {"32": "dropped", **dict.fromkeys(("64", "128", "256"), "not tried")}
    assert result.trials[-1].reason == "batch_size=32 is not faster"
    costly = Simulated(larger, accuracies=lambda one: 0.7 - 0.1 * (one.data.batch_size > 32))  # type: ignore[union-attr]
    result = tuned(validated, costly, ("batch_size",))
    assert [*batch_sizes(result).values()] == ["accepted", "trade", "not tried", "not tried"]
    assert result.pipeline.data.batch_size == 32


def test_a_second_call_tries_no_batch_size_that_the_first_has_ruled_out(validated: PipelineSpec) -> None:
    dropped = {"32": "dropped", **dict.fromkeys(("64", "128", "256"), "not tried")}
    first = tuned(validated, Simulated(the_same), ("batch_size",))
    arena = Simulated(larger)  # in which all would be accepted
    second = tuned(validated, arena, ("batch_size",), known=verdicts(first.trials))
    assert batch_sizes(second) == batch_sizes(first) == dropped
    assert not [entry for entry in arena.opened if "batch_size" in entry.name]
    known = [
        Tried(f"batch_size={size}", "step", outcome, 1.2, 1.1, 1.3, 4)
        for size, outcome in ((32, "accepted"), (64, "accepted"), (96, "dropped"))
    ]
    changes = [
        *allowed(resolve(validated), ("batch_size",)),
        *remembered(resolve(validated), ["batch_size=96"]),
    ]
    tuner = Tuner(validated, Simulated(larger), changes, [], {}, known)  # type: ignore[arg-type]
    tuner.run()
    tuner.close()
    assert batch_sizes(tuner.result()) == {
        "32": "accepted", "64": "accepted", "96": "dropped", "128": "not tried", "256": "not tried",
    }  # fmt: skip


def test_the_budget_ends_it_with_every_change_in_the_report(spec: PipelineSpec) -> None:
    result = tuned(spec, Simulated(slow_step, rounds=30))
    assert "(--seconds)" not in result.stopped
    names = {one.name for one in candidates(resolve(spec))}
    assert {one.name for one in result.trials} == names
    assert {one.outcome for one in result.trials} >= {"not tried"}
    assert all(one.reason for one in result.trials if one.outcome in ("not tried", "undecided"))
    assert [one.rounds for one in result.trials if one.outcome == "undecided"] == [30 - done(result)]
    json.loads(json.dumps(result.to_dict()), parse_constant=pytest.fail)  # no infinity
    assert "The model is the bottleneck" in str(result)


class Ending(Simulated):
    """The time is over when the bottleneck is measured again, after the first accepted change."""

    def limits(self, contender: Any) -> dict[str, float]:
        if len(self.opened) > 1:
            raise OutOfTime
        return super().limits(contender)


def test_limits_are_those_of_the_tuned_pipeline_or_unknown(spec: PipelineSpec) -> None:
    result = tuned(spec, Ending(slow_step))
    assert [one.name for one in result.accepted] == ["ChannelsLast"]
    assert (result.limits, result.before) == ({}, pytest.approx(1 / 3))
    assert result.bound == "The bottleneck is not known: there was no time to measure it."


def test_an_accepted_change_is_kept_before_the_bottleneck_is_measured_again(spec: PipelineSpec) -> None:
    """A kill in that time would lose it otherwise; here, the time ends."""
    saved: list[Tuned] = []
    tuned(spec, Ending(slow_step), save=saved.append)
    assert [one.name for one in saved[-1].accepted] == ["ChannelsLast"]
    assert saved[-1].limits == {}


def done(result: Tuned) -> int:
    """The rounds of changes with a verdict."""
    return sum(one.rounds for one in result.trials if one.outcome in ("accepted", "dropped"))


def test_a_second_call_goes_on(spec: PipelineSpec) -> None:
    whole = Simulated(slow_step)
    first = tuned(spec, Simulated(slow_step, rounds=30))
    known = [one for one in first.trials if one.outcome in ("accepted", "dropped")]
    second = tuned(spec, whole, known=known)
    # of the pipeline as given to the first call
    assert second.before == pytest.approx(whole.speed(spec), rel=0.05)
    again = {entry.name for entry in whole.opened} - {"as given"}
    assert again.isdisjoint(one.name for one in known)
    assert [one.name for one in second.accepted] == ["ChannelsLast"]
    assert any(isinstance(one, ChannelsLast) for one in second.pipeline.transforms)


def test_a_change_that_fails_is_a_row_with_its_reason(spec: PipelineSpec) -> None:
    arena = Simulated(slow_decode, fits=lambda one: not one.distributed.compile)
    row = next(one for one in tuned(spec, arena).trials if one.name == "compile=True")
    assert (row.outcome, row.reason[:13]) == ("failed", "out of memory")


def test_environment_variables_compete_in_processes_of_their_own(spec: PipelineSpec) -> None:
    arena = Simulated(the_same, kept=1.2)
    result = tuned(spec, arena)
    assert result.variables == KEEPS_MEMORY
    assert [entry.variables for entry in arena.opened if entry.variables is not None] == [{}, KEEPS_MEMORY]
    line = "export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592"
    assert str(result).endswith(f"\n{line}")
    # Two processes of one pipeline differ as much.
    assert not tuned(spec, Simulated(the_same, kept=1.04)).variables
    assert resolve(result.pipeline).steps == resolve(spec).steps
    assert all(entry.closed for entry in arena.opened)
    assert not tuned(spec, Simulated(the_same)).variables


def test_the_allocators_variables_of_a_user_stay(spec: PipelineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under each of their names. torch reports a GPU; nothing here computes on it."""
    plan, names = resolve(spec), ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [one.variables for one in _allocator(plan)] == [VARIABLES["cuda"]]
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64")
            assert not _allocator(plan)


@pytest.fixture(scope="module")
def validated(toy: Toy) -> PipelineSpec:
    return Pipeline(plain_model).load(toy.train, toy.val, batch_size=16, image_size=8, workers=1)


def lower(spec: PipelineSpec) -> Mapping[str, float]:
    """Smaller images and bf16 make the model faster."""
    assert spec.data is not None
    side = spec.data.image_size
    assert isinstance(side, int)
    return {"loader": 0.1, "model": (side / 8) ** 2 * (0.6 if spec.distributed.precision == "bf16" else 1)}


def test_what_costs_accuracy_is_a_trade_and_what_keeps_it_is_taken(validated: PipelineSpec) -> None:
    """Smaller images cost two points here, and bf16 nothing."""

    def accuracies(spec: PipelineSpec) -> float:
        return 0.7 if spec.data is None or spec.data.image_size == 8 else 0.68

    for seed in range(4):
        arena = Simulated(lower, seed=seed, accuracies=accuracies)
        result = tuned(validated, arena, ("precision", "resolution"))
        assert [one.name for one in result.accepted] == ["precision='bf16'"]
        assert [one.name for one in result.trades] == ["image_size=6"]
        (trade,) = result.trades
        assert trade.accuracy == pytest.approx(-0.02, abs=0.004)
        assert trade.accuracy_low < trade.accuracy < trade.accuracy_high < -MARGIN
        assert trade.ratio > 1.5
        assert result.pipeline.data.image_size == 8
        assert "points" in trade.figure
        text = " ".join(str(result).split())
        assert "not shown to keep the accuracy, and so not accepted: image_size=6." in text
        given = [one for one, _ in arena.trained if one is validated]
        assert len(given) == len({seed for one, seed in arena.trained if one is validated})  # once per seed


def test_accuracies_are_of_trainings_that_fit(validated: PipelineSpec) -> None:
    arena = Simulated(lower, fits=lambda one: one.distributed.accumulate >= 4)
    result = tuned(validated, arena, ("precision",))
    assert [one.name for one in result.accepted] == ["accumulate=4", "precision='bf16'"]
    assert arena.trained
    assert all(spec.distributed.accumulate == 4 for spec, _ in arena.trained)
    again = Simulated(lower, fits=arena.fits)
    tuned(validated, again, ("precision", "resolution"), known=list(result.trials))
    assert again.trained
    assert all(spec.distributed.accumulate == 4 for spec, _ in again.trained)


def test_small_losses_do_not_add_up(validated: PipelineSpec) -> None:
    """Each change is compared with the pipeline as given, not with the last that was accepted."""

    def accuracies(spec: PipelineSpec) -> float:
        smaller = spec.data is not None and spec.data.image_size != 8
        return 0.7 - 0.003 * ((spec.distributed.precision == "bf16") + smaller)

    result = tuned(validated, Simulated(lower, accuracies=accuracies), ("precision", "resolution"))
    assert [one.name for one in result.accepted] == ["precision='bf16'"]
    assert [one.name for one in result.trades] == ["image_size=6"]


def test_every_accuracy_is_compared_with_that_of_the_pipeline_as_given(validated: PipelineSpec) -> None:
    """The first change is accepted after three seeds; the second needs more, after the first was accepted."""

    def accuracies(spec: PipelineSpec) -> float:
        return 0.7 if spec.data is None or spec.data.image_size == 8 else 0.7 - 0.0042

    arena = Simulated(lower, accuracies=accuracies)
    first, second = (one for one in tuned(validated, arena, ("precision", "resolution")).trials if one.seeds)
    assert (first.outcome, first.seeds) == ("accepted", 3)
    assert second.seeds > 3
    assert len([seed for spec, seed in arena.trained if spec is validated]) == second.seeds


def test_an_accuracy_that_was_not_measured_is_a_trade_that_is_tried_again(
    validated: PipelineSpec, tmp_path: Path
) -> None:
    class Short(Simulated):
        def accuracy(self, spec: PipelineSpec, seed: int) -> float:
            if len(self.trained) == 3:
                raise OutOfTime
            return super().accuracy(spec, seed)

    result = tuned(validated, Short(lower), ("precision",))
    (trade,) = result.trades
    assert trade.name == "precision='bf16'"
    assert trade.reason == "the tuning ended before its accuracy was known"
    assert result.pipeline.distributed.precision == "fp32"
    result.save(tmp_path / "tuned.json")
    assert "precision='bf16'" not in {one.name for one in read_trials(tmp_path / "tuned.json", {})}


def test_the_error_of_the_accuracy_is_below_what_is_promised() -> None:
    """A loss of just the margin is found to keep the accuracy in at most 2.5 %."""
    random, kept = np.random.default_rng(0), 0
    for _ in range(2000):
        differences = list(random.normal(-MARGIN, 0.004, 8))
        looks = (judge_accuracy(differences[:count])[0] for count in range(1, 9))
        kept += next((one for one in looks if one != "undecided"), "") == "kept"
    assert kept <= 65  # 2.5 % are 50


@pytest.mark.parametrize("kind", [name for name in ALLOW if name != "storage"])  # which needs other data
def test_every_kind_of_change_is_a_pipeline(kind: str, validated: PipelineSpec) -> None:
    for candidate in allowed(resolve(validated), (kind,)):
        assert candidate.numbers
        if (candidate.batch_size or 0) > TRAIN:
            continue  # more than there are
        changed = resolve(candidate.change(validated))
        assert changed.steps != resolve(validated).steps
        assert changed.data.eval_size == 8


def test_a_larger_batch_has_a_learning_rate_scaled_to_it(validated: PipelineSpec) -> None:
    spec = validated.optimize("sgd", lr=0.1)
    twice, four_times, *_ = allowed(resolve(spec), ("batch_size",))
    assert resolve(four_times.change(twice.change(spec))).optimization.lr == pytest.approx(0.4)
    adamw = resolve(twice.change(validated.optimize("adamw", lr=0.1)))
    assert adamw.optimization.lr == pytest.approx(0.1 * 2**0.5)


def test_what_cannot_be_allowed_is_refused(validated: PipelineSpec) -> None:
    with pytest.raises(PlanError, match=r"'resolutoin' is not a kind of change\. Did you mean 'resolution'"):
        allowed(resolve(validated), ("resolutoin",))
    with pytest.raises(PlanError, match="there is no such change to this pipeline"):
        allowed(resolve(validated.distribute("single", precision="bf16")), ("precision",))


def test_short_trainings_that_are_too_short_are_refused_before_any_trial(validated: PipelineSpec) -> None:
    why = "with epochs=1 none would have full size"
    with pytest.raises(PlanError, match=why):
        _allowed(resolve(validated.transform(ProgressiveResizing())), ("precision",), 1)
    (change,) = (one for one in _allowed(resolve(validated), ("resolution",), 1) if one.name == "ProgressiveResizing")
    arena = Simulated(the_same)
    tuner = Tuner(validated, arena, [change], [], {})  # type: ignore[arg-type]
    tuner.run()
    tuner.close()
    (row,) = tuner.result().trials
    assert (row.outcome, row.rounds, [entry.name for entry in arena.opened]) == ("failed", 0, ["as given"])
    assert why in row.reason


def test_layers_that_would_not_freeze_in_a_short_training_are_not_judged_by_it(validated: PipelineSpec) -> None:
    """Its accuracy would be that without the change, whose speed is that of a full run."""
    for epochs in (1, 3):
        changes = _allowed(resolve(validated), ("surgery",), epochs)
        (change,) = (one for one in changes if one.name == "LayerFreezing")
        with pytest.raises(PlanError, match="epochs=1 none would freeze") if epochs == 1 else nullcontext():
            change.change(validated)


def test_a_row_has_the_interval_that_decided(spec: PipelineSpec) -> None:
    """Accepted ones exclude 1, dropped ones a gain, and the others have no verdict; two rounds give no interval."""
    for seed in range(5):
        for one in tuned(spec, Simulated(slow_step, seed=seed, noise=0.04, rounds=70)).trials:
            if one.outcome == "accepted":
                assert one.low > 1
            elif one.outcome == "dropped":
                assert one.high < 1.06 or one.reason == "no verdict after 24 rounds", one
                assert one.low <= 1 or one.bottleneck == "step"
            elif one.outcome == "undecided" and one.rounds < LOOKS[0]:
                assert one.low is None


def test_measurements_that_contradict_each_other_name_no_bottleneck(spec: PipelineSpec) -> None:
    for training, sentence in ((320.0, "is not known"), (96.0, "The model is the bottleneck")):
        assert sentence in Tuned(spec, [], {"training": training, "loader": 900.0, "model": 94.0}).bound


def test_a_pipeline_that_no_recipe_can_name_is_saved_without_one(tmp_path: Path) -> None:
    Tuned(Pipeline(lambda: plain_model()).load("a.beton", batch_size=8, image_size=8), []).save(tmp_path / "tuned.json")
    assert "It is a lambda." in json.loads((tmp_path / "tuned.json").read_text())["recipe"]["none"]


def test_an_interrupt_travels_to_another_process(spec: PipelineSpec) -> None:
    interrupted = TuneInterrupted(Tuned(spec, [Tried("workers=2", "data", "dropped")]))
    copy = pickle.loads(pickle.dumps(interrupted))
    assert (str(copy), copy.tuned.trials) == (str(interrupted), interrupted.tuned.trials)


def test_a_notebook_shows_the_table(spec: PipelineSpec) -> None:
    page = Tuned(spec, [Tried("a<b", "data", "dropped")], variables={"NAME": "1"})._repr_html_()
    assert page.startswith("<table>")
    assert "a&lt;b" in page
    assert "NAME=1" in page


def test_no_gain_is_reported_if_nothing_was_measured(spec: PipelineSpec) -> None:
    result = tuned(spec, Simulated(slow_step, rounds=2))
    assert "changes accepted\n" in str(result).replace(" \n", "\n")
    assert "as fast" not in str(result)


def test_the_picture_has_every_trial() -> None:
    pytest.importorskip("matplotlib")
    tuned = Tuned(
        Pipeline(plain_model).load("a.beton", batch_size=8, image_size=8),
        [
            Tried("workers=4", "data", "accepted", 1.12, 1.08, 1.16, 12),
            Tried("compile", "step", "dropped", 0.97, 0.95, 0.99, 5),
            Tried("graphs", "step", "not tried", reason="there is no GPU"),
        ],
        before=1200.0, limits={"training": 1340.0, "loader": 5000.0},
    )  # fmt: skip
    (axes,) = tuned.picture().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["workers=4", "compile", "graphs"]
    assert [text.get_text() for text in axes.texts] == ["  not tried: there is no GPU"]
    spans = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 2]
    assert [1.08, 1.16] in [list(span) for span in spans]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["accepted", "dropped"]
    assert "before 1,200, now 1,340, loader alone 5,000" in axes.get_title(loc="left")


def test_the_picture_has_reasons_as_they_are(tmp_path: Path) -> None:
    """Between two dollars, matplotlib would read mathematics, and fail for two subscripts."""
    pytest.importorskip("matplotlib")
    failed = Tried("workers=4", "data", "failed", reason="set $A_B_C or $D")
    tuned = Tuned(Pipeline(plain_model).load("a.beton", batch_size=8, image_size=8), [failed])
    tuned.save(tmp_path / "tuned.png")
    assert (tmp_path / "tuned.png").exists()
    (axes,) = tuned.picture().axes
    assert [text.get_text() for text in axes.texts] == [r"  failed: set \$A_B_C or \$D"]
