"""A policy's operations for each image, their magnitudes, and AugMix's weights, drawn from the sample's key.

n samples, c chains of s steps each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import draws
from .policies import LONGEST, complete

# torchvision's names of the operations, in the order of their numbers in policies.c.
NAMES = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip

IDENTITY, SHEAR_X, POSTERIZE, SOLARIZE = (
    NAMES.index(name) for name in ("Identity", "ShearX", "Posterize", "Solarize")
)

# Draws of a sample's key (see augmentation.py). AugMix: a chain's depth takes one, a weight _PER_WEIGHT; and
# each operation takes three: which one, its bin, its sign.
DEPTHS, WEIGHTS, OPERATIONS = 100, 200, 2000
_TRIES = 8  # each fails with a probability below 0.05
_PER_WEIGHT = 1 + 3 * _TRIES
assert DEPTHS + LONGEST <= WEIGHTS
assert WEIGHTS + (LONGEST + 2) * _PER_WEIGHT <= OPERATIONS

_AUG_MIX_BINS = 10


@dataclass(frozen=True)
class Drawn:
    """The operations of a policy on n images."""

    # (n, c, s): indices into `NAMES`; chains shorter than the longest are padded with Identity.
    operations: NDArray[np.int64]
    magnitudes: NDArray[np.float64]  # (n, c, s), signed, in torchvision's units (see `magnitudes`)
    # AugMix: (n, 1 + c), of the image itself and of each chain's result; they sum to 1. For the other policies, whose
    # single chain replaces the image, (n, 0).
    weights: NDArray[np.float32]


def draw(policy: Mapping[str, Any], keys: NDArray[np.uint64], size: tuple[int, int]) -> Drawn:
    """Draw the policy's operations for the samples with these `keys` `(n,)`, of images with this height and width. The
    same distribution as torchvision's classes; AugMix with all operations."""
    name, options = complete(policy)
    if name == "rand_augment":
        table = magnitudes(name, size, options["num_magnitude_bins"])
        shape, bins, first = (1, options["num_ops"]), (options["magnitude"], 1), IDENTITY
    elif name == "trivial_augment":
        table = magnitudes(name, size, options["num_magnitude_bins"])
        shape, bins, first = (1, 1), (0, options["num_magnitude_bins"]), IDENTITY
    else:
        table = magnitudes(name, size, _AUG_MIX_BINS)
        depth = options["depth"] if options["depth"] > 0 else 3
        shape, bins, first = (options["width"], depth), (0, options["severity"]), SHEAR_X
    drawn = draws.uniforms(keys, OPERATIONS, 3 * shape[0] * shape[1]).reshape(len(keys), *shape, 3)
    operations = first + (drawn[..., 0] * (len(NAMES) - first)).astype(np.int64)
    chosen = bins[0] + (drawn[..., 1] * bins[1]).astype(np.int64)
    signs = np.where((drawn[..., 2] < 0.5) & (operations < POSTERIZE), -1.0, 1.0)
    weights = np.empty((len(keys), 0), dtype=np.float32)
    if name == "aug_mix":
        if options["depth"] < 0:
            depths = 1 + (draws.uniforms(keys, DEPTHS, shape[0]) * 3).astype(np.int64)
            operations[np.arange(3) >= depths[..., None]] = IDENTITY
        weights = _mixing_weights(keys, shape[0], options["alpha"])
    return Drawn(operations, signs * table[operations, chosen], weights)


@functools.lru_cache(maxsize=16)
def magnitudes(name: str, size: tuple[int, int], bins: int) -> NDArray[np.float64]:
    """Return the magnitudes that a policy chooses from, unsigned, `(len(NAMES), bins)`: each torchvision's float32.

    Shear: pixels per pixel. Translation: pixels. Rotation: degrees. Brightness, color, contrast and sharpness: added to
    the factor 1. Posterize: number of bits kept. Solarize: threshold, as a fraction of 255. 0 for the others.
    """
    height, width = size
    # Shear, translations across and down, rotation, factor; the fewest bits Posterize keeps, the most it removes.
    largest, most_bits, taken = {
        "rand_augment": ((0.3, 150.0 / 331.0 * width, 150.0 / 331.0 * height, 30.0, 0.9), 8, 4),
        "trivial_augment": ((0.99, 32.0, 32.0, 135.0, 0.99), 8, 6),
        "aug_mix": ((0.3, width / 3.0, height / 3.0, 30.0, 0.9), 4, 4),
    }[name]
    exactly: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # independent of torch's defaults
    shear, across, down, turn, factor = (torch.linspace(0.0, end, bins, **exactly).numpy() for end in largest)
    table = np.zeros((len(NAMES), bins))
    table[SHEAR_X:POSTERIZE] = [shear, shear, across, down, turn, factor, factor, factor, factor]
    table[POSTERIZE] = (most_bits - torch.arange(bins, **exactly) / ((bins - 1) / taken)).round().numpy()
    table[SOLARIZE] = torch.linspace(1.0, 0.0, bins, **exactly).numpy()
    table.setflags(write=False)  # it is shared
    return table


def _mixing_weights(keys: NDArray[np.uint64], chains: int, alpha: float) -> NDArray[np.float32]:
    """Return Beta(alpha, alpha) weights between image and mixture, and Dirichlet(alpha, …) weights within it."""
    uniform = draws.uniforms(keys, WEIGHTS, (chains + 2) * _PER_WEIGHT)
    logs = _log_gammas(uniform.reshape(len(keys), chains + 2, _PER_WEIGHT), alpha)
    share, within = (_softmax(logs[:, span]) for span in (slice(2), slice(2, None)))
    return np.concatenate([share[:, :1], share[:, 1:] * within], axis=1).astype(np.float32)


def _softmax(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _log_gammas(uniform: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return logarithms of Gamma(alpha) variables, one per row of `uniform` `(…, _PER_WEIGHT)`.

    Marsaglia and Tsang 2000, "A simple method for generating gamma variables": rejection for alpha + 1, then their step
    down to alpha; in logarithms, because a small alpha leaves the range of floats.
    """
    tries = uniform[..., 1:].reshape(*uniform.shape[:-1], _TRIES, 3)
    normal = np.sqrt(-2 * np.log1p(-tries[..., 0])) * np.cos(2 * np.pi * tries[..., 1])
    d = alpha + 1 - 1 / 3
    cube = (
        np.maximum(1 + normal / np.sqrt(9 * d), 1e-3) ** 3
    )  # below 0 is rejected; so, practically, is 0.001
    accepted = np.log1p(-tries[..., 2]) < normal**2 / 2 + d - d * cube + d * np.log(cube)
    first = accepted.argmax(axis=-1)[..., None]
    chosen = np.take_along_axis(cube, first, axis=-1)[..., 0]
    logs: NDArray[np.float64] = np.log(d * chosen) + np.log1p(-uniform[..., 0]) / alpha
    return logs
