"""Which samples are held out, folded, few, limited and balanced: exact shares, and functions of seed and sample."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.common.errors import DataError, PlanError
from drivetrain.loaders import FFCVLoader, selection
from drivetrain.loaders.beton import data_set
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.order import epoch as epoch_order
from drivetrain.loaders.order.arrays import by_weight
from drivetrain.loaders.order.batches import Marked, Rest, as_array, count_marked, marked, taken
from drivetrain.loaders.order.permutation import key_of, permuted
from drivetrain.loaders.sample_options import SampleOptions
from drivetrain.loaders.selection import Selection, selected
from drivetrain.loaders.sources import files_of
from hypothesis import example, given
from hypothesis import strategies as st
from pipeline_data import SIDE, TRAIN, Toy

counts_of = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def data(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Samples with so many of each class, mixed up."""
    classes = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(classes)), np.random.default_rng(0).permutation(classes)


def held_out(samples: np.ndarray, classes: np.ndarray | None, share: float, seed: int) -> np.ndarray:
    """Return which samples are held out."""
    held = np.zeros(len(samples), np.bool_)
    held[selection.held_out(samples, classes, share, seed)] = True
    return held


def drawn_by_line(samples: np.ndarray, weights: np.ndarray, **key: int) -> np.ndarray:
    order = epoch_order.drawn(samples, epoch_order.line_of(weights), **key)
    return order.at(np.arange(order.count))


def drawn_by_array(samples: np.ndarray, weights: np.ndarray, **key: int) -> np.ndarray:
    """Up to version 3, and in quasi-random order up to version 4."""
    return by_weight(samples, weights, **key)


@given(counts_of, st.floats(0.05, 0.95), st.integers(0, 5))
@example([1, 6], 0.5, 0)
def test_each_class_is_held_out_by_its_share(counts: list[int], share: float, seed: int) -> None:
    samples, classes = data(counts)
    try:
        held = held_out(samples, classes, share, seed)
    except DataError:
        assert all(count == 1 or count * share < 1 for count in counts)
        return
    for each, count in enumerate(counts):
        found = held[classes == each].sum()
        assert found <= count - 1
        assert abs(found - count * share) < 1 or found == count - 1
    if all(count * (1 - share) >= 1 for count in counts):
        assert held.sum() == round(len(samples) * share)


@given(counts_of, st.integers(2, 6), st.integers(0, 5))
def test_each_sample_is_in_one_fold(counts: list[int], folds: int, seed: int) -> None:
    samples, classes = data(counts)
    if folds > len(samples):
        with pytest.raises(DataError, match=rf"folds={folds} is more than the {len(samples)} samples"):
            selection.folds_of(samples, classes, folds, seed)
        return
    fold = selection.folds_of(samples, classes, folds, seed)
    sizes = np.bincount(fold[fold >= 0], minlength=folds)
    assert sizes.max() - sizes.min() <= 1
    for each, count in enumerate(counts):
        own = fold[classes == each]
        assert (own == -1).all() if count == 1 else (own >= 0).all()
        per_fold = np.bincount(own[own >= 0], minlength=folds)
        assert per_fold.max() - per_fold.min() <= 1


@pytest.mark.parametrize("classes", [True, False])
def test_the_choice_depends_on_seed_and_sample_alone(*, classes: bool) -> None:
    """Not on the order of the samples, and not on samples of other classes."""
    samples, labels = data([50, 70, 30])
    known = labels if classes else None
    order = np.random.default_rng(1).permutation(len(samples))
    shuffled = None if known is None else known[order]
    held = held_out(samples, known, 0.2, 3)
    assert (held_out(samples[order], shuffled, 0.2, 3) == held[order]).all()
    assert (selection.folds_of(samples[order], shuffled, 5, 3) == selection.folds_of(samples, known, 5, 3)[order]).all()
    assert (held_out(samples, known, 0.2, 4) != held).any()
    assert set(selection.limited(samples[order], shuffled, 20, 3)) == set(selection.limited(samples, known, 20, 3))
    if classes:
        own = samples[labels == 1]
        fewer = selection.few(own, labels[labels == 1], 9, 3)
        assert set(fewer) == set(selection.few(samples, labels, 9, 3)) & set(own)


