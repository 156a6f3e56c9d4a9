"""Exported programs: what they compute, for any batch size, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import export_models
import pytest
import torch
from command_line import call
from drivetrain import CheckpointError, ExportError, MissingExtra
from drivetrain.pipeline import Exported, FitResult, export
from drivetrain.pipeline.apps.exports.card import CARD
from drivetrain.pipeline.apps.exports.export import _images
from drivetrain.pipeline.describe.inputs import Inputs
from drivetrain.transforms import EMA, BlurPool, ChannelsLast
from pipeline_data import CLASSES, SIDE, Toy, batch_norm_model, write_toy
from safetensors import safe_open

pytestmark = pytest.mark.long
KINDS = {"torch-export": "model.pt2", "onnx": "model.onnx"}
FAST = ["torch-export", pytest.param("onnx", marks=pytest.mark.slow)]
Ran = tuple[FitResult, Path]


@pytest.fixture(scope="module")
def run(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run with surgery and averages, and its folder."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    pipeline = toy.named(0.05, mean=(0.5, 0.4, 0.3)).transform(
        BlurPool(min_channels=1), ChannelsLast(), EMA(half_life=2)
    )
    return pipeline.fit(epochs=1, out=folder, progress=False), folder


def outputs_of(path: Path, images: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, str]]:
    """Run a file as its users do. Return the outputs and the metadata."""
    if path.suffix == ".pt2":
        about = {"inputs": "", "task": ""}
        model = torch.export.load(path, extra_files=about).module()
        result = model(images)
        return [*result.values()] if isinstance(result, dict) else [result], about
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    found = session.run(None, {"images": images.numpy()})
    return [torch.from_numpy(one) for one in found], session.get_modelmeta().custom_metadata_map


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_computes_the_trained_models_outputs(run: Ran, kind: str, tmp_path: Path) -> None:
    result, folder = run
    path = tmp_path / KINDS[kind]
    exported = export(folder, path)
    assert isinstance(exported, Exported)
    assert exported.difference is not None
    assert exported.difference.images == "8 images of val.beton"
    assert exported.difference.largest < 1e-4 < exported.difference.scale
    assert exported.checkpoint.content.epoch == 1
    for count in (1, 5):
        images = torch.randn(count, 3, SIDE, SIDE)
        (found,), about = outputs_of(path, images)
        with torch.no_grad():
            torch.testing.assert_close(found, result.model(images), rtol=1e-4, atol=1e-4)
    assert Inputs.from_dict(json.loads(about["inputs"])) == result.inputs
    assert json.loads(about["task"]) == "Classification()"
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([CARD, path.name])


def test_the_command(run: Ran, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, folder = run
    path = tmp_path / "own.pt2"
    end = call("export", str(folder), str(path), "--format", "torch-export", "--data", toy.train)
    assert end.code == 0, end.err
    first, second, third = end.out.splitlines()
    assert first == f"{path}: step-00000004"
    assert "largest difference" in second
    assert "8 images of train.beton" in second
    assert third == f"  model card: {tmp_path / CARD}"
    weights = tmp_path / "own.safetensors"
    assert call("export", str(folder), str(weights), "--quiet").out == f"{weights}: step-00000004\n"
    with safe_open(weights, framework="pt") as file:
        assert Inputs.from_dict(json.loads(file.metadata()["inputs"])) == result.inputs
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    missing = call("export", str(folder), str(tmp_path / "own.onnx"))
    assert "onnxruntime is needed to export to ONNX" in missing.line
    assert missing.line.endswith("pip install 'drivetrain[onnx]'\n")
    with pytest.raises(MissingExtra):
        export(folder, tmp_path / "own.onnx")
    for options, message in (
        (("own.onnx", "--format", "torch-export"), "does not end in .pt2"),
        (("own.weights",), "does not end in .safetensors or .pt2 or .onnx"),
        (("own.pt2", "--format", "torchscript"), "Did you mean 'torch-export'?"),
        (("own.pt2", "--names", "trained"), "are of safetensors"),
        (("own.safetensors", "--names", "plan"), "names='plan' (--names) is not known. Pass plain or trained"),
        (("own.safetensors", "--data", toy.val), "data= (--data) compares a program"),
        (("own.safetensors", "--tolerance", "0.1"), "tolerance= (--tolerance) compares a program"),
        (("own.pt2", "--tolerance", "0"), "tolerance=0.0 must be a finite number in (0, 1]"),
        (("own.pt2", "--data", "nothing.beton"), "nothing.beton does not exist"),
    ):
        assert message in call("export", str(folder), str(tmp_path / options[0]), *options[1:]).line
    assert not (tmp_path / "own.onnx").exists()
    with pytest.raises(CheckpointError, match="is not known"):
        export(folder, tmp_path / "new.safetensors", names="surgery")  # type: ignore[arg-type]
    assert not (tmp_path / "new.safetensors").exists()


def test_any_tolerance_of_weights_is_refused(tmp_path: Path) -> None:
    """Also the one of programs that are exported without it."""
    with pytest.raises(CheckpointError, match=r"tolerance= \(--tolerance\) compares a program"):
        export(tmp_path, tmp_path / "own.safetensors", tolerance=1e-3)


def own(toy: Toy, folder: Path, model: Any) -> Path:
    """A run of a model that is already built, which its recipe cannot name."""
    toy.pipeline(model()).fit(epochs=1, out=folder, progress=False)
    return folder


def test_a_program_can_be_compared_on_one_image(tmp_path: Path) -> None:
    one = write_toy(tmp_path / "one.beton", 1, seed=3)
    images, about = _images(Inputs(SIDE, 1.0, (0.5,) * 3, (0.2,) * 3), {}, one)
    assert about == "1 image of one.beton"
    assert images.shape == (2, 3, SIDE, SIDE)
    assert images[0].equal(images[1])


def test_a_factory_can_be_given(toy: Toy, tmp_path: Path) -> None:
    folder = own(toy, tmp_path / "run", batch_norm_model)
    path = tmp_path / "own.pt2"
    assert "was passed as a module" in call("export", str(folder), str(path)).line
    end = call("export", str(folder), str(path), "--model", "export_models:batch_norm_model")
    assert end.code == 0, end.err
    assert "8 random images" in end.out  # there is no recipe that names the data
    with pytest.raises(CheckpointError, match="is not the model that was trained"):
        export(folder, path, model=lambda: batch_norm_model(5))


@pytest.mark.parametrize("kind", FAST)
def test_what_computes_something_else_is_not_written(toy: Toy, kind: str, tmp_path: Path) -> None:
    folder = own(toy, tmp_path / "run", export_models.Counting)
    with pytest.raises(ExportError, match=r"computes something else: largest difference \d.*was not written"):
        export(folder, tmp_path / KINDS[kind], model=export_models.Counting)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", FAST)
def test_a_difference_within_the_tolerance_is_written(toy: Toy, kind: str, tmp_path: Path) -> None:
    """The outputs are larger than the difference, because the number of all calls is added to them."""
    folder, path = own(toy, tmp_path / "run", export_models.Counting), tmp_path / KINDS[kind]
    difference = export(folder, path, model=export_models.Counting, tolerance=1.0).difference
    assert difference is not None
    assert difference.scale > difference.largest > 0.9
    assert path.exists()


def test_a_model_of_one_batch_size_is_not_exported(toy: Toy, tmp_path: Path) -> None:
    folder = own(toy, tmp_path / "run", export_models.FixedBatch)
    with pytest.raises(ExportError, match=r"cannot be exported as torch-export: .*must not depend on the batch"):
        export(folder, tmp_path / "model.pt2", model=export_models.FixedBatch)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", FAST)
def test_a_model_may_return_several_tensors(toy: Toy, kind: str, tmp_path: Path) -> None:
    folder = own(toy, tmp_path / "run", export_models.TwoOutputs)
    path = tmp_path / KINDS[kind]
    export(folder, path, model=export_models.TwoOutputs)
    images = torch.randn(3, 3, SIDE, SIDE)
    logits, mean = outputs_of(path, images)[0]
    assert logits.shape == (3, CLASSES)
    torch.testing.assert_close(mean, images.mean((1, 2, 3)))
