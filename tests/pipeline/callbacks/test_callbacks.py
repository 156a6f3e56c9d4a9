"""`fit(callbacks=[…])` in one process: what callbacks see, how they stop a run, and what a resumed run keeps; and the
lines of `docs/guide/callbacks.md` as printed."""

import csv
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call_several, toy_values
from drivetrain import (
    Callback,
    CheckpointError,
    Checkpoints,
    DrivetrainError,
    EarlyStopping,
    GradientNorms,
    Pipeline,
    PlanError,
    Profile,
    RunView,
)
from drivetrain.pipeline import RunOptions, load_run
from drivetrain.transforms import EMA, GradientClipping
from pipeline_data import BATCH, TRAIN, Toy, batch_norm_model, evaluated, plain_model
from places import ROOT
from safetensors.torch import load_file
from same_runs import assert_same_run, assert_same_weights

STEPS = TRAIN // BATCH  # in an epoch


class Diary(Callback):
    """Writes down each event and what it saw."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def on_fit_start(self, view: RunView) -> None:
        self.lines = [("start", view.step, view.total_steps, view.epochs)]

    def on_step_end(self, view: RunView) -> None:
        self.lines.append(("step", view.step, view.step_in_epoch, view.loss, view.learning_rates[0]))

    def on_evaluation_end(self, view: RunView) -> None:
        self.lines.append(("evaluation", view.step, dict(view.metrics)))

    def on_epoch_end(self, view: RunView) -> None:
        self.lines.append(("epoch", view.epoch, view.history[-1].values()))

    def on_fit_end(self, view: RunView) -> None:
        self.lines.append(("end", view.step, view.failed))


class StopAt(Callback):
    """Stops after one step, evaluation or epoch, and counts steps in its state."""

    def __init__(self, step: int = 0, *, evaluation: int = 0, epoch: int = 0) -> None:
        self.wanted = {"step": step, "evaluation": evaluation, "epoch": epoch}
        self.seen: list[int] = []

    def on_fit_start(self, view: RunView) -> None:  # noqa: ARG002
        self.seen = []

    def on_step_end(self, view: RunView) -> None:
        self.seen.append(view.step)
        self._stop(view, "step", view.step)

    def on_evaluation_end(self, view: RunView) -> None:
        self._stop(view, "evaluation", view.step)

    def on_epoch_end(self, view: RunView) -> None:
        self._stop(view, "epoch", view.epoch)

    def _stop(self, view: RunView, event: str, number: int) -> None:
        if number == self.wanted[event]:
            view.stop(f"{event} {number}")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


def test_each_event_is_called_with_the_position_and_the_results(toy: Toy) -> None:
    diary = Diary()
    result = toy.pipeline().fit(epochs=2, progress=False, callbacks=[diary])
    events = [line[0] for line in diary.lines]
    assert events == ["start", *(["step"] * STEPS + ["evaluation", "epoch"]) * 2, "end"]
    assert diary.lines[0] == ("start", 0, 2 * STEPS, 2)
    steps = [line for line in diary.lines if line[0] == "step"]
    assert [(line[1], line[2]) for line in steps] == [(n + 1, n % STEPS + 1) for n in range(2 * STEPS)]
    assert sum(line[3] for line in steps[:STEPS]) / STEPS == pytest.approx(result.history.epochs[0].loss)
    assert all(line[4] == 0.1 for line in steps)
    epochs = [line[2] for line in diary.lines if line[0] == "epoch"]
    assert epochs == [epoch.values() for epoch in result.history.epochs]
    last = result.history.epochs[-1]
    assert diary.lines[-3][1:] == (2 * STEPS, {"val_loss": last.val_loss, "top1": last.accuracy})
    assert diary.lines[-1] == ("end", 2 * STEPS, False)
    assert result.stopped is None


class SeesGradients(Callback):
    """Steps the weights of SGD by hand from the gradients that it sees."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}
        self.compared = 0

    def needs_gradients(self, step: int) -> bool:
        return step % 2 == 0

    def on_step_end(self, view: RunView) -> None:
        now = {name: value.clone() for name, value in view.named_parameters()}
        if self.needs_gradients(view.step):
            for name, gradient in view.named_gradients():
                torch.testing.assert_close(now[name], self.before[name] - 0.1 * gradient)
                self.compared += 1
        else:
            with pytest.raises(DrivetrainError, match="needs_gradients"):
                list(view.named_gradients())
        self.before = now


