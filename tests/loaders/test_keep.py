"""`EpochLoader.keep`: samples are left out of epochs, on any ranks, and the loader continues within one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drivetrain import DataError
from drivetrain.loaders import FFCVLoader
from drivetrain.loaders.options import LoaderKeywords
from drivetrain.loaders.sample_options import SampleOptions
from pipeline_data import SIDE, TRAIN, Toy

OPTIONS: LoaderKeywords = {"batch_size": 16, "image_size": SIDE, "workers": 1}
KEPT = np.arange(0, TRAIN, 2)[:-3]  # 61 samples


def load(toy: Toy, **options: Any) -> FFCVLoader:
    return FFCVLoader(toy.train, **{**OPTIONS, "drop_last": True, **options})


def test_the_kept_samples_are_shared_and_all_come_back(toy: Toy) -> None:
    ranks = [load(toy, rank=rank, world_size=2) for rank in range(2)]
    alone = load(toy)
    for loader in (*ranks, alone):
        loader.keep(KEPT)
        assert (len(loader), loader.full_length, loader.dropped) == (3, TRAIN // 16, 61 - 48)
    for epoch in range(2):
        shares = [loader.shares(epoch) for loader in (*ranks, alone)]
        for first, second, both in zip(*shares, strict=True):
            assert np.concatenate([first, second]).tolist() == both.tolist()
        assert set(np.concatenate(shares[2])) < set(KEPT.tolist())
    with alone:
        labels = [int(label) for _, batch in alone for label in batch]
        assert len(labels) == 48
        assert labels == [alone.labels[sample] for share in alone.shares(0) for sample in share]
        alone.keep(None)
        assert len(alone) == alone.full_length
        alone.keep(KEPT)
        alone.set_indices(np.arange(64))
        assert len(alone) == 4


@pytest.mark.parametrize("taken", [1, 3])
def test_a_position_continues_with_the_same_samples_kept(toy: Toy, taken: int) -> None:
    with load(toy) as loader, load(toy) as other:
        loader.keep(KEPT)
        batches = iter(loader)
        seen = [next(batches)[1].tolist() for _ in range(taken)]
        state = loader.state_dict()
        rest = [labels.tolist() for _, labels in batches]
        assert len(seen + rest) == 3
        other.keep(KEPT)
        other.load_state_dict(state, within=True)
        assert [labels.tolist() for _, labels in other] == rest
        # After the last batch, whatever is kept in the next epoch.
        state = loader.state_dict()
        other.keep(KEPT[:40])
        other.load_state_dict(state)
        assert [labels.tolist() for _, labels in other] == [
            [int(other.labels[sample]) for sample in share] for share in other.shares(1)
        ]


def test_what_cannot_be_kept(toy: Toy) -> None:
    with load(toy, indices=range(64)) as loader:
        with pytest.raises(DataError, match="sample 64 is not one of the loader's 64 indices"):
            loader.keep(range(60, 68))
        with pytest.raises(DataError, match="batch_size=16 is larger than the data set of 15 samples"):
            loader.keep(range(15))
        with pytest.raises(DataError, match=r"a mask has true or false for each of the 128 .* has shape \(64,\)"):
            loader.keep(np.ones(64, np.bool_))
        loader.keep(range(16))
        assert len(loader) == 1
    with load(toy) as loader:
        loader.select(loader.selection(SampleOptions(balance="class")))
        with pytest.raises(DataError, match="would change the shares of an epoch, which balance="):
            loader.keep(KEPT)


def test_what_the_caller_changes_later_changes_nothing(toy: Toy) -> None:
    own = np.arange(64)
    given = own.view()
    given.flags.writeable = False
    with load(toy, indices=given) as loader:
        own[:] = 0
        assert loader.indices.tolist() == list(range(64))
