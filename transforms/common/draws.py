"""Draws from a generator of the host, which no step waits for."""

import math

import torch


def draw_beta(alpha: float, generator: torch.Generator) -> float:
    """Return one draw from Beta(alpha, alpha): X / (X + Y), with X and Y from Gamma(alpha). Both are kept as
    logarithms: at alpha = 0.01 a third of the Gamma draws underflow float32, and 0 / 0 is NaN."""
    difference = _log_gamma(alpha, generator) - _log_gamma(alpha, generator)
    # The logistic function, evaluated on the negative side so that exp cannot overflow.
    small = math.exp(-abs(difference)) / (1 + math.exp(-abs(difference)))
    return small if difference < 0 else 1 - small


def _log_gamma(alpha: float, generator: torch.Generator) -> float:
    # Marsaglia and Tsang 2000, "A simple method for generating gamma variables": their rejection method for alpha + 1,
    # which is above 1 as it must be, and Gamma(alpha) = Gamma(alpha + 1) · U^(1 / alpha).
    d = alpha + 1 - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        normal = torch.randn((), generator=generator, dtype=torch.float64, device="cpu").item()
        v = (1 + c * normal) ** 3
        if v > 0 and math.log(_uniform(generator)) < normal * normal / 2 + d - d * v + d * math.log(v):
            return math.log(d * v) + math.log(_uniform(generator)) / alpha


def _uniform(generator: torch.Generator) -> float:
    """Return a number in (0, 1], so that its logarithm exists."""
    return 1 - torch.rand((), generator=generator, dtype=torch.float64, device="cpu").item()
