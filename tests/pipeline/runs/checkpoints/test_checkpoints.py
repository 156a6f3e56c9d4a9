"""Checkpoints in one process: resuming is bit-for-bit identical to no interruption; a different run is rejected."""

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checkpoint_jobs import Dropping
from drivetrain import CheckpointError, Classification, DrivetrainError, Pipeline, PlanError
from drivetrain import transforms as t
from drivetrain.pipeline import Checkpoints, CheckpointWarning, FitResult, export
from drivetrain.pipeline.runs.checkpoints.format import Checkpoint, _digest, _measure
from drivetrain.pipeline.runs.checkpoints.state import global_randomness_kept, load_randomness
from drivetrain.pipeline.runs.folder import lock_run_dir
from pipeline_data import (
    BATCH,
    CLASSES,
    SIDE,
    TRAIN,
    Layered,
    Toy,
    batch_norm_model,
    left_in,
    numbers,
    plain_model,
    surroundings,
    write_toy,
)
from safetensors import safe_open
from safetensors.torch import load_file
from same_runs import assert_same_run
from torch import nn

STEPS = TRAIN // BATCH  # of an epoch
ALL = Checkpoints(every_steps=1, keep=1000, background=False)


def gyro() -> nn.Module:
    return nn.Sequential(*batch_norm_model()[:-1], nn.Dropout(0.3), batch_norm_model()[-1])


class Failing(Layered):
    """Fails in the first step."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) == BATCH:  # which the plan's check of the output is not
            raise ZeroDivisionError
        result: torch.Tensor = self.layers(images)
        return result


def fit(pipeline: Pipeline, epochs: int = 3, **arguments: Any) -> FitResult:
    return pipeline.fit(epochs=epochs, progress=False, **arguments)


def checkpoints_in(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("step-*"))


def cases(toy: Toy) -> dict[str, Pipeline]:
    sgd, model = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, batch_norm_model
    plain = toy.pipeline(model, flip=True).optimize("sgd", **sgd, schedule="cosine", warmup=0.2)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5, 8.0]))
    weighted = toy.pipeline(Dropping).task(Classification(loss=loss))
    return {
        "random numbers": toy.pipeline(Dropping),
        "adamw": plain.optimize("adamw", lr=0.01).transform(t.NoWeightDecay(), t.LabelSmoothing(0.1)),
        "no momentum": plain.optimize("sgd", lr=0.1),
        "a factory": plain.optimize(lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5)),
        "ema": plain.transform(t.EMA(half_life=3, update_every=2), t.ChannelsLast()),
        "swa": plain.transform(t.SWA(0.3, 0.8)),
        "lookahead": plain.transform(t.Lookahead(3, power=2.0)),
        "gyro": toy.pipeline(gyro).transform(t.GyroDropout(total_steps=12, sigma=4, tau=1)),
        "resizing": plain.transform(t.ProgressiveResizing(0.5, 0.3, 0.25, 2)),
        "freezing": plain.transform(t.LayerFreezing(0.2, 1.0)),
        "selecting": plain.transform(t.SelectiveBackprop(0.2, 0.9)),
        "mixing": plain.transform(t.MixUp(), t.CutMix(), t.SAM(interval=2)),
        "in parts": plain.distribute("single", accumulate=4, clip_norm=0.1, precision="bf16"),
        "weighted": weighted.transform(t.MixUp(), t.EMA(half_life=3)).distribute("single", accumulate=2),
        "fp16": plain.distribute("single", precision="fp16"),  # its loss scale has moved
        "torch loader": toy.pipeline(model, loader="torch", workers=0, flip=True),
    }


NAMES = [
    "random numbers", "adamw", "no momentum", "a factory", "ema", "swa", "gyro", "resizing", "freezing", "selecting",
    "mixing", "in parts", "weighted", "fp16", "torch loader",
]  # fmt: skip


LONGER = {"no momentum", "a factory", "freezing", "selecting", "resizing", "mixing", "in parts"}
"""Those that keep nothing which another of them does not keep, too: for `make test-all`."""


EVERYWHERE = {"random numbers", "swa", "fp16", *LONGER}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONGER else ()) for name in NAMES]
)
def test_resumed_anywhere_it_is_the_same_run(name: str, toy: Toy, tmp_path: Path) -> None:
    """At the end of the first epoch, in the middle of the second; after the first step, and before the last."""
    pipeline = cases(toy)[name]
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    whole = fit(pipeline, out=tmp_path, checkpoints=ALL)
    found = checkpoints_in(tmp_path)
    assert [int(path.name[5:]) for path in found] == list(range(1, 3 * STEPS + 1))
    before = surroundings()
    ends = (1, 3 * STEPS - 1) if name in EVERYWHERE else ()
    for step in (STEPS, STEPS + 2, *ends):
        assert_same_run(fit(pipeline, resume=found[step - 1]), whole)
    assert surroundings() == before


def test_cases_depend_on_what_is_restored(toy: Toy, tmp_path: Path) -> None:
    """Else they would be the same without it: one file or value of a checkpoint at a time is another's."""
    pipeline = cases(toy)["random numbers"].transform(t.EMA(half_life=3)).optimize("adamw", lr=0.01)
    whole = fit(pipeline, out=tmp_path, checkpoints=ALL)
    donor, host = checkpoints_in(tmp_path)[1], checkpoints_in(tmp_path)[5]
    for name in ("model", "optimizer", "methods", "rank"):
        mixed = swap_file(host, donor, f"{name}.safetensors", tmp_path / name)
        assert numbers(fit(pipeline, resume=mixed)) != numbers(whole), name


