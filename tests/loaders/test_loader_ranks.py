"""Two real ranks together load what one process loads, in any order, and resume like one process."""

import hashlib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, TorchLoader
from drivetrain.strategies import launch
from loader_pictures import jpeg_beton

Digest = tuple[int, str]
"""A sample's label, and a digest of its pixels."""

CASES: list[dict[str, Any]] = [
    {"order": "random", "drop_last": False},
    {"order": "sequential", "drop_last": False},
    {"order": "quasi_random", "drop_last": False},
    {"order": "random", "drop_last": True},
    {"order": "quasi_random", "pad_last": True},
    {"order": "random", "indices": [*range(0, 18, 2), 1], "seed": 3, "drop_last": False},
    {"train": False, "order": "sequential"},
]


def digests(images: torch.Tensor, labels: torch.Tensor) -> list[Digest]:
    return [
        (int(label), hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest())
        for image, label in zip(images, labels, strict=True)
    ]


def epoch(kind: str, path: str, options: dict[str, Any], state: dict[str, Any] | None = None) -> list[list[Digest]]:
    """This process's batches of an epoch: its share, if it is a rank, which the loader finds out itself."""
    made, workers = (FFCVLoader, 1) if kind == "ffcv" else (TorchLoader, 0)
    base = {"batch_size": 4, "image_size": 24, "workers": workers, "dtype": torch.uint8}
    with made(path, **{**base, **options}) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [digests(images, labels) for images, labels in loader]


def load_as_rank(path: str, state: dict[str, Any]) -> list[list[list[Digest]]]:
    """All cases, by both loaders, and a resumed epoch: gathered, batch by batch in the order of the ranks."""
    runs = [epoch(kind, path, case) for kind in ("ffcv", "torch") for case in CASES]
    runs.append(epoch("ffcv", path, {"drop_last": False}, state))
    for kind in ("ffcv", "torch"):  # 17 samples leave one
        odd = {"indices": range(17), "order": "sequential"}
        runs += [epoch(kind, path, odd), epoch(kind, path, {**odd, "train": False})]
        mine = [len(batch) for run in runs[-2:] for batch in run]
        assert mine == [2] * 4 + [2] * 3 + [3 - dist.get_rank()], mine  # no share is empty
        with pytest.raises(DataError, match="pass both, or neither"):
            epoch(kind, path, {"rank": 0})
    runs.append(epoch("ffcv", path, {"rank": 0, "world_size": 1, "train": False}))
    assert sum(map(len, runs.pop())) == 18  # all samples on each rank, where the user wants that
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, runs)
    return [
        [list(chain(*shares)) for shares in zip(*(rank[number] for rank in gathered), strict=True)]
        for number in range(len(runs))
    ]


@pytest.mark.process
@pytest.mark.timeout(200)
def test_two_ranks_load_what_one_process_loads(tmp_path: Path) -> None:
    path = str(jpeg_beton(tmp_path / "photos.beton"))
    with FFCVLoader(path, batch_size=4, image_size=24, workers=1, dtype=torch.uint8) as loader:
        loader.set_epoch(2)
        batches = iter(loader)
        next(batches)
        next(batches)
        state = loader.state_dict()
        rest = [digests(*batch) for batch in batches]
    together = launch(load_as_rank, path, state, devices=2)[0]
    alone = [epoch(kind, path, case) for kind in ("ffcv", "torch") for case in CASES]
    odd = together[len(alone) + 1 :]
    assert together[: len(alone) + 1] == [*alone, rest]
    for number, count in enumerate((16, 17, 16, 17)):
        flat = list(chain(*odd[number]))
        assert len(set(flat)) == len(flat) == count
    assert len(alone[0]) == 5
    for number, case in enumerate(CASES[:3]):
        flat = list(chain(*together[number]))
        assert len(set(flat)) == len(flat) == 18, case
    assert len(list(chain(*together[3]))) == 16
    assert len(list(chain(*together[4]))) == 20