def test_gradients_of_the_step_are_seen_before_they_are_zeroed(toy: Toy) -> None:
    sees = SeesGradients()
    pipeline = toy.pipeline().optimize("sgd", lr=0.1, schedule="constant")
    pipeline.fit(epochs=1, progress=False, callbacks=[sees])
    assert sees.compared == STEPS // 2 * len(list(plain_model().parameters()))


class Unanswered(Diary):
    """Raises where it is asked for the gradients of step 3."""

    def needs_gradients(self, step: int) -> bool:
        if step == 3:
            raise ZeroDivisionError
        return False


def test_an_error_where_gradients_are_asked_for_ends_the_run_before_the_step(toy: Toy) -> None:
    diary = Unanswered()
    with pytest.raises(ZeroDivisionError):
        toy.pipeline().fit(epochs=1, progress=False, callbacks=[diary])
    assert diary.lines[-1] == ("end", 2, True)


class FirstNorm(Callback):
    """Keeps the norm of the first step's gradients."""

    norm = 0.0

    def needs_gradients(self, step: int) -> bool:
        return step == 1

    def on_step_end(self, view: RunView) -> None:
        if view.step == 1:
            self.norm = torch.stack([gradient.norm() for _, gradient in view.named_gradients()]).norm().item()


@pytest.mark.parametrize("by", ["norm", "value"])
def test_gradients_are_seen_before_a_transform_clips_them(toy: Toy, by: Any) -> None:
    """As before the engine's own clipping."""
    plain, clipped, limited = FirstNorm(), FirstNorm(), FirstNorm()
    toy.pipeline().fit(epochs=1, progress=False, callbacks=[plain])
    toy.pipeline().transform(GradientClipping(by, 1e-3)).fit(epochs=1, progress=False, callbacks=[clipped])
    toy.pipeline().distribute("single", clip_norm=1e-3).fit(epochs=1, progress=False, callbacks=[limited])
    assert plain.norm > 0.1
    assert clipped.norm == limited.norm == plain.norm


