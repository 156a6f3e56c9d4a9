"""Comparison with Composer's numbers. Composer is a test reference only; Drivetrain does not import it."""

from __future__ import annotations

import copy
import math
from types import ModuleType

import composer_reference
import pytest
import torch
import torchvision
from drivetrain.transforms import BlurPool
from drivetrain.transforms.binary_cross_entropy import binary_cross_entropy
from drivetrain.transforms.label_smoothing import smooth_targets


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
    BlurPool(**options).apply(ours)  # type: ignore[arg-type]
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


def test_binary_cross_entropy() -> None:
    """Composer's is given the logits of a model whose bias starts where its recipes start it."""
    theirs_with_logits = composer_reference.load("composer.loss").binary_cross_entropy_with_logits

    torch.manual_seed(0)
    logits, labels = torch.randn(8, 10, requires_grad=True), torch.randint(10, (8,))
    for targets in (labels, torch.randn(8, 10).softmax(1)):
        ours, theirs = (
            binary_cross_entropy(logits, targets),
            theirs_with_logits(logits - math.log(10), targets),
        )
        torch.testing.assert_close(ours, theirs)
        (gradient,), (expected,) = (torch.autograd.grad(loss, logits) for loss in (ours, theirs))
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.08, 0.5])
def test_smooth_labels(composer: ModuleType, smoothing: float) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 10), torch.randint(10, (8,))
    for targets in (labels, torch.randn(8, 10).softmax(1)):
        torch.testing.assert_close(
            smooth_targets(logits, targets, smoothing),
            composer.smooth_labels(logits, targets, smoothing),
            rtol=0,
            atol=1e-7,
        )
