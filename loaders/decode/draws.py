"""The random draws of a sample, pure functions of (seed, epoch, sample index), in the native core, whatever thread,
batch or rank handles it; and the operations of a policy that they choose."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.three_augment import RADII
from ..native.library import address, library
from .policies import LONGEST, complete

# torchvision's names of the operations, in the order of their numbers in policies.c; Pillow's Gaussian blur follows.
NAMES = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip

IDENTITY, SHEAR_X, POSTERIZE, SOLARIZE = map(NAMES.index, ("Identity", "ShearX", "Posterize", "Solarize"))
BRIGHTNESS, COLOR, CONTRAST = map(NAMES.index, ("Brightness", "Color", "Contrast"))
GAUSSIAN_BLUR = len(NAMES)
_ORDERS = np.array([*itertools.permutations((BRIGHTNESS, COLOR, CONTRAST))])

# Draws of a sample's key (see augmentation.py). AugMix: a chain's depth takes one, a weight _PER_WEIGHT; and
# each operation takes three: which one, its bin, its sign.
DEPTHS, WEIGHTS, OPERATIONS = 100, 200, 2000
_TRIES = 8  # each fails with a probability below 0.05
_PER_WEIGHT = 1 + 3 * _TRIES
assert DEPTHS + LONGEST <= WEIGHTS
assert WEIGHTS + (LONGEST + 2) * _PER_WEIGHT <= OPERATIONS
_AUG_MIX_BINS = 10


def sample_keys(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the keys `(n,)` of all random draws for the samples `indices` `(n,)` in one epoch."""
    indices = np.ascontiguousarray(indices, dtype=np.int64)
    keys = np.empty(len(indices), dtype=np.uint64)
    library().dt_sample_keys(seed, epoch, address(indices), len(indices), address(keys))
    return keys


def view_keys(keys: NDArray[np.uint64], first: int, count: int) -> NDArray[np.uint64]:
    """Return the keys `(n · count,)` of `count` views of each sample, from `first` on; view 0 has the sample's own."""
    keys = np.ascontiguousarray(keys)
    views = np.empty(len(keys) * count, dtype=np.uint64)
    library().dt_view_keys(address(keys), len(keys), first, count, address(views))
    return views


def uniforms(keys: NDArray[np.uint64], first: int, count: int) -> NDArray[np.float64]:
    """Return draws `first` to `first + count - 1` of each key, uniform in [0, 1), `(n, count)`."""
    keys = np.ascontiguousarray(keys)
    values = np.empty((len(keys), count), dtype=np.float64)
    library().dt_uniforms(address(keys), len(keys), first, count, address(values))
    return values


def random_resized_crops(
    keys: NDArray[np.uint64], heights: NDArray[np.int64], widths: NDArray[np.int64],
    scale: NDArray[np.float64], ratio: NDArray[np.float64],
) -> NDArray[np.int64]:  # fmt: skip
    """Return each sample's crop, `(n, 4)`: top, left, height, width in pixels, by draws 0 to 39 of its key.
    Inception's; after ten tries, the center. The same distribution as torchvision's `RandomResizedCrop.get_params`."""
    keys = np.ascontiguousarray(keys)
    heights, widths = np.ascontiguousarray(heights), np.ascontiguousarray(widths)
    boxes = np.empty((len(keys), 4), dtype=np.int64)
    given = address(keys), address(heights), address(widths), len(keys), address(scale), address(ratio)
    library().dt_random_resized_crops(*given, address(boxes))
    return boxes


@dataclass(frozen=True)
class Drawn:
    """The operations of a policy on n images: c chains of s steps each."""

    # (n, c, s): indices into `NAMES`; chains shorter than the longest are padded with Identity.
    operations: NDArray[np.int64]
    magnitudes: NDArray[np.float64]  # (n, c, s), signed, in torchvision's units (see `magnitudes`)
    # AugMix: (n, 1 + c), of the image itself and of each chain's result; they sum to 1. For the other policies, whose
    # single chain replaces the image, (n, 0).
    weights: NDArray[np.float32]


