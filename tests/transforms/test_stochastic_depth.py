"""StochasticDepth: rates, draws, and that skipping a branch equals multiplying it by zero."""

import copy
from collections.abc import Callable

import pytest
import surgery_models as models
import torch
import torchvision
from drivetrain.transforms import NothingChanged, StochasticDepth
from drivetrain.transforms.common import residual_blocks
from torch import nn


@pytest.mark.parametrize("method", ["block", "sample"])
def test_dropped_branches(method: str) -> None:
    """Over many draws: the share that is dropped, one draw for the batch or one per sample, and the mean."""
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(models.resnet()[4]))
    StochasticDepth(method, 0.25, "uniform").apply(model)  # type: ignore[arg-type]
    branch = model[0].drop_branch
    x = torch.ones(8, 2, 3, 3)
    rows = torch.stack([branch(x)[:, 0, 0, 0] for _ in range(400)])
    torch.testing.assert_close(rows.unique(), torch.tensor([0, 1 / 0.75]))
    assert rows.mean().item() == pytest.approx(1, abs=0.1)
    assert (rows == rows[:, :1]).all().item() is (method == "block")
    assert torch.equal(branch.eval()(x), x)


def wait_for_layers(model: nn.Module) -> nn.Module:
    """Hooks on the convolutions, as FSDP has where it shards single layers: no branch may be skipped."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda module, inputs: None)  # noqa: ARG005
    return model


@pytest.mark.long
@pytest.mark.parametrize("factory", [models.bottlenecks, models.resnet], ids=["bottleneck", "basic"])
def test_a_skipped_branch_is_a_branch_times_zero(factory: Callable[[], nn.Module]) -> None:
    """Skipped eagerly, masked in a graph and under hooks: the same output, gradients and statistics."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = factory()
    StochasticDepth("block", 0.5, "uniform").apply(model)
    state = copy.deepcopy(model.state_dict())
    hooked, compiled = wait_for_layers(copy.deepcopy(model)), copy.deepcopy(model)
    compiled.compile(backend="eager", fullgraph=True)

    def step(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(seed)
        out = model(models.images())
        out.square().mean().backward()
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        return {"out": out.detach(), **gradients, **dict(model.named_buffers())}

    dropped = set()
    for seed in range(6):
        skipped = step(model, seed)
        dropped.add(not skipped["5.conv1.weight.grad"].any())
        for other in (hooked, compiled):
            torch.testing.assert_close(step(other, seed), skipped, rtol=1e-4, atol=1e-5)
    assert dropped == {True, False}


def test_a_dropped_branch_is_not_computed_and_learns_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(models.bottlenecks()[5])
    StochasticDepth("block", 0.999, "uniform").apply(model)
    block, calls = model[0], []
    block.conv1._conv_forward = lambda *_: calls.append(1)  # not a hook: those are waited for
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    before = copy.deepcopy(dict(block.named_buffers()))
    out = model(x)
    torch.testing.assert_close(out, block.downsample(x).relu())
    out.sum().backward()
    assert not calls
    assert x.grad.any()
    assert all(p.grad is not None for p in block.parameters())
    for name, p in block.named_parameters():
        assert p.grad.any().item() is name.startswith("downsample"), name
    for name, value in block.named_buffers():
        assert torch.equal(value, before[name]) is not name.startswith("downsample"), name


def test_two_forwards_before_the_backward() -> None:
    """Statistics that are put back in place must not spoil the first forward's gradients."""
    torch.manual_seed(0)
    model = models.resnet()
    StochasticDepth("block", 0.5, "uniform").apply(model)
    wait_for_layers(model)
    (model(models.images()) + model(models.images())).sum().backward()


def test_rates_and_blocks() -> None:
    model = models.convnext()
    report = StochasticDepth(drop_rate=0.3).apply(model)
    assert report.changed == ("features.1.0", "features.3.0", "features.3.1")
    rates = [model.get_submodule(name).stochastic_depth.p for name in report.changed]
    assert rates == pytest.approx([0.1, 0.2, 0.3])
    (note,) = StochasticDepth().apply(models.timm_model("test_convnext", drop_path_rate=0.2)).notes
    assert "Replaced the drop rate" in note


def test_blocks_without_a_shortcut_are_left_alone() -> None:
    report = StochasticDepth().apply(torchvision.models.efficientnet_b0())
    assert len(report.changed) == 9
    assert [why for _, why in report.skipped] == ["it has no shortcut"] * 7
    with pytest.warns(NothingChanged, match="it has no shortcut"):
        StochasticDepth().apply(models.timm_model("test_efficientnet"))
    with torch.device("meta"):
        vovnet, mobile, regnet = (models.timm_model(name) for name in ("ese_vovnet39b", "mobileone_s0", "regnetz_b16"))
    assert StochasticDepth().apply(vovnet).changed == ("stages.2.blocks.1", "stages.3.blocks.1")
    for model, attribute in ((mobile, "identity"), (regnet, "shortcut")):
        report = StochasticDepth().apply(model)
        assert all(getattr(model.get_submodule(name), attribute) is not None for name in report.changed)
        left = [model.get_submodule(name) for name, why in report.skipped if why == "it has no shortcut"]
        assert left
        assert all(getattr(block, attribute) is None for block in left)


def test_a_branch_of_a_copy_of_data_parallel_is_scaled() -> None:
    """Its norm's weight and bias are tensors, no parameters."""
    norm, x = nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)
    copied = norm._replicate_for_data_parallel()
    copied.weight, copied.bias = norm.weight * 1, norm.bias * 1  # as torch.nn.parallel.replicate sets them
    torch.testing.assert_close(residual_blocks._scaled(copied, x, 2.0), residual_blocks._scaled(norm, x, 2.0))


def test_a_branch_of_a_copy_of_data_parallel_is_not_skipped() -> None:
    """It has no parameters that could get gradients of 0, and threads would draw in any order."""
    norm, x = nn.BatchNorm2d(3), torch.zeros(1, 3, 2, 2)
    assert residual_blocks._may_skip([norm], x)
    assert not residual_blocks._may_skip([norm._replicate_for_data_parallel()], x)
