"""Job 10: two ranks train to the numbers of one process."""

import pytest
import torch
from journey_models import Net, photos
from torch import nn


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "norm"),
    [("ddp", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("ddp", "fsdp"))],
)
def test_two_ranks(strategy: str, norm: bool) -> None:
    """Of few layers: in deep networks with BatchNorm, sums in another order change losses by up to a percent within
    some steps of small batches, as another number of threads does."""
    layers = nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 3)
    one = photos(nn.Sequential(nn.Conv2d(3, 16, 5, stride=2), *layers) if norm else Net)
    one = one.optimize("sgd", lr=0.05, momentum=0.9)
    plan = " ".join(one.distribute(strategy, devices=2).plan().cautions)
    assert not norm or "sync_batchnorm=True" in plan
    two = one.distribute(strategy, devices=2, sync_batchnorm=norm)
    expected = one.fit(epochs=2, progress=False)
    found = two.fit(epochs=2, out="runs/two", progress=False)
    for here, there in zip(found.history.epochs, expected.history.epochs, strict=True):
        assert (here.loss, here.val_loss) == pytest.approx((there.loss, there.val_loss), rel=1e-4)
        assert here.metrics == pytest.approx(there.metrics)
    torch.testing.assert_close(found.model.state_dict(), expected.model.state_dict(), rtol=1e-3, atol=1e-4)