def draw_policy(policy: Mapping[str, Any], keys: NDArray[np.uint64], size: tuple[int, int]) -> Drawn:
    """Draw the policy's operations for the samples with these `keys` `(n,)`, of images with this height and width. The
    same distribution as torchvision's classes, and DeiT's; AugMix with all operations."""
    name, options = complete(policy)
    if name == "three_augment":
        return _draw_three(keys, options["color_jitter"])
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
    drawn = uniforms(keys, OPERATIONS, 3 * shape[0] * shape[1]).reshape(len(keys), *shape, 3)
    operations = first + (drawn[..., 0] * (len(NAMES) - first)).astype(np.int64)
    chosen = bins[0] + (drawn[..., 1] * bins[1]).astype(np.int64)
    signs = np.where((drawn[..., 2] < 0.5) & (operations < POSTERIZE), -1.0, 1.0)
    weights = np.empty((len(keys), 0), dtype=np.float32)
    if name == "aug_mix":
        if options["depth"] < 0:
            depths = 1 + (uniforms(keys, DEPTHS, shape[0]) * 3).astype(np.int64)
            operations[np.arange(3) >= depths[..., None]] = IDENTITY
        weights = _mixing_weights(keys, shape[0], options["alpha"])
    return Drawn(operations, signs * table[operations, chosen], weights)


def _draw_three(keys: NDArray[np.uint64], color_jitter: float) -> Drawn:
    """Return one of three operations, then the factors of `ColorJitter` in any order."""
    drawn = uniforms(keys, OPERATIONS, 6)
    three = np.array([COLOR, SOLARIZE, GAUSSIAN_BLUR])[(drawn[:, :1] * 3).astype(np.int64)]
    # Without color; above the threshold 128; of this radius.
    radii = RADII[0] + (RADII[1] - RADII[0]) * drawn[:, 1:2]
    strength = np.select([three == COLOR, three == SOLARIZE], [-1.0, 127.5 / 255], radii)
    order = _ORDERS[(drawn[:, 5] * len(_ORDERS)).astype(np.int64)]
    operations = np.concatenate([three, order], axis=1)
    magnitudes = np.concatenate([strength, color_jitter * (2 * drawn[:, 2:5] - 1)], axis=1)
    return Drawn(operations[:, None], magnitudes[:, None], np.empty((len(keys), 0), dtype=np.float32))


@functools.lru_cache(maxsize=16)
def magnitudes(name: str, size: tuple[int, int], bins: int) -> NDArray[np.float64]:
    """Return the magnitudes that a policy chooses from, unsigned, `(len(NAMES), bins)`: each torchvision's float32.
    Those of brightness, color, contrast and sharpness are added to the factor 1; 0 where there is none."""
    height, width = size
    # Shear (pixels per pixel), translations across and down (pixels), rotation (degrees), factor; the fewest bits that
    # Posterize keeps, the most it removes. Solarize's threshold is a fraction of 255.
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
    uniform = uniforms(keys, WEIGHTS, (chains + 2) * _PER_WEIGHT)
    logs = _log_gammas(uniform.reshape(len(keys), chains + 2, _PER_WEIGHT), alpha)
    share, within = (_softmax(logs[:, span]) for span in (slice(2), slice(2, None)))
    return np.concatenate([share[:, :1], share[:, 1:] * within], axis=1).astype(np.float32)


def _softmax(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _log_gammas(uniform: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return logarithms of Gamma(alpha) variables, one per row of `uniform` `(…, _PER_WEIGHT)`. Marsaglia and Tsang
    2000, "A simple method for generating gamma variables": rejection for alpha + 1, then their step down to alpha."""
    # In logarithms, because a small alpha leaves the range of floats.
    tries = uniform[..., 1:].reshape(*uniform.shape[:-1], _TRIES, 3)
    normal = np.sqrt(-2 * np.log1p(-tries[..., 0])) * np.cos(2 * np.pi * tries[..., 1])
    d = alpha + 1 - 1 / 3
    # Below 0 is rejected; so, practically, is 0.001.
    cube = np.maximum(1 + normal / np.sqrt(9 * d), 1e-3) ** 3
    accepted = np.log1p(-tries[..., 2]) < normal**2 / 2 + d - d * cube + d * np.log(cube)
    first = accepted.argmax(axis=-1)[..., None]
    chosen = np.take_along_axis(cube, first, axis=-1)[..., 0]
    logs: NDArray[np.float64] = np.log(d * chosen) + np.log1p(-uniform[..., 0]) / alpha
    return logs