def test_a_larger_share_holds_out_the_same_samples_and_more() -> None:
    samples, classes = data([100, 100])
    small, large = (held_out(samples, classes, share, 0) for share in (0.1, 0.3))
    assert (large | ~small).all()


@given(counts_of, st.integers(1, 100), st.integers(0, 3))
def test_a_limit_leaves_each_class_its_share(counts: list[int], limit: int, seed: int) -> None:
    samples, classes = data(counts)
    chosen = selection.limited(samples, classes, limit, seed)
    assert len(chosen) == min(limit, len(samples))
    assert (np.diff(chosen) > 0).all()
    for each, count in enumerate(counts):
        assert abs((classes[chosen] == each).sum() - count * len(chosen) / len(samples)) <= max(1, len(counts) / 2)


def test_so_many_of_each_class() -> None:
    samples, classes = data([5, 9, 7])
    chosen = selection.few(samples, classes, 5, 0)
    assert np.bincount(classes[chosen]).tolist() == [5, 5, 5]
    with pytest.raises(DataError, match=r"per_class=6: class 0 has only 5 samples .* at most 5\."):
        selection.few(samples, classes, 6, 0)
    with pytest.raises(DataError, match=r"needs labels that are class indices"):
        selection.few(samples, None, 1, 0)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 2]])
def test_a_split_that_holds_out_nothing_is_refused(counts: list[int]) -> None:
    with pytest.raises(DataError, match=r"val_split=0.01 holds out none of"):
        selection.held_out(*data(counts), 0.01, 0)


def test_a_seed_that_64_bits_do_not_hold_is_refused() -> None:
    for seed in (-1, 2**63, 1.5):
        with pytest.raises(PlanError, match=rf"split_seed={seed} must be an integer from 0 to 2\*\*63 - 1"):
            SampleOptions.of({"val_split": 0.5, "split_seed": seed})


def test_labels_that_are_no_classes_are_not_stratified() -> None:
    samples = np.arange(4)
    for labels in (None, np.zeros(4), np.zeros((4, 2), np.int64)):
        assert selection.classes_of(labels, samples) is None
    assert selection.classes_of(np.array([7, 8, 9]), np.array([2, 0])).tolist() == [9, 7]  # type: ignore[union-attr]


ALL_ORDERS = [drawn_by_line, drawn_by_array]


@pytest.mark.parametrize("drawn", ALL_ORDERS)
@given(
    weights=st.lists(st.floats(0, 5), min_size=1, max_size=40).filter(any), seed=st.integers(0, 3),
    epoch=st.integers(0, 9),
)  # fmt: skip
def test_each_epoch_has_each_samples_share(drawn: Any, weights: list[float], seed: int, epoch: int) -> None:
    """Rounded up or down; and the repetitions of a sample have numbers of their own."""
    array = np.array(weights)
    found = drawn(np.arange(len(weights)) + 3, array, seed=seed, epoch=epoch, repeats=100)
    assert len(found) == len(set(found.tolist())) == len(weights)
    exact = array / array.sum() * len(weights)
    counts = np.bincount(found % 100 - 3, minlength=len(weights))
    assert (np.abs(counts - exact) < 1 + 1e-8).all()
    for sample, count in enumerate(counts):
        assert sorted(found[found % 100 == sample + 3] // 100) == list(range(count))
    if drawn is drawn_by_line:
        assert (counts[array == 0] == 0).all()


@pytest.mark.parametrize("drawn", ALL_ORDERS)
def test_over_the_epochs_the_mean_is_the_share(drawn: Any) -> None:
    weights = np.random.default_rng(0).random(50)
    samples, epochs = np.arange(50), 200
    total = sum(
        np.bincount(drawn(samples, weights, seed=0, epoch=epoch, repeats=50) % 50, minlength=50)
        for epoch in range(epochs)
    )
    assert np.abs(total / epochs - weights / weights.sum() * 50).max() < 0.02


def test_a_position_is_drawn_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(1).random(1000)
    line = epoch_order.line_of(weights)
    order = epoch_order.drawn(range(7, 1007), line, seed=1, epoch=3, repeats=2000)
    found = order.at(np.arange(1000))
    some = np.arange(999, 0, -7)
    assert (order.at(some) == found[some]).all()
    monkeypatch.setattr(epoch_order, "_AT_ONCE", 7)
    assert (epoch_order.line_of(weights) == line).all()


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (5, 1), (5, 10**12)])
def test_the_samples_that_this_version_draws_by_weight_stay(seed: int, epoch: int) -> None:
    """As a loop over the pieces of the line counts the points in each: resumed runs depend on it."""
    count, unit = 30, 1 << 30
    line = epoch_order.line_of(np.random.default_rng(2).random(count))
    offset = (int(key_of(seed, purpose=5)) + epoch * 663_608_941) % unit
    expected, before = list[int](), 0
    for place, end in enumerate(line.tolist()):
        sample = int(permuted(np.array([place]), count, key_of(count, purpose=6))[0])
        points = sum(before < (number + 1) * unit - offset <= end for number in range(count))
        expected += [sample + turn * 100 for turn in range(points)]
        before = end
    order = epoch_order.drawn(range(count), line, seed=seed, epoch=epoch, repeats=100)
    assert order.at(np.arange(count)).tolist() == expected


