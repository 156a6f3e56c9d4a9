"""`tune(target=…)`: changes race to an accuracy, in real runs."""

import math
from collections.abc import Sequence
from operator import truediv
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import pytest
from drivetrain import DrivetrainError, Pipeline, PlanError
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.measuring.race.result import Point, RaceResult, RaceRun
from drivetrain.pipeline.measuring.tuning import to_target
from drivetrain.pipeline.measuring.tuning.candidates import Candidate
from drivetrain.pipeline.measuring.tuning.candidates import candidates as changes_of_speed
from drivetrain.pipeline.measuring.tuning.candidates import to_target as changes_to_target
from drivetrain.pipeline.measuring.tuning.kept import Results
from drivetrain.pipeline.measuring.tuning.result import Tried, Tuned
from drivetrain.pipeline.measuring.tuning.to_target import PAIRS, judged
from drivetrain.pipeline.runs.facts import facts_of
from drivetrain.pipeline.telemetry.history import Monitor
from pipeline_data import Sleepy, Toy

pytestmark = pytest.mark.usefixtures("own_cache")
TARGET = 0.9
EPOCHS = 3  # in which the toy pipeline reaches it


def names(pipeline: Pipeline, allow: Sequence[str] = ()) -> list[str]:
    return [one.name for one in changes_to_target(resolve(pipeline), allow)]


def test_fewer_epochs_are_tried_last(toy: Toy) -> None:
    pipeline = toy.pipeline().replace(epochs=8)
    found = names(pipeline)
    assert found[-2:] == ["epochs=6", "epochs=4"]
    batch = resolve(pipeline).data.batch_size
    assert {f"batch_size={batch // 2}", f"batch_size={2 * batch}", "ProgressiveResizing"} <= {*found}
    assert names(pipeline, ("methods",)) == ["EfficientTrain", "InfoBatch"]
    assert not {"EfficientTrain", "InfoBatch"} & {one.name for one in changes_of_speed(resolve(pipeline))}
    assert names(pipeline, ("epochs", "resolution"))[-2:] == ["epochs=6", "epochs=4"]
    assert names(pipeline.replace(epochs=2), ("epochs",)) == ["epochs=1"]
    assert not any("image_size" in name or "Resizing" in name for name in names(toy.pipeline(cutout=4)))
    for wrong in ("workers", "epochs,resolution"):
        with pytest.raises(PlanError, match=f"allow='{wrong}' is not a kind of change"):
            names(pipeline, (wrong,))


def searched(pipeline: Pipeline, changes: list[Candidate], known: Sequence[Tried] = (), seconds: float = 100) -> Tuned:
    tuner = to_target.TargetTuner(pipeline, TARGET, changes, {}, known, perf_counter() + seconds, lambda _: None)
    tuner.run()
    return tuner.result()


def slower(seconds: float) -> Candidate:
    return Candidate("slower", "step", lambda spec: spec.replace(model_options={"seconds": seconds}))


def sleepy(toy: Toy, seconds: float) -> Pipeline:
    return toy.pipeline(Sleepy).replace(model_options={"seconds": seconds}, epochs=EPOCHS)


@pytest.mark.parametrize(
    ("best", "own", "outcome", "reason"),
    [
        ([10, 11, 10], [5, 5.5, 5.1], "undecided", ""),  # too few pairs
        ([10, 11, 10, 10], [5, 5.5, 5.1, 5], "accepted", ""),
        ([10, 11, 10, 10], [12, 12.5, 11.8, 12], "dropped", ""),
        ([10, 12, 10, 12], [12, 10, 12, 10], "undecided", ""),
        ([10, 10], [5, None], "dropped", "seed 1 does not reach the target at all"),
    ],
)
def test_the_verdict_follows_from_the_times_to_the_target(
    best: list[float], own: list[float | None], outcome: str, reason: str
) -> None:
    """In seconds, by seed; None: not reached."""
    trial = judged(Tried("faster", "step", "not tried"), raced(best, own))
    assert (trial.outcome, trial.reason, trial.rounds) == (outcome, reason, len(best))
    if None not in own:
        assert trial.ratio == pytest.approx(math.exp(mean(map(math.log, map(truediv, best, own)))))  # type: ignore[arg-type]
        assert trial.low is not None
        assert (trial.low > 1 and len(best) >= PAIRS[0]) == (outcome == "accepted")


