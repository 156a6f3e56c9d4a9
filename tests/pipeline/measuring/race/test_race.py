"""`Pipeline.race` and `drivetrain race` on real runs: times, rule, budget, files and interrupts."""

import builtins
import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, ClassVar

import pytest
import torch
from command_line import call, done, toy_values
from drivetrain import Classification, Pipeline, PlanError
from drivetrain.common.errors import DrivetrainError, LedgerError
from drivetrain.pipeline import RaceInterrupted, RaceResult
from drivetrain.pipeline.apps.cli.race import _recipe_of
from drivetrain.pipeline.measuring.race.picture import medians
from drivetrain.pipeline.measuring.race.race import RaceClock
from drivetrain.pipeline.measuring.race.result import Point, RaceRun
from drivetrain.pipeline.telemetry.history import Monitor
from pipeline_data import BATCH, TRAIN, Sleepy, Toy, plain_model
from torch import nn
from torchmetrics import MeanMetric

TARGET = 0.9
EPOCHS = 3  # in which the toy pipeline reaches it


def slow(toy: Toy, seconds: float = 0.02) -> Pipeline:
    """It learns nothing."""
    return toy.pipeline(Sleepy).replace(model_options={"seconds": seconds}).optimize("sgd", lr=1e-9)


@pytest.mark.long
def test_the_seconds_are_those_of_the_history(toy: Toy, tmp_path: Path) -> None:
    """Without evaluations, also those within epochs, and after resuming."""
    clock, start = RaceClock(Monitor(unit="fraction"), 1.0, None), perf_counter()
    options: dict[str, Any] = {"eval_every_steps": 3, "out": tmp_path / "run", "progress": False}
    history = toy.pipeline().fit(epochs=EPOCHS, callbacks=[clock], **options).history
    wall = perf_counter() - start
    steps = TRAIN // BATCH
    ends = [*accumulate(TRAIN / epoch.images_per_s for epoch in history.epochs)]
    known = {TRAIN * epoch: seconds for epoch, seconds in enumerate(ends, 1)}
    values = {TRAIN * epoch.epoch: epoch.accuracy for epoch in history.epochs}
    values |= {BATCH * each.step: each.accuracy for each in history.evaluations}
    assert [images for _, images, _ in clock.points] == sorted(values)
    assert len(values) == len(history.epochs) + len(history.evaluations) == EPOCHS + EPOCHS * steps // 3 - 1
    for seconds, images, accuracy in clock.points:
        assert accuracy == values[images]
        assert seconds == pytest.approx(known.get(images, seconds), rel=1e-9)
    seconds = [each[0] for each in clock.points]
    assert seconds == sorted(seconds)
    assert seconds[-1] < min(wall, sum(epoch.seconds for epoch in history.epochs))
    toy.pipeline().fit(epochs=EPOCHS + 1, callbacks=[clock], resume=True, **options)
    assert clock.points[-1][1] == TRAIN * (EPOCHS + 1)
    assert clock.points[-1][0] > ends[-1]


def run(variant: str, seed: int, *points: tuple[float, float], **more: Any) -> RaceRun:
    return RaceRun(variant, seed, tuple(Point(at, 0, accuracy) for at, accuracy in points), **more)


