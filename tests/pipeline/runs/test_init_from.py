"""`fit(init_from=…)`, `Pipeline.evaluate` and `FitResult.evaluate`: weights of runs, checkpoints and files."""

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import yaml
from command_line import call
from drivetrain import CheckpointError, DataError, Pipeline, PlanError
from drivetrain.pipeline import FitResult
from drivetrain.pipeline.describe.config import FitOptions
from drivetrain.pipeline.ledger.data import Trained
from drivetrain.pipeline.ledger.variant import PLAIN, VariantId
from drivetrain.pipeline.measuring.ledger import train_each
from drivetrain.pipeline.measuring.runner import Variant
from drivetrain.pipeline.measuring.tuning.arena import Arena
from drivetrain.transforms import EMA, Factorize
from pipeline_data import BATCH, SIDE, Toy, batch_norm_model, evaluated, plain_model
from safetensors.torch import load_file, save_file
from torch import nn

FACTORIZED = Factorize(min_features=0, latent_features=2)
OPTIONS: dict[str, Any] = {"progress": False}


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FitResult]:
    """A run with averages, and its folder."""
    out = tmp_path_factory.mktemp("runs") / "first"
    return out, averaged(toy).fit(epochs=2, out=out, **OPTIONS)


class Code(str):
    """A pickled object that would make a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self),)


def averaged(toy: Toy) -> Pipeline:
    return toy.pipeline(batch_norm_model).transform(EMA(half_life=3))


def started_from(pipeline: Pipeline, source: str | Path) -> FitResult:
    """A training that changes nothing, so that its result shows where it began."""
    return pipeline.optimize("sgd", lr=0.0, schedule="constant").fit(epochs=1, init_from=source, **OPTIONS)


@pytest.mark.parametrize("kind", ["a run", "a checkpoint", "a file", "x.pth", "script.bin", "timm.pth.tar"])
def test_a_run_begins_with_weights(kind: str, toy: Toy, run: tuple[Path, FitResult]) -> None:
    folder, first = run
    places = {
        "a run": folder, "a checkpoint": folder / "checkpoints/step-00000008", "a file": folder / "model.safetensors",
    } | {name: folder.parent / name for name in ("x.pth", "script.bin", "timm.pth.tar")}  # fmt: skip
    state = first.model.state_dict()
    mean = {"n_averaged": torch.ones(1)} | {f"module.{name}": value for name, value in state.items()}
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    torch.save(state, places["x.pth"])
    options = Namespace(lr=0.1, device=torch.device("cpu"))
    torch.save({"model": zeros, "model_ema": mean, "args": options}, places["script.bin"])
    torch.save(
        {"epoch": 3, "state_dict": {f"_orig_mod.module.{n}": v for n, v in state.items()}},
        places["timm.pth.tar"],
    )
    second = started_from(toy.pipeline(batch_norm_model), places[kind])
    for name, value in first.model.named_parameters():
        torch.testing.assert_close(second.model.get_parameter(name), value, rtol=0, atol=0)
    report = second.history.facts["init_from"]
    assert report == {
        "source": str(places[kind]), "loaded": len(state), "missing": [], "unexpected": [],
        "reshaped": [],
    }  # fmt: skip


class Around(nn.Module):
    """Its own names begin as those do that DistributedDataParallel makes."""

    def __init__(self) -> None:
        super().__init__()
        self.module = plain_model()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(images)
        return found


def test_a_models_own_names_may_begin_with_module(toy: Toy, tmp_path: Path) -> None:
    """Of its own file nothing is removed from them, and of one that was saved in parallel only the first."""
    model = Around()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    state = model.state_dict()
    save_file(state, tmp_path / "own.safetensors")
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "parallel.pth")
    for file in ("own.safetensors", "parallel.pth"):
        result = started_from(toy.pipeline(Around), tmp_path / file)
        torch.testing.assert_close(result.model.state_dict(), state, rtol=0, atol=0)
    assert toy.pipeline(Around).evaluate(tmp_path / "own.safetensors")["val_loss"] > 0


def test_a_longer_run_from_a_finished_one(
    toy: Toy, run: tuple[Path, FitResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, first = run
    longer = averaged(toy).fit(epochs=1, out=tmp_path / "second", init_from=folder)
    assert "Weights from" in capsys.readouterr().out
    assert longer.history.epochs[0].loss < 0.7 * first.history.epochs[0].loss
    resumed = averaged(toy).fit(epochs=1, out=tmp_path / "second", resume="auto", **OPTIONS)
    assert resumed.history.facts["init_from"] == longer.history.facts["init_from"]


def test_the_command_line_begins_with_weights(toy: Toy, run: tuple[Path, FitResult], tmp_path: Path) -> None:
    folder, first = run
    recipe = toy.pipeline(batch_norm_model).optimize("sgd", lr=0.0, schedule="constant").to_recipe()
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    command = ["train", str(tmp_path / "own.yaml"), "epochs=1", "--init-from"]
    second = tmp_path / "second"
    end = call(*command, str(folder), "--out", str(second))
    assert end.code == 0, end.err
    assert f"Weights from {folder}" in end.out
    facts = json.loads((second / "history.json").read_text())
    assert facts["init_from"]["loaded"] == len(first.model.state_dict())
    trained = load_file(second / "model.safetensors")
    for name, value in first.model.named_parameters():
        torch.testing.assert_close(trained[name], value.detach(), rtol=0, atol=0)
    assert "nowhere does not exist" in call(*command, str(tmp_path / "nowhere")).line
    again = call(*command, str(folder), "--out", str(second), "--resume")
    assert again.code == 0, again.err
    assert "the training was finished" in again.out
    assert "Weights from" not in again.out


def test_with_resume_weights_are_used_only_without_a_checkpoint(
    toy: Toy, run: tuple[Path, FitResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is restarted passes both, also when the weights are no longer there."""
    source = tmp_path / "source"
    shutil.copytree(run[0], source)
    options: dict[str, Any] = {"init_from": source, "out": tmp_path / "job", "resume": "auto"}
    first = averaged(toy).fit(epochs=1, **options)
    assert "There is no checkpoint yet: training starts with these weights." in capsys.readouterr().out
    shutil.rmtree(source)
    second = averaged(toy).fit(epochs=1, **options, progress=False)
    assert second.history.facts["init_from"] == first.history.facts["init_from"]
    assert "resumed" in second.history.facts
    expected = averaged(toy).fit(epochs=1, init_from=run[0], **OPTIONS)
    torch.testing.assert_close(second.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0)


