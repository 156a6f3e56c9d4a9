"""`Pipeline.fit` on one device: it learns, agrees with plain PyTorch, is reproducible, and restores global state."""

import copy
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
import yaml
from drivetrain import Callback, DrivetrainError, Pipeline, PlanError, RunView
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline import Checkpoints, FitResult
from drivetrain.pipeline.runs import run
from drivetrain.pipeline.telemetry import loggers, progress
from drivetrain.pipeline.telemetry.history import COLUMNS, History
from drivetrain.pipeline.telemetry.progress import Progress
from drivetrain.pipeline.telemetry.state import EpochMeter, TrainState
from drivetrain.pipeline.training import loop
from drivetrain.transforms import BlurPool, ChannelsLast, LabelSmoothing
from pipeline_data import (
    BATCH,
    CLASSES,
    RUN_FILES,
    SIDE,
    TRAIN,
    VAL,
    Layered,
    Sleepy,
    Toy,
    batch_norm_model,
    evaluated,
    left_in,
    living_threads,
    numbers,
    plain_model,
    surroundings,
)
from safetensors.torch import load_file
from torch import nn


def assert_equal_states(left: nn.Module, right: nn.Module, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(left.state_dict(), right.state_dict(), rtol=tolerance, atol=tolerance)


def batches(path: str, train: bool, epochs: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    with FFCVLoader(
        path, batch_size=BATCH, image_size=SIDE, train=train, flip=False, seed=0, workers=1, drop_last=train
    ) as loader:
        for _ in range(epochs):
            yield list(loader)


def plain_training(
    toy: Toy, epochs: int, accumulate: int = 1, clip_norm: float | None = None, warmup: float = 0.0
) -> tuple[nn.Module, list[float], list[tuple[float, float]]]:
    """A typical hand-written training loop, with a triangular learning rate."""
    torch.manual_seed(0)
    model = batch_norm_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    steps, step = epochs * (TRAIN // BATCH), 0
    losses, evaluations = [], []
    for train, val in zip(
        batches(toy.train, True, epochs), batches(toy.val, False, epochs), strict=True
    ):  # fmt: skip
        total = 0.0
        model.train()
        for images, labels in train:
            rising = warmup * steps
            factor = (step + 1) / (rising + 1) if step < rising else 1 - (step - rising) / (steps - rising)
            optimizer.param_groups[0]["lr"] = 0.1 * factor
            optimizer.zero_grad()
            for part in range(accumulate):
                share = slice(part * BATCH // accumulate, (part + 1) * BATCH // accumulate)
                loss = F.cross_entropy(model(images[share]), labels[share]) / accumulate
                loss.backward()
                total += loss.item()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            step += 1
        losses.append(total / len(train))
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(images) for images, _ in val])
        labels = torch.cat([labels for _, labels in val])
        assert len(labels) == VAL
        evaluations.append((F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()))
    return model, losses, evaluations


def fit(pipeline: Pipeline, epochs: int, **arguments: Any) -> FitResult:
    return pipeline.fit(epochs=epochs, progress=False, **arguments)


@pytest.mark.parametrize(
    "case",
    [{}, {"accumulate": 2}, {"clip_norm": 0.05}, {"accumulate": 4, "clip_norm": 0.05, "warmup": 0.3}],
    ids=["plain", "accumulated", "clipped", "all with warm-up"],
)
def test_agrees_with_a_loop_written_by_hand(toy: Toy, case: dict[str, Any]) -> None:
    model, losses, evaluations = plain_training(toy, 3, **case)
    warmup = case.get("warmup", 0.0)
    pipeline = (
        toy.pipeline(batch_norm_model)
        .optimize("sgd", lr=0.1, momentum=0.9, weight_decay=1e-3, schedule="linear", warmup=warmup)
        .distribute("single", **{key: value for key, value in case.items() if key != "warmup"})
    )
    result = fit(pipeline, 3)
    found = result.history.epochs
    assert [epoch.loss for epoch in found] == pytest.approx(losses, abs=1e-6)
    assert [epoch.val_loss for epoch in found] == pytest.approx([loss for loss, _ in evaluations], abs=1e-6)
    assert [epoch.accuracy for epoch in found] == pytest.approx([right for _, right in evaluations], abs=1e-6)
    assert_equal_states(result.model, model, 1e-6)


def test_clipping_and_accumulation_matter_here(toy: Toy) -> None:
    """Else the parity above would hold without them."""
    plain, _, _ = plain_training(toy, 1)
    clipped, _, _ = plain_training(toy, 1, clip_norm=0.05)
    accumulated, _, _ = plain_training(toy, 1, accumulate=2)
    for other in (clipped, accumulated):
        with pytest.raises(AssertionError):
            assert_equal_states(plain, other, 1e-6)


def test_learns_and_tells_what_happened(toy: Toy, tmp_path: Path, capsys: Any) -> None:
    pipeline = toy.pipeline(batch_norm_model).transform(LabelSmoothing(0.1), ChannelsLast())
    result = pipeline.fit(epochs=4, out=tmp_path / "a" / "run")
    first, *_, last = result.history.epochs
    assert last.loss < 0.7 * first.loss
    assert result.accuracy == last.accuracy
    assert (result.accuracy or 0) > 0.9  # chance is 0.25
    for number, epoch in enumerate(result.history.epochs, 1):
        assert epoch.epoch == number
        assert epoch.lr == 0.1
        assert 0 <= epoch.data_wait_fraction <= 1
        # The training of TRAIN images took a part of the epoch's time.
        assert TRAIN / epoch.images_per_s < epoch.seconds
        assert round(epoch.accuracy * VAL, 6) == round(epoch.accuracy * VAL)  # type: ignore[operator]
    assert str(result.history).count("\n") == 3
    page = result.history._repr_html_()
    assert {*COLUMNS, "metrics", "units"} == {*asdict(last)}
    assert page.count("<tr>") == 1 + len(result.history.epochs)
    assert f">{result.accuracy:.2%}</td>" in page
    assert "the plan" in result._repr_html_()
    assert "what was changed" in result._repr_html_()
    assert "<td" in result.reports[0]._repr_html_()
    assert "LabelSmoothing(smoothing=0.1)<br>ChannelsLast()" in pipeline._repr_html_()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    for number, (line, epoch) in enumerate(zip(lines, result.history.epochs, strict=True), 1):
        for figure in (
            f"epoch {number}  ", f"loss {epoch.loss:.4f}  ", f"top1 {epoch.accuracy:.2%}  ",
            f"{epoch.images_per_s:,.0f} images/s  ", f"waiting {epoch.data_wait_fraction:.0%}  ",
        ):  # fmt: skip
            assert figure in line

    written = json.loads((tmp_path / "a" / "run" / "history.json").read_text())
    assert written == result.history.to_dict()
    assert written["seed"] == 0
    assert written["provenance"]["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert left_in(tmp_path / "a" / "run") == RUN_FILES
    assert (tmp_path / "a" / "run" / "plan.txt").read_text() == f"{result.plan.text(120)}\n"
    loaded = batch_norm_model()
    loaded.load_state_dict(load_file(tmp_path / "a" / "run" / "model.safetensors"), strict=True)
    assert_equal_states(loaded, result.model)
    assert not result.model.training
    assert evaluated(loaded, toy.val) == pytest.approx((last.val_loss, last.accuracy), abs=1e-6)


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        (120, ["50%", "|", "loss 1.2500", "top1 81.25%", "images/s", "left", "waiting 25%"]),
        (80, ["50%", "loss 1.2500", "top1 81.25%", "images/s", "left"]),
        (60, ["50%", "loss 1.2500", "images/s", "left"]),
        (45, ["50%", "|", "loss 1.2500"]),
    ],
)
def test_the_bar_shows_what_there_is_room_for(columns: int, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As people see it in the middle of the second epoch."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(progress, "_REFRESH", 0.05)
    file = io.StringIO()
    state = TrainState(meter=EpochMeter(seconds=2.0, data_wait_s=0.5), step_images=32)
    state.step_loss = torch.tensor(1.25)
    with Progress(2, 3, 128, "top1 81.25%", show=True, file=file) as bar:
        bar.on_step_end(state)
        time.sleep(0.1)  # until it is drawn again
        bar.on_step_end(state)
    drawn = file.getvalue().split("\r")
    seen = [text for text in drawn if "loss 1.2500" in text]
    assert seen, drawn
    found = re.findall(r"\d+%|\||loss [\d.]+|top1 [\d.]+%|images/s|left|waiting \d+%", seen[-1])
    assert list(dict.fromkeys(found)) == texts
    assert len(seen[-1].rstrip()) <= columns


def test_the_time_left_is_that_of_the_epochs_to_come(toy: Toy, capsys: Any) -> None:
    result = toy.pipeline(partial(Sleepy, 0.04)).fit(epochs=3)  # 0.16 s of training each, and the evaluation
    first, _, last = (line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch "))
    left = timedelta(seconds=round(2 * result.history.epochs[0].seconds))
    assert first == f"{result.history.epochs[0]}  {left} left"
    assert last == str(result.history.epochs[2])


def test_a_run_of_named_parts_leaves_its_recipe_too(toy: Toy, tmp_path: Path) -> None:
    made = toy.named()
    fit(made, 1, out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*RUN_FILES, "recipe.yaml"}
    again = Pipeline.from_recipe(tmp_path / "recipe.yaml")
    assert again.to_recipe() | {"name": None} == made.to_recipe() | {"epochs": 1, "name": None}


def test_the_recipe_and_the_scripts_of_the_user_stay(toy: Toy, tmp_path: Path) -> None:
    recipe, script = tmp_path / "recipe.yaml", tmp_path / "script_train.py"
    recipe.write_text(f"# mine\n{yaml.safe_dump(toy.named().to_recipe())}")
    script.write_text("mine")
    pipeline = Pipeline.from_recipe(recipe)
    with pytest.raises(DrivetrainError, match=r"recipe\.yaml was not written by a run"):
        pipeline.fit(epochs=1, out=tmp_path, progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {recipe.name, script.name}
    recipe.unlink()
    for _ in range(2):  # the second run replaces the first
        pipeline.fit(epochs=1, out=tmp_path, progress=False)
    assert script.exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (3, "out=3 must be the path of a folder"),
        (b"run", "out=b'run' must be the path"),
        ("", "out='' is not a folder"),
    ],
)
def test_what_is_no_folder_is_refused(toy: Toy, out: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        toy.pipeline().fit(epochs=1, out=out)


def test_without_validation_data(toy: Toy) -> None:
    pipeline = Pipeline(plain_model).load(toy.train, batch_size=BATCH, image_size=SIDE, workers=1)
    result = fit(pipeline, 1)
    assert (result.accuracy, result.history.epochs[0].val_loss) == (None, None)


def test_bf16_learns_with_fp32_weights(toy: Toy) -> None:
    pipeline = toy.pipeline(batch_norm_model).transform(ChannelsLast())
    bf16 = fit(pipeline.distribute("single", precision="bf16"), 3)
    fp32 = fit(pipeline, 3)
    assert (bf16.accuracy or 0) > 0.8
    assert {value.dtype for value in bf16.model.parameters()} == {torch.float32}
    assert bf16.history.epochs[0].loss != fp32.history.epochs[0].loss
    assert bf16.history.epochs[0].loss == pytest.approx(fp32.history.epochs[0].loss, rel=0.05)


def test_same_seed_same_bits_and_another_seed_another_run(toy: Toy) -> None:
    pipeline = toy.pipeline(batch_norm_model, flip=True).transform(BlurPool(), ChannelsLast())
    pipeline = pipeline.replace(model=lambda: nn.Sequential(plain_pool(), nn.Dropout(0.3)))
    one, two = fit(pipeline, 2), fit(pipeline, 2)
    assert [e.loss for e in one.history.epochs] == [e.loss for e in two.history.epochs]
    assert_equal_states(one.model, two.model)
    other = fit(pipeline.replace(seed=1), 2)
    assert other.history.epochs[0].loss != one.history.epochs[0].loss


def plain_pool() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
    )


def test_touches_nothing_outside(toy: Toy) -> None:
    """The user's module, random states, threads, default dtype and signal handlers are as before."""
    model = batch_norm_model()
    before = copy.deepcopy(model.state_dict())
    pipeline = toy.pipeline(model).transform(ChannelsLast(), BlurPool(), LabelSmoothing())

    at_first, threads, children = surroundings(), living_threads(), set(psutil.Process().children())
    with pytest.warns(match="BlurPool changed nothing"):
        result = fit(pipeline, 1)
    assert surroundings() == at_first
    assert model.training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model[0].weight.is_contiguous()
    assert result.model is not model
    assert [type(layer) for layer in model] == [type(layer) for layer in batch_norm_model()]
    assert living_threads() <= threads
    started = set(psutil.Process().children()) - children
    assert not [child for child in started if "resource_tracker" not in str(child.cmdline())]


def test_the_same_from_a_module_as_from_its_factory(toy: Toy) -> None:
    torch.manual_seed(0)
    assert_equal_states(fit(toy.pipeline(plain_model()), 1).model, fit(toy.pipeline(plain_model), 1).model)


def test_an_optimizer_factory_gets_the_final_parameters(toy: Toy) -> None:
    seen: list[list[torch.Tensor]] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        seen.append(list(parameters))
        return torch.optim.AdamW(seen[-1], lr=0.01)

    pipeline = toy.pipeline(batch_norm_model).transform(ChannelsLast()).optimize(factory)
    with pipeline.build() as built:
        own = list(built.engine.plain_model.parameters())
        assert [id(p) for p in seen[-1]] == [id(p) for p in own]
        assert isinstance(built.engine.optimizer, torch.optim.AdamW)
        assert not own[0].is_contiguous()


def test_the_torch_loader_trains_too_also_from_a_folder(toy: Toy, tmp_path: Path) -> None:
    from PIL import Image
    from pipeline_data import toy_arrays

    images, labels = toy_arrays(64, seed=5)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "photos" / ("a", "b", "c", "d")[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    pipeline = toy.pipeline(loader="torch", workers=0)
    assert fit(pipeline, 3).history.epochs[-1].loss < 1.3
    folder_pipeline = Pipeline(plain_model).load(
        tmp_path / "photos", toy.val, batch_size=BATCH, image_size=SIDE, loader="torch", workers=0
    )
    assert fit(folder_pipeline, 1).accuracy is not None


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad, torch.inference_mode, float64, lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["no_grad", "inference_mode", "float64", "device", "autocast"],
)  # fmt: skip
def test_the_settings_of_the_caller_change_nothing(
    toy: Toy, around: Callable[[], AbstractContextManager[object]]
) -> None:
    pipeline, image = toy.pipeline(), np.zeros((SIDE, SIDE, 3), np.uint8)
    plain = pipeline.fit(epochs=1, progress=False)

    def settings() -> tuple[object, ...]:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return *modes, torch.get_default_dtype(), torch.get_default_device()

    with around():
        set_by_caller = settings()
        result = pipeline.fit(epochs=1, progress=False)
        evaluated, predicted = result.evaluate(), result.predict(image)
        with pipeline.build() as built:
            assert next(built.engine.plain_model.parameters()).dtype == torch.float32
            assert built.begin(1).set_lr(0) == 0.1
        assert settings() == set_by_caller
    assert numbers(result) == numbers(plain)
    assert evaluated == plain.evaluate()
    assert predicted == plain.predict(image)


def test_a_relative_folder_and_another_working_directory(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moves(Callback):
        def on_step_end(self, view: RunView) -> None:
            (tmp_path / f"at{view.step}").mkdir()
            os.chdir(tmp_path / f"at{view.step}")

    monkeypatch.chdir(tmp_path)
    toy.pipeline().fit(epochs=2, out="run", progress=False, callbacks=[Moves()])
    assert left_in(tmp_path / "run") == RUN_FILES
    assert not list((tmp_path / "at8").iterdir())


def test_a_history_is_saved_by_its_suffix(toy: Toy, tmp_path: Path) -> None:
    history = toy.pipeline().fit(epochs=1, progress=False).history
    for name, start in (("h.json", b"{"), ("h.png", b"\x89PNG"), ("h.svg", b"<?xml"), ("h.pdf", b"%PDF")):
        history.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert len(history.show().axes) == 4
    with pytest.raises(DrivetrainError, match=r"h\.txt must end in \.json, \.png"):
        history.save(tmp_path / "h.txt")
    for draw in (History().show, lambda: History().save(tmp_path / "empty.png")):
        with pytest.raises(DrivetrainError, match="No epoch has finished"):
            draw()
    assert len([*tmp_path.iterdir()]) == 4


class Clocked(Layered):
    """By its own clock, a batch of training takes a second, and one of evaluation ten."""

    now: ClassVar[float] = 0.0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        Clocked.now += 1.0 if self.training else 10.0
        result: torch.Tensor = self.layers(images)
        return result


class Totals(Callback):
    """Keeps the images and the seconds of the run at the end of each epoch."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def on_epoch_end(self, view: RunView) -> None:
        self.found.append((view.images, view.seconds))


class Speeds:
    """A logger that keeps the speed of each step."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        if "step/images_per_s" in values:
            self.found[step] = values["step/images_per_s"]


def test_evaluations_do_not_count_in_the_speed(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an epoch that is resumed: of four steps, with three evaluations within and one at the end."""
    for module in (loop, run, loggers):
        monkeypatch.setattr(module, "perf_counter", lambda: Clocked.now)
    pipeline, every, results = toy.pipeline(Clocked), Checkpoints(every_steps=1, keep=9), list[FitResult]()
    place = tmp_path / "checkpoints" / "step-00000006"
    for options, totals, steps in (
        ({"out": tmp_path, "checkpoints": every}, [(TRAIN, 4.0), (2 * TRAIN, 8.0)], range(1, 9)),
        ({"resume": place}, [(2 * TRAIN, 8.0)], range(7, 9)),
    ):
        counted, speeds = Totals(), Speeds()
        given: dict[str, Any] = {"callbacks": [counted], "logger": speeds, "log_every": 1, **options}
        results.append(fit(pipeline, 2, eval_every_steps=1, **given))
        assert counted.found == totals
        assert speeds.found == dict.fromkeys(steps, float(BATCH))
    for result in results:
        epochs = result.history.epochs
        assert [TRAIN / epoch.images_per_s for epoch in epochs] == pytest.approx([4.0, 4.0])
        assert [epoch.seconds for epoch in epochs] == pytest.approx([84.0, 84.0])
        assert [epoch.data_wait_fraction for epoch in epochs] == [0.0, 0.0]