def test_the_rows_follow_from_the_runs() -> None:
    runs = [
        run("a", 0, (1, 0.5), (2, 0.9)), run("b", 0, (1, 0.4), (6, 0.9)),
        run("b", 1, (1, 0.4), (9, 0.8)), run("a", 1, (3, 0.8), (4, 0.7)),
        run("a", 2, (1, 0.7), (3, 0.9)), run("b", 2, (2, 0.5), limit=3.0, stopped="race: …"),
    ]  # fmt: skip
    race = RaceResult(0.8, ("a", "b"), runs, give_up=3.0)
    first, second = race.rows
    assert (first.runs, first.reached, second.runs, second.reached) == (3, 3, 3, 2)
    assert first.seconds is not None
    assert (first.seconds.value, first.seconds.n) == (3, 3)
    assert 0 < first.seconds.low < 3 < first.seconds.high < math.inf
    assert second.seconds is not None
    # The one that did not reach it is later.
    assert (second.seconds.value, second.seconds.high) == (9, math.inf)
    assert first.ratio is not None
    assert first.ratio.value == 1
    assert second.ratio is None
    assert first.accuracy is not None
    assert first.accuracy.value == pytest.approx((0.9 + 0.7 + 0.9) / 3)
    assert second.accuracy is not None
    assert second.accuracy.n == 2  # the stopped one is not at its end
    pairs = RaceResult(0.8, ("a", "b"), runs[:4]).rows[1].ratio
    assert pairs is not None
    assert pairs.value == pytest.approx(3)  # 6 / 2 and 9 / 3
    assert (pairs.low, pairs.high) == pytest.approx((3, 3))
    assert [race.limit(seed) for seed in (0, 1, 2, 3)] == [6, 9, 9, 9]
    assert RaceResult(0.8, ("a", "b"), runs).limit(0) is None
    assert medians(race.of("b")) == [(1, 0.4), (7.5, pytest.approx(0.85))]
    undefined = RaceResult(0.8, ("a",), [run("a", 0, limit=3.0, stopped="race: …")])  # its metric, in all evaluations
    assert "a, seed 0, was stopped: its limit was 3 s." in " ".join(repr(undefined).split())
    # With `eval_every=2`, a run is stopped at the end of an epoch, and evaluated there: too late.
    late = RaceResult(0.8, ("a",), [run("a", 0, (2, 0.7), (3.5, 0.85), limit=3.0, stopped="race: …")])
    assert (late.rows[0].reached, late.rows[0].seconds) == (0, None)
    error = RaceResult(0.3, ("a",), [run("a", 0, (1, 0.5), (2, 0.25))], Monitor("error", False, "fraction"))
    assert error.rows[0].seconds is not None
    assert error.rows[0].seconds.value == 2


def test_the_interval_of_the_time_trims_runs_at_both_ends() -> None:
    """From five on, as docs/tuning.md states: how slow the slowest was does not matter."""

    def interval(*times: float) -> tuple[float, float, float]:
        (row,) = RaceResult(0.8, ("a",), [run("a", seed, (time, 0.9)) for seed, time in enumerate(times)]).rows
        assert row.seconds is not None
        return row.seconds.low, row.seconds.value, row.seconds.high

    low, value, high = interval(10, 11, 12, 13, 14)
    assert (low, value, high) == interval(10, 11, 12, 13, 99)
    assert low < value == 12 < high
    assert interval(10, 11, 12, 13)[2] < interval(10, 11, 12, 99)[2]


def test_the_picture_names_each_variant_as_it_is() -> None:
    """Also in a legend, which leaves out labels with a "_" at the beginning, and draws mathematics between two "$"."""
    pytest.importorskip("matplotlib")
    names = ("_base.yaml", "train=$DATA/$NAME")
    figure = RaceResult(0.8, names, [run(name, 0, (1, 0.5), (2, 0.9)) for name in names]).show()
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["_base.yaml: 1 of 1 reached it", r"train=\$DATA/\$NAME: 1 of 1 reached it"]


