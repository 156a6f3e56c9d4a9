"""The random draws of the augmentation policies, compared with the distribution of torchvision's classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.loaders.decode.draws import NAMES, draw_policy, sample_keys
from drivetrain.loaders.decode.policies import POLICIES, torchvision_policy
from numpy.typing import NDArray
from PIL import Image

EACH = [{"name": name} for name in POLICIES]


def torchvisions_draws(policy: dict[str, Any], count: int, side: int) -> NDArray[np.float64]:
    """`(operations, 2)`: number and magnitude of each operation that torchvision draws for `count` images."""
    found = []
    transform = torchvision_policy(policy)

    class Recorded(type(transform)):  # type: ignore[misc]
        """Draws as its base does, and writes the operations down in place of doing them."""

        def _apply_image_or_video_transform(self, image: Any, name: str, magnitude: float, **_: Any) -> Any:
            found.append((NAMES.index(name), magnitude))
            return image

    transform.__class__ = Recorded
    torch.manual_seed(0)
    image = Image.new("RGB", (side, side))
    for _ in range(count):
        transform(image)
    return np.array(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        *EACH,
        {"name": "rand_augment", "num_ops": 3, "magnitude": 20},
        {"name": "trivial_augment", "num_magnitude_bins": 11},
        {"name": "aug_mix", "severity": 10, "width": 2, "depth": 4},
    ],
    ids=str,
)
def test_operations_are_drawn_as_torchvision_draws_them(policy: dict[str, Any]) -> None:
    """The same magnitudes of each operation and no others, each (operation, magnitude) about as often."""
    count, side = 6000, 48
    theirs = torchvisions_draws(policy, count, side)
    keys = sample_keys(3, 1, np.arange(count))
    drawn = draw_policy(policy, keys, (side, side))
    mine = np.stack([drawn.operations.ravel(), drawn.magnitudes.ravel()], axis=1)
    if policy["name"] == "aug_mix":  # there Identity only says that a chain has ended
        mine = mine[mine[:, 0] > 0]
    assert abs(len(mine) - len(theirs)) < 5 * math.sqrt(len(theirs))
    theirs[:, 1] += 0.0  # -0.0 is 0.0
    mine[:, 1] += 0.0
    pairs, numbers = np.unique(np.concatenate([theirs, mine]), axis=0, return_inverse=True)
    one, other = (
        np.bincount(part, minlength=len(pairs)) for part in np.split(numbers.ravel(), [len(theirs)])
    )
    # Two samples of one distribution: (a - b)² / (a + b) sums to χ² with as many degrees of freedom as pairs.
    distance = ((one - other) ** 2 / (one + other)).sum()
    assert distance < len(pairs) + 5 * math.sqrt(2 * len(pairs)), (distance, len(pairs))
    frequent = (one + other) > 40
    assert (np.minimum(one, other)[frequent] > 0).all()
    assert (drawn.magnitudes[drawn.operations == 0] == 0).all()


@pytest.mark.parametrize(("alpha", "width"), [(1.0, 3), (0.3, 2), (5.0, 4), (0.01, 3), (1.0, 1)])
def test_aug_mix_weighs_as_torchvision_does(alpha: float, width: int) -> None:
    """Mean, spread and distribution of the image's own weight and of each chain's; all of them sum to 1."""
    count = 20000
    keys = sample_keys(1, 2, np.arange(count))
    found = draw_policy({"name": "aug_mix", "alpha": alpha, "width": width}, keys, (16, 16)).weights
    torch.manual_seed(0)
    share = torch._sample_dirichlet(torch.full((count, 2), alpha)).numpy()
    within = torch._sample_dirichlet(torch.full((count, width), alpha)).numpy()
    expected = np.concatenate([share[:, :1], share[:, 1:] * within], axis=1)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
    for k in range(width + 1):
        assert abs(found[:, k].mean() - expected[:, k].mean()) < 5 / math.sqrt(count)
        assert abs(found[:, k].std() - expected[:, k].std()) < 5 / math.sqrt(count)
        tenths = np.arange(0.1, 1, 0.1)
        below = (found[:, k][:, None] <= tenths).mean(0), (expected[:, k][:, None] <= tenths).mean(0)
        np.testing.assert_allclose(*below, atol=4 * math.sqrt(0.5 / count))
    correlations = [np.corrcoef(weights[:, 0], weights[:, 1])[0, 1] for weights in (found, expected)]
    assert abs(correlations[0] - correlations[1]) < 0.03