def test_other_ranks_draw_by_seed_step_and_rank(toy: Toy, tmp_path: Path) -> None:
    """A checkpoint of one rank on two: whatever a rank draws from is its own, and the same when it resumes again."""
    fit(toy.pipeline(), epochs=1, out=tmp_path, checkpoints=ALL)
    saved = [Checkpoint(path) for path in checkpoints_in(tmp_path)[:2]]

    def drawn(checkpoint: Checkpoint, rank: int, seed: int) -> tuple[float, ...]:
        engine: Any = SimpleNamespace(rank=rank, world_size=2)
        load_randomness(checkpoint, engine, seed)
        return torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002

    cases = [*product(saved, (0, 1), (0, 5))]
    with global_randomness_kept(), torch.random.fork_rng(devices=[]):
        found, again = ([drawn(*case) for case in cases] for _ in range(2))
    assert found == again
    assert [len(set(kind)) for kind in zip(*found, strict=True)] == [len(cases)] * 3


def swap_file(host: Path, donor: Path, name: str, target: Path) -> Path:
    """A copy of `host` with one file of `donor`, with digests that are right."""
    target = target / "step-00000006"
    shutil.copytree(host, target)
    shutil.copy(donor / name, target)
    state = json.loads((target / "state.json").read_text())
    del state["sha256"]
    state["files"][name] = _measure(target / name)
    (target / "state.json").write_text(json.dumps({**state, "sha256": _digest(state)}))
    return target