def test_without_the_change_the_target_must_be_reached() -> None:
    with pytest.raises(DrivetrainError, match=r"without faster, seed 0 reaches 0.00%. Pass a lower target"):
        judged(Tried("faster", "step", "not tried"), raced([None], [1.0]))


def test_what_is_reached_is_that_of_the_same_seed() -> None:
    with pytest.raises(DrivetrainError, match=r"without faster, seed 1 reaches 0.00%"):
        judged(Tried("faster", "step", "not tried"), raced([1.0, None], [1.0, 1.0]))


def test_why_it_is_not_reached_without_the_change() -> None:
    """A failure is the reason, and what was reached is the least of a metric that is better when lower."""
    other = RaceRun("faster", 0, (Point(1.0, 0, 0.05),))
    failed = RaceRun("best", 0, failed="RuntimeError: of the model")
    with pytest.raises(DrivetrainError, match="Without faster, the pipeline fails from seed 0: RuntimeError: of the"):
        judged(Tried("faster", "step", "not tried"), RaceResult(TARGET, ("best", "faster"), [failed, other]))
    late = RaceRun("best", 0, (Point(1.0, 0, 0.8), Point(2.0, 0, 0.25)))
    errors = RaceResult(0.1, ("best", "faster"), [late, other], Monitor("error", higher_is_better=False))
    with pytest.raises(DrivetrainError, match=r"target=0.1: without faster, seed 0 reaches 25.00%"):
        judged(Tried("faster", "step", "not tried"), errors)


def raced(*times: Sequence[float | None]) -> RaceResult:
    runs = [
        RaceRun(name, seed, (Point(9.0 if each is None else each, 0, 0.0 if each is None else 1.0),))
        for name, own in zip(("best", "faster"), times, strict=True)
        for seed, each in enumerate(own)
    ]
    return RaceResult(TARGET, ("best", "faster"), runs)


@pytest.mark.slow
def test_a_change_that_is_sooner_there_is_kept_and_one_that_never_is_dropped(toy: Toy) -> None:
    blind = Candidate("learns nothing", "step", lambda spec: spec.optimize("sgd", lr=1e-9))
    changes = [blind, slower(0.0), Candidate("nonsense", "step", lambda spec: spec.optimize("sgd", lr=-1.0))]
    tuned = searched(sleepy(toy, 0.1), changes)
    never, faster, wrong = tuned.trials
    assert (never.outcome, never.rounds, never.ratio) == ("dropped", 1, None)
    assert never.reason.startswith("seed 0 does not reach the target")
    assert faster.outcome == "accepted", faster
    assert wrong.outcome == "failed"
    assert tuned.pipeline.model_options == {"seconds": 0.0}
    assert tuned.stopped == "Every change was tried."
    assert f"× as fast to {TARGET:.2%}" in str(tuned)
    assert "the time of training to it without the change, over that with it" in " ".join(str(tuned).split())

    again = searched(sleepy(toy, 0.1), changes[:2], tuned.trials)  # nothing runs again
    assert again.trials == tuned.trials[:2]
    assert again.pipeline.model_options == {"seconds": 0.0}


def test_a_pair_of_runs_that_ends_after_the_budget_counts(toy: Toy) -> None:
    """Nothing interrupts it, as outside the main thread. The two runs sleep for 0.6 s at least."""
    blind = Candidate("learns nothing", "step", lambda spec: spec.optimize("sgd", lr=1e-9))
    (trial,) = searched(sleepy(toy, 0.02), [blind], seconds=0.4).trials
    assert (trial.outcome, trial.rounds) == ("dropped", 1)


