"""The order of version 1, computed again as loops: runs that began with it are resumed in it."""

import math

import numpy as np
from drivetrain.loaders.order.arrays import array_order, by_weight, mixed_array
from drivetrain.loaders.order.batches import shares

SEED, EPOCH = 5, 3


def test_the_shares_of_a_mix_stay() -> None:
    parts, weights, expected = [range(10), range(10, 17), range(17, 40)], [1.0, 3.0, 2.0], list[int]()
    for number, (part, count) in enumerate(zip(parts, shares(40, weights), strict=True)):
        for place in range(EPOCH * count, (EPOCH + 1) * count):
            turn, at = divmod(place, len(part))
            random = np.random.default_rng(np.random.SeedSequence([SEED, turn], spawn_key=(number,)))
            repetition = turn - EPOCH * count // len(part)
            expected.append(int(random.permutation(np.array(part))[at]) + repetition * 40)
    assert mixed_array(parts, weights, seed=SEED, epoch=EPOCH, samples=40).tolist() == expected


def test_the_draws_by_weight_stay() -> None:
    weights = np.array([1.0, 4.0, 0.5, 2.0, 2.5, 1.0, 0.0, 3.0])
    random = np.random.default_rng(np.random.SeedSequence(SEED, spawn_key=(8,)))
    order, times = random.permutation(8).tolist(), dict[int, int]()
    end = (random.random() + EPOCH * (5**0.5 - 1) / 2) % 1
    for sample in order:
        begin, end = end, end + 8 * weights[sample] / weights.sum()
        times[sample] = math.floor(end) - math.floor(begin)
    expected = [100 + sample + 1000 * k for k in range(8) for sample in order if times[sample] > k]
    found = by_weight(np.arange(100, 108), weights, seed=SEED, epoch=EPOCH, repeats=1000)
    assert found.tolist() == expected


def test_the_runs_of_pages_stay() -> None:
    """Pages of 7 samples, in runs of at least 16 batches of 2."""
    pages, random = np.arange(300) // 7, np.random.default_rng([SEED, EPOCH])
    runs, before = dict[int, int](), 0
    for page in random.permutation(43).tolist():
        runs[page] = before // 32
        before += 7 if page < 42 else 6
    draws = random.random(300).tolist()
    expected = sorted(range(300), key=lambda sample: (runs[sample // 7], draws[sample]))
    order = array_order(np.arange(300), order="quasi_random", seed=SEED, epoch=EPOCH, batch_size=2, pages=pages)
    assert order.at(np.arange(300)).tolist() == expected
