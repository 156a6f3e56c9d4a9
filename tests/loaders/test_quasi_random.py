"""Quasi-random order: stretches of pages in the file, and shares near to its order."""

import itertools
import shutil
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, epochs
from drivetrain.loaders.beton.data_set import BetonFiles
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.loaders.order.arrays import array_order, by_weight, mixed_array
from drivetrain.loaders.order.batches import WINDOW, Order, Rest, between, shares
from drivetrain.loaders.order.epoch import drawn, in_runs, line_of, spread, unshuffled
from drivetrain.loaders.order.permutation import key_of, permuted, subkeys
from drivetrain.loaders.sample_options import SampleOptions
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_pictures import make
from pipeline_data import SIDE as TOY_SIDE
from pipeline_data import TRAIN, Toy

COUNT = 23

loader = partial(make, FFCVLoader)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_quasi_random_order_goes_by_stretches_of_pages(data: st.DataObject) -> None:
    """Every sample once; what is read at a time is a few whole pages; another order each epoch."""
    samples = data.draw(st.integers(1, 400), label="samples")
    per_page = data.draw(st.integers(1, 60), label="samples on a page")
    batch = data.draw(st.integers(1, 8), label="batch")
    indices = np.array(data.draw(st.permutations(range(samples)), label="indices"))[: samples // 2 + 1]
    pages = np.arange(samples) // per_page
    options = {"seed": 1, "epoch": data.draw(st.integers(0, 9))}
    if (version := data.draw(st.integers(1, 3), label="version")) == 1:
        order = array_order(indices, order="quasi_random", **options, batch_size=batch, pages=pages)
    else:
        indices = np.sort(indices)
        pages[indices] = np.arange(len(indices)) // per_page
        size = batch if version == 3 else None
        order = in_runs(unshuffled(indices), **options, block=per_page, window=WINDOW * batch, batch_size=size)
    found = order.at(np.arange(order.count))
    assert sorted(found) == sorted(indices)
    places = {page: np.flatnonzero(pages[found] == page) for page in set(pages[indices].tolist())}
    for where in places.values():  # a page lies within one stretch of 16 batches, or a page more
        assert where.max() - where.min() < WINDOW * batch + per_page


@pytest.mark.parametrize("version", [1, 2, 3])
def test_quasi_random_order_mixes_and_changes(version: int) -> None:
    pages = np.arange(1000) // 10

    def epoch_of(number: int) -> Any:
        if version == 1:
            order = array_order(np.arange(1000), order="quasi_random", seed=4, epoch=number, batch_size=5, pages=pages)
        else:
            size = 5 if version == 3 else None
            order = in_runs(unshuffled(range(1000)), seed=4, epoch=number, block=10, window=WINDOW * 5, batch_size=size)
        return order.at(np.arange(1000))

    first, second, same = (epoch_of(number) for number in (0, 1, 0))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, second)
    per_batch = [len(set(pages[first[start : start + 5]])) for start in range(0, 1000, 5)]
    assert np.mean(per_batch) > 3  # a batch comes from several pages


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_ranks_in_quasi_random_order_read_runs_of_their_own(data: st.DataObject) -> None:
    """Of each window, a rank reads one run of the blocks; another one in each window; batches are shared evenly."""
    world, share = data.draw(st.integers(1, 8), label="ranks"), data.draw(st.integers(1, 8), label="of each")
    batch, block = world * share, data.draw(st.integers(1, 40), label="block")
    blocks_of_window = -(-WINDOW * batch // block)
    window = blocks_of_window * block
    count, key = 5 * window, {"seed": data.draw(st.integers(0, 9)), "epoch": data.draw(st.integers(0, 9))}
    order = in_runs(unshuffled(range(count)), **key, block=block, window=WINDOW * batch, batch_size=batch)
    samples = order.at(np.arange(count))
    for start in range(0, count, window):
        mine = samples[start : start + window]
        ranks = np.arange(start, start + window) % batch // share
        read = [sorted(set(mine[ranks == rank].tolist())) for rank in range(world)]
        borders = sum(len({one // block for one in own}) for own in read) - blocks_of_window
        assert borders <= world, "each rank begins and ends within a block at most"
    # Of each window, a batch has its share of each block.
    most = -(-block // (window // batch)) + 1
    for start in range(0, count - batch + 1, batch):
        if start // window == (start + batch - 1) // window:
            assert np.bincount(samples[start : start + batch] // block).max() <= most


def test_the_runs_of_a_rank_change() -> None:
    """A block of more than a window: rank 0 would always have its first part."""
    order = in_runs(unshuffled(range(4096)), seed=0, epoch=0, block=256, window=64, batch_size=16)
    first_rank = order.at(np.arange(4096).reshape(-1, 16)[:, :4].ravel())
    assert np.bincount(first_rank % 256 // 64, minlength=4).min() > 4096 / 16 / 4


def test_quasi_random_order_mixes_16_batches(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed runs depend on the number; it shows with blocks that are shorter than these batches."""
    monkeypatch.setattr(BetonFiles, "samples_on_a_page", 1)
    with loader(numbered, order="quasi_random", batch_size=1, seed=3) as made:
        found = np.concatenate(made.shares(1))
    order = in_runs(unshuffled(range(COUNT)), seed=3, epoch=1, block=1, window=16, batch_size=1)
    assert found.tolist() == order.at(np.arange(COUNT)).tolist()


def test_quasi_random_order_needs_pages(photos: Path) -> None:
    folder = photos.with_name("photos-images")
    with pytest.raises(DataError, match=r"'quasi_random' reads a \.beton file page by page"):
        TorchLoader(folder, batch_size=4, image_size=16, order="quasi_random")


def test_a_state_of_version_2_keeps_its_quasi_random_order(photos: Path) -> None:
    options: dict[str, Any] = {"order": "quasi_random", "seed": 3}
    state = {"epoch": 1, "position": 2, "seed": 3, "batch_size": 4, "samples": 18, "order": "quasi_random"}
    with loader(photos, **options) as made:
        assert made.state_dict()["order_version"] == 3
        new = np.concatenate(made.shares(1))
        made.load_state_dict(state | {"order_version": 2})
        assert made.state_dict()["order_version"] == 2
        kept = np.concatenate(made.shares(1))
        pages = made.beton.samples_on_a_page if made.beton else 0
    order = in_runs(unshuffled(range(18)), seed=3, epoch=1, block=pages, window=WINDOW * 4)
    assert kept.tolist() == order.at(np.arange(18)).tolist()
    assert new.tolist() != kept.tolist()


def test_a_run_keeps_its_quasi_random_order_with_other_files_of_the_same_samples(tmp_path: Path) -> None:
    """Each file begins with its tables, so that several have more bytes than one, and fewer samples on a page."""
    images, labels = np.zeros((60, 256, 256, 3), np.uint8), np.arange(60)
    one, several = tmp_path / "one.beton", tmp_path / "{a,b}.beton"
    for path in (one, several):
        convert((images, labels), path, write_mode="raw", progress=False)
    with loader(one, order="quasi_random") as made:
        state = made.state_dict() | {"epoch": 1, "position": 3}
        expected = [np.concatenate(made.shares(epoch)).tolist() for epoch in (1, 2)]
    with loader(several, order="quasi_random") as other:
        assert np.concatenate(other.shares(1)).tolist() != expected[0]
        other.load_state_dict(state)
        assert [np.concatenate(other.shares(epoch)).tolist() for epoch in (1, 2)] == expected
        assert other.state_dict() == state


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6), seed=st.integers(0, 2**40),
    epoch=st.sampled_from([0, 1, 7, 2**63 - 1]), data=st.data(),
)  # fmt: skip
def test_shares_near_to_the_order_of_the_file(
    lengths: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:  # fmt: skip
    """Each part has its exact share, at equal distances; what is repeated has an augmentation of its own."""
    ends = np.cumsum([0, *lengths])
    parts = [np.arange(a, b) if b % 2 else range(a, b) for a, b in itertools.pairwise(ends.tolist())]
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(parts), max_size=len(parts)))
    samples = int(ends[-1])
    order = spread(parts, weights, seed=seed, epoch=epoch, samples=samples)
    found = order.at(np.arange(order.count))
    assert len(np.unique(found)) == order.count == samples
    start = 0
    for part, count in zip(parts, shares(samples, weights), strict=True):
        own, start = found[start : start + count], start + count
        times = np.bincount(own % samples - part[0], minlength=len(part))
        assert set(times.tolist()) <= {count // len(part), -(-count // len(part))}
        for sample in np.flatnonzero(times):
            turns = own[own % samples - part[0] == sample] // samples
            assert sorted(turns.tolist()) == list(range(times[sample]))
        assert (np.diff((own % samples - part[0]) // 64) >= 0).all()
    positions = np.array(data.draw(st.permutations(range(samples))))
    assert order.at(positions).tolist() == found[positions].tolist()


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (5, 1), (5, 2**63 - 1)])
def test_the_shares_of_this_version_stay(seed: int, epoch: int) -> None:
    """As a loop computes them, because resumed runs depend on it: of each part, samples at equal distances, from a
    place that the seed and the epoch decide; those of each 64 change places."""
    parts, weights, samples = [range(100), range(100, 107), range(107, 300)], [1.0, 3.0, 2.0], 300
    expected = list[int]()
    for number, (part, count) in enumerate(zip(parts, shares(samples, weights), strict=True)):
        size, seen = len(part), Counter[int]()
        start = (int(key_of(seed, number, purpose=3)) + epoch * count) % size
        for own in range(count):
            place = (own * size + start) // count
            first = place // 64 * 64
            key = subkeys(key_of(purpose=7), np.array([first]))
            near = first + int(permuted(np.array([place - first]), min(64, size - first), key)[0])
            expected.append(part[near] + seen[place] * samples)
            seen[place] += 1
    order = spread(parts, weights, seed=seed, epoch=epoch, samples=samples)
    assert order.at(np.arange(samples)).tolist() == expected


def test_shares_of_more_samples_than_products_of_64_bits() -> None:
    """Their number is multiplied by a part's: with 64 bits, places wrap around from three billion samples on."""
    sizes, positions = [7, 4_000_000_000], np.arange(3_999_990_000, 4_000_000_007, 3)
    parts = [range(sizes[0]), range(sizes[0], sum(sizes))]
    order = spread(parts, [float(size) for size in sizes], seed=5, epoch=3, samples=sum(sizes))
    found = order.at(positions)
    assert len(np.unique(found)) == len(positions)
    assert (np.diff((found - sizes[0]) // 64) >= 0).all()
    assert (abs(found - positions) < 64).all()


def test_across_epochs_each_sample_of_a_part_is_trained_on_equally_often() -> None:
    """Up to once: of a data set of which an epoch has half, two epochs have all."""
    parts, total = [range(100), range(100, 107), range(107, 300)], np.zeros(300, np.int64)
    for epoch in range(12):
        order = spread(parts, [1.0, 3.0, 2.0], seed=5, epoch=epoch, samples=300)
        total += np.bincount(order.at(np.arange(300)) % 300, minlength=300)
        assert all(np.ptp(total[part.start : part.stop]) <= 1 for part in parts)


def near_shares(count: int, seed: int, epoch: int, kind: str) -> Order:
    """A file in which two classes take turns: the second is to be three quarters of an epoch, or half of the file."""
    weights = np.where(np.arange(count) % 2, 1.5, 0.5)
    if kind == "weights":
        return drawn(range(count), line_of(weights, near=True), seed=seed, epoch=epoch, repeats=count, near=True)
    parts = [range(count // 2), range(count // 2, count)]
    return spread(parts, [1.0, 3.0], seed=seed, epoch=epoch, samples=count)


@pytest.mark.parametrize(("kind", "expected"), [("weights", 0.75), ("parts", 0.5)])
def test_classes_that_take_turns_in_a_file_do_so_in_no_epoch(kind: str, expected: float) -> None:
    """At equal distances in the very order of the file, an epoch would have all samples of a class, or none."""
    count, total = 6400, np.zeros(6400)
    for epoch in range(40):
        order = near_shares(count, 3, epoch, kind)
        found = order.at(np.arange(count)) % count
        assert abs(np.mean(found % 2) - expected) < 0.03
        total += np.bincount(found, minlength=count)
    share = np.where(np.arange(count) % 2, 1.5, 0.5) if kind == "weights" else np.repeat([0.5, 1.5], count // 2)
    assert np.abs(total / 40 - share).max() < 0.1, "each as often as its share over the epochs"


@pytest.mark.parametrize("kind", ["weights", "parts"])
def test_shares_in_quasi_random_order_read_runs_of_the_file(kind: str) -> None:
    count, page, batch = 6400, 20, 10
    order = in_runs(
        near_shares(count, 1, 2, kind), seed=1, epoch=2, block=page, window=WINDOW * batch, batch_size=batch
    )
    windows = order.at(np.arange(count)).reshape(-1, WINDOW * batch) % count // page
    # A block of as many draws as a page has samples is of a stretch of 64 samples, or of two.
    assert max(len(np.unique(window)) for window in windows) <= WINDOW * batch // page * 9
    assert np.mean([len(np.unique(batch)) for batch in windows.reshape(-1, batch)]) > batch / 2


@pytest.mark.parametrize("balance", ["class", tuple(range(1, TRAIN + 1))], ids=["class", "weights"])
def test_balance_in_quasi_random_order(toy: Toy, balance: Any) -> None:
    """By class: 32 samples of the first, and 8 of each of the others."""
    options: dict[str, Any] = {
        "order": "quasi_random",
        "seed": 3,
        "image_size": TOY_SIDE,
        "batch_size": 16,
        "drop_last": True,
    }
    few = tuple(sample for sample in range(TRAIN) if sample % 4 == 0 or sample < 32)
    chosen = SampleOptions(balance=balance, indices=few if balance == "class" else None)
    with loader(toy.train, indices=chosen, **options) as made:
        state = made.state_dict()
        assert state["order_version"] == 5
        new = [np.concatenate(made.shares(epoch)) for epoch in range(20)]
        often = np.bincount(np.concatenate(new) % TRAIN, minlength=TRAIN)
        expected = np.zeros(TRAIN)
        expected[made.indices] = made.frequencies
        assert np.corrcoef(often, expected)[0, 1] > 0.97
        assert (often[expected == 0] == 0).all()
        ranks = [loader(toy.train, indices=chosen, rank=rank, world_size=2, **options) for rank in range(2)]
        for one, other, both in zip(*(each.shares(4) for each in (*ranks, made)), strict=True):
            assert np.concatenate([one, other]).tolist() == both.tolist()
        made.load_state_dict(state | {"order_version": 1, "epoch": 1})
        assert made.state_dict()["order_version"] == 1
        kept = np.concatenate(made.shares(1))
        selected, pages = made.selected, made.beton.pages if made.beton else None
    assert selected is not None
    if balance == "class":
        given = mixed_array(selected.parts, [1.0] * 4, seed=3, epoch=1, samples=TRAIN)
    else:
        given = by_weight(made.kept, np.array(balance, float), seed=3, epoch=1, repeats=TRAIN)
    order = array_order(given, order="quasi_random", seed=3, epoch=1, batch_size=16, pages=pages)
    assert kept.tolist() == order.at(np.arange(len(kept))).tolist() != new[1].tolist()


@pytest.mark.parametrize("balance", [None, "class", tuple(range(1, TRAIN + 1))], ids=["none", "class", "weights"])
def test_quasi_random_order_is_that_of_the_file_in_whatever_order_indices_are(toy: Toy, balance: Any) -> None:
    given = np.random.default_rng(0).permutation(TRAIN)[:80]
    options: dict[str, Any] = {"order": "quasi_random", "image_size": TOY_SIDE, "batch_size": 16}
    found = []
    for indices in (given, np.sort(given)):
        chosen = SampleOptions(indices=tuple(indices.tolist()), balance=balance)
        with loader(toy.train, indices=chosen, **options) as made:
            found.append([np.concatenate(made.shares(epoch)).tolist() for epoch in range(2)])
    assert found[0] == found[1]


def test_a_mix_in_quasi_random_order(numbered: Path, tmp_path: Path) -> None:
    for path in (numbered, manifest_path(numbered)):
        if path.exists():
            shutil.copy(path, tmp_path / path.name.replace("numbered", "other"))
    mix: Any = {str(numbered): 1, str(tmp_path / "other.beton"): 3}
    with loader(mix, order="quasi_random", indices=Rest(2 * COUNT, np.array([1, 30]))) as made:
        assert made.state_dict()["order_version"] == 5
        found = [np.concatenate(made.shares(epoch)) % (2 * COUNT) for epoch in range(30)]
        assert {np.count_nonzero(one < COUNT) for one in found} == {11}
        assert np.bincount(np.concatenate(found))[[1, 30]].tolist() == [0, 0]
        made.load_state_dict(made.state_dict() | {"order_version": 1})
        kept = np.concatenate(made.shares(1))
        parts = [between(np.delete(np.arange(2 * COUNT), [1, 30]), first, first + COUNT) for first in (0, COUNT)]
        pages = made.beton.pages if made.beton else None
    given = mixed_array(parts, [1.0, 3.0], seed=0, epoch=1, samples=2 * COUNT)
    order = array_order(given, order="quasi_random", seed=0, epoch=1, batch_size=4, pages=pages)
    assert kept.tolist() == order.at(np.arange(len(kept))).tolist()


def test_whether_samples_are_in_place_is_found_some_at_a_time() -> None:
    """Ranks map them: what each needs must not grow with the data."""
    samples, part = np.arange(1 << 21), epochs._AT_ONCE
    tracemalloc.start()
    try:
        assert epochs._in_place(samples) is samples
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < len(samples) / 2
    for at in (0, part - 1, part, len(samples) - 2):  # also where two parts meet
        changed = samples.copy()
        changed[[at, at + 1]] = changed[[at + 1, at]]
        assert (epochs._in_place(changed) == samples).all()
    assert len(epochs._in_place(samples[:1])) == 1