@pytest.mark.parametrize("drawn", ALL_ORDERS)
def test_each_seed_and_epoch_draws_others_by_weight(drawn: Any) -> None:
    samples, weights = np.arange(50_000), np.random.default_rng(0).random(50_000)
    keys = [{"seed": seed, "epoch": epoch} for seed in range(3) for epoch in range(3)]
    found = [np.sort(drawn(samples, weights, **key, repeats=50_000)) for key in keys]
    assert len({each.tobytes() for each in found}) == len(keys)


@pytest.mark.parametrize("drawn", ALL_ORDERS)
def test_classes_that_take_turns_have_their_shares_of_every_epoch(drawn: Any) -> None:
    """On a line in the order of such a file, an epoch has all samples of the first class, or none."""
    weights = np.tile([0.5, 1.5, 1.0, 1.0], 1000)
    for epoch in range(5):
        found = drawn(np.arange(4000), weights, seed=0, epoch=epoch, repeats=4000) % 4000 % 4
        assert np.abs(np.bincount(found, minlength=4) - [500, 1500, 1000, 1000]).max() < 100


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1, 2], r"balance has 2 weights, but the data set has 3 samples"),
        ([1, -1, 2], r"the weight of sample 1 is -1\.0"),
        ([1, 2, float("nan")], r"the weight of sample 2 is nan"),
        ([0, 0, 0], r"all weights are 0"),
        (["a", "b", "c"], r"balance has values of type <U1\. Pass numbers"),
        ([[1], [2], [3]], r"balance has values of shape \(3, 1\)\. Pass one weight per sample, in one dimension"),
    ],
)
def test_weights_are_checked(weights: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        selection.check_weights(weights, 3)


def test_a_mask_of_two_dimensions_is_refused_for_its_shape(tmp_path: Path) -> None:
    """Not for its number of values, which may be right."""
    np.save(tmp_path / "mask.npy", np.ones((3, 1), np.bool_))
    with pytest.raises(DataError, match=r"indices has values of type bool and shape \(3, 1\)\. Pass integers, or true"):
        selection.select(SampleOptions(indices=tmp_path / "mask.npy"), 3, lambda: None)


def test_samples_by_class() -> None:
    samples = np.array([4, 5, 6, 7])
    parts = selection.by_class(samples, np.array([1, 0, 1, 5]))
    assert [part.tolist() for part in parts] == [[5], [4, 6], [7]]


def splitmix(value: int) -> int:
    """SplitMix64 of a state (Steele et al. 2014), in Python's integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


@pytest.mark.parametrize("seed", [0, 3, 2**63 - 1])
def test_the_draws_of_this_version_stay(seed: int) -> None:
    """With others, a finished run would be evaluated on samples that it was trained on."""
    assert splitmix(0) == 0xE220A8397B1DCDAF, "the first number of the published generator"
    samples = np.array([0, 1, 7, 2**40])
    expected = [splitmix(splitmix(seed) ^ splitmix(sample)) for sample in samples.tolist()]
    assert selection.draws(samples, seed).tolist() == expected


def test_the_folds_of_this_version_stay() -> None:
    """Class by class, and in each by its draws, samples are dealt out in turn; the only one of a class is in none."""
    samples, classes = data([4, 1, 9])
    draws, names = selection.draws(samples, 6).tolist(), classes.tolist()
    several = [sample for sample in samples.tolist() if names[sample] != 1]
    dealt = sorted(several, key=lambda sample: (names[sample], draws[sample]))
    expected = {sample: place % 3 for place, sample in enumerate(dealt)}
    found = selection.folds_of(samples, classes, 3, 6)
    assert found.tolist() == [expected.get(sample, -1) for sample in samples.tolist()]


@pytest.mark.parametrize(
    "options", [{"val_split": 0.3}, {"folds": 3, "fold": 1}, {"per_class": 3}, {"limit": 20}], ids=str
)
def test_another_split_seed_selects_other_samples(options: dict[str, Any]) -> None:
    found = [
        as_array(selection.select(SampleOptions(**options, split_seed=seed), 60, lambda: np.arange(60) % 4).train)
        for seed in (0, 0, 1)
    ]
    assert np.array_equal(found[0], found[1])
    assert set(found[0].tolist()) != set(found[2].tolist())


@pytest.mark.parametrize("near", [False, True])
def test_weights_are_those_of_the_samples_that_are_left(*, near: bool) -> None:
    """In whatever order indices= has them, and without those that are held out."""
    chosen = tuple(np.random.default_rng(0).permutation(60)[:40].tolist())
    options = SampleOptions(indices=chosen, val_split=0.25, balance=tuple(range(1, 61)))
    made = selection.select(options, 60, lambda: np.arange(60) % 2, near=near)
    train = as_array(made.train)
    assert made.val is not None
    assert made.weights is not None
    assert made.line is not None
    assert sorted([*train.tolist(), *made.val.tolist()]) == sorted(chosen)
    assert made.weights.tolist() == [sample + 1 for sample in train.tolist()]
    placed, epochs, total = np.sort(train) if near else train, 400, np.zeros(60)
    for epoch in range(epochs):
        order = epoch_order.drawn(placed, made.line, seed=0, epoch=epoch, repeats=60, near=near)
        total += np.bincount(order.at(np.arange(order.count)) % 60, minlength=60)
    expected = np.zeros(60)
    expected[train] = made.weights / made.weights.sum() * len(train)
    assert np.abs(total / epochs - expected).max() < 0.05


@pytest.mark.parametrize("margin", [8, 0])  # without, classes have too few below the first bound
@pytest.mark.parametrize("mixed", [True, False])
def test_samples_are_the_first_of_all_by_their_draws(
    monkeypatch: pytest.MonkeyPatch, margin: int, *, mixed: bool
) -> None:
    """A bound on the draws, and pieces, change nothing: compared with sorting all."""
    monkeypatch.setattr(selection, "_MARGIN", margin)
    monkeypatch.setattr(selection, "_AT_ONCE", 1000)
    samples, classes = data([3, 4000, 1, 9000, 700])
    samples, used = samples + 5, range(5, 5 + len(samples))
    classes = (7 * classes - 3) if mixed else None
    known = np.zeros(len(samples), np.int64) if classes is None else classes
    order = np.lexsort((selection.draws(samples, 4), known))
    ranks = np.empty(len(samples), np.int64)
    for name in np.unique(known):
        own = order[known[order] == name]
        ranks[own] = np.arange(len(own))
    counts = np.array([(known == name).sum() for name in known])
    out = selection.held_out(used, classes, 0.03, 4)
    assert (out == selection.held_out(samples, classes, 0.03, 4)).all()
    for name in np.unique(known):
        held = np.isin(np.flatnonzero(known == name), out).sum()
        assert (np.isin(np.flatnonzero((known == name) & (ranks < held)), out)).all()
    line = np.lexsort((selection.draws(samples, 4), (ranks + 0.5) / counts))
    for limit in (1, 2, 50, 5000, len(samples) - 1):
        assert (selection.limited(used, classes, limit, 4) == np.sort(samples[line[:limit]])).all()
    if classes is not None:
        assert (selection.few(used, classes, 1, 4) == samples[ranks < 1]).all()


@pytest.mark.parametrize("left_out", [[], [0], [9], [0, 1, 5, 9], [3, 4, 5], range(1, 10)])
def test_the_rest_of_the_samples(left_out: list[int]) -> None:
    out = np.array(left_out, np.int64)
    rest, array = Rest(10, out), np.delete(np.arange(10), out)
    assert len(rest) == len(array)
    assert as_array(rest).tolist() == array.tolist()
    places = np.arange(len(array))[::-1]
    assert taken(rest, places).tolist() == array[places].tolist()


@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 3))
@example(512, 1.0, 0)
@example(513, 0.0, 0)
def test_the_marked_samples(samples: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    mask = random.random(samples) < share
    mask[: samples // 3] = False  # rows without any
    expected = np.flatnonzero(mask)
    found = Marked(mask)
    assert len(found) == len(expected)
    assert as_array(found).tolist() == taken(found, np.arange(len(found))).tolist() == expected.tolist()
    places = random.permutation(len(expected))
    assert taken(found, places).tolist() == expected[places].tolist()


@pytest.mark.parametrize("samples", [range(10), range(2, 7), Rest(10, np.array([0, 4, 9])), np.array([7, 1, 4, 3])])
def test_marks_leave_the_samples_in_their_order(samples: Any) -> None:
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 1, 0, 1], np.bool_)
    expected = [sample for sample in as_array(samples).tolist() if mask[sample]]
    assert as_array(marked(samples, mask)).tolist() == expected
    assert count_marked(samples, mask) == len(expected)
    assert mask.sum() == 6  # unchanged


SELECTIONS: list[dict[str, Any]] = [
    {"val_split": 0.2}, {"folds": 4, "fold": 1}, {"indices": [7, 3, 40, 41, 90, 2], "limit": 4}, {"per_class": 3},
    {"limit": 20, "balance": "class"}, {"balance": "class"}, {"val_split": 0.3, "balance": tuple(range(1, TRAIN + 1))},
    {"limit": 10 * TRAIN}, {"balance": "weights.npy"},
]  # fmt: skip


@pytest.mark.parametrize("options", SELECTIONS, ids=str)
def test_a_large_data_sets_selection_is_shared(
    toy: Toy, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process maps what the first has computed, and has the same samples and order."""
    np.save(tmp_path / "weights.npy", np.arange(1, TRAIN + 1)[::-1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"drivetrain-{os.getuid()}"
    chosen, given = SampleOptions(**options), {"batch_size": 4, "image_size": SIDE, "workers": 1}
    with FFCVLoader(toy.train, indices=chosen, **given) as plain:  # type: ignore[arg-type]
        expected = [[share.tolist() for share in plain.shares(epoch)] for epoch in range(2)]
    assert not folder.exists()
    monkeypatch.setattr(data_set, "CHECKED", 0)
    with closing(open_files(files_of(toy.train))) as beton:
        first = selected(chosen, beton)
        (key,) = (path for path in folder.iterdir() if path.is_dir())
        monkeypatch.setattr(selection, "select", None)  # not called again
        again = selected(chosen, beton)
        assert all(np.array_equal(array, again.arrays()[name]) for name, array in first.arrays().items())
        assert first.arrays().keys() == again.arrays().keys()
    with FFCVLoader(toy.train, indices=chosen, **given) as mapped:  # type: ignore[arg-type]
        assert [[share.tolist() for share in mapped.shares(epoch)] for epoch in range(2)] == expected
    assert [path for path in folder.iterdir() if path.is_dir()] == [key]


def test_other_options_or_data_have_other_selections(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(data_set, "CHECKED", 0)
    weights = tmp_path / "weights.npy"
    found: list[Selection] = []
    with closing(open_files(files_of(toy.train))) as beton, closing(open_files(files_of(toy.val))) as other:
        for seed in (0, 1):
            found += [selected(SampleOptions(limit=20, split_seed=seed), one) for one in (beton, other)]
        for fill in (1, 2):
            np.save(weights, np.r_[np.full(len(beton) - 1, 1.0), fill])
            os.utime(weights, (fill, fill))
            found.append(selected(SampleOptions(balance=str(weights)), beton))
    digests = [tuple((name, array.tobytes()) for name, array in one.arrays().items()) for one in found]
    assert len(set(digests)) == len(found)


@pytest.mark.timeout(30)
def test_no_server_is_asked_for_indices(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address is not a local file: it is refused without waiting for a server."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(data_set, "CHECKED", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(open_files(files_of(toy.train))) as beton:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/some.npy"
        with pytest.raises(DataError, match="cannot be read"):
            selected(SampleOptions(indices=address), beton)
