"""Weights of files for torchvision's and timm's models: torch's format and safetensors, another last layer, and files
that are not weights; timm's models by name."""

import enum
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from drivetrain import DataError, Pipeline, PlanError, RecipeError
from drivetrain.pipeline import load_run
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.models.factories import model_factory, pretrained
from drivetrain.pipeline.models.weights import read_weights, weights_omitted
from drivetrain.pipeline.runs.checkpoints.fingerprint import description
from pipeline_data import CLASSES, Toy, toy_arrays
from safetensors.torch import load_file, save_file

NAME = "squeezenet1_1"  # of torchvision's models the smallest, 1.2 million weights
HEAD = "classifier.1"


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """As torchvision publishes them, for 1,000 classes."""
    return dict(torchvision.models.get_model(NAME, weights=None).state_dict())


def save(state: Any, path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def assert_has(model: torch.nn.Module, state: dict[str, torch.Tensor], width: int) -> None:
    """The weights, and a new last layer unless it has the same width."""
    for name, value in model.state_dict().items():
        if name.startswith(HEAD) and width != len(state[f"{HEAD}.bias"]):
            assert value.shape == (width, *state[name].shape[1:])
        else:
            assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_and_another_last_layer(suffix: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = save(state, tmp_path / f"weights{suffix}")
    for weights in (path, str(path)):
        assert_has(pretrained(NAME, 7, weights), state, 7)
        assert_has(pretrained(NAME, 1000, weights), state, 1000)
    seven = {name: value.contiguous() for name, value in pretrained(NAME, 7, path).state_dict().items()}
    again = save(seven, tmp_path / f"seven{suffix}")
    assert_has(pretrained(NAME, 3, again), seven, 3)
    assert_has(pretrained(NAME, 7, again), seven, 7)


def test_what_training_scripts_save(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"  # the suffix does not matter
    parallel = {f"module.{name}": value for name, value in state.items()}
    for content in (
        {"model": state, "epoch": 3}, {"state_dict": parallel}, {"model_state_dict": state}, parallel,
    ):  # fmt: skip
        torch.save(content, path)
        assert_has(pretrained(NAME, 7, path), state, 7)


class Runs:
    """Code in a pickle."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


def test_files_that_are_not_weights_of_the_model(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    full = save(state, tmp_path / "full.pth").read_bytes()
    (tmp_path / "half.pth").write_bytes(full[: len(full) // 2])
    (tmp_path / "empty.pth").write_bytes(b"")
    whole = save(state, tmp_path / "full.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pth").write_text("not weights")
    torch.save({"model": Runs(tmp_path / "proof")}, tmp_path / "code.pth")
    (tmp_path / "code.bin").write_bytes(pickle.dumps(Runs(tmp_path / "proof")))
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "number.pth")
    save({**state, "more": torch.zeros(1)}, tmp_path / "more.pth")
    save({name: value for name, value in state.items() if name != f"{HEAD}.bias"}, tmp_path / "less.pth")
    save({**state, "features.0.bias": torch.zeros(3)}, tmp_path / "shape.pth")
    before = torchvision.models.get_model(NAME, weights=None).state_dict().keys()
    for name, words in (
        ("none.pth", r"none\.pth of squeezenet1_1 are not a file"),
        ("half.pth", r"half\.pth cannot be loaded into squeezenet1_1: .*Pass a complete file"),
        ("empty.pth", r"empty\.pth cannot be loaded into squeezenet1_1"),
        ("half.safetensors", r"half\.safetensors cannot be loaded"),
        ("text.pth", r"text\.pth cannot be loaded"),
        ("code.pth", "more than tensors, an object of .*, and unpickling that could run code"),
        ("code.bin", "more than tensors, and unpickling that could run code"),
        ("list.pth", "it has no state dict"),
        ("number.pth", "its entry 'epoch' is not a tensor"),
        ("more.pth", "'more' is not a weight of it"),
        ("less.pth", rf"'{HEAD}\.bias' is missing"),
        ("shape.pth", r"'features\.0\.bias' is \(3,\) there and \(64,\) in it"),
    ):
        with pytest.raises(DataError, match=words):
            pretrained(NAME, 7, tmp_path / name)
    assert not (tmp_path / "proof").exists()
    timm = model_factory("timm:resnet10t")
    for name in ("code.pth", "half.pth", "full.pth"):
        with pytest.raises(DataError, match=f"{name} cannot be loaded into timm:resnet10t"):
            timm(pretrained=tmp_path / name)
    assert not (tmp_path / "proof").exists()
    with pytest.raises(RecipeError, match=r"has no weights 'IMAGENET', nor is that a file.*Known: .*IMAGENET1K_V1"):
        pretrained(NAME, 7, "IMAGENET")
    assert read_weights(tmp_path / "full.pth", NAME).keys() == before


def test_a_damaged_file_in_torchs_cache(
    state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    url = torchvision.models.get_model_weights(NAME).DEFAULT.url
    (tmp_path / "checkpoints").mkdir()
    path = save(state, tmp_path / "checkpoints" / url.rpartition("/")[2])
    assert_has(pretrained(NAME, 7), state, 7)
    data = path.read_bytes()
    for size in (len(data) // 2, 100, 0):
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=rf"of {NAME} in .*{path.name} are damaged: .*Delete the file"):
            pretrained(NAME, 7)


def test_published_weights_as_torchvisions_object(
    state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    weights = torchvision.models.get_model_weights(NAME).DEFAULT
    (tmp_path / "checkpoints").mkdir()
    save(state, tmp_path / "checkpoints" / weights.url.rpartition("/")[2])
    assert_has(pretrained(NAME, 7, weights), state, 7)
    with pytest.raises(RecipeError, match=r"has no weights ResNet18_Weights\.IMAGENET1K_V1, nor is that a file"):
        pretrained(NAME, 7, torchvision.models.ResNet18_Weights.DEFAULT)
    with weights_omitted():
        pretrained(NAME, 7, weights)


def test_checkpoints_have_the_name_of_published_weights(toy: Toy) -> None:
    """A value of another enumeration cannot be known from its name."""

    class Width(enum.Enum):
        SMALL = 4

    def described(model: str, **options: Any) -> dict[str, Any] | None:
        pipeline = Pipeline(model, num_classes=CLASSES, **options)
        return description(resolve(pipeline.load(toy.train, batch_size=32, image_size=32)))

    weights = torchvision.models.get_model_weights(NAME).IMAGENET1K_V1
    found = described("pretrained", name=NAME, weights=weights)
    assert found is not None
    assert found["model_options"] == {"name": NAME, "num_classes": CLASSES, "weights": "IMAGENET1K_V1"}
    assert found == described("pretrained", name=NAME, weights="IMAGENET1K_V1")
    assert described("cifar_resnet", width=Width.SMALL) is None


def test_without_the_published_weights_it_is_built_as_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is opened without them, and must take its weights."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    url = torchvision.models.GoogLeNet_Weights.DEFAULT.url
    with torch.device("meta"):
        full = torchvision.models.GoogLeNet(init_weights=False).state_dict()
    published = {name: torch.zeros_like(value, device="cpu") for name, value in full.items()}
    save(published, tmp_path / "checkpoints" / url.rpartition("/")[2])
    trained = pretrained("googlenet", 7)
    with weights_omitted(), torch.device("meta"):
        opened = pretrained("googlenet", 7)
        large = pretrained("vit_b_16", 7, "IMAGENET1K_SWAG_E2E_V1")
    one, other = ({key: value.shape for key, value in each.state_dict().items()} for each in (trained, opened))
    assert one == other
    assert vars(trained)["transform_input"] is vars(opened)["transform_input"] is True
    assert large(torch.zeros(2, 3, 384, 384, device="meta")).shape == (2, 7)


def test_inception_is_built_without_its_auxiliary_classifier(tmp_path: Path) -> None:
    """Its outputs are the same in training as in evaluation; torchvision's option refuses published weights."""
    with weights_omitted(), torch.device("meta"):
        model = pretrained("inception_v3", 7)
        assert model(torch.zeros(2, 3, 299, 299)).shape == (2, 7)
        whole = torchvision.models.inception_v3(init_weights=False)
    assert model.training
    assert not any(name.startswith("AuxLogits") for name in model.state_dict())
    for source in (model, whole):  # both can be the start of another one, the latter without its classifier
        state = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in source.state_dict().items()}
        pretrained("inception_v3", 3, save(state, tmp_path / "weights.pth"))


def test_a_run_travels_without_the_file(state: dict[str, torch.Tensor], toy: Toy, tmp_path: Path) -> None:
    path = save(state, tmp_path / "weights.pth")
    pipeline = Pipeline("pretrained", name=NAME, num_classes=CLASSES, weights=path)
    pipeline = pipeline.load(toy.train, toy.val, batch_size=32, image_size=32, workers=1)
    result = pipeline.fit(epochs=1, out=tmp_path / "run", progress=False)
    again = Pipeline.from_recipe(tmp_path / "run/recipe.yaml")
    assert again.to_recipe()["model_options"] == {"name": NAME, "num_classes": CLASSES, "weights": str(path)}
    resumed = again.fit(epochs=1, out=tmp_path / "run", progress=False, resume=True)
    assert resumed.history.epochs == result.history.epochs
    path.rename(tmp_path / "elsewhere.pth")
    pixels, _ = toy_arrays(3, seed=5, side=32)
    assert load_run(tmp_path / "run").predict(list(pixels)) == result.predict(list(pixels))
    for judged in (load_run(tmp_path / "run").evaluate(), again.evaluate(tmp_path / "run")):
        assert judged == pytest.approx(result.metrics)
    with pytest.raises(PlanError, match="are not a file"):
        again.fit(epochs=1, progress=False)
    with weights_omitted():
        pretrained(NAME, 7, tmp_path / "none.pth")
        pretrained(NAME, 7, "IMAGENET1K_V1")
        model_factory("timm:resnet10t")(pretrained=True)
    assert load_file(tmp_path / "run/model.safetensors").keys() == state.keys()


TIMM = "timm:resnet10t"


def test_a_file_that_is_gone_is_not_taken_for_a_name() -> None:
    with weights_omitted():
        assert pretrained(NAME, 7, "gone.ckpt").get_submodule(HEAD).out_channels == 7
    with pytest.raises(RecipeError, match=r"has no weights 'gone.ckpt', nor is that a file"):
        pretrained(NAME, 7, "gone.ckpt")


def test_timms_model_trains_and_goes_into_a_recipe(toy: Toy, tmp_path: Path) -> None:
    pipeline = Pipeline(TIMM, num_classes=CLASSES).load(toy.train, toy.val, batch_size=32, image_size=32, workers=1)
    result = pipeline.fit(epochs=1, out=tmp_path, progress=False)
    assert result.accuracy is not None
    again = Pipeline.from_recipe(tmp_path / "recipe.yaml")
    assert again.model == pipeline.model
    assert again.to_recipe()["model"] == TIMM
    assert repr(pipeline).startswith(f"Pipeline({TIMM}, num_classes={CLASSES})")
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline


def test_timm_takes_weights_of_a_file(tmp_path: Path) -> None:
    factory = Pipeline(TIMM).model
    model = factory(num_classes=5)  # type: ignore[operator]
    path = tmp_path / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    same = factory(num_classes=5, pretrained=path)  # type: ignore[operator]
    torch.testing.assert_close(same.state_dict(), model.state_dict(), rtol=0, atol=0)
    other = factory(num_classes=3, pretrained=str(path))  # type: ignore[operator]
    assert other.get_classifier().out_features == 3
    assert torch.equal(other.conv1[0].weight, model.conv1[0].weight)


def test_names_options_and_weights_of_timm_are_checked(tmp_path: Path, toy: Toy) -> None:
    with pytest.raises(RecipeError, match=r"timm has no model 'resnet10'. Did you mean 'resnet1"):
        Pipeline("timm:resnet10")

    def build(**options: Any) -> None:
        Pipeline(TIMM, **options).load(toy.train, batch_size=32, image_size=32, workers=1).build()

    wrong = tmp_path / "wrong.safetensors"
    save_file({"weight": torch.zeros(2)}, wrong)
    for options, words in (
        ({"pretrained": "nothing.pth"}, r"weights nothing.pth of timm:resnet10t are not a file"),
        ({"classes": CLASSES}, "timm:resnet10t.* does not take {'classes': 4}"),
        (
            {"pretrained": str(wrong)},
            r"wrong.safetensors cannot be loaded into timm:resnet10t: '.*' is missing",
        ),
        ({"pretrained": str(toy.train)}, r"cannot be loaded into timm:resnet10t|cannot be built"),
    ):
        with pytest.raises(PlanError, match=words):
            build(**options)
