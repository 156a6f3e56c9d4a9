"""Hugging Face's models by name: in a pipeline, on ranks, in a run's folder, with weights, and without a network."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import hf_folders
import pytest
import torch
from cifar10_files import closed_port
from drivetrain import DataError, Pipeline, PlanError, RecipeError
from drivetrain.pipeline import export, load_run
from drivetrain.pipeline.models import libraries
from drivetrain.pipeline.models.factories import model_factory
from drivetrain.strategies import launch
from pipeline_data import CLASSES, Toy, numbers, toy_arrays
from safetensors.torch import load_file, save_file
from torch import nn

LAST = {"vit": "classifier", "resnet": "classifier.1", "convnext": "classifier"}
"""The last layer of each."""
KINDS = tuple(LAST)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("hub")
    return {kind: hf_folders.save(root / kind, kind, num_labels=7) for kind in KINDS}


def pipeline_of(name: str, toy: Toy, **options: Any) -> Pipeline:
    start = Pipeline(name, num_classes=CLASSES, **options)
    start = start.load(toy.train, toy.val, batch_size=32, image_size=hf_folders.SIDE, workers=1, flip=False)
    return start.optimize("adamw", lr=0.003, schedule="constant")


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_resumes_and_travels(kind: str, names: dict[str, str], toy: Toy, tmp_path: Path) -> None:
    pipeline = pipeline_of(names[kind], toy, weights=Path(names[kind][3:]))
    result = pipeline.fit(epochs=1, out=tmp_path / "run", progress=False)
    longer = pipeline.fit(epochs=2, out=tmp_path / "run", progress=False, resume=True)
    assert longer.history.epochs[-1].loss < result.history.epochs[0].loss
    again = Pipeline.from_recipe(tmp_path / "run/recipe.yaml")
    assert again.model == pipeline.model
    assert again.to_recipe()["model"] == names[kind]
    assert again.to_recipe()["model_options"] == {"num_classes": CLASSES, "weights": names[kind][3:]}
    assert repr(pipeline).startswith(f"Pipeline({names[kind]}, num_classes={CLASSES}, weights=")
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline
    pixels, _ = toy_arrays(3, seed=5)
    assert load_run(tmp_path / "run").predict(list(pixels)) == longer.predict(list(pixels))
    export(tmp_path / "run", tmp_path / "plain.safetensors")
    state = load_file(tmp_path / "plain.safetensors")
    torch.testing.assert_close(state, longer.model.state_dict(), rtol=0, atol=0)


def test_a_run_needs_its_first_weights_no_more(names: dict[str, str], toy: Toy, tmp_path: Path) -> None:
    shutil.copy(Path(names["vit"][3:]) / "model.safetensors", tmp_path / "first.safetensors")
    pipeline = pipeline_of(names["vit"], toy, weights=tmp_path / "first.safetensors")
    result = pipeline.fit(epochs=1, out=tmp_path / "run", progress=False)
    (tmp_path / "first.safetensors").unlink()
    pixels, _ = toy_arrays(3, seed=5)
    assert load_run(tmp_path / "run").predict(list(pixels)) == result.predict(list(pixels))
    export(tmp_path / "run", tmp_path / "plain.safetensors")
    with pytest.raises(PlanError, match=r"first\.safetensors of hf:.*vit are not a file"):
        pipeline.fit(epochs=1, progress=False)


def on_ranks(names: dict[str, str], toy: Toy) -> dict[Any, Any]:
    """Of ResNet's BatchNorm, each rank sees another half."""
    found = {}
    for kind, strategy in (("vit", "ddp"), ("vit", "fsdp"), ("convnext", "fsdp")):
        pipeline = pipeline_of(names[kind], toy).distribute(strategy, devices=2)
        found[kind, strategy] = numbers(pipeline.fit(epochs=1, progress=False))
    return found


@pytest.mark.slow  # two ranks import transformers
@pytest.mark.process
@pytest.mark.usefixtures("one_thread")
def test_the_same_on_two_ranks(names: dict[str, str], toy: Toy) -> None:
    found = launch(on_ranks, names, toy, devices=2)[0]
    for (kind, strategy), epochs in found.items():
        alone = numbers(pipeline_of(names[kind], toy).fit(epochs=1, progress=False))
        for one, other in zip(alone, epochs, strict=True):
            assert other == pytest.approx(one, abs=1e-5), (kind, strategy)


def build(name: str, **options: Any) -> Any:
    with torch.random.fork_rng():
        return model_factory(name)(**options)


def head_of(model: nn.Module) -> set[str]:
    return {name for name in model.state_dict() if name.startswith("classifier")}


