"""Two real ranks: together they load what one process loads, in any order, and resume as one."""

from __future__ import annotations

import hashlib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain.loaders import FFCVLoader, TorchLoader
from drivetrain.strategies import launch
from loader_pictures import jpeg_beton

Digest = tuple[int, str]
"""A sample's label, and a digest of its pixels."""

CASES: list[dict[str, Any]] = [
    {"order": "random"},
    {"order": "sequential"},
    {"order": "quasi_random"},
    {"order": "random", "drop_last": True},
    {"order": "quasi_random", "pad_last": True},
    {"order": "random", "indices": list(range(0, 18, 2)), "seed": 3},
    {"train": False, "order": "sequential"},
]


def digests(images: torch.Tensor, labels: torch.Tensor) -> list[Digest]:
    return [
        (int(label), hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest())
        for image, label in zip(images, labels, strict=True)
    ]


def epoch(
    kind: str, path: str, options: dict[str, Any], state: dict[str, Any] | None = None
) -> list[list[Digest]]:
    """This process's batches of an epoch: its share, if it is a rank."""
    made, workers = (FFCVLoader, 1) if kind == "ffcv" else (TorchLoader, 0)
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if dist.is_initialized() else {}
    base = {"batch_size": 4, "image_size": 24, "workers": workers, "dtype": torch.uint8}
    with made(path, **{**base, **options, **ranks}) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [digests(images, labels) for images, labels in loader]


def load_as_rank(path: str, state: dict[str, Any]) -> list[list[list[Digest]]]:
    """All cases, by both loaders, and a resumed epoch: gathered, batch by batch in the order of the ranks."""
    runs = [epoch(kind, path, case) for kind in ("ffcv", "torch") for case in CASES]
    runs.append(epoch("ffcv", path, {}, state))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, runs)
    return [
        [list(chain(*shares)) for shares in zip(*(rank[number] for rank in gathered), strict=True)]
        for number in range(len(runs))
    ]


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
    assert together == [*alone, rest]
    assert len(alone[0]) == 5
    for number, case in enumerate(CASES[:3]):
        flat = list(chain(*together[number]))
        assert len(set(flat)) == len(flat) == 18, case
    assert len(list(chain(*together[3]))) == 16
    assert len(list(chain(*together[4]))) == 20
