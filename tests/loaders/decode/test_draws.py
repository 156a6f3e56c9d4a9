"""The draws of a sample, computed again in Python's integers: resumed runs and their repetitions depend on them."""

import itertools
import math

import numpy as np
import pytest
from drivetrain.loaders.decode.augmentation import alternating, draw_choices
from drivetrain.loaders.decode.draws import NAMES, draw_policy, magnitudes, sample_keys, uniforms, view_keys
from drivetrain.loaders.options import LoaderOptions

GOLDEN = 0x9E3779B97F4A7C15
SAMPLES = [0, 3, 17, 10**10]
SIDE = 24


def mixed(number: int) -> int:
    """SplitMix64's finaliser."""
    number %= 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


def keys_of(seed: int, epoch: int) -> list[int]:
    both = mixed(mixed(seed + GOLDEN) ^ (epoch + GOLDEN))
    return [mixed(both ^ (sample + GOLDEN)) for sample in SAMPLES]


def draw(key: int, number: int) -> float:
    return (mixed(key + (number + 1) * GOLDEN) >> 11) / 2**53


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (5, 7), (2**40, 1)])
def test_the_keys_and_their_draws_stay(seed: int, epoch: int) -> None:
    found, expected = sample_keys(seed, epoch, np.array(SAMPLES)), keys_of(seed, epoch)
    assert found.tolist() == expected
    views = [[key, mixed(key ^ mixed(1 + GOLDEN)), mixed(key ^ mixed(2 + GOLDEN))] for key in expected]
    assert view_keys(found, 0, 3).tolist() == [view for own in views for view in own]
    assert view_keys(found, 2, 1).tolist() == [own[2] for own in views]
    assert uniforms(found, 4, 3).tolist() == [[draw(key, number) for number in (4, 5, 6)] for key in expected]


def test_which_draw_decides_what_stays() -> None:
    """The place of a crop 0 and 1, mirroring 40, the square 41 and 42, color 43 to 46."""
    strengths = (0.4, 0.2, 1.5)
    made = LoaderOptions(batch_size=1, image_size=SIDE, crop="padded", padding=3, cutout=6, color_jitter=strengths)
    found = draw_choices(made, sample_keys(5, 7, np.array(SAMPLES)), np.full(4, SIDE), np.full(4, SIDE))
    for number, key in enumerate(keys_of(5, 7)):
        shifts = [int(7 * draw(key, own)) - 3 for own in (0, 1)]
        assert found.boxes[number].tolist() == [*shifts, SIDE, SIDE]
        assert found.flips[number] == (draw(key, 40) < 0.5)
        assert found.corners[number].tolist() == [int((SIDE - 6 + 1) * draw(key, own)) for own in (41, 42)]
        factors = []
        for own, strength in enumerate(strengths, 43):
            low, high = max(0.0, 1 - strength), 1 + strength
            factors.append(low + (high - low) * draw(key, own))
        assert found.color[number].tolist() == pytest.approx([*factors, int(6 * draw(key, 46))], abs=1e-12)
    flips = [draw(key, 40) < 0.5 for key in keys_of(5, 0)]
    assert alternating(5, 2, np.array(SAMPLES)).tolist() == flips
    assert alternating(5, 3, np.array(SAMPLES)).tolist() == [not flip for flip in flips]


@pytest.mark.parametrize("name", ["rand_augment", "trivial_augment", "aug_mix"])
def test_which_draw_decides_what_in_a_policy_stays(name: str) -> None:
    """Three for each operation, from 2000 on: which one, its strength, its sign; AugMix's depths are 100 to 102."""
    bins = 10 if name == "aug_mix" else 31
    drawn = draw_policy({"name": name}, sample_keys(5, 7, np.array(SAMPLES)), (SIDE, SIDE))
    table, posterize = magnitudes(name, (SIDE, SIDE), bins), NAMES.index("Posterize")
    _, chains, steps = drawn.operations.shape
    assert (chains, steps) == {"rand_augment": (1, 2), "trivial_augment": (1, 1), "aug_mix": (3, 3)}[name]
    for number, key in enumerate(keys_of(5, 7)):
        for place, (chain, step) in enumerate(itertools.product(range(chains), range(steps))):
            which, strength, sign = (draw(key, 2000 + 3 * place + own) for own in range(3))
            operation = 1 + int(13 * which) if name == "aug_mix" else int(14 * which)
            if name == "aug_mix" and step >= 1 + int(3 * draw(key, 100 + chain)):
                operation = 0
            chosen = {"rand_augment": 9, "trivial_augment": int(31 * strength), "aug_mix": int(3 * strength)}[name]
            signed = -1 if sign < 0.5 and operation < posterize else 1
            assert drawn.operations[number, chain, step] == operation
            assert drawn.magnitudes[number, chain, step] == signed * table[operation, chosen]


def test_which_draw_decides_what_in_three_augment_stays() -> None:
    drawn = draw_policy({"name": "three_augment"}, sample_keys(5, 7, np.array(SAMPLES)), (SIDE, SIDE))
    color, solarize, blur = NAMES.index("Color"), NAMES.index("Solarize"), len(NAMES)
    orders = [*itertools.permutations((NAMES.index("Brightness"), color, NAMES.index("Contrast")))]
    for number, key in enumerate(keys_of(5, 7)):
        values = [draw(key, 2000 + own) for own in range(6)]
        first = (color, solarize, blur)[int(3 * values[0])]
        assert drawn.operations[number, 0].tolist() == [first, *orders[int(6 * values[5])]]
        strength = {color: -1.0, solarize: 0.5, blur: 0.1 + 1.9 * values[1]}[first]
        factors = [0.3 * (2 * value - 1) for value in values[2:5]]
        assert drawn.magnitudes[number, 0].tolist() == pytest.approx([strength, *factors], abs=1e-12)


def log_gamma(key: int, first: int, alpha: float) -> float:
    """The logarithm of a Gamma(alpha) variable of 25 draws: one to scale, and eight tries of three."""
    shape = alpha + 2 / 3
    for own in range(first + 1, first + 25, 3):
        length, angle, limit = (draw(key, number) for number in (own, own + 1, own + 2))
        normal = math.sqrt(-2 * math.log1p(-length)) * math.cos(2 * math.pi * angle)
        cube = max(1 + normal / math.sqrt(9 * shape), 1e-3) ** 3
        if math.log1p(-limit) < normal**2 / 2 + shape - shape * cube + shape * math.log(cube):
            break
    return math.log(shape * cube) + math.log1p(-draw(key, first)) / alpha


def test_which_draws_decide_the_weights_of_aug_mix_stays() -> None:
    """25 for each, from 200 on: two between image and mixture, then one for each chain."""
    policy = {"name": "aug_mix", "alpha": 0.8, "width": 2}
    found = draw_policy(policy, sample_keys(5, 7, np.array(SAMPLES)), (SIDE, SIDE)).weights
    for number, key in enumerate(keys_of(5, 7)):
        own, other, *chains = (math.exp(log_gamma(key, 200 + 25 * row, 0.8)) for row in range(4))
        share = own / (own + other)
        expected = [share, *((1 - share) * chain / sum(chains) for chain in chains)]
        assert found[number].tolist() == pytest.approx(expected, abs=1e-6)
