"""The order of samples: determined by (seed, epoch), independent of workers and ranks, and exactly resumable."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drivetrain.common.errors import DataError
from drivetrain.common.options.config import options_of
from drivetrain.loaders import FFCVLoader, TorchLoader
from drivetrain.loaders.options import LoaderOptions
from drivetrain.loaders.order.arrays import by_weight
from drivetrain.loaders.order.batches import Rest, Shares, between, last_batch, shares
from drivetrain.loaders.order.epoch import mixed, shuffled, unshuffled
from drivetrain.loaders.order.permutation import key_of, permuted, subkeys
from drivetrain.loaders.sample_options import SampleOptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loader_pictures import same

COUNT, SIDE = 23, 12


def loader(path: Path, **options: Any) -> FFCVLoader:
    return FFCVLoader(path, **{"batch_size": 4, "image_size": 16, "workers": 1, **options})


def epoch(path: Path, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    number = options.pop("epoch", 0)
    with loader(path, **options) as made:
        made.set_epoch(number)
        return list(made)


def order(path: Path, **options: Any) -> list[int]:
    return [int(label) for _, labels in epoch(path, **options) for label in labels]


def joined(parts: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The ranks' batches, put together again."""
    return [
        (torch.cat([images for images, _ in batch]), torch.cat([labels for _, labels in batch]))
        for batch in zip(*parts, strict=True)
    ]


def test_each_sample_once_and_in_another_order_each_epoch(numbered: Path) -> None:
    orders = [order(numbered, seed=seed, epoch=number) for seed in range(4) for number in range(4)]
    assert all(sorted(one) == list(range(COUNT)) for one in orders)
    assert len({tuple(one) for one in orders}) == 16  # keyed by the sum seed + epoch there would be 7
    assert order(numbered, seed=3, epoch=2) == orders[14]