def test_another_last_layer_keeps_its_own_values_and_is_named(
    toy: Toy, run: tuple[Path, FitResult], tmp_path: Path
) -> None:
    state = dict(load_file(run[0] / "model.safetensors"))
    state["5.weight"], state["5.bias"] = torch.zeros(7, 128), torch.zeros(7)
    state["extra"] = state.pop("1.running_mean")
    save_file(state, tmp_path / "other.safetensors")
    pipeline = toy.pipeline(batch_norm_model)
    result = started_from(pipeline, tmp_path / "other.safetensors")
    report = result.history.facts["init_from"]
    assert (report["reshaped"], report["missing"], report["unexpected"]) == (
        ["5.weight", "5.bias"], ["1.running_mean"], ["extra"]
    )  # fmt: skip
    with pipeline.build() as built:
        fresh = built.engine.plain_model.get_parameter("5.weight")
        torch.testing.assert_close(result.model.get_parameter("5.weight"), fresh, rtol=0, atol=0)
    torch.testing.assert_close(result.model.get_parameter("0.weight"), state["0.weight"], rtol=0, atol=0)


def test_plain_names_and_those_after_surgery_both_load(toy: Toy, tmp_path: Path) -> None:
    """Factorize renames weights: a plain file is translated, and a run's own names are taken as they are."""
    plain, factorized = toy.pipeline(plain_model), toy.pipeline(plain_model).transform(FACTORIZED)
    torch.manual_seed(5)
    source = plain_model()
    save_file(source.state_dict(), tmp_path / "plain.safetensors")
    result = started_from(factorized, tmp_path / "plain.safetensors")
    names = result.history.facts["init_from"]
    assert (names["missing"], names["unexpected"]) == ([], [])
    torch.testing.assert_close(
        result.model(torch.ones(1, 3, SIDE, SIDE)),
        factorized_like(source, result)(torch.ones(1, 3, SIDE, SIDE)),
    )
    save_file(result.model.state_dict(), tmp_path / "trained.safetensors")
    again = started_from(factorized, tmp_path / "trained.safetensors")
    torch.testing.assert_close(again.model.state_dict(), result.model.state_dict(), rtol=0, atol=0)
    assert plain.evaluate(tmp_path / "plain.safetensors") == plain.evaluate(source.state_dict())
    assert factorized.evaluate(tmp_path / "trained.safetensors") == again.metrics


