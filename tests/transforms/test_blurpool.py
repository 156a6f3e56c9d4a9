"""BlurPool alone: what it changes in full models, what it skips, and its reports."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torchvision
from blurpool_models import images, models, small_resnet, strided
from drivetrain.common.errors import PlanError
from drivetrain.transforms import BlurPool, NothingChanged
from drivetrain.transforms.blurpool import BlurConv2d, BlurMaxPool2d
from torch import nn


@models
@pytest.mark.parametrize("train", [True, False])
def test_models(factory: Callable[[], nn.Module], count: int, train: bool) -> None:
    torch.manual_seed(0)
    model = factory().train(train)
    before, parameters = copy.deepcopy(model), dict(model.named_parameters())
    shape = model(images()).shape
    report = BlurPool().apply(model)

    assert len(report.changed) == count
    assert list(report.changed) == [
        name for name, module in model.named_modules() if isinstance(module, BlurConv2d | BlurMaxPool2d)
    ]
    assert all(module.training is train for module in model.modules())
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in parameters), "an earlier optimizer would be stale"
    assert list(model.state_dict()) == list(before.state_dict())
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in before.named_buffers()]

    out = model(images())
    assert out.shape == shape
    assert not torch.allclose(out, before(images()))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_resnet18_report() -> None:
    report = BlurPool().apply(torchvision.models.resnet18())
    assert report.changed[:2] == ("maxpool", "layer2.0.conv1")
    assert report.skipped == (("conv1", "3 input channels, fewer than min_channels=16"),)
    assert "changed 7 module(s)" in str(report)
    assert "left alone: conv1: 3 input channels" in str(report)


def test_options() -> None:
    def changed(**options: bool | int) -> int:
        return len(BlurPool(**options).apply(small_resnet()).changed)  # type: ignore[arg-type]

    assert changed(replace_maxpools=False) == 6
    assert changed(replace_convs=False) == 1
    assert changed(min_channels=3) == 8
    assert changed(min_channels=65) == 5


@models
@pytest.mark.parametrize("moment", ["plain weights after surgery", "blurred weights into a plain model"])
def test_state_dicts_are_plain(factory: Callable[[], nn.Module], count: int, moment: str) -> None:
    torch.manual_seed(0)
    plain, blurred = factory().eval(), factory().eval()
    assert len(BlurPool().apply(blurred).changed) == count
    if moment.startswith("plain"):
        blurred.load_state_dict(plain.state_dict())
        BlurPool().apply(plain)
    else:
        plain.load_state_dict(blurred.state_dict())
        BlurPool().apply(plain)
    torch.testing.assert_close(plain(images()), blurred(images()), rtol=0, atol=0)
    assert BlurPool.renames is False


class OwnForward(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def instance_forward() -> nn.Module:
    conv = strided()
    conv.forward = conv._conv_forward  # type: ignore[method-assign, assignment]
    return conv


def parametrised() -> nn.Module:
    return torch.nn.utils.parametrizations.spectral_norm(strided())


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: OwnForward(16, 16, 3, 2), "OwnForward is a subclass of Conv2d"),
    (lambda: nn.LazyConv2d(16, 3, 2), "LazyConv2d is a subclass of Conv2d"),
    (parametrised, "ParametrizedConv2d is a subclass of Conv2d"),
    (instance_forward, "its forward was replaced on the instance"),
    (lambda: nn.Conv2d(15, 16, 3, 2), "15 input channels, fewer than min_channels=16"),
    (lambda: nn.MaxPool2d(3, 1, 1), "stride 1 does not subsample"),
    (lambda: nn.MaxPool2d(2, return_indices=True), "return_indices=True"),
])  # fmt: skip
def test_left_alone_and_reported(make: Callable[[], nn.Module], reason: str) -> None:
    odd = make()
    kind = type(odd)
    report = BlurPool().apply(nn.Sequential(strided(), odd))
    assert report.changed == ("0",)
    assert [name for name, _ in report.skipped] == ["1"]
    assert report.skipped[0][1].startswith(reason)
    assert type(odd) is kind


def test_twice_changes_nothing_and_says_so() -> None:
    model = small_resnet().eval()
    BlurPool().apply(model)
    out = model(images())
    report = BlurPool(blur_first=False).apply(model)
    assert report.changed == ()
    assert report.notes == ("7 module(s) were already changed and are left as they are.",)
    torch.testing.assert_close(model(images()), out, rtol=0, atol=0)


def test_what_came_later_is_changed_too() -> None:
    model = nn.Sequential(strided())
    BlurPool().apply(model)
    report = BlurPool().apply(model.append(nn.MaxPool2d(2)))
    assert report.changed == ("1",)
    assert len(report.notes) == 1


def test_nothing_to_change_warns() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(NothingChanged) as caught:
        report = BlurPool().apply(model)
    text = str(caught[0].message)
    assert report.changed == ()
    assert "Conv2d with a stride above 1 and at least 16 input channels and MaxPool2d" in text
    assert "Sequential is made of 2 Linear, 1 ReLU." in text
    assert caught[0].filename == __file__


def test_nothing_changed_names_the_obstacle() -> None:
    with pytest.warns(NothingChanged, match=r"Left alone: 0: 16 input channels, fewer than min_channels=99"):
        BlurPool(min_channels=99).apply(nn.Sequential(strided()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NothingChanged, match="And 2 more"):
            BlurPool(min_channels=99).apply(nn.Sequential(*(strided() for _ in range(5))))


@pytest.mark.parametrize("options", [
    {"replace_convs": False, "replace_maxpools": False},
    {"replace_convs": 1},
    {"replace_maxpools": "yes"},
    {"blur_first": None},
    {"min_channels": -1},
    {"min_channels": 16.0},
    {"min_channels": True},
])  # fmt: skip
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=next(iter(options))):
        BlurPool(**options)  # type: ignore[arg-type]
