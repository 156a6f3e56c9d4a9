"""The surgeries compared with Composer's numbers, wherever Composer has a defined result."""

import copy
import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import surgery_models as models
import torch
import torchvision
from drivetrain import transforms as t
from drivetrain.transforms.alibi import distance_bias, slopes
from drivetrain.transforms.gyro_dropout import GyroDropoutLayer
from torch import nn


def plain_name(name: str) -> str:
    """Our name of one of Composer's parameters."""
    for theirs, ours in (
        (".conv.weight", ".weight"),
        (".conv.bias", ".bias"),
        ("se.pool_and_mlp.2", "se.down"),
        ("se.pool_and_mlp.4", "se.up"),
        (".batchnorm.", "."),
        (".parametrizations.weight.original", ".weight"),
        (".module0.", ".down."),
        (".module1.", ".up."),
    ):
        name = name.replace(theirs, ours)
    return name


def assert_same(ours: nn.Module, theirs: nn.Module, count: int = 8) -> None:
    """Outputs, gradients and buffers agree, after their weights have become ours."""
    ours.load_state_dict({plain_name(n): v for n, v in theirs.state_dict().items()}, strict=True)
    x = models.images(count)
    out, reference = ours(x), theirs(x)
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    reference.square().sum().backward()
    grads = {plain_name(name): parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-3, atol=1e-3, msg=name)
    buffers = {plain_name(name): buffer for name, buffer in theirs.named_buffers()}
    torch.testing.assert_close(dict(ours.named_buffers()), buffers, rtol=1e-4, atol=1e-6)


