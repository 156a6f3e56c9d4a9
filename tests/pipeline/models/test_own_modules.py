"""Custom models, imported from the recipe's folder and exported by name; and custom transforms without their method."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from drivetrain import CheckpointError, PlanError, RecipeError
from drivetrain.pipeline import export
from drivetrain.pipeline.recipes.files import modules_of
from drivetrain.transforms import ChannelsLast, Factorize, LabelSmoothing, TestTimeFlip, Transform
from pipeline_data import CLASSES, Toy, batch_norm_model, plain_model
from safetensors.torch import load_file
from torch import nn

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes, width=32):
        super().__init__(
            nn.Conv2d(3, width, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(width, classes),
        )
"""


@pytest.fixture
def recipe(toy: Toy, tmp_path: Path) -> Path:
    """Write a recipe file next to a model."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "beside_net.py").write_text(NET)
    file = folder / "mine.yaml"
    file.write_text(
        f"model: beside_net:Net\nmodel_options: {{classes: {CLASSES}, width: 16}}\ntrain: {toy.train}\n"
        f"val: {toy.val}\nbatch_size: 32\nimage_size: 16\nepochs: 1\nworkers: 1\n"
        "transforms: [{name: BlurPool}]\noptimizer: {name: sgd, lr: 0.01}\n"
    )
    return file


@pytest.mark.process
@pytest.mark.slow
def test_a_model_beside_the_recipe_trains_and_is_exported(recipe: Path, tmp_path: Path) -> None:
    """From another working directory; then, for the export, from that of the model."""
    trained = run("train", str(recipe), "--out", "run", cwd=tmp_path)
    assert trained.code == 0, trained.err
    out = tmp_path / "plain.safetensors"
    nameless = run("export", "../run", str(out), cwd=recipe.parent)
    assert "model='beside_net:Net' (--model beside_net:Net)" in nameless.line
    exported = run("export", "../run", str(out), "--model", "beside_net:Net", cwd=recipe.parent)
    assert exported.code == 0, exported.err
    sizes = {name: tuple(value.shape) for name, value in load_file(out).items()}
    assert sizes == {
        "0.weight": (16, 3, 3, 3), "0.bias": (16,), "4.weight": (CLASSES, 16), "4.bias": (CLASSES,),
    }  # fmt: skip


@pytest.mark.slow  # a program and two interpreters of its ranks
@pytest.mark.timeout(300)
def test_ranks_find_the_model_too(recipe: Path, tmp_path: Path) -> None:
    values = ["strategy=ddp", "devices=2", "strategy_options.device=cpu", "transforms=[]"]
    end = run("train", str(recipe), *values, cwd=tmp_path)
    assert end.code == 0, end.err
    assert "after 1 epoch\n" in end.out


def test_the_path_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And inside, own modules stand before installed packages and after the standard library's."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with modules_of(str(tmp_path / "sub" / "mine.yaml")):
        here, beside = sys.path.index(str(tmp_path)), sys.path.index(str(tmp_path / "sub"))
        packages = next(n for n, path in enumerate(sys.path) if path.endswith("site-packages"))
        assert sys.path.index(os.path.dirname(os.__file__)) < beside < here < packages  # noqa: PTH120
    assert sys.path == before
    with modules_of("baseline"):
        assert set(sys.path) - set(before) == {str(tmp_path)}
    assert sys.path == before


def test_export_with_a_model_that_is_given(toy: Toy, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out.safetensors"
    factorize = Factorize(min_channels=1, min_features=1, latent_channels=2, latent_features=2)
    pipeline = toy.pipeline(batch_norm_model).transform(factorize, ChannelsLast())
    result = pipeline.fit(epochs=1, out=run, progress=False)
    for model in ("pipeline_data:batch_norm_model", batch_norm_model, batch_norm_model()):
        export(run, out, model=model)
        torch.testing.assert_close(load_file(out), result.plain_state(), rtol=0, atol=0)
    out.unlink()
    for wrong, error, message in (
        (plain_model, CheckpointError, "plain_model is not the model that was trained: of the weight '1.bias', "),
        (batch_norm_model(5), CheckpointError, r"of the weight '5\..*', .* has it as \(5,.* has it as \(4,"),
        ("pipeline_data:no_model", RecipeError, "cannot be imported"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            export(run, out, model=wrong)
    with pytest.raises(CheckpointError, match=r"names='trained' .* takes no model"):
        export(run, out, names="trained", model=batch_norm_model)
    assert not out.exists()


def test_export_of_a_built_module(toy: Toy, tmp_path: Path) -> None:
    result = toy.pipeline(batch_norm_model()).fit(epochs=1, out=tmp_path / "run", progress=False)
    out = tmp_path / "out.safetensors"
    with pytest.raises(CheckpointError, match=r"was passed as a module.*\(--model MODULE:FACTORY\)"):
        export(tmp_path / "run", out)
    export(tmp_path / "run", out, model=batch_norm_model)
    torch.testing.assert_close(load_file(out), result.plain_state(), rtol=0, atol=0)


def lacking(name: str, **declared: Any) -> type[Transform]:
    """A transform of one's own that declares this, and nothing else."""
    return dataclass(frozen=True)(type(name, (Transform,), {"source": "here", **declared}))


@dataclass(frozen=True)
class Derived(TestTimeFlip):
    pass


SURGERY = lacking("Surgery", kind="surgery")
LACKING: dict[type[Transform], str] = {
    lacking("Losses", kind="loss", losses=lambda _, loss: loss):
        "Losses is a transform of kind 'loss' and must define the method 'loss' .*It defines 'losses': rename",
    SURGERY: "Surgery is a transform of kind 'surgery' and must define the method 'apply'",
    lacking("Image", kind="image"):
        "Image is a transform of kind 'image' and must define the property 'loader_settings'",
    lacking("Evaluation", kind="evaluation"):
        "Evaluation is a transform of kind 'evaluation' and must define the method 'predict'",
    lacking("Kindless"): "Kindless has kind=None; it must declare one",
    lacking("Misspelt", kind="losses"): "Misspelt has kind='losses'; .*Did you mean 'loss'",
}  # fmt: skip


@pytest.mark.parametrize("cls", LACKING)
def test_a_transform_that_lacks_its_method_is_refused(cls: type[Transform], toy: Toy) -> None:
    with pytest.raises(PlanError, match=LACKING[cls]):
        toy.pipeline().transform(LabelSmoothing(), cls())


def test_alone_it_is_refused_too(toy: Toy) -> None:
    with pytest.raises(PlanError, match="must define the method 'apply'"):
        SURGERY().apply(nn.Linear(2, 2))
    assert toy.pipeline().transform(Derived()).transforms == (Derived(),)