@pytest.mark.parametrize("kind", KINDS)
def test_weights(kind: str, names: dict[str, str], tmp_path: Path) -> None:
    folder = Path(names[kind][3:])
    file, torchs = folder / "model.safetensors", tmp_path / "weights.pth"
    torch.save({"state_dict": load_file(file)}, torchs)
    saved = build(names[kind], weights="DEFAULT").state_dict()  # the library renames some weights when it saves them
    assert sorted(map(float, load_file(file)[f"{LAST[kind]}.weight"].flatten())) == sorted(
        map(float, saved[f"{LAST[kind]}.weight"].flatten())
    )
    save_file(saved, tmp_path / "ours.safetensors")
    for weights in ("DEFAULT", folder, str(file), torchs, tmp_path / "ours.safetensors"):
        same, other = build(names[kind], weights=weights), build(names[kind], weights=weights, num_classes=3)
        assert same.training
        torch.testing.assert_close(same.state_dict(), saved, rtol=0, atol=0)
        state = other.state_dict()
        for name in state:
            if name in head_of(other):
                assert state[name].shape == (3, *saved[name].shape[1:])
                assert state[name].isfinite().all()
            else:
                assert torch.equal(state[name], saved[name])
        assert other.config.num_labels == 3
    assert not torch.equal(build(names[kind]).state_dict()[f"{LAST[kind]}.weight"], saved[f"{LAST[kind]}.weight"])


def test_half_precision_is_read_as_float32(names: dict[str, str], tmp_path: Path) -> None:
    made = build(names["vit"], weights="DEFAULT").half()
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    for weights in (None, "DEFAULT"):
        model = build(f"hf:{tmp_path}", weights=weights)
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model.classifier.weight, made.classifier.weight.float())


def test_a_name_in_the_cache_and_one_that_is_not(
    names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setattr(libraries, "getproxies", dict)
    snapshot = tmp_path / "models--someone--tiny/snapshots/0123"
    shutil.copytree(names["vit"][3:], snapshot)
    (tmp_path / "models--someone--tiny/refs").mkdir()
    (tmp_path / "models--someone--tiny/refs/main").write_text("0123")
    model = build("hf:someone/tiny", weights="DEFAULT", num_classes=2)
    saved = load_file(snapshot / "model.safetensors")
    assert torch.equal(model.vit.layernorm.weight, saved["vit.layernorm.weight"])
    (snapshot / "model.safetensors").unlink()
    build("hf:someone/tiny")
    with pytest.raises(DataError, match=r"hf:someone/tiny: the files of someone/tiny are neither in the cache .*"):
        build("hf:someone/tiny", weights="DEFAULT")
    with pytest.raises(DataError) as raised:
        build("hf:someone/other")
    for words in (str(tmp_path), "hf download someone/other", "'hf:path/to/folder'"):
        assert words in str(raised.value)


def test_refused(names: dict[str, str], toy: Toy, tmp_path: Path) -> None:
    import transformers

    (tmp_path / "empty").mkdir()
    for name, words in (
        (f"hf:{tmp_path / 'empty'}", r"empty of hf:.* has no config\.json"),
        ("hf:", r"^hf: is neither a folder nor a name"),
        ("hf:../nowhere", "neither a folder nor a name on Hugging Face's hub"),
        ("hf:a/b/c", "neither a folder nor a name on Hugging Face's hub"),
    ):
        with pytest.raises(RecipeError, match=words):
            Pipeline(name)
    transformers.BertConfig(hidden_size=8).save_pretrained(tmp_path / "bert")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "wit"}')
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text('{"model_type": ')
    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    full = (Path(names["vit"][3:]) / "model.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(full[: len(full) // 2])
    deeper = build(names["vit"], num_hidden_layers=3).state_dict()
    save_file(deeper, tmp_path / "deeper.safetensors")
    wider = build(names["vit"], hidden_size=64).state_dict()
    save_file(wider, tmp_path / "wider.safetensors")
    vit = names["vit"]
    for name, options, words in (
        (f"hf:{tmp_path / 'bert'}", {}, "is a model of type 'bert', of which transformers has none for image"),
        (f"hf:{tmp_path / 'odd'}", {}, "cannot be configured with .*`wit`"),
        (f"hf:{tmp_path / 'half'}", {}, r"Pass a folder with a complete config\.json"),
        (vit, {"depth": 3}, "does not take 'depth': its configuration, a ViTConfig"),
        (vit, {"hidden_size": "many"}, "cannot be configured with"),
        (vit, {"weights": "no.safetensors"}, r"weights no\.safetensors of hf:.* are not a file"),
        (vit, {"weights": "BEST"}, "weights BEST of hf:.* are not a folder.*only 'DEFAULT'"),
        (vit, {"weights": tmp_path / "foreign.safetensors"}, r"foreign\.safetensors cannot be loaded .*is missing"),
        (vit, {"weights": tmp_path / "half.safetensors"}, r"half\.safetensors cannot be loaded"),
        (vit, {"weights": tmp_path / "deeper.safetensors"}, r"'vit.*' is not a weight of it \(\d+ such"),
        (vit, {"weights": tmp_path / "wider.safetensors"}, r"'vit.*' has another shape there \(\d+ such"),
        (vit, {"weights": tmp_path / "empty"}, r"empty cannot be loaded into hf:"),
        (vit, {"weights": names["resnet"][3:]}, r"cannot be loaded into hf:.*is missing"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=words):
            pipeline_of(name, toy, **options).build()
    with pytest.raises(PlanError, match=r"Input image size \(16\*16\) doesn't match model"):
        pipeline_of(vit, toy, image_size=32).build()
    with pytest.raises(PlanError, match=r"returns \(2, 7\) for 2 images, but .* has 4 classes"):
        Pipeline(vit).load(toy.train, batch_size=32, image_size=16, workers=1).build()