def test_the_files_are_those_that_other_tools_read(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(batch_norm_model).transform(t.EMA(half_life=3)).optimize("adamw", lr=0.01)
    result = fit(pipeline, out=tmp_path)
    path = checkpoints_in(tmp_path)[-1]
    names = ["methods.safetensors", "model.safetensors", "optimizer.safetensors", "rank.safetensors"]
    assert sorted(entry.name for entry in path.iterdir()) == [*names, "state.json"]
    state = json.loads((path / "state.json").read_text())
    assert (state["epoch"], state["step_in_epoch"], state["step"]) == (3, 0, 3 * STEPS)
    assert state["history"] == result.history.to_dict()
    weights = load_file(path / "model.safetensors")
    assert set(weights) == set(result.model.state_dict())
    averages = load_file(path / "methods.safetensors")
    for name, value in result.model.state_dict().items():
        assert torch.equal(averages[f"EMA.averages::{name}"], value)  # what was evaluated
    with safe_open(path / "optimizer.safetensors", framework="pt") as moments:
        assert moments.get_tensor("0.weight::exp_avg").shape == weights["0.weight"].shape
        assert moments.get_tensor("0.weight::step") == 3 * STEPS


def test_the_history_goes_on(toy: Toy, tmp_path: Path, capsys: Any) -> None:
    pipeline = toy.pipeline(batch_norm_model)
    whole = fit(pipeline, out=tmp_path / "whole", checkpoints=ALL)
    resumed = pipeline.fit(epochs=3, out=tmp_path / "on", resume=checkpoints_in(tmp_path / "whole")[STEPS])
    assert resumed.history.epochs[0] == whole.history.epochs[0]  # with its images/s and seconds
    assert json.loads((tmp_path / "on" / "history.json").read_text()) == resumed.history.to_dict()
    assert resumed.history.facts["resumed"][0]["step"] == STEPS + 1
    assert f"step-0000000{STEPS + 1}: step 1 of epoch 2" in capsys.readouterr().out
    # The second epoch counts the images, and the time, of the step before the interruption.
    second = resumed.history.epochs[1]
    assert second.seconds > second.images_per_s**-1 * TRAIN * 0.99


def test_evaluated_on_images_of_another_size_from_then_on(toy: Toy, tmp_path: Path) -> None:
    small, large = toy.pipeline(), toy.pipeline(eval_image_size=SIDE + 8)
    fit(small, 1, out=tmp_path)
    with pytest.warns(CheckpointWarning, match=rf"had {SIDE} pixels \(eval_image_size\), and have now {SIDE + 8}: the"):
        resumed = fit(large, 2, out=tmp_path, resume="auto")
    assert resumed.inputs.image_size == SIDE + 8
    with pytest.warns(CheckpointWarning, match=rf"had {SIDE + 8} pixels"):
        finished = fit(small, 2, out=tmp_path, resume="auto")
    assert finished.inputs.image_size == SIDE + 8  # its metrics are of those


def test_auto(toy: Toy, tmp_path: Path, capsys: Any) -> None:
    pipeline = toy.pipeline(batch_norm_model)
    whole = pipeline.fit(epochs=3, out=tmp_path, resume="auto")
    assert "There is no checkpoint yet" in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")}
    again = pipeline.fit(epochs=3, out=tmp_path, resume=True)
    assert "the training was finished" in capsys.readouterr().out
    assert_same_run(again, whole)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")} == files
    with pytest.raises(PlanError, match="Pass fit"):
        fit(pipeline, resume="auto")


def test_a_damaged_one_is_passed_over(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(batch_norm_model)
    whole = fit(pipeline, out=tmp_path)
    newest = checkpoints_in(tmp_path)[-1]
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"model.safetensors has 100 bytes that differ from the \d+"):
        fit(pipeline, resume=newest)
    with pytest.warns(CheckpointWarning, match="is damaged: model.safetensors"):
        resumed = fit(pipeline, out=tmp_path, resume="auto")
    assert resumed.history.facts["resumed"][0]["step"] == 2 * STEPS
    assert_same_run(resumed, whole)
    assert_same_run(fit(pipeline, resume=newest), whole)  # it was rewritten


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_one_that_may_not_be_read_is_not_passed_over(
    name: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not damaged: an older one would take its place, and remove it."""
    pipeline = toy.pipeline()
    fit(pipeline, out=tmp_path)
    newest, before, read = checkpoints_in(tmp_path)[-1], sorted(tmp_path.rglob("*")), Path.open

    def denied(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == newest / name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CheckpointError, match=f"{newest.name} could not be read: {name}: .*Permission denied"):
        fit(pipeline, out=tmp_path, resume="auto")
    assert sorted(tmp_path.rglob("*")) == before


def test_another_run_is_refused(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(batch_norm_model)
    fit(pipeline, out=tmp_path)
    other = Toy(tmp_path)
    assert other.train != toy.train
    shuffled = str(write_toy(tmp_path / "other.beton", TRAIN, seed=9))
    changed = {
        r"seed = 0, and this one has 1": pipeline.replace(seed=1),
        r"batch_size = 32, and this one has 16": toy.pipeline(batch_norm_model, batch_size=16),
        r"image_size": toy.pipeline(batch_norm_model, image_size=8),
        r"loader = 'ffcv', and this one has 'torch'": toy.pipeline(batch_norm_model, loader="torch", workers=0),
        r"order = 'random', and this one has 'quasi_random'": toy.pipeline(batch_norm_model, order="quasi_random"),
        r"load settings": toy.pipeline(batch_norm_model, flip=True),
        r"transforms = \[\]": pipeline.transform(t.LabelSmoothing(0.1)),
        r"optimizer = 'sgd', and this one has 'adamw'": pipeline.optimize("adamw", schedule="constant"),
        r"parameter groups": pipeline.optimize("sgd", lr=0.1, momentum=0.8, schedule="constant"),
        r"schedule": pipeline.optimize("sgd", lr=0.1, momentum=0.9),
        r"warmup": pipeline.optimize("sgd", lr=0.1, momentum=0.9, schedule="constant", warmup=0.5),
        r"precision": pipeline.distribute("single", precision="bf16"),
        r"clip_norm": pipeline.distribute("single", clip_norm=1.0),
        r"another model: model.0 is Conv2d.*bias=False.* in the checkpoint": toy.pipeline(plain_model),
        r"another model: model.0 is Conv2d\(3, 8": toy.pipeline(wide),
        r"training samples": pipeline.load(other.val, batch_size=BATCH, image_size=SIDE, flip=False),
        r"training data": pipeline.load(shuffled, batch_size=BATCH, image_size=SIDE, flip=False),
    }
    for message, one in changed.items():
        with pytest.raises(CheckpointError, match=message):
            fit(one, resume=tmp_path)
    # And what makes no difference to the numbers is not compared.
    moved = pipeline.load(other.train, other.val, batch_size=BATCH, image_size=SIDE, flip=False, workers=2)
    assert len(fit(moved.distribute("single", accumulate=2), resume=tmp_path).history.epochs) == 3


def test_settings_for_damaged_samples_and_defaults_do_not_stop_a_resume(toy: Toy, tmp_path: Path) -> None:
    fit(toy.pipeline(scale=(0.5, 1.0), ratio=(0.75, 4 / 3)), 1, out=tmp_path)
    careful = toy.pipeline(scale=[0.5, 1.0], on_error="skip", verify=True)
    assert_same_run(fit(careful, 2, resume=tmp_path), fit(careful, 2))
    with pytest.raises(CheckpointError, match=r"load settings = \{'flip': False, 'scale': \[0.5, 1.0\]\}, and this"):
        fit(toy.pipeline(scale=(0.4, 1.0), on_error="skip"), 2, resume=tmp_path)


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def test_another_scale_of_a_schedulers_learning_rates_is_refused(toy: Toy, tmp_path: Path) -> None:
    def tuned_for(batch_size: int) -> Pipeline:
        options: dict[str, Any] = {"schedule": halved, "scale_lr": True, "base_batch_size": batch_size}
        return toy.pipeline().optimize("sgd", lr=0.1, **options)

    fit(tuned_for(BATCH), 1, out=tmp_path)
    with pytest.raises(CheckpointError, match=r"scale_lr of the scheduler = 1.0, and this one has 2.0"):
        fit(tuned_for(BATCH // 2), 2, resume=tmp_path)
    assert len(fit(tuned_for(BATCH), 2, resume=tmp_path).history.epochs) == 2


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 9, 3, padding=1, bias=False), nn.BatchNorm2d(9), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(9 * 16, CLASSES),
    )  # fmt: skip


@pytest.mark.long
def test_more_epochs_only_where_nothing_depends_on_their_number(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(batch_norm_model)
    whole = fit(pipeline, 4)
    fit(pipeline, 2, out=tmp_path / "constant")
    assert_same_run(fit(pipeline, 4, out=tmp_path / "constant", resume="auto"), whole)
    with pytest.raises(CheckpointError, match="more than epochs=1"):
        fit(pipeline, 1, out=tmp_path / "constant", resume="auto")
    words = r"epochs = 2, and this one has 3. The learning rate, or a method"
    for number, one in enumerate((pipeline.optimize("sgd", lr=0.1), pipeline.transform(t.SWA(0.3, 0.8)))):
        fit(one, 2, out=tmp_path / str(number))
        with pytest.raises(CheckpointError, match=words):
            fit(one, 3, out=tmp_path / str(number), resume="auto")


@dataclass(frozen=True)
class Fading(t.Transform):
    """Looks at the progress, and declares nothing."""

    weigh: Callable[[float], float] = abs

    kind: ClassVar = "batch"
    source: ClassVar[str] = "this test"

    def batch(self, images: torch.Tensor, targets: torch.Tensor, context: t.BatchContext) -> Any:
        return images * (1 - self.weigh(context.progress)), targets


class Steady(Fading):
    @property
    def depends_on_length(self) -> bool:
        return False


@pytest.mark.long
def test_no_method_that_follows_the_length_takes_other_epochs(toy: Toy, tmp_path: Path) -> None:
    """Each is refused by what it declares; one of the user's that declares nothing learns how to."""
    pipeline = toy.pipeline(gyro)
    for name, one in {
        "lookahead": pipeline.transform(t.Lookahead(2, power=3.0)),
        "gyro": pipeline.transform(t.GyroDropout(sigma=4, tau=1)), "own": pipeline.transform(Fading()),
    }.items():  # fmt: skip
        fit(one, 1, out=tmp_path / name)
        with pytest.raises(CheckpointError, match="depends on the length of the training: ") as caught:
            fit(one, 2, out=tmp_path / name, resume="auto")
        assert ("define the property depends_on_length" in str(caught.value)) == (name == "own")
        assert "0x" not in str(caught.value)
    for name, one in {
        "steady": pipeline.transform(Steady()), "lookahead 0": pipeline.transform(t.Lookahead(2)),
        "gyro fixed": pipeline.transform(t.GyroDropout(sigma=4, tau=1, total_steps=2 * STEPS)),
    }.items():  # fmt: skip
        fit(one, 1, out=tmp_path / name)
        resumed = fit(one, 2, out=tmp_path / name, resume="auto")
        if name != "steady":  # whose declaration is not true
            assert_same_run(resumed, fit(one, 2))


def test_functions_are_the_same_at_another_address(toy: Toy, tmp_path: Path) -> None:
    """As in a new process. One that computes otherwise is another run."""
    pipeline = toy.pipeline(plain_model)
    first, again = (Fading(lambda progress: progress / 2) for _ in range(2))
    assert repr(first) != repr(again)
    fit(pipeline.transform(first), 1, out=tmp_path)
    assert fit(pipeline.transform(again), 1, out=tmp_path, resume="auto").history.facts["resumed"]
    with pytest.raises(CheckpointError, match=r"transforms = \['Fading\(weigh=test_checkpoints\..*<lambda>"):
        fit(pipeline.transform(Fading(lambda progress: progress / 3)), 1, out=tmp_path, resume="auto")


def test_places_without_a_checkpoint(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(plain_model)
    (tmp_path / "step-00000001").mkdir()
    for place in (tmp_path / "none", tmp_path, tmp_path / "step-00000001", Path(toy.train)):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint|is not a complete checkpoint"):
            fit(pipeline, resume=place)
    for option in ("every_steps", "keep"):
        with pytest.raises(PlanError, match=f"{option}=0"):
            Checkpoints(**{option: 0})
    fit(pipeline, 1, out=tmp_path / "off", checkpoints=None)
    assert not (tmp_path / "off" / "checkpoints").exists()


def test_the_loss_scale_of_fp16_goes_on(toy: Toy, tmp_path: Path) -> None:
    """It counts the steps since it last changed."""
    pipeline = cases(toy)["fp16"]
    fit(pipeline, out=tmp_path / "whole", checkpoints=ALL)
    halfway = checkpoints_in(tmp_path / "whole")[STEPS]
    fit(pipeline, out=tmp_path / "resumed", resume=halfway, checkpoints=ALL)
    last = [Checkpoint(checkpoints_in(tmp_path / run)[-1]) for run in ("whole", "resumed")]
    scale, other = (checkpoint.content.optimizer.loss_scale for checkpoint in last)
    assert scale == other
    assert scale["_growth_tracker"] == 3 * STEPS


@pytest.mark.long
def test_an_earlier_run_is_replaced_with_a_word_and_as_a_whole(toy: Toy, tmp_path: Path, capsys: Any) -> None:
    pipeline = toy.pipeline(plain_model)
    pipeline.fit(epochs=2, out=tmp_path, logger="csv")
    assert "held" not in capsys.readouterr().out
    pipeline.fit(epochs=1, out=tmp_path)
    assert f"{tmp_path} held a run of 2 epochs; it is replaced" in capsys.readouterr().out
    assert not (tmp_path / "metrics.csv").exists()
    pipeline.fit(epochs=1, out=tmp_path, resume="auto")
    assert "held" not in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        fit(toy.pipeline(Failing), out=tmp_path)
    # The files of the run that failed, and nothing of the other run but its checkpoint.
    assert left_in(tmp_path) == ["checkpoints", "plan.txt"]
    (old,) = checkpoints_in(tmp_path)
    with pytest.raises(CheckpointError, match=f"of an earlier run.*Pass {re.escape(str(old))} to use it"):
        export(tmp_path, tmp_path / "model.safetensors", names="trained")
    fit(pipeline, epochs=1, out=tmp_path, checkpoints=None)
    assert checkpoints_in(tmp_path) == []
    fit(pipeline, epochs=1, out=tmp_path / "off", checkpoints=None)
    pipeline.fit(epochs=1, out=tmp_path / "off", resume="auto")  # it has nothing to resume from
    assert "off held a run of 1 epoch; it is replaced.\n" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_from_another_folder_without_checkpoints_clears_those_of_an_earlier_run(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(plain_model)
    for name in ("from", "here"):
        fit(pipeline, epochs=1, out=tmp_path / name)
    assert checkpoints_in(tmp_path / "here")
    fit(pipeline, epochs=1, out=tmp_path / "here", resume=tmp_path / "from", checkpoints=None)
    assert checkpoints_in(tmp_path / "here") == []
    assert checkpoints_in(tmp_path / "from")
    fit(pipeline, epochs=1, out=tmp_path / "from", resume="auto", checkpoints=None)
    assert checkpoints_in(tmp_path / "from")  # it continues in this folder


@pytest.mark.parametrize("rank", ["", "1"])
def test_two_runs_in_one_folder_are_refused(
    rank: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the variable of a rank is left over, which disables neither the lock nor the curves."""
    if rank:
        monkeypatch.setenv("RANK", rank)
    with lock_run_dir(tmp_path):
        with pytest.raises(DrivetrainError, match=r"Another run is training in .*out="):
            fit(toy.pipeline(plain_model), epochs=1, out=tmp_path)
        assert list(tmp_path.iterdir()) == []
    assert fit(toy.pipeline(plain_model), epochs=1, out=tmp_path).history.epochs
    assert (tmp_path / "curves.png").exists()


VERSION_0_1 = Path(__file__).parent / "version-0.1.0/step-00000006"
"""A checkpoint of that version, after the sixth step of `fit(epochs=2, checkpoints=Checkpoints(every_steps=2))`."""
LOSSES = [1.2614469528198242, 0.34928664565086365]


def test_a_checkpoint_of_version_0_1_within_an_epoch(toy: Toy) -> None:
    """Its meter has the sum of the steps' losses, which newer ones weight."""
    result = toy.pipeline().fit(epochs=2, resume=VERSION_0_1, progress=False)
    assert [epoch.loss for epoch in result.history.epochs] == pytest.approx(LOSSES, abs=1e-6)
