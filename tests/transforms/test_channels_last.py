"""ChannelsLast: every 4-D parameter, in place, and nothing else."""

import copy

import pytest
import torch
import torchvision
from drivetrain.common.errors import PlanError
from drivetrain.transforms import BlurPool, ChannelsLast, NothingChanged
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: parameter.stride() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [True, False])
def test_same_layout_as_torch_gives(dtype: torch.dtype, train: bool) -> None:
    model = torchvision.models.resnet18(num_classes=5).to(dtype).train(train)
    reference = copy.deepcopy(model).to(memory_format=torch.channels_last)
    values, identities = copy.deepcopy(model.state_dict()), list(map(id, model.parameters()))
    report = ChannelsLast().apply(model)
    assert strides(model) == strides(reference)
    assert list(map(id, model.parameters())) == identities
    assert model.training is train
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert list(report.changed) == convolutions


def test_contiguous_inputs_give_channels_last_activations() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1))
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    ChannelsLast().apply(model)
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), before)


def test_twice_changes_nothing_and_says_so() -> None:
    model = torchvision.models.resnet18(num_classes=5)
    ChannelsLast().apply(model)
    before = strides(model)
    report = ChannelsLast().apply(model)
    assert report.changed == ()
    assert report.notes == ("20 module(s) were already channels-last.",)
    assert strides(model) == before


@pytest.mark.parametrize("first", [BlurPool(), ChannelsLast()])
def test_every_order_with_blurpool_keeps_every_weight(first: BlurPool | ChannelsLast) -> None:
    model = torchvision.models.resnet18(num_classes=5)
    reference = copy.deepcopy(model).to(memory_format=torch.channels_last)
    first.apply(model)
    (ChannelsLast() if isinstance(first, BlurPool) else BlurPool()).apply(model)
    assert strides(model) == strides(reference)
    assert ChannelsLast.after == ("BlurPool",)


def test_only_four_dimensions() -> None:
    """`model.to(memory_format=torch.channels_last)` raises on a Conv3d; here it stays as it is."""
    model = nn.ModuleList([nn.Conv3d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(3, 4), nn.Conv1d(3, 4, 3)])
    before = strides(model)
    assert ChannelsLast().apply(model).changed == ("1",)
    assert {name for name, stride in strides(model).items() if stride != before[name]} == {"1.weight"}


def test_gradients_and_flags_follow() -> None:
    conv = nn.Conv2d(3, 8, 3)
    frozen = nn.Conv2d(3, 8, 3).requires_grad_(False)
    conv(torch.randn(2, 3, 8, 8)).sum().backward()
    gradient = conv.weight.grad.clone()
    ChannelsLast().apply(nn.ModuleList([conv, frozen]))
    assert conv.weight.grad.stride() == conv.weight.stride() == frozen.weight.stride()
    assert torch.equal(conv.weight.grad, gradient)
    assert not frozen.weight.requires_grad


def test_meta_and_lazy_parameters() -> None:
    model = nn.ModuleList([nn.Conv2d(3, 8, 3, device="meta"), nn.LazyConv2d(8, 3)])
    report = ChannelsLast().apply(model)
    assert report.changed == ("0",)
    assert report.skipped == (("1", "its parameters have no shape before the first forward"),)


def test_nothing_to_change_warns() -> None:
    with pytest.warns(NothingChanged, match=r"4-D parameters, such as .*Linear is made of 1 Lin") as caught:
        report = ChannelsLast().apply(nn.Linear(3, 3))
    assert report.changed == ()
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("one_process_group")
def test_sharded_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(PlanError, match=r"'0.weight', which is sharded"):
        ChannelsLast().apply(model)