@pytest.mark.long
def test_a_hopeless_run_is_stopped_by_the_rule(toy: Toy, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    race = toy.pipeline().race(
        target=TARGET, seeds=2, epochs=EPOCHS, against={"slow": slow(toy, 0.16)}, give_up=1.5, progress=False,
        out=tmp_path / "race.json",
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state)
    order = [(one.variant, one.seed) for one in race.runs]
    assert order == [("the pipeline", 0), ("slow", 0), ("slow", 1), ("the pipeline", 1)]
    times = [one.seconds_to(TARGET, race.monitor) for one in race.of("the pipeline")]
    for one in race.of("slow"):  # on the second seed it runs first: the other seed's time is the measure
        assert one.limit == 1.5 * (times[0] or 0.0)
        assert [point.images for point in one.points] == [TRAIN]
    assert (race.rows[1].reached, race.rows[1].accuracy) == (0, None)
    text = repr(race)
    assert "slow, seed 1, was stopped after" in text
    assert "trained 1.5 times as long as the fastest variant so far needed" in text
    assert "4 of 4 runs have ended" in text
    assert "<p>4 of 4 runs" in race._repr_html_()
    assert RaceResult.load(tmp_path / "race.json") == race
    pytest.importorskip("matplotlib")
    race.save(tmp_path / "race.png")


class Unlucky(Sleepy):
    """Its first step raises the exception that the environment names: its code stays the same."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and len(images) == BATCH and (name := os.environ.get("RACE_ERROR")):
            raise getattr(builtins, name)
        return super().forward(images)


@pytest.mark.long
def test_an_interrupt_keeps_the_runs_and_a_second_call_goes_on(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, options = tmp_path / "race.json", {"target": TARGET, "epochs": 1, "progress": False}
    other = {"other": toy.pipeline(Unlucky(0))}
    for error in (KeyboardInterrupt, RuntimeError):  # in the first step of the second variant
        monkeypatch.setenv("RACE_ERROR", error.__name__)
        interrupted = pytest.raises(RaceInterrupted, match=r"after 1 run\(s\)")
        with interrupted if error is KeyboardInterrupt else nullcontext():
            toy.pipeline().race(seeds=1, against=other, out=file, **options)
    saved = RaceResult.load(file)
    assert [one.failed for one in saved.runs] == ["", "RuntimeError"]
    assert "other, seed 0, failed: RuntimeError" in repr(saved)
    monkeypatch.delenv("RACE_ERROR")
    race = toy.pipeline().race(seeds=2, against=other, out=file, **options)
    assert [(one.variant, one.seed) for one in race.runs] == [
        ("the pipeline", 0), ("other", 0), ("other", 1), ("the pipeline", 1),
    ]  # fmt: skip
    assert race.runs[0] == saved.runs[0]
    assert not any(one.failed for one in race.runs)
    _refuses_others(toy, file, options, other)


class Interrupts(Sleepy):
    """In the folder that the environment names, a file for each step; one that is to be interrupted raises, once."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and len(images) == BATCH:
            folder = Path(os.environ["RACE_STEPS"])
            number = len([*folder.iterdir()])
            (folder / f"{number}").touch()
            if number == int(os.environ["RACE_LAST"]):
                raise KeyboardInterrupt
        return super().forward(images)


@pytest.mark.long
def test_an_unfinished_run_continues_where_its_last_epoch_ended(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def race(name: str, last: int) -> RaceResult:
        (steps := tmp_path / f"steps {name}").mkdir(exist_ok=True)
        monkeypatch.setenv("RACE_STEPS", str(steps))
        monkeypatch.setenv("RACE_LAST", str(last))
        options: dict[str, Any] = {"target": TARGET, "epochs": EPOCHS, "against": {}, "progress": False}
        return pipeline.race(seeds=1, out=tmp_path / f"{name}.json", **options)

    pipeline, each = toy.pipeline(Interrupts(0)), TRAIN // BATCH
    whole = race("whole", -1).runs[0]
    with pytest.raises(RaceInterrupted):
        race("interrupted", 2 * each + 1)  # within the last epoch
    assert RaceResult.load(tmp_path / "interrupted.json").runs == []
    (left,) = (tmp_path / "interrupted-unfinished").iterdir()
    (left.parent / "of another race").mkdir()
    found = race("interrupted", -1)
    (run,) = found.runs
    assert [point[1:] for point in run.points] == [point[1:] for point in whole.points]
    assert [point.seconds for point in run.points] == sorted(point.seconds for point in run.points)
    assert run.wall > run.points[-1].seconds
    assert (whole.resumed, run.resumed) == (0, 1)
    repeated = 2  # the step that it was in, and the one before in the same epoch
    assert len([*(tmp_path / "steps interrupted").iterdir()]) == EPOCHS * each + repeated
    assert "the pipeline, seed 0, was continued after 1 interrupt(s)" in repr(found)
    assert not left.parent.exists()


def test_a_failed_run_that_is_repeated_leaves_the_unfinished_one(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated one comes first, in the order of the runs."""
    (tmp_path / "steps").mkdir()
    monkeypatch.setenv("RACE_STEPS", str(tmp_path / "steps"))
    monkeypatch.setenv("RACE_LAST", str(TRAIN // BATCH + 1))  # within the last epoch
    monkeypatch.setenv("RACE_ERROR", "RuntimeError")
    pipeline, against = toy.pipeline(Unlucky(0)), {"other": toy.pipeline(Interrupts(0))}
    options: dict[str, Any] = {"target": TARGET, "epochs": 2, "seeds": 1, "against": against, "progress": False}
    with pytest.raises(RaceInterrupted):
        pipeline.race(out=tmp_path / "race.json", **options)
    assert [run.failed for run in RaceResult.load(tmp_path / "race.json").runs] == ["RuntimeError"]
    monkeypatch.setenv("RACE_LAST", "-1")
    monkeypatch.delenv("RACE_ERROR")
    runs = pipeline.race(out=tmp_path / "race.json", **options).runs
    assert [(run.variant, run.failed, run.resumed) for run in runs] == [("the pipeline", "", 0), ("other", "", 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["race.json", "steps"]


class Calls(Sleepy):
    """Calls the function in `before`, if there is one, in its next training step."""

    before: ClassVar[list[Callable[[], object]]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and len(images) == BATCH and self.before:
            self.before.pop()()
        return super().forward(images)


def test_a_second_race_with_the_same_file_leaves_the_first_alone(toy: Toy, tmp_path: Path) -> None:
    """Its unfinished run would be removed, which ends it."""
    pipeline, errors = toy.pipeline(Calls(0)), list[str]()
    options: dict[str, Any] = {"target": TARGET, "epochs": 1, "seeds": 1, "against": {}, "progress": False}

    def second() -> None:
        with pytest.raises(DrivetrainError) as error:
            pipeline.race(out=tmp_path / "race.json", **options)
        errors.append(str(error.value))

    Calls.before.append(second)
    (run,) = pipeline.race(out=tmp_path / "race.json", **options).runs
    assert (run.failed, len(run.points)) == ("", 1)
    assert errors[0].startswith(f"Another race uses {tmp_path / 'race.json'}. ")
    assert [path.name for path in tmp_path.iterdir()] == ["race.json"]


def _refuses_others(toy: Toy, file: Path, options: dict[str, Any], against: dict[str, Pipeline]) -> None:
    for pipeline, changed, what in (
        (toy.pipeline(), {"target": 0.5}, "target"),
        (toy.pipeline(), {"give_up": None}, "give_up"),
        (toy.pipeline(), {"epochs": 2}, "other: epochs and the pipeline: epochs"),
        (toy.pipeline().optimize("sgd", lr=0.2), {}, "the pipeline: optimizer's options"),
        (toy.pipeline().replace(seed=1), {}, "first seed"),
        (toy.pipeline(), {"against": {"third": toy.pipeline()}}, "other: "),
    ):
        with pytest.raises(LedgerError, match=f"is of another {what}"):
            pipeline.race(**{"against": against, "out": file, **options, **changed})
    file.write_text("{}")
    with pytest.raises(LedgerError, match="is not the file of a race"):
        toy.pipeline().race(against=against, out=file, **options)


def test_runs_of_other_code_are_not_mixed(toy: Toy, tmp_path: Path) -> None:
    def raced(width: int) -> RaceResult:
        one = toy.pipeline(
            lambda: nn.Sequential(nn.AvgPool2d(width), nn.Flatten(), nn.Linear(3 * (16 // width) ** 2, 4))
        )
        options: dict[str, Any] = {"target": 0.9, "seeds": 1, "against": {}, "epochs": 1, "progress": False}
        return one.race(out=tmp_path / "race.json", **options)

    assert raced(4).runs == raced(4).runs
    with pytest.raises(LedgerError, match="is of another the pipeline: code:"):
        raced(8)


@pytest.mark.long
def test_no_run_begins_that_cannot_be_expected_to_end(toy: Toy, tmp_path: Path) -> None:
    file, options = tmp_path / "race.json", {"target": TARGET, "epochs": 1, "against": {}, "progress": False}
    pipeline, start = slow(toy, 0.15), perf_counter()
    race = pipeline.race(seconds=1.8, out=file, **options)  # a run takes one second
    assert perf_counter() - start < 2.8
    assert len(race.runs) == 1
    assert race.stopped == (
        "Stopped before the next run, which was not expected to end within the 1.8 s budget: 1 of 3 runs have ended."
    )
    start = perf_counter()
    race = pipeline.race(seconds=0.1, out=file, **options)
    assert perf_counter() - start < 1.5
    assert len(race.runs) == 1
    start = perf_counter()
    race = pipeline.race(seconds=0.5, **options)
    assert perf_counter() - start < 2.5
    assert (race.runs, race.stopped) == (
        [], "Stopped at the 0.5 s budget, within a run, which does not count: 0 of 3 runs have ended.",
    )  # fmt: skip


class Vanishing(MeanMetric):
    """The accuracy, without a value from the second evaluation on."""

    higher_is_better = True
    unit = "fraction"
    evaluations = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:  # type: ignore[override]
        super().update((outputs.argmax(1) == targets).float())

    def compute(self) -> torch.Tensor:
        type(self).evaluations += 1  # each evaluation has a copy; before the first, the metric is tried
        return super().compute() if self.evaluations <= 2 else torch.tensor(math.nan)


def test_what_is_undefined_in_the_last_evaluation_has_no_final_value(toy: Toy) -> None:
    pipeline = toy.pipeline().task(Classification(metrics={"vanishing": Vanishing()}))
    race = pipeline.race(target=TARGET, seeds=1, epochs=2, against={}, progress=False)
    (one,), (row,) = race.runs, race.rows
    assert (one.failed, len(one.points), one.undefined, row.accuracy) == ("", 1, True, None)
    assert "the pipeline, seed 0: vanishing has no value in its last evaluation." in " ".join(repr(race).split())


def test_what_cannot_be_raced_is_refused(toy: Toy, tmp_path: Path) -> None:
    pipeline, options = toy.pipeline(), {"target": TARGET, "epochs": 1}
    blind = Pipeline(plain_model).load(toy.train, batch_size=BATCH, image_size=16)
    for changed, message in (
        ({"target": 90}, r"target=90 must be a finite number in \(0, 1\]"),
        ({"seeds": 0}, "seeds=0 must be a positive integer"),
        ({"epochs": None}, "Number of epochs of 'the pipeline' not set.*epochs=… in the recipe or the command"),
        ({"epochs": 0}, "epochs=0 must be a positive integer"),
        ({"give_up": 0.5}, r"give_up=0.5 must be a finite number in \[1, inf\)"),
        ({"seconds": 0}, "must be positive and finite"),
        ({"out": tmp_path / "race.png"}, r"must end in \.json"),
        ({"against": {"blind": blind}}, "'blind' has none. Pass a second file"),
        ({"against": [3]}, "Pass pipelines, as a dict by name or as a list"),
        ({"against": {"the pipeline": pipeline}}, "is the name of the pipeline itself"),
        ({"against": {64: pipeline}, "out": tmp_path / "race.json"}, "against: 64 is not a text. Give each"),
    ):
        with pytest.raises(PlanError, match=message):
            pipeline.race(**{**options, **changed})
    with pytest.raises(PlanError, match="num_classes"):
        pipeline.replace(model_options={"classes": 7}).race(against=[], progress=False, **options)


def test_a_budget_that_is_shorter_than_an_epoch(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of calls with as many seconds would not end the run."""
    options: dict[str, Any] = {"target": TARGET, "epochs": 1, "seeds": 1, "against": {}, "progress": False}
    pipeline, file = toy.pipeline(Calls(0)), tmp_path / "race.json"
    monkeypatch.setattr(Calls, "before", [lambda: sleep(60)])
    race = pipeline.race(seconds=1.5, out=file, **options)
    assert (race.runs, race.stopped) == (
        [], "Stopped at the 1.5 s budget, within a run, which has not ended an epoch, so the next call begins it again "
        "(pass more seconds): 0 of 1 runs have ended.",
    )  # fmt: skip
    assert len(pipeline.race(out=file, **options).runs) == 1


def test_invalid_options_leave_no_folder(toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "race"
    end = call("race", "cifar10-quickstart", *toy_values(toy), "--target", "2", "--out", str(out))
    assert (end.code, "target=2" in end.err, out.exists()) == (1, True, False)


def test_a_dict_of_a_variant_replaces_the_commands_entries_of_it(toy: Toy) -> None:
    """The learning rate of SGD is none of AdamW's. The race is refused for its target, and not before."""
    adamw = 'optimizer={"name": "adamw", "lr": 0.003}'
    given = ["optimizer.lr=0.5", *toy_values(toy), "--target", "2"]
    end = call("race", "cifar10-quickstart", *given, "--against", f"{adamw} batch_size=16")
    assert (end.code, "target=2" in end.err) == (1, True), end
    assert _recipe_of([adamw], "mine.yaml", ["optimizer.lr=0.5", "epochs=2"]) == ("mine.yaml", ["epochs=2", adamw])


@pytest.mark.long
def test_the_command_races_a_recipe_against_others(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")  # no name is wrapped
    out, values = tmp_path / "race", toy_values(toy)
    against = 'optimizer={"name": "sgd", "lr": 0.01} batch_size=16'
    command = ["race", "cifar10-quickstart", *values, "--target", "0.2", "--seeds", "1", "--out", str(out)]
    printed = done(*command, "--against", against)
    race = RaceResult.load(out / "race.json")
    assert race.variants == ("cifar10-quickstart", against)
    assert all(name in printed for name in (*race.variants, "seconds to 20.00%"))
    assert race.facts[f"{against}: batch_size"] == "16"
    assert {"date", "command", "hardware", "versions"} <= {*race.provenance}
    assert done(*command, "--against", against) == printed  # nothing is trained again
    assert json.loads((out / "race.json").read_text())["rows"][0]["runs"] == 1
    assert (out / "race.png").exists()
    refused = {
        "": "--against is empty",
        "no-recipe": "no-recipe",
        "lr=": "lr",
        "batch_size=8 seed=7": "Pass seed=7 next",
    }
    for text, message in refused.items():
        end = call(*command, "--against", text)
        assert end.code == 1
        assert message in end.err


@pytest.mark.long
def test_the_command_races_seeds_alone(toy: Toy, tmp_path: Path) -> None:
    command = ["race", "cifar10-quickstart", *toy_values(toy), "--target", "0.2", "--against", "none"]
    done(*command, "--seeds", "2", "--out", str(tmp_path))
    (row,) = RaceResult.load(tmp_path / "race.json").rows
    assert (row.runs, row.accuracy is not None) == (2, True)
    end = call(*command, "--against", "plain")
    assert (end.code, "--against none excludes plain. Remove one" in end.err) == (1, True)


@pytest.mark.slow
def test_by_default_the_other_one_is_plain_pytorch(toy: Toy, tmp_path: Path) -> None:
    command = "race", "cifar10-quickstart", *toy_values(toy), "--target", "0.2", "--seeds", "1"
    done(*command, "--out", str(tmp_path))
    race = RaceResult.load(tmp_path / "race.json")
    assert race.variants == ("cifar10-quickstart", "plain PyTorch")
    assert race.facts["plain PyTorch: loader"] == "'torch'"
    assert [point.images for point in race.runs[1].points] == [TRAIN, 2 * TRAIN]


@pytest.mark.slow
def test_ranks_keep_the_points_of_rank_0(toy: Toy) -> None:
    pipeline = toy.pipeline().distribute("ddp", devices=2, device="cpu")
    race = pipeline.race(target=TARGET, seeds=1, epochs=EPOCHS, against={"one": toy.pipeline()}, progress=False)
    two, one = race.runs
    assert [point.images for point in two.points] == [point.images for point in one.points]
    assert [point.accuracy for point in two.points] == [point.accuracy for point in one.points]


def test_callbacks_of_a_recipe_that_only_look_are_left_out(toy: Toy, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    looking = [
        {"name": "GradientNorms", "every": 1}, {"name": "Profile", "out": str(trace), "start": 0, "steps": 1},
        {"name": "callback_jobs:Logs"},
    ]  # fmt: skip
    recipe = toy.named().replace(epochs=1).to_recipe() | {"logger": "csv", "callbacks": looking}
    race = Pipeline.from_recipe(recipe).race(target=0.1, seeds=1, against=[], progress=False)
    assert [run.failed for run in race.runs] == [""]
    assert not trace.exists()