class LastLoss(Callback):
    """Looks at the loss of the last step without following steps."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_fit_start(self, view: RunView) -> None:
        self.seen = [view.loss]

    def on_evaluation_end(self, view: RunView) -> None:
        self.seen.append(view.loss)

    def on_epoch_end(self, view: RunView) -> None:
        self.seen.append(view.loss)


def test_the_last_loss_is_known_without_following_steps(toy: Toy) -> None:
    alone, diary = LastLoss(), Diary()
    options: dict[str, Any] = {"epochs": 1, "progress": False, "eval_every_steps": 2}
    toy.pipeline().fit(callbacks=[alone], **options)
    toy.pipeline().fit(callbacks=[diary], **options)
    losses = [line[3] for line in diary.lines if line[0] == "step"]
    assert alone.seen == [None, losses[1], losses[-1], losses[-1]]


def test_callbacks_that_only_look_change_nothing(toy: Toy) -> None:
    pipeline = toy.pipeline(batch_norm_model).transform(EMA(half_life=3))
    alone = pipeline.fit(epochs=2, progress=False)
    seen = pipeline.fit(epochs=2, progress=False, callbacks=[Diary()], eval_every=2, eval_every_steps=3)
    assert_same_weights(alone, seen)
    assert [epoch.loss for epoch in seen.history.epochs] == [epoch.loss for epoch in alone.history.epochs]


@pytest.mark.long
@pytest.mark.parametrize(
    ("stop", "epochs", "steps"),
    [({"step": 6}, 1, 6), ({"step": 4}, 1, 4), ({"evaluation": 4}, 1, 4), ({"epoch": 2}, 2, 8)],
    ids=str,
)
def test_a_stop_keeps_the_weights_and_the_reason_and_only_goes_on_when_told(
    stop: dict[str, int], epochs: int, steps: int, toy: Toy, tmp_path: Path
) -> None:
    pipeline = toy.pipeline(batch_norm_model).transform(EMA(half_life=3))
    (event, number), options = next(iter(stop.items())), {"epochs": 3, "progress": False, "eval_every": 3}
    if event == "evaluation":
        options["eval_every"] = 1
    stopped = pipeline.fit(out=tmp_path / "run", callbacks=[StopAt(**stop)], **options)
    assert stopped.stopped == f"{event} {number}"
    assert [epoch.epoch for epoch in stopped.history.epochs] == [n + 1 for n in range(epochs)]
    history = json.loads((tmp_path / "run/history.json").read_text())
    assert history["stopped"] == {
        "reason": f"{event} {number}", "epoch": epochs, "step": steps, "within": steps % STEPS,
    }  # fmt: skip
    # The weights are those of this moment, evaluated, on disk and in the result.
    assert evaluated(stopped.model, toy.val)[1] == pytest.approx(stopped.accuracy)
    saved = load_file(tmp_path / "run/model.safetensors")
    torch.testing.assert_close(saved, dict(stopped.model.state_dict()), rtol=0, atol=0)
    if event != "evaluation":
        assert history["evaluations"][-1]["step"] == steps
        assert history["evaluations"][-1]["epoch"] == -(-steps // STEPS)
        assert history["evaluations"][-1]["metrics"]["top1"] == stopped.accuracy
    assert (tmp_path / f"run/checkpoints/step-{steps:08d}").is_dir()

    again = pipeline.fit(out=tmp_path / "run", resume="auto", callbacks=[StopAt()], **options)
    assert (again.stopped, again.accuracy) == (stopped.stopped, stopped.accuracy)
    assert_same_weights(again, stopped)

    goes_on = StopAt()
    ended = pipeline.fit(out=tmp_path / "run", resume="auto", continue_stopped=True, callbacks=[goes_on], **options)
    whole = pipeline.fit(**options)
    assert ended.stopped is None
    assert goes_on.seen == [n + 1 for n in range(3 * STEPS)]
    assert ended.history.facts["resumed"][-1]["stopped"]["step"] == steps
    assert_same_run(ended, whole)


@pytest.mark.parametrize("step", [2, 6])
def test_a_run_that_was_stopped_within_an_epoch_is_loaded(step: int, toy: Toy, tmp_path: Path) -> None:
    """Also resumed; also without the steps of the epoch, which version 0.2.0 did not write, once resumed."""
    pipeline = toy.named()
    options: dict[str, Any] = {"epochs": 3, "out": tmp_path, "progress": False}
    stopped = pipeline.fit(callbacks=[StopAt(step)], **options)
    place = tmp_path / "history.json"
    saved = [list(point) for point in stopped.history.steps]
    assert [at for at, *_ in saved] == [n / STEPS for n in range(1, step + 1)]
    assert json.loads(place.read_text())["steps"] == saved
    for _ in range(2):
        loaded = load_run(tmp_path)
        assert (loaded.stopped, loaded.metrics) == (f"step {step}", stopped.metrics)
        assert_same_weights(loaded, stopped)
        pipeline.fit(resume="auto", **options)
    history = json.loads(place.read_text())
    del history["stopped"]["within"]
    place.write_text(json.dumps(history))
    with pytest.raises(CheckpointError, match=r"does not have the weights after epoch .*Resume the run"):
        load_run(tmp_path)
    pipeline.fit(resume="auto", **options)
    assert_same_weights(load_run(tmp_path), stopped)


def test_evaluations_within_epochs(toy: Toy, tmp_path: Path) -> None:
    """Every third step and every second epoch; the last epoch always; the best checkpoint is an evaluated one."""
    pipeline = toy.pipeline(batch_norm_model)
    result = pipeline.fit(
        epochs=3, out=tmp_path, progress=False, eval_every=2, eval_every_steps=3, logger="csv",
        checkpoints=Checkpoints(every_steps=1, keep=1),
    )  # fmt: skip
    assert [(each.epoch, each.step) for each in result.history.evaluations] == [(1, 3), (2, 6), (3, 9)]
    assert [epoch.accuracy is None for epoch in result.history.epochs] == [True, False, False]
    history = json.loads((tmp_path / "history.json").read_text())
    assert history["evaluations"] == result.history.to_dict()["evaluations"]
    assert history["epochs"][0]["val_loss"] is None
    with (tmp_path / "metrics.csv").open(newline="") as file:
        logged = [(int(row["step"]), row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]
    assert [step for step, _ in logged] == [3, 6, 8, 9, 12]
    accuracies = {each.step: each.accuracy for each in result.history.evaluations}
    accuracies |= {8: result.history.epochs[1].accuracy, 12: result.history.epochs[2].accuracy}
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    kept = {int(path.name[-8:]) for path in (tmp_path / "checkpoints").glob("step-*")}
    assert kept == {best, 12}


def test_steps_that_are_due_at_the_end_of_an_epoch_are_evaluated_there(toy: Toy) -> None:
    """Once, whichever epochs are due."""
    history = toy.pipeline().fit(epochs=3, progress=False, eval_every=3, eval_every_steps=STEPS).history
    assert [epoch.accuracy is None for epoch in history.epochs] == [False] * 3
    assert not history.evaluations


def test_the_result_is_that_of_the_last_evaluation_within_an_epoch(toy: Toy) -> None:
    result = toy.pipeline().fit(epochs=2, progress=False, eval_every_steps=1, callbacks=[StopAt(evaluation=STEPS + 2)])
    assert [each.step for each in result.history.evaluations] == [1, 2, 3, 5, 6]
    assert result.history.last is result.history.evaluations[-1]
    assert result.metrics == result.history.evaluations[-1].results


def test_the_evaluation_of_a_run_stopped_after_an_epoch_without_one_is_logged_and_shown_once(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"epochs": 9, "eval_every": 5, "out": tmp_path, "logger": "csv"}
    result = toy.pipeline().fit(callbacks=[StopAt(epoch=2)], **options)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        logged = [(row["step"], float(row["val_loss"])) for row in csv.DictReader(file) if row["val_loss"]]
    assert logged == [(str(2 * STEPS), result.metrics["val_loss"])]
    assert capsys.readouterr().out.count(f"{result.history.evaluations[-1]}") == 1


def failing(event: str) -> Callback:
    """A callback that raises in this method."""

    def fail(_: Callback, view: RunView) -> None:
        assert not view.failed
        raise ZeroDivisionError(event)

    return type("Fails", (Callback,), {event: fail})()


@pytest.mark.parametrize("event", ["on_fit_start", "on_step_end", "on_epoch_end", "on_fit_end"])
def test_an_error_of_a_callback_ends_the_run_with_it(event: str, toy: Toy) -> None:
    diary = Diary()
    with pytest.raises(ZeroDivisionError, match=event):
        toy.pipeline().fit(epochs=1, progress=False, callbacks=[diary, failing(event)])
    assert diary.lines[-1][0] == "end"
    if event != "on_fit_end":
        assert diary.lines[-1][2]  # failed


def test_callbacks_after_one_that_fails_at_the_end_end_once(toy: Toy) -> None:
    before, after = Diary(), type("Second", (Diary,), {})()
    with pytest.raises(ZeroDivisionError):
        toy.pipeline().fit(epochs=1, progress=False, callbacks=[before, failing("on_fit_end"), after])
    assert [line for line in before.lines if line[0] == "end"] == [("end", STEPS, False)]
    assert [line for line in after.lines if line[0] == "end"] == [("end", STEPS, True)]


class KeepsTuple(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"pair": (1, 2)}


class StopsAtStart(Callback):
    def on_fit_start(self, view: RunView) -> None:
        view.stop("now")


class Misspelled(StopAt):
    def on_train_epoch_end(self, view: RunView) -> None: ...


class Locked(Callback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": EarlyStopping()}, "must be a list of callbacks"),
        (
            {"callbacks": [Misspelled()]},
            "on_train_epoch_end, which nothing calls.*Did you mean 'on_epoch_end'",
        ),
        ({"callbacks": [EarlyStopping]}, r"is not a callback.*Did you mean EarlyStopping\(\)\?"),
        ({"callbacks": [EarlyStopping(), EarlyStopping("top1")]}, "two callbacks of the class EarlyStopping"),
        ({"callbacks": [EarlyStopping("val_los")]}, "no metric is named 'val_los'. Did you mean 'val_loss'"),
        ({"callbacks": [GradientNorms()]}, "logs to the run's loggers, and there are none"),
        ({"callbacks": [KeepsTuple()]}, r"state_dict\(\) returned .*not a dict of JSON values"),
        ({"callbacks": [StopsAtStart()]}, "nothing to stop in on_fit_start"),
        ({"eval_every": 0}, "eval_every=0 must be a positive integer"),
        ({"eval_every_steps": 0.5}, "eval_every_steps=0.5 must be a positive integer, or None"),
        ({"continue_stopped": True}, "Pass resume='auto' or its path, too"),
        ({"continue_stopped": 1}, "continue_stopped=1 must be True or False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "options",
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str, toy: Toy) -> None:
    with pytest.raises(PlanError, match=message):
        toy.pipeline().fit(epochs=1, progress=False, **options)


def test_what_needs_validation_data_is_refused_without(toy: Toy) -> None:
    pipeline = toy.pipeline().load(toy.train, batch_size=BATCH, image_size=16, workers=1)
    with pytest.raises(PlanError, match=r"has no validation data.*monitor 'loss'"):
        pipeline.fit(epochs=1, progress=False, callbacks=[EarlyStopping()])
    with pytest.raises(PlanError, match=r"eval_every=2\) needs validation data"):
        pipeline.fit(epochs=1, progress=False, eval_every=2)
    with pytest.raises(PlanError, match="Locked cannot be sent to the ranks"):
        toy.pipeline().distribute("ddp", devices=2).fit(epochs=1, progress=False, callbacks=[Locked()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(patience=0), "patience=0 must be a positive integer"),
        (lambda: EarlyStopping(min_delta=-1.0), "min_delta=-1.0 must be"),
        (
            lambda: EarlyStopping("kappa").check(RunOptions(("kappa",), False)),
            "Pass mode='min' or mode='max'",
        ),
        (lambda: EarlyStopping(3), "monitor=3 must be the name of a metric"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(mode="down"), "mode='down' is not known"),  # type: ignore[arg-type]
        (lambda: GradientNorms(every=0), "every=0 must be a positive integer"),
        (lambda: GradientNorms(by="layer"), "by='layer' is not known"),  # type: ignore[arg-type]
        (lambda: Profile("trace.txt"), "does not end in .json"),
        (lambda: Profile("trace.json", steps=0), "steps=0 must be a positive integer"),
    ],
)
def test_invalid_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_a_checkpoint_with_the_state_of_other_callbacks(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A callback that is missing is named; one that is new begins with its own state."""
    pipeline, counting = toy.pipeline(), StopAt()
    pipeline.fit(epochs=1, out=tmp_path, progress=False, callbacks=[counting])
    with_early = pipeline.fit(epochs=2, out=tmp_path, resume="auto", callbacks=[EarlyStopping()])
    assert len(with_early.history.epochs) == 2
    assert "has the state of StopAt, which is not among callbacks=[…]; it is ignored" in capsys.readouterr().out
    content = json.loads((tmp_path / "checkpoints/step-00000008/state.json").read_text())
    assert list(content["ranks"][0]["callbacks"]) == ["EarlyStopping"]