def test_augmentation_is_keyed_by_the_pair_too(photos: Path) -> None:
    one = epoch(photos, seed=1, epoch=2, order="sequential")
    other = epoch(photos, seed=2, epoch=1, order="sequential")
    assert all(torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


def test_epochs_move_on_and_set_epoch_returns(photos: Path) -> None:
    with loader(photos) as made:
        first, second = list(made), list(made)
        assert not same(first, second)
        made.set_epoch(1)
        assert same(list(made), second)
        made.set_epoch(0)
        assert same(list(made), first)


def test_sequential_order_is_the_files(numbered: Path) -> None:
    assert order(numbered, order="sequential") == list(range(COUNT))
    assert order(numbered, train=False) == list(range(COUNT))


@pytest.mark.parametrize("train", [True, False])
def test_any_number_of_workers(photos: Path, train: bool) -> None:
    one = epoch(photos, train=train, seed=5, epoch=3)
    for workers in (2, 4):
        assert same(epoch(photos, train=train, seed=5, epoch=3, workers=workers), one)
    assert same(epoch(photos, train=train, seed=5, epoch=3, batches_ahead=1), one)


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
@pytest.mark.parametrize(("samples", "batch", "world"), [(21, 4, 4), (23, 8, 2), (17, 4, 2), (5, 2, 2), (21, 6, 3)])
def test_a_partial_last_batch_among_ranks(numbered: Path, kind: Any, samples: int, batch: int, world: int) -> None:
    """Training: dropped by default, else equal shares; evaluation: each sample once; never an empty share."""
    rest, full = samples % batch, samples // batch

    def shares(**options: Any) -> tuple[Any, list[list[list[int]]]]:
        parts = []
        for rank in range(world):
            workers = 0 if kind is TorchLoader else 2
            with kind(
                numbered, batch_size=batch, image_size=SIDE, dtype=torch.uint8, indices=range(samples), seed=3,
                workers=workers, rank=rank, world_size=world, **options,
            ) as made:  # fmt: skip
                parts.append([labels.tolist() for _, labels in made])
                assert len(parts[-1]) == len(made)
                assert all(map(len, parts[-1]))
        return made, parts

    made, parts = shares()
    assert (made.dropped, made.padded) == (rest, 0)
    assert {len(labels) for part in parts for labels in part} == {batch // world}
    assert len(parts[0]) == full
    made, parts = shares(drop_last=False)
    assert (made.dropped, made.padded) == (0, -rest % world)
    assert len({tuple(map(len, part)) for part in parts}) == 1  # equal shares
    given = [label for batches in zip(*parts, strict=True) for share in batches for label in share]
    assert sorted(given[:samples]) == list(range(samples))
    assert given[samples:] == given[: made.padded]
    for options in ({}, {"drop_last": False}):
        made, parts = shares(train=False, **options)
        assert (made.dropped, made.padded) == (0, 0)
        assert sorted(label for part in parts for labels in part for label in labels) == list(range(samples))
        assert len({len(part) for part in parts}) == 1
        assert max(len(labels) for part in parts for labels in part) <= batch // world + 1


def test_the_last_batch_of_the_defect() -> None:
    """33 samples, batch 16, 2 ranks were [8, 8, 1] and [8, 8, 0], whose mean loss is NaN."""

    def sizes(**options: Any) -> list[list[int]]:
        last = last_batch(33, 16, **{"pad_last": False, "train": True, "world_size": 2, **options})
        order = shuffled(unshuffled(range(33)), seed=0, epoch=0)
        return [[len(share) for share in Shares(order, 16, last, rank, 2)] for rank in (0, 1)]

    assert sizes(drop_last=True) == [[8, 8], [8, 8]]
    assert sizes(drop_last=False) == [[8, 8, 1], [8, 8, 1]]
    assert sizes(drop_last=False, train=False) == [[8, 9], [8, 8]]
    assert sizes(drop_last=False, pad_last=True) == [[8, 8, 8], [8, 8, 8]]


def test_a_launched_process_that_has_not_joined_its_group(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=r"WORLD_SIZE=2, .* has not joined .*init_process_group\(\)"):
        loader(numbered)
    assert len(epoch(numbered, rank=0, world_size=1)) == 6
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(epoch(numbered)) == 6


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_a_loader_that_is_older_than_the_group_of_ranks(
    numbered: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "image_size": SIDE, "workers": 0 if kind is TorchLoader else 1}
    with (
        kind(numbered, **options) as made,
        kind(numbered, rank=0, world_size=1, **options) as whole,
        kind(numbered, train=False, **options) as evaluation,
    ):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        with pytest.raises(DataError, match=r"created before this process became one of 2 ranks"):
            iter(made)
        assert len(list(whole)) == len(list(evaluation)) == 6


def test_drop_last_and_the_length(numbered: Path) -> None:
    for drop_last, count in ((False, 6), (True, 5)):
        with loader(numbered, drop_last=drop_last) as made:
            assert len(made) == count
            assert len(list(made)) == count
    with loader(numbered, batch_size=COUNT, drop_last=True) as made:
        assert len(made) == len(list(made)) == 1


def test_pad_last_fills_up_with_the_first_samples(numbered: Path) -> None:
    with loader(numbered, pad_last=True, batch_size=5) as made:
        labels = [int(label) for _, labels in made for label in labels]
        assert (len(made), made.padded, made.dropped) == (5, 2, 0)
    assert labels[COUNT:] == labels[:2]
    assert sorted(labels[:COUNT]) == list(range(COUNT))
    with loader(numbered, drop_last=True, batch_size=5) as made:
        assert (len(made), made.padded, made.dropped) == (4, 0, 3)
    with loader(numbered, batch_size=5) as made:
        assert (len(made), made.padded, made.dropped) == (5, 0, 0)
    with loader(numbered, indices=[4, 2, 9], batch_size=8, pad_last=True, order="sequential") as made:
        assert [labels.tolist() for _, labels in made] == [[4, 2, 9, 4, 2, 9, 4, 2]]
    for kind in (FFCVLoader, TorchLoader):
        with pytest.raises(DataError, match="pad_last=True must be False if drop_last is True"):
            kind(numbered, batch_size=4, image_size=SIDE, pad_last=True, drop_last=True)


def test_indices_choose_and_can_be_changed(numbered: Path) -> None:
    chosen = [3, 7, 20, 11, 5]
    assert order(numbered, indices=chosen, order="sequential") == chosen
    assert sorted(order(numbered, indices=np.array(chosen))) == sorted(chosen)
    assert order(numbered, indices=np.arange(COUNT) % 4 == 1, train=False) == list(range(1, COUNT, 4))
    with loader(numbered, train=False) as made:
        assert len([made.set_indices([2, 1]), *made]) == 2
        assert [labels.tolist() for _, labels in made] == [[2, 1]]
        made.set_indices(None)
        assert len(made) == 6


def test_some_samples_are_taken_evenly_from_the_first_to_the_last(numbered: Path) -> None:
    """Those of which what holds for all is judged: targets, masks."""
    with loader(numbered, indices=[2, 3, 5, 11, 20]) as made:
        assert [made.some(count).tolist() for count in (2, 3)] == [[2, 20], [2, 5, 20]]
        assert set(made.some(9).tolist()) == {2, 3, 5, 11, 20}


# Resuming


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_resuming_is_exact(numbered: Path, data: st.DataObject) -> None:
    """After any batch of any epoch, with any other number of ranks, pixels included."""
    count = data.draw(st.integers(1, COUNT), label="samples")
    batch = data.draw(st.integers(1, count), label="batch")
    worlds = [world for world in (1, 2, 3, 4) if batch % world == 0]
    before, after = (data.draw(st.sampled_from(worlds), label="world") for _ in range(2))
    number = data.draw(st.integers(0, 3), label="epoch")
    options = {
        "batch_size": batch, "indices": range(count), "dtype": torch.uint8, "image_size": SIDE,
        "seed": data.draw(st.integers(0, 2**40), label="seed"),
        "order": data.draw(st.sampled_from(options_of(LoaderOptions)["order"].choices), label="order"),
        **data.draw(
            st.sampled_from([{}, {"drop_last": False}, {"drop_last": True}, {"pad_last": True}]), label="last"
        ),
    }  # fmt: skip
    with loader(numbered, **options, rank=before - 1, world_size=before) as first:
        position = data.draw(st.integers(0, len(first)), label="position")
        first.set_epoch(number)
        batches = iter(first)
        for _ in range(position):
            next(batches)
        state = first.state_dict()
    options.setdefault("drop_last", after > 1 and not options.get("pad_last"))  # what None means there
    rest = epoch(numbered, epoch=number, **options)[position:] if position < state["batches"] else []
    rest = rest or epoch(numbered, epoch=number + 1, **options)
    parts = []
    for rank in range(after):
        with loader(numbered, **options, rank=rank, world_size=after) as second:
            second.load_state_dict(state)
            # The epoch is over where it was for the ranks before; these may have a smaller last batch left.
            over = position == state["batches"]
            assert second.state_dict()["position"] == (0 if over else position % len(second))
            parts.append(list(second))
    found = joined(parts)
    if second.padded and not options.get("pad_last"):  # equal shares of the last batch
        images, labels = found[-1]
        found[-1] = images[: -second.padded], labels[: -second.padded]
    assert same(found, rest)


def test_resuming_then_the_next_epoch_is_whole(photos: Path) -> None:
    with loader(photos, seed=4) as made:
        made.set_epoch(6)
        batches = iter(made)
        next(batches)
        next(batches)
        state = made.state_dict()
        expected = [*batches, *made]
    with loader(photos, seed=4) as other:
        other.load_state_dict(state)
        assert same([*other, *other], expected)
        assert other.state_dict() == {
            "epoch": 7,
            "position": 5,
            "seed": 4,
            "batch_size": 4,
            "samples": 18,
            "order": "random",
            "order_version": 2,
            "batches": 5,
        }


def test_set_epoch_forgets_the_place_within_one(photos: Path) -> None:
    with loader(photos) as made:
        made.load_state_dict({"epoch": 2, "position": 3, "seed": 0, "batch_size": 4, "samples": 18, "order": "random"})
        made.set_epoch(2)
        assert len(list(made)) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed=1, but this loader has 0"),
        ({"batch_size": 8}, "batch_size=8, but this loader has 4"),
        ({"samples": 17}, "samples=17, but this loader has 23"),
        ({"order": "sequential"}, "order=sequential, but this loader has random"),
        ({"position": None}, "position=None"),
        ({"epoch": -1}, "epoch=-1"),
        ({"epoch": "2"}, "epoch='2'"),
    ],
)
@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_state_of_another_loader(numbered: Path, kind: Any, change: dict[str, Any], words: str) -> None:
    made = kind(numbered, batch_size=4, image_size=16, workers=1)
    before = made.state_dict()
    with pytest.raises(DataError, match=words):
        made.load_state_dict(before | change)
    with pytest.raises(DataError, match="epoch=None"):
        made.load_state_dict({})
    assert made.state_dict() == before


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
def test_a_state_of_an_older_version_keeps_its_order(numbered: Path, kind: Any) -> None:
    """The order of version 1 is NumPy's permutation, recorded here; new runs have that of version 2."""
    options = {"batch_size": 4, "image_size": SIDE, "workers": 0 if kind is TorchLoader else 1, "seed": 3}
    first = [np.random.default_rng([3, number]).permutation(COUNT).tolist() for number in (1, 2)]
    assert first[0][:8] == [13, 10, 11, 2, 20, 14, 9, 5]

    def labels(made: Any) -> list[int]:
        return [int(label) for _, batch in made for label in batch]

    state = {"epoch": 1, "position": 2, "seed": 3, "batch_size": 4, "samples": COUNT, "order": "random"}
    with kind(numbered, **options) as made:
        made.load_state_dict(state)
        assert made.order_version == made.state_dict()["order_version"] == 1
        assert labels(made) == first[0][8:]
        assert labels(made) == first[1]
        saved = made.state_dict()
    assert (saved["order_version"], saved["epoch"]) == (1, 2)
    with kind(numbered, **options) as made:
        made.load_state_dict(saved | {"position": 1, "batches": 6})
        assert labels(made) == first[1][4:]
    with kind(numbered, **options) as made:
        assert made.order_version == made.state_dict()["order_version"] == 2
        made.set_epoch(2)
        assert sorted(found := labels(made)) == sorted(first[1])
        assert found != first[1]
        with pytest.raises(DataError, match="order_version=6, and this version of Drivetrain knows 1 to 5"):
            made.load_state_dict(saved | {"order_version": 6})


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), seed=st.integers(0, 2**40),
    epoch=st.sampled_from([0, 1, 7, 10**12]), data=st.data(),
)  # fmt: skip
def test_a_mix_is_of_permutations_of_its_parts(lengths: list[int], seed: int, epoch: int, data: st.DataObject) -> None:
    """As a loop over the parts computes it, which would take as long as there are classes for each few samples."""
    ends = np.cumsum([0, *lengths])
    parts = [np.arange(a, b) if b % 2 else range(a, b) for a, b in itertools.pairwise(ends.tolist())]
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(parts), max_size=len(parts)))
    samples, expected = int(ends[-1]), list[int]()
    for number, (part, count) in enumerate(zip(parts, shares(samples, weights), strict=True)):
        for place in range(epoch * count, (epoch + 1) * count):
            turn, at = divmod(place, len(part))
            key = subkeys(key_of(seed, number, purpose=3), np.array([turn]))
            found = int(permuted(np.array([at]), len(part), key)[0])
            expected.append(int(part[found]) + (turn - epoch * count // len(part)) * samples)
    order = mixed(parts, weights, seed=seed, epoch=epoch, samples=samples)
    positions = np.array(data.draw(st.permutations(range(samples))))
    assert order.at(positions).tolist() == np.array(expected)[positions].tolist()
    assert order.at(np.empty(0, np.int64)).dtype == np.int64


def test_a_state_of_version_2_keeps_its_order_by_weight(numbered: Path) -> None:
    weights = np.arange(COUNT) % 3 + 0.5
    with loader(numbered, seed=3) as made:
        made.select(made.selection(SampleOptions(balance=tuple(weights))))
        state = made.state_dict()
        assert state["order_version"] == 4
        new = np.concatenate(made.shares(1))
        made.load_state_dict(state | {"order_version": 2, "epoch": 1})
        assert made.state_dict()["order_version"] == 2
        kept = np.concatenate(made.shares(1))
    given = unshuffled(by_weight(np.arange(COUNT), weights, seed=3, epoch=1, repeats=COUNT))
    order = shuffled(given, seed=3, epoch=1)
    assert kept.tolist() == order.at(np.arange(COUNT))[: len(kept)].tolist() != new.tolist()


def test_a_part_of_all_but_some_has_no_array_of_its_own() -> None:
    rest = Rest(100, np.array([3, 40, 41, 77]))
    for first, end in ((0, 100), (0, 40), (40, 78), (42, 77), (41, 42)):
        part = between(rest, first, end)
        assert isinstance(part, Rest)
        expected = [sample for sample in range(first, end) if sample not in (3, 40, 41, 77)]
        assert part.at(np.arange(len(part))).tolist() == expected


def test_a_last_batch_that_was_not_given_yet_is_not_lost(numbered: Path) -> None:
    """One process saves before its last batch of one sample, which on two ranks joins the batch before."""
    options: dict[str, Any] = {"indices": range(21), "train": False}
    with loader(numbered, **options) as made:
        batches = iter(made)
        states = [made.state_dict(), *(made.state_dict() for _ in batches)]
    with loader(numbered, **options, rank=0, world_size=2) as other:
        other.load_state_dict(states[4])
        assert [labels.tolist() for _, labels in other] == [[16, 17, 18]]
        with pytest.raises(
            DataError,
            match="lacks its epoch's last batch, of 1 samples, which cannot be shared among 2 ranks",
        ):
            other.load_state_dict(states[5])
        other.load_state_dict(states[6])
        assert other.state_dict()["epoch"] == 1


@pytest.mark.parametrize("number", [-1, 1.5, "2"])
def test_epoch_that_is_none(numbered: Path, number: Any) -> None:
    with pytest.raises(DataError, match="epoch="):
        loader(numbered).set_epoch(number)