@pytest.mark.long
def test_a_change_that_is_much_faster_does_not_stop_the_best(toy: Toy) -> None:
    """Of a pipeline that reaches the target after some epochs, so that there are evaluations before at which a run
    could be stopped; in the second pair, the change trains first."""
    late = sleepy(toy, 0.03).optimize("sgd", lr=0.02, schedule="constant").replace(epochs=4)
    (faster,) = searched(late, [slower(0.0)]).trials
    assert faster.rounds >= PAIRS[0], faster  # how many it takes depends on how busy the machine is
    assert faster.ratio is not None
    assert faster.ratio > to_target.GIVE_UP


@pytest.mark.long
def test_a_pipeline_that_does_not_reach_the_target_cannot_be_tuned_to_it(toy: Toy) -> None:
    pipeline = sleepy(toy, 0.0).optimize("sgd", lr=1e-9).replace(epochs=1)
    with pytest.raises(PlanError, match=r"without slower, seed 0 reaches \d.*Pass a lower target, or more epochs"):
        searched(pipeline, [slower(0.0)])


def test_a_pipeline_that_cannot_be_trained_cannot_be_tuned_to_a_target(toy: Toy) -> None:
    """Each change would be a failed one, for a reason that it is not."""
    wrong = toy.pipeline().replace(model_options={"classes": 7}, epochs=1)
    with pytest.raises(PlanError, match=r"Without blind, the pipeline cannot be trained: .*num_classes"):
        searched(wrong, [Candidate("blind", "step", lambda spec: spec.optimize("sgd", lr=1e-9))])


@pytest.mark.long
def test_the_budget_is_kept_and_the_file_continues(toy: Toy, tmp_path: Path) -> None:
    pipeline, file = sleepy(toy, 0.03), tmp_path / "tuned.json"
    options: dict[str, Any] = {"target": TARGET, "out": file, "allow": ("epochs",), "progress": False}
    start = perf_counter()
    tuned = pipeline.tune(seconds=2, **options)
    assert perf_counter() - start < 7
    assert tuned.stopped.startswith("Stopped at the 2 s budget. No change has a verdict: pass about ")
    assert tuned.trials[0].outcome in ("not tried", "undecided")  # by how many pairs were run
    assert tuned.trials[1].outcome == "not tried"
    known = [Tried("epochs=2", "step", "dropped", reason="known", rounds=1), tuned.trials[1]]
    Tuned(tuned.pipeline, known, facts=tuned.facts, target=TARGET).save(file)
    assert pipeline.tune(seconds=1, **options).trials[0].reason == "known"
    with pytest.raises(Exception, match="target"):
        pipeline.tune(seconds=2, **options | {"target": 0.5})


def test_a_search_that_ends_early_is_continued_by_a_larger_budget(toy: Toy, tmp_path: Path) -> None:
    """Of two changes, the second one shows that the pipeline does not reach the target from each seed."""
    pipeline, file = toy.pipeline().optimize("sgd", lr=1e-9).replace(epochs=1), tmp_path / "tuned.json"
    facts = facts_of(resolve(pipeline)) | {"allow": ["batch_size"], "target": 0.999, "epochs": 1}
    first = Tried("batch_size=16", "step", "dropped", 0.9, 0.8, 0.95, 4)
    Tuned(pipeline, [first], facts=facts).save(file)
    tuned = pipeline.tune(seconds=60, target=0.999, allow=("batch_size",), out=file, progress=False)
    assert "Pass a lower target" in tuned.stopped
    second = Tried("batch_size=64", "step", "not tried", reason="the search ended before it")
    assert tuned.trials == [first, second]
    kept = Results(None, facts, again=True).read()
    assert kept is not None
    assert (kept.answers(60), kept.answers(61)) == (True, False)


def test_what_it_cannot_tune(toy: Toy) -> None:
    pipeline = toy.pipeline()
    for target in (0, 1.5, "high"):
        with pytest.raises(PlanError, match="target="):
            pipeline.tune(target=target, epochs=1)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"epochs not set.*--epochs"):
        pipeline.tune(target=0.5)
    with pytest.raises(PlanError, match="epochs=0"):
        pipeline.tune(target=0.5, epochs=0)
    with pytest.raises(PlanError, match=r"needs validation data.*--val"):
        Pipeline(Sleepy).load(toy.train, batch_size=16, image_size=8).tune(target=0.5, epochs=1)