def test_a_state_that_becomes_unusable_is_named(toy: Toy, tmp_path: Path) -> None:
    class Spoils(Callback):
        bad = False

        def on_step_end(self, view: RunView) -> None:  # noqa: ARG002
            self.bad = True

        def state_dict(self) -> dict[str, Any]:
            return {"loss": float("nan")} if self.bad else {}

    with pytest.raises(CheckpointError, match=r"Spoils.state_dict\(\) returned"):
        toy.pipeline().fit(epochs=1, out=tmp_path, progress=False, callbacks=[Spoils()])


GUIDE = (ROOT / "docs/guide/callbacks.md").read_text()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning:torch.profiler")
def test_the_guide_runs(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pipeline": toy.pipeline(), "__name__": "guide"}
    stopped = []
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(compile(block, "guide", "exec"), names)
        stopped.append(names["result"].stopped)
    assert stopped[0].startswith("val_loss is 0.0")
    assert stopped[1] != stopped[0]
    assert {event.get("name") for event in json.loads(Path("runs/look/trace.json").read_text())["traceEvents"]} >= {
        "step 6", "step 7", "step 8"
    }  # fmt: skip
    assert [each.step for each in names["result"].history.evaluations] == [6]
    assert [epoch.accuracy is None for epoch in names["result"].history.epochs] == [True, False, False, False]


def test_its_table_names_the_methods() -> None:
    named = set(re.findall(r"^\| `(on_\w+)`", GUIDE, re.MULTILINE))
    assert named == {name for name in vars(Callback) if name.startswith("on_")}


BY_NAME = [
    {"name": "EarlyStopping", "monitor": "val_loss", "patience": 1},
    {"name": "GradientNorms", "every": 1},
]


def test_callbacks_by_name_are_in_recipes_and_do_what_objects_do(toy: Toy, tmp_path: Path) -> None:
    """A recipe keeps them through a file; each class is imported and made with its options."""
    recipe = {
        "model": "cifar_resnet", "model_options": {"num_classes": 4, "width": 4}, "train": toy.train, "val": toy.val,
        "batch_size": BATCH, "image_size": 16, "optimizer": {"name": "sgd", "lr": 0.0}, "epochs": 5,
        "strategy": "single", "strategy_options": {"device": "cpu"}, "callbacks": [BY_NAME[0]],
    }  # fmt: skip
    pipeline = Pipeline.from_recipe(recipe)
    assert pipeline.to_recipe()["callbacks"] == [BY_NAME[0]]
    named = pipeline.fit(progress=False)
    given = pipeline.fit(progress=False, callbacks=[EarlyStopping("val_loss", patience=1)])
    assert (named.stopped, len(named.history.epochs)) == (given.stopped, 2)  # at a rate of 0 nothing improves
    assert "EarlyStopping" in str(named.stopped)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"epochs": 1, "callbacks": BY_NAME[:2]}))
    norms = Pipeline.from_recipe(tmp_path / "recipe.json").fit(progress=False, out=tmp_path / "run", logger="csv")
    assert norms.stopped is None
    assert "gradients/" in (tmp_path / "run" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "EarlyStoping"}, r"No callback is named 'EarlyStoping'.*Did you mean 'EarlyStopping'"),
        ({"patience": 3}, r"No callback is named None"),
        ({"name": "EarlyStopping", "patienc": 3}, r"EarlyStopping.*patienc.*Did you mean 'patience'"),
        ({"name": "json:JSONDecoder"}, r"names Python's standard library, which has no callbacks"),
        ({"name": "nowhere:Class"}, r"nowhere"),
        ("EarlyStopping", r"'EarlyStopping' is not a callback"),
    ],
)
def test_a_name_that_is_no_callback_is_refused_before_training(toy: Toy, entry: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        toy.pipeline().fit(epochs=1, progress=False, callbacks=[entry])


def test_numbers_of_numpy_are_in_the_recipe(toy: Toy, tmp_path: Path) -> None:
    stops = EarlyStopping(min_delta=np.float64(0.5))
    toy.named().fit(epochs=1, out=tmp_path, progress=False, callbacks=[stops])
    again = Pipeline.from_recipe(tmp_path / "recipe.yaml")
    assert again.to_recipe()["callbacks"] == [{"name": "EarlyStopping", "min_delta": 0.5}]


def test_the_command_line_takes_callbacks_by_name(toy: Toy, tmp_path: Path) -> None:
    values = [*toy_values(toy), "optimizer.lr=0.0", "--out", str(tmp_path / "run"), "--logger", "csv"]
    values[values.index("epochs=2")] = "epochs=4"
    named = ["--callback", json.dumps(BY_NAME[0]), "--callback", "GradientNorms"]
    (end,) = call_several(["train", "cifar10-quickstart", *values, *named])
    assert end.code == 0, end
    assert "EarlyStopping" in end.out
    # At a rate of 0, BatchNorm's statistics may improve it for an epoch.
    assert len(json.loads((tmp_path / "run" / "history.json").read_text())["epochs"]) in (2, 3)