def pair(model: nn.Module, train: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # so that evaluation depends on them
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.train(train), copy.deepcopy(model).train(train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("latent", [8, 0.25])
def test_squeeze_excite(composer: ModuleType, train: bool, latent: float) -> None:
    ours, theirs = pair(models.resnet(), train)
    assert t.SqueezeExcite(latent, 32).apply(ours).changed
    composer.apply_squeeze_excite(theirs, latent_channels=latent, min_channels=32)
    assert_same(ours, theirs)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("count", [4, 6, 7, 9])
def test_ghost_batch_norm(composer: ModuleType, train: bool, count: int) -> None:
    ours, theirs = pair(models.bottlenecks(), train)
    t.GhostBatchNorm(4).apply(ours)
    composer.apply_ghost_batchnorm(theirs, ghost_batch_size=4)
    assert_same(ours, theirs, count)


@pytest.mark.parametrize("factory", [models.resnet, models.convnext])
def test_weight_standardization(composer: ModuleType, factory) -> None:
    ours, theirs = pair(factory(), False)
    t.WeightStandardization().apply(ours)
    composer.apply_weight_standardization(theirs)
    assert_same(ours, theirs)


def test_factorize_splits_the_same_modules_at_the_same_ranks(composer: ModuleType) -> None:
    options = {"min_channels": 16, "latent_channels": 0.25, "min_features": 16, "latent_features": 8}
    # Not torchvision's ViT: Composer factorises its out_proj, whose weight nn.MultiheadAttention reads, and fails.
    for factory in (models.resnet, models.bottlenecks, models.convnext, models.timm_vit):
        ours, theirs = pair(factory(), False)
        assert t.Factorize(**options).apply(ours).changed
        composer.apply_factorization(theirs, **options)
        shapes = {plain_name(name): value.shape for name, value in theirs.state_dict().items()}
        found = {name: value.shape for name, value in ours.state_dict().items()}
        extra = set(shapes) - set(found)
        assert all(name.endswith("up.bias") for name in extra), "a bias for a convolution that had none"
        assert found == {name: shape for name, shape in shapes.items() if name not in extra}
        state = {plain_name(name): value for name, value in theirs.state_dict().items()}
        for name in extra:
            state.pop(name).zero_()
        ours.load_state_dict(state)
        torch.testing.assert_close(ours(models.images()), theirs(models.images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["block", "sample"])
@pytest.mark.parametrize("distribution", ["linear", "uniform"])
def test_stochastic_depth(composer: ModuleType, method: str, distribution: str) -> None:
    ours, theirs = pair(models.bottlenecks(), False)
    t.StochasticDepth(method, 0.4, distribution).apply(ours)  # type: ignore[arg-type]
    composer.apply_stochastic_depth(theirs, "ResNetBottleneck", method, 0.4, distribution)
    for place in ("4", "5"):
        block, reference = ours.get_submodule(place), theirs.get_submodule(place)
        assert block.drop_branch.p == pytest.approx(float(reference.drop_rate))
        for parameter in (block.bn3.weight, block.bn3.bias):  # the documented change of scale
            parameter.data *= 1 - block.drop_branch.p
    torch.testing.assert_close(ours(models.images()), theirs(models.images()))


def test_stochastic_depth_in_training(composer: ModuleType) -> None:
    """Both give the block with its branch or without, and nothing else."""
    ours, theirs = pair(models.bottlenecks())
    t.StochasticDepth("block", 0.5, "uniform").apply(ours)
    composer.apply_stochastic_depth(theirs, "ResNetBottleneck", "block", 0.5, "uniform")
    block, reference = ours.get_submodule("4"), theirs.get_submodule("4")
    for parameter in (block.bn3.weight, block.bn3.bias):
        parameter.data *= 0.5
    x = torch.rand(4, 16, 8, 8)
    found = [{round(module(x).mean().item(), 4) for _ in range(24)} for module in (block, reference)]
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_low_precision_norms_without_autocast(composer: ModuleType) -> None:
    from composer.core import Precision

    ours, theirs = pair(models.vit(), False)
    t.LowPrecisionLayerNorm().apply(ours)
    composer.apply_low_precision_layernorm(theirs, Precision.AMP_BF16)
    assert_same(ours, theirs)
    ours, theirs = pair(models.Mixed(), False)
    t.LowPrecisionGroupNorm().apply(ours)
    composer.apply_low_precision_groupnorm(theirs, Precision.AMP_BF16)
    torch.testing.assert_close(ours(models.images()), theirs(models.images()))


@pytest.mark.usefixtures("composer")
def test_gyro_dropout() -> None:
    from composer.algorithms.gyro_dropout import GyroDropoutLayer as Theirs

    transform = t.GyroDropout(p=0.25, sigma=16, tau=4, total_steps=100)
    model = nn.Sequential(nn.Dropout(0.1))
    transform.apply(model)
    ours = model[0]
    theirs = Theirs(iters_per_epoch=10, max_epoch=10, p=0.25, sigma=16, tau=4)
    x = torch.rand(8, 12)
    reference = theirs(x)
    assert isinstance(ours, GyroDropoutLayer)
    assert ours.hold == theirs.iter_num
    ours(x)
    ours.masks = theirs.selected_masks.bool()
    torch.testing.assert_close(ours(x), reference)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.usefixtures("composer")
def test_alibi_in_one_dimension() -> None:
    """Composer imports this file only with `transformers`, which it does not need."""
    import composer.algorithms.alibi as package

    file = Path(package.__file__).parent / "attention_surgery_functions" / "utils.py"
    spec = importlib.util.spec_from_file_location("composer_alibi_utils", file)
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    for heads in range(1, 17):
        expected = torch.tensor(theirs._get_alibi_head_slopes(heads))
        torch.testing.assert_close(slopes(heads, torch.device("cpu")), expected)
        reference = theirs.register_alibi(nn.Linear(1, 1), heads, 9, causal=False).alibi
        torch.testing.assert_close(distance_bias(heads, (1, 9), 0, torch.zeros(1)), reference)


@pytest.mark.usefixtures("composer")
def test_gated_linear_units() -> None:
    from composer.algorithms.gated_linear_units.gated_linear_unit_layers import BERTGatedFFOutput

    model = models.timm_vit().eval()
    t.GatedLinearUnits().apply(model)
    ours = model.get_submodule("blocks.0.mlp")
    nn.init.normal_(ours.value.weight)
    theirs = BERTGatedFFOutput(24, 96, 0.0, nn.GELU(), 1e-5, True, True)
    theirs.layernorm = nn.Identity()
    for name, source in (("gated_layer", ours.fc1), ("non_gated_layer", ours.value), ("wo", ours.fc2)):
        getattr(theirs, name).load_state_dict(source.state_dict())
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(ours(x), theirs(x, torch.zeros(())))


@pytest.mark.parametrize(("start", "level"), [(0.5, 1.0), (0.0, 0.7), (0.3, 0.0)])
def test_layer_freezing(composer: ModuleType, start: float, level: float) -> None:
    ours, theirs = pair(models.resnet())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for progress in (0.0, 0.2, 0.5, 0.61, 0.9, 1.0):
        t.LayerFreezing(start, level).freeze(ours, progress)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            composer.freeze_layers(theirs, optimizer, progress, start, level)
        expected = [name for name, parameter in theirs.named_parameters() if not parameter.requires_grad]
        assert [
            name for name, parameter in ours.named_parameters() if not parameter.requires_grad
        ] == expected


@pytest.mark.parametrize(("options", "train"), [
    ({}, True),
    ({}, False),
    ({"blur_first": False}, True),
    ({"replace_maxpools": False, "min_channels": 3}, False),
])  # fmt: skip
def test_blurpool(composer: ModuleType, options: dict[str, bool | int], train: bool) -> None:
    torch.manual_seed(0)
    ours = torchvision.models.resnet18(num_classes=5)
    theirs = copy.deepcopy(ours)
    t.BlurPool(**options).apply(ours)  # type: ignore[arg-type]
    composer.apply_blurpool(theirs, **options)
    ours.train(train)
    theirs.train(train)
    x = torch.randn(4, 3, 32, 32)
    out, reference = ours(x), theirs(x)
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-6)
    out.square().sum().backward()
    reference.square().sum().backward()
    expected = {name.replace(".conv.", "."): parameter for name, parameter in theirs.named_parameters()}
    assert set(expected) == set(dict(ours.named_parameters()))
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-5, msg=name)
