"""Models by name: Drivetrain's own, torchvision's, imported ones, and published weights with a new last layer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import recipe_factories
import torch
import torchvision
from drivetrain import DataError, Pipeline, PlanError, RecipeError
from drivetrain.loaders.datasets.names import cifar10
from drivetrain.pipeline.models.cifar import Shift, Whitening, airbench_net
from drivetrain.pipeline.models.factories import MODELS, model_factory, name_of_factory, pretrained, vit_s16
from drivetrain.pipeline.recipes.presets import RECIPES
from drivetrain.pipeline.training.build import build_model
from torch import nn


def test_factories_by_name() -> None:
    assert model_factory("resnet18") is torchvision.models.resnet18
    assert model_factory("recipe_factories:small") is recipe_factories.small
    assert model_factory("recipe_factories:Small.Inner") is recipe_factories.Small.Inner
    for name, factory in MODELS.items():
        assert model_factory(name) is factory
        assert name_of_factory(factory) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet81", "'resnet81'.*package.module:factory.*Did you mean 'resnet18'"),
        ("no_such_module:small", "cannot be imported: No module named 'no_such_module'"),
        ("recipe_factories:smal", "cannot be imported: .*'smal'"),
        ("recipe_factories:", "cannot be imported"), (":small", "cannot be imported"),
        ("recipe_factories:not_a_factory", "is 3. Name a function that returns an nn.Module, or an nn.Module class"),
        ("torch.optim:SGD", "Name a function that returns an nn.Module, or an nn.Module class"),
        ("os:system", "'os:system' names Python's standard library, which has no models. Write package.module"),
        ("json.decoder:loads", "standard library, which has no models"),
        ("__main__:small", "is defined in the running script.*to a separate module"),
    ],
)  # fmt: skip
def test_a_name_that_is_no_factory(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Pipeline(name)


HEADS = {
    "resnet18": "fc", "vit_b_16": "heads.head", "efficientnet_b0": "classifier.1", "vgg11": "classifier.6",
    "densenet121": "classifier", "swin_t": "head", "convnext_tiny": "classifier.2", "squeezenet1_1": "classifier.1",
    "mobilenet_v3_small": "classifier.3",
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_the_last_layer_is_replaced_whatever_its_name(name: str) -> None:
    with torch.device("meta"):
        plain = torchvision.models.get_model(name, weights=None).eval()
        model = pretrained(name, 7, weights=None).eval()
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 7)
    before = {key: value.shape for key, value in plain.state_dict().items()}
    after = {key: value.shape for key, value in model.state_dict().items()}
    assert before.keys() == after.keys()
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {f"{HEADS[name]}.weight", f"{HEADS[name]}.bias"}


@pytest.mark.parametrize("backbone", ["resnet18d", "convnext_atto", "mambaout_femto"])
def test_a_network_with_logits_for_each_pixel(backbone: str) -> None:
    model = model_factory("fpn")(num_classes=5, backbone=backbone, width=16)
    for height, width in ((64, 96), (75, 50)):
        logits = model(torch.rand(2, 3, height, width))
        assert logits.shape == (2, 5, height, width)
    logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(RecipeError, match=r"timm has no model 'resnet18dd'.*resnet18d"):
        model_factory("fpn")(num_classes=5, backbone="resnet18dd")
    with pytest.raises(PlanError, match=r"timm:levit_128 does not take .*features_only.*out of range"):
        model_factory("fpn")(num_classes=5, backbone="levit_128")


def test_weights_that_are_not_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    gone = replace(weights.value, url=(tmp_path / "none-00000000.pth").as_uri())
    monkeypatch.setattr(weights, "_value_", gone)
    with pytest.raises(DataError, match=r"weights IMAGENET1K_V1 of resnet18 could not be downloaded: .*checkpoints"):
        pretrained("resnet18", 5, "IMAGENET1K_V1")
    pipeline = Pipeline("pretrained", name="resnet18", num_classes=5, weights="IMAGENET1K_V1")
    with pytest.raises(PlanError, match="could not be downloaded"):
        build_model(pipeline, pipeline.transforms)
    with pytest.raises(RecipeError, match=r"no weights 'IMAGENET1K_V3'.*Known: .*IMAGENET1K_V1"):
        pretrained("resnet18", 5, "IMAGENET1K_V3")
    with pytest.raises(RecipeError, match=r"No model is named 'resnet81'"):
        pretrained("resnet81", 5)


@pytest.mark.parametrize(
    ("weights", "name"), [("DEFAULT", "DEFAULT"), (torchvision.models.ResNet18_Weights.DEFAULT, "IMAGENET1K_V1")]
)
def test_published_weights_for_other_classes_name_the_model_that_has_them(weights: object, name: str) -> None:
    pipeline = Pipeline("resnet18", num_classes=4, weights=weights)
    remedy = rf'Pipeline\("pretrained", name="resnet18", num_classes=4, weights="{name}"\)'
    with pytest.raises(PlanError, match=f"expected value 1000 but got 4 instead. .*{remedy}"):
        build_model(pipeline, pipeline.transforms)


def test_vit_s16_has_the_size_that_is_known() -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in vit_s16().parameters())
    assert count == 22_050_664  # timm's vit_small_patch16_224, too


def test_airbenchs_convolutions_begin_as_the_identity() -> None:
    model = airbench_net()
    group = model[3]
    images = torch.randn(2, 64, 8, 8)
    torch.testing.assert_close(group[0](images)[:, :64], images)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert (norm.momentum, norm.affine) == (0.4, False)


@pytest.mark.slow
def test_the_first_layer_whitens_cifar10() -> None:
    """Compared with the images themselves, if they are cached or can be downloaded."""
    try:
        images, _ = cifar10.load_cifar10(cifar10.fetch_cifar10(), "train")
    except DataError as error:
        pytest.skip(str(error).splitlines()[0])
    mean, std = (torch.tensor(RECIPES["cifar10-fast"]["loading"][key]) for key in ("mean", "std"))
    x = (torch.from_numpy(np.asarray(images[:5000])) / 255 - mean) / std
    layer = Whitening()
    white = layer(x.permute(0, 3, 1, 2).contiguous()).transpose(0, 1).flatten(1)
    torch.testing.assert_close(white[12:], -white[:12])
    squares = white[:12] @ white[:12].T / white.shape[1]
    assert ((squares.diag() > 0.5) & (squares.diag() < 1.1)).all()  # below 1 where the variance is near ε
    assert (squares - squares.diag().diag()).abs().max() < 0.3
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["bias"]


def test_a_whitening_on_the_meta_device_gets_its_filters() -> None:
    with torch.device("meta"):
        layer = Whitening()
    layer.to_empty(device="cpu").reset_parameters()
    torch.testing.assert_close(layer.state_dict(), Whitening().state_dict())


def test_a_shift_learns_faster_and_decays_as_slowly() -> None:
    """As airbench's bias: 64 times the learning rate, and a weight decay divided by it."""
    generator = torch.Generator().manual_seed(0)
    shift, bias = Shift(3, 64.0), nn.Parameter(torch.zeros(3))
    options = {"momentum": 0.85, "nesterov": True}
    ours = torch.optim.SGD(shift.parameters(), lr=0.01, weight_decay=0.1, **options)
    theirs = torch.optim.SGD([bias], lr=0.64, weight_decay=0.1 / 64, **options)
    for _ in range(5):
        images = torch.randn(2, 3, 4, 4, generator=generator)
        for optimizer, output in ((ours, shift(images)), (theirs, images + bias[:, None, None])):
            optimizer.zero_grad()
            (output**2).mean().backward()
            optimizer.step()
        torch.testing.assert_close(8 * shift.bias, bias)
    assert bias.abs().max() > 0.01