def factorized_like(source: torch.nn.Module, result: FitResult) -> torch.nn.Module:
    """The plain model with the product of the factors."""
    model = plain_model()
    model.load_state_dict(source.state_dict() | result.plain_state())
    return model


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"init_from": "RUN", "resume": "OUT"}, PlanError, "begins a new run, and resume='.*OUT' contin"),
        ({"init_from": "nowhere"}, PlanError, "nowhere does not exist"),
        ({"init_from": "FILE.pt"}, DataError, "it has more than tensors.*save_file"),
        ({"init_from": "MODEL.pth"}, DataError, "an object of torch.nn.modules.*Save the state dict alone"),
        ({"init_from": "CODE.pth"}, DataError, r"an object of posix\.mkdir.*Save the state dict alone"),
        ({"init_from": "WORDS.txt"}, PlanError, r"WORDS.txt is not a file of weights.*\.safetensors, \.pth"),
        ({"init_from": "RUN/model.safetensors", "out": "RUN"}, PlanError, "which the new run would overwrite"),
        (
            {"init_from": "RUN/model.safetensors", "out": "RUN", "resume": "auto"}, PlanError,
            r"to continue the run in it, pass resume='auto' \(--resume\) without init_from",
        ),
        ({"init_from": "OUT"}, CheckpointError, "has no model.safetensors"),
        ({"init_from": "DAMAGED.safetensors"}, DataError, "not a complete safetensors file"),
        ({"init_from": "OTHER.safetensors"}, PlanError, "Nothing to begin with.*loaded 0 of"),
        ({"init_from": 3}, PlanError, "init_from=3 must be the path of a run"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_begin_a_run_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, toy: Toy, run: tuple[Path, FitResult], tmp_path: Path
) -> None:  # fmt: skip
    (tmp_path / "OUT").mkdir()
    for name in ("FILE.pt", "DAMAGED.safetensors", "WORDS.txt"):
        (tmp_path / name).write_bytes(b"damaged")
    torch.save(batch_norm_model(), tmp_path / "MODEL.pth")
    torch.save({"state_dict": {}, "code": Code(str(tmp_path / "proof"))}, tmp_path / "CODE.pth")
    save_file({"other": torch.zeros(3)}, tmp_path / "OTHER.safetensors")

    def place(value: Any) -> Any:
        if not isinstance(value, str) or value == "auto":
            return value
        return str(run[0]) + value[3:] if value.startswith("RUN") else str(tmp_path / value)

    with pytest.raises(error, match=message):
        toy.pipeline(batch_norm_model).fit(
            epochs=1, progress=False, **{name: place(value) for name, value in options.items()}
        )
    assert list((tmp_path / "OUT").iterdir()) == []
    assert not (tmp_path / "proof").exists()
    assert (run[0] / "model.safetensors").exists()


