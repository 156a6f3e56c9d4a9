"""Permutations without an array, and the order of an epoch that a rank computes of its own positions alone."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from drivetrain.loaders.order.batches import LastBatch, Shares, last_batch
from drivetrain.loaders.order.epoch import in_runs, mixed, shuffled, unshuffled
from drivetrain.loaders.order.permutation import key_of, permuted, subkeys
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

BILLION = 10**9


def everything(n: int, seed: int, epoch: int = 0) -> NDArray[np.int64]:
    return permuted(np.arange(n), n, key_of(seed, epoch))


def test_every_number_to_300_is_a_bijection() -> None:
    for n in range(1, 301):
        for seed, epoch in ((0, 0), (0, 1), (7, 3)):
            assert np.array_equal(np.sort(everything(n, seed, epoch)), np.arange(n))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 200_000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**63 - 1))
def test_larger_numbers_are_bijections(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(everything(n, seed, epoch)), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1000, 2**62), seed=st.integers(0, 2**63 - 1), data=st.data())
def test_a_position_does_not_depend_on_the_others(n: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True)))
    found = permuted(positions, n, key_of(seed))
    assert found.min() >= 0
    assert found.max() < n
    assert len(np.unique(found)) == len(found)
    assert [int(permuted(positions[at : at + 1], n, key_of(seed))[0]) for at in range(len(found))] == [*found]
    keys = subkeys(key_of(seed), positions)
    each = permuted(positions, n, keys)
    assert [int(permuted(positions[at : at + 1], n, keys[at])[0]) for at in range(len(found))] == [*each]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = [tuple(everything(50, seed, epoch)) for seed in range(8) for epoch in range(8)]
    assert len(set(orders)) == 64
    # As different as two random orders: one position in 50 is the same on average.
    pairs = itertools.combinations(map(np.array, orders), 2)
    assert np.mean([(one == other).sum() for one, other in pairs]) == pytest.approx(1, abs=0.1)


def z_score(counts: NDArray[Any], expected: float, freedom: int) -> float:
    """How many standard deviations chi-square of the counts is above its mean (Wilson and Hilferty 1931)."""
    square = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return float(((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


@pytest.mark.parametrize("n", [3, 5, 6, 12, 16, 23, 33, 64, 100, 257])
def test_every_place_is_equally_likely(n: int) -> None:
    """Of each position, of two that follow each other, and (up to 6) of whole orders; over keys drawn at random."""
    count = 400_000 // n
    keys = np.random.default_rng(n).integers(0, 2**64, count, dtype=np.uint64)
    found = permuted(np.tile(np.arange(n), count), n, np.repeat(keys, n)).reshape(count, n)
    places = np.stack([np.bincount(column, minlength=n) for column in found.T])
    assert abs(z_score(places, count / n, (n - 1) ** 2)) < 4
    steps = np.bincount(((found[:, 1:] - found[:, :-1]) % n).ravel(), minlength=n)
    assert steps[0] == 0
    assert abs(z_score(steps[1:], count, n - 2)) < 4 or n == 3
    if n <= 6:
        orders = np.unique(found @ n ** np.arange(n), return_counts=True)[1]
        assert len(orders) == math.factorial(n)
        assert abs(z_score(orders, count / len(orders), len(orders) - 1)) < 4


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_number_of_ranks_shares_the_batches(data: st.DataObject) -> None:
    """All orders, and all ways to end an epoch, against slices of arrays of the whole."""
    n = data.draw(st.integers(1, 300), label="samples")
    world = data.draw(st.integers(1, min(n, 9)), label="ranks")
    batch = world * data.draw(st.integers(1, 12), label="of each")
    key = {"seed": data.draw(st.integers(0, 5)), "epoch": data.draw(st.integers(0, 2**63 - 1))}
    chosen: Any = range(n)
    if data.draw(st.booleans(), label="some"):
        chosen = np.array(data.draw(st.permutations(range(n))))[: max(n // 2, world)]
    kind = data.draw(st.sampled_from(["sequential", "random", "quasi_random", "mix"]))
    order = unshuffled(chosen)
    if kind == "random":
        order = shuffled(order, **key)
    elif kind == "quasi_random":
        block, window = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 80))
        size = data.draw(st.sampled_from([None, batch]), label="of version 2 or 3")
        order = in_runs(order, **key, block=block, window=window, batch_size=size)
    elif kind == "mix":
        middle = len(chosen) // 2
        parts = [part for part in (chosen[:middle], chosen[middle:]) if len(part)]
        order = mixed(parts, [1.0, 3.0][: len(parts)], **key, samples=n)
        assert order.count == len(chosen)
        order = shuffled(order, **key)
    every = order.at(np.arange(order.count))
    if kind != "mix":
        assert sorted(every) == sorted(chosen)
    ending = data.draw(st.sampled_from(["drop_last", "pad_last", "train", "evaluation"]))
    last = last_batch(
        len(every), batch, drop_last=ending == "drop_last", pad_last=ending == "pad_last",
        train=ending != "evaluation", world_size=world,
    )  # fmt: skip
    kept = every[: len(every) - last.dropped]
    padded = np.concatenate([kept, np.resize(every, last.padded)])
    starts = [*range(0, len(padded), batch)]
    whole = np.split(padded, starts[1:-1] if last.joined else starts[1:]) if len(padded) else []
    shares = [Shares(order, batch, last, rank, world) for rank in range(world)]
    for number, expected in enumerate(whole):
        assert [*np.concatenate([own[number] for own in shares])] == [*expected]
        assert [len(own[number]) for own in shares] == [len(p) for p in np.array_split(expected, world)]
    own = shares[-1]
    assert len(own) == len(whole)
    first = data.draw(st.integers(0, len(whole)))
    assert [[*share] for share in own[first:]] == [[*own[number]] for number in range(first, len(whole))]
    with pytest.raises(IndexError):
        own[len(whole)]


@pytest.mark.parametrize("kind", ["random", "quasi_random", "mix"])
def test_a_rank_of_ten_thousand_computes_its_share(kind: str) -> None:
    """100,000 of a billion samples, in little memory; the whole would take 8 GB."""
    order = unshuffled(range(BILLION))
    if kind == "random":
        order = shuffled(order, seed=1, epoch=2)
    elif kind == "quasi_random":
        order = in_runs(order, seed=1, epoch=2, block=97, window=1 << 20, batch_size=40_000)
    else:
        parts = [range(7), range(7, BILLION)]
        order = shuffled(mixed(parts, [1.0, 2.0], seed=1, epoch=2, samples=BILLION), seed=1, epoch=2)
    tracemalloc.start()
    shares = Shares(order, 40_000, LastBatch(), 9_999, 10_000)
    found = np.concatenate(list(shares))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == len(np.unique(found)) == 100_000
    assert peak < 40e6
    assert np.array_equal(shares[17], order.at(np.arange(17 * 40_000 + 39_996, 18 * 40_000)))


def test_the_order_of_this_version_stays() -> None:
    """Recorded when it was made: resumed runs depend on it. Another order needs another version."""
    positions = np.arange(8)
    assert permuted(positions, 10, key_of(0, 0)).tolist() == [9, 3, 6, 7, 4, 2, 8, 0]
    assert permuted(positions[:4], BILLION, key_of(1, 2)).tolist() == [
        445960393, 748833677, 514906207, 258421584
    ]  # fmt: skip
    given, key = unshuffled(range(1000)), {"seed": 1, "epoch": 2}
    mix = mixed([range(40), range(40, 1000)], [1, 2], **key, samples=1000)
    for order, recorded in (
        (shuffled(given, **key), [595, 744, 669, 202, 660, 881, 596, 488]),
        (in_runs(given, **key, block=7, window=64), [296, 930, 529, 295, 405, 397, 214, 956]),
        (in_runs(given, **key, block=7, window=64, batch_size=4), [958, 398, 928, 399, 797, 530, 767, 294]),
        (mix, [3, 12, 22, 5, 17, 4, 39, 2]),
    ):
        assert order.at(positions).tolist() == recorded
