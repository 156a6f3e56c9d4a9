"""Job 10: two ranks train to the numbers of one process."""

import pytest
import torch
from drivetrain.pipeline import FitResult
from journey_models import photos
from torchvision.models import resnet18


def same(found: FitResult, expected: FitResult) -> None:
    for one, other in zip(found.history.epochs, expected.history.epochs, strict=True):
        assert (one.loss, one.val_loss) == pytest.approx((other.loss, other.val_loss), rel=1e-4)
        assert one.metrics == pytest.approx(other.metrics)
    torch.testing.assert_close(found.model.state_dict(), expected.model.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks(strategy: str) -> None:
    pipeline = photos().optimize("sgd", lr=0.05, momentum=0.9)
    expected = pipeline.fit(epochs=2, progress=False)
    found = pipeline.distribute(strategy, devices=2).fit(epochs=2, out="runs/two", progress=False)
    same(found, expected)


@pytest.mark.process
@pytest.mark.long
def test_two_ranks_with_batch_norm() -> None:
    pipeline = photos(resnet18).optimize("sgd", lr=0.001)
    plan = " ".join(str(pipeline.distribute("ddp", devices=2).plan()).split())
    assert "sync_batchnorm=True" in plan
    found = pipeline.distribute("ddp", devices=2, sync_batchnorm=True).fit(epochs=1, progress=False)
    same(found, pipeline.fit(epochs=1, progress=False))