def test_evaluate_gives_the_metrics_of_the_run(toy: Toy, run: tuple[Path, FitResult]) -> None:
    folder, first = run
    expected = first.metrics
    pipeline = averaged(toy)
    for weights in (folder, str(folder / "checkpoints/step-00000008"), folder / "model.safetensors",
                    first.model.state_dict()):  # fmt: skip
        assert pipeline.evaluate(weights) == pytest.approx(expected, rel=1e-6)
    assert first.evaluate() == pytest.approx(expected, rel=1e-6)
    loss, accuracy = evaluated(first.model, toy.val)
    assert first.evaluate(toy.val) == pytest.approx({"val_loss": loss, "top1": accuracy}, rel=1e-4)
    other = first.evaluate(toy.train)
    assert other["val_loss"] != expected["val_loss"]


def test_evaluate_refuses_what_is_not_of_its_model(toy: Toy, run: tuple[Path, FitResult]) -> None:
    state = run[1].model.state_dict()
    for wrong in (
        {name: value for name, value in state.items() if name != "5.bias"},
        state | {"extra": torch.zeros(1)},
        state | {"5.bias": torch.zeros(9)},
    ):
        with pytest.raises(PlanError, match=r"These are not weights of this model\. .*(5\.bias|extra)"):
            averaged(toy).evaluate(wrong)
    with pytest.raises(PlanError, match="The state dict is empty"):
        averaged(toy).evaluate({})
    with pytest.raises(PlanError, match="no validation data to evaluate"):
        averaged(toy).load(toy.train, batch_size=BATCH, image_size=SIDE, workers=1).evaluate(state)


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.slow
def test_both_on_two_ranks(strategy: str, toy: Toy, run: tuple[Path, FitResult], tmp_path: Path) -> None:
    folder, first = run
    ranks = averaged(toy).distribute(strategy, devices=2, device="cpu")
    assert ranks.evaluate(folder) == pytest.approx(first.metrics, abs=1e-5)
    result = started_from(toy.pipeline(batch_norm_model).distribute(strategy, devices=2, device="cpu"), folder)
    for name, value in first.model.named_parameters():
        torch.testing.assert_close(result.model.get_parameter(name), value, rtol=0, atol=0)
    options = OPTIONS | {"init_from": folder, "out": tmp_path / "job", "resume": "auto"}
    begun, resumed = (ranks.fit(epochs=1, **options) for _ in range(2))
    assert resumed.history.facts["init_from"] == begun.history.facts["init_from"]
    assert "resumed" in resumed.history.facts
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(PlanError, match="Nothing to begin with"):
        started_from(ranks, tmp_path / "other.safetensors")


def test_every_way_to_train_begins_with_the_recipe_s_weights(toy: Toy, tmp_path: Path) -> None:
    """Short trainings of `tune` and `ledger`, `lr_range`, `build` and Lightning, against a model with these weights."""
    trained = toy.pipeline().fit(epochs=3, **OPTIONS).model
    save_file(trained.state_dict(), tmp_path / "start.safetensors")
    options = FitOptions(init_from=tmp_path / "start.safetensors", eval_every=2)
    still = {"lr": 1e-9, "schedule": "constant"}
    recipe = toy.pipeline().optimize("sgd", **still).replace(fit_options=options)
    known = toy.pipeline(trained).optimize("sgd", **still)
    expected = known.fit(epochs=2, **OPTIONS).history.monitored
    assert expected is not None
    assert expected > 0.9
    assert Arena(perf_counter() + 60, 0.1, epochs=2).accuracy(recipe, 0) == expected
    rows: dict[VariantId, Trained] = {}
    train_each([Variant(PLAIN, recipe)], rows, 2, None, progress=False)
    assert rows[PLAIN].accuracy == expected
    assert recipe.lr_range(steps=10).losses == known.lr_range(steps=10).losses
    with recipe.build() as built:
        torch.testing.assert_close(built.engine.export_state(), trained.state_dict(), rtol=0, atol=0)
    pytest.importorskip("lightning")
    module = recipe.to_lightning(epochs=1).module
    torch.testing.assert_close(module.model.state_dict(), trained.state_dict(), rtol=0, atol=0)
