"""`on_error="skip"`: in the place of a sample that cannot be decoded, the same other one on every rank."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import Pipeline
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, open_beton
from drivetrain.loaders.beton.reader import Beton
from drivetrain.loaders.decode.draws import sample_keys, uniforms
from drivetrain.pipeline import Checkpoints
from loader_pictures import jpeg_beton
from torch import nn

BAD = (4, 9)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18 samples, of which two are zeros."""
    path = jpeg_beton(tmp_path_factory.mktemp("skipped") / "photos.beton")
    spoil(path, BAD)
    return path


def spoil(path: Path, samples: tuple[int, ...]) -> None:
    beton = open_beton(path)
    with path.open("r+b") as file:
        for sample in samples:
            file.seek(int(beton.pointers[sample]))
            file.write(bytes(int(beton.sizes[sample])))


def epoch(path: Path, **options: Any) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    with FFCVLoader(path, **{"batch_size": 6, "image_size": 32, "on_error": "skip", **options}) as loader:
        return list(loader), sorted(loader.replaced)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_batches_do_not_depend_on_workers_and_ranks(photos: Path, workers: int) -> None:
    whole, replaced = epoch(photos, seed=3, workers=workers)
    assert replaced == list(BAD)
    assert [len(labels) for _, labels in whole] == [6, 6, 6]
    ranks = [epoch(photos, seed=3, workers=workers, rank=rank, world_size=2) for rank in range(2)]
    for number, (images, labels) in enumerate(whole):
        assert torch.equal(images, torch.cat([batches[number][0] for batches, _ in ranks]))
        assert torch.equal(labels, torch.cat([batches[number][1] for batches, _ in ranks]))
    assert sorted(ranks[0][1] + ranks[1][1]) == list(BAD)


def test_the_other_samples_stay_and_labels_are_those_of_the_substitutes(photos: Path) -> None:
    """Each sample's label is shown by its place in a further epoch without the bad ones."""
    sequential = {"order": "sequential", "fields": (), "dtype": torch.uint8, "seed": 1}
    (batches, _), labels = epoch(photos, **sequential), open_beton(photos).labels
    images, found = (torch.cat(each) for each in zip(*batches, strict=True))
    good = [sample for sample in range(18) if sample not in BAD]
    alone, _ = epoch(photos, indices=good, batch_size=16, **sequential)
    assert torch.equal(images[good], alone[0][0])
    assert found[good].tolist() == labels[good].tolist()
    for sample in BAD:  # the same sample is drawn with its own draws for the epoch
        (same,) = np.flatnonzero([torch.equal(images[sample], image) for image in alone[0][0]])[:1]
        assert found[sample] == labels[good[same]]
        drawn = uniforms(sample_keys(1, 0, np.array([sample])), 50, 8)[0]  # in resumed runs, too
        assert good[same] == next(one for one in (18 * drawn).astype(int).tolist() if one not in BAD)


def test_only_selected_samples_take_a_place(photos: Path) -> None:
    """Others may be held out."""
    chosen = [*BAD, 0, 1, 2, 3]
    (batches, replaced), kept = epoch(photos, indices=chosen, dtype=torch.uint8, crop="whole", flip=False), []
    assert replaced == list(BAD)
    with FFCVLoader(
        photos, batch_size=4, image_size=32, indices=chosen[2:], dtype=torch.uint8, crop="whole", flip=False
    ) as loader:
        kept = [image for images, _ in loader for image in images]
    for images, _ in batches:
        assert all(any(torch.equal(image, one) for one in kept) for image in images)


def test_what_cannot_be_skipped(photos: Path, tmp_path: Path) -> None:
    with (
        FFCVLoader(photos, batch_size=6, image_size=32) as loader,
        pytest.raises(BetonError, match=r"sample [49]"),
    ):
        list(loader)
    evaluation = {"train": False, "on_error": "skip", "batch_size": 6, "image_size": 32}
    with FFCVLoader(photos, **evaluation) as loader, pytest.raises(BetonError, match="sample 4"):
        list(loader)
    everything = jpeg_beton(tmp_path / "bad.beton")
    spoil(everything, tuple(range(18)))
    with pytest.raises(BetonError, match="cannot be decoded"):
        epoch(everything)
    with pytest.raises(DataError, match=r"on_error='ignore' is not known\. Known: raise, skip"):
        epoch(photos, on_error="ignore")
    with pytest.raises(DataError, match="only available in FFCVLoader"):
        TorchLoader(photos, batch_size=6, image_size=32, on_error="skip")


def test_changed_samples_are_skipped_with_their_checksums(photos: Path, tmp_path: Path) -> None:
    """One whose pixels decode, but are not those that were converted."""
    path = Path(shutil.copy(photos, tmp_path / "changed.beton"))
    shutil.copy(f"{photos}.json", f"{path}.json")
    beton = open_beton(path)
    with path.open("r+b") as file:
        file.seek(int(beton.pointers[2]) + int(beton.sizes[2]) - 1)
        file.write(b"\xd8")
    assert epoch(path, verify=True)[1] == [2, *BAD]


@pytest.mark.parametrize("verify", [False, True])
def test_a_failure_of_the_disk_is_no_property_of_a_sample(
    photos: Path, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be another one on each machine; and one that passes changes no batch."""
    options: dict[str, Any] = {"batch_size": 6, "image_size": 32, "on_error": "skip", "verify": verify}
    expected, replaced = epoch(photos, verify=verify)
    with FFCVLoader(photos, workers=1, **options) as loader:
        (beton,) = loader.beton.files
        here, kept = beton.file.descriptor, os.dup(beton.file.descriptor)
        unreadable = os.open(photos, os.O_WRONLY)
        os.dup2(unreadable, here)
        with pytest.raises(BetonError, match=r"Sample \d+ cannot be read: .*photos.beton cannot be read: Bad file"):
            list(loader)
        assert not loader.replaced
        read = Beton.stored

        def read_again(own: Beton, index: int) -> bytes:
            os.dup2(kept, here)
            return read(own, index)

        monkeypatch.setattr(Beton, "stored", read_again)
        loader.set_epoch(0)
        for (images, labels), (same, own) in zip(loader, expected, strict=True):
            assert torch.equal(images, same)
            assert torch.equal(labels, own)
        assert sorted(loader.replaced) == replaced
    for descriptor in (kept, unreadable):
        os.close(descriptor)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.process
def test_every_rank_counts_all(photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    histories = []
    for devices in (1, 2):
        pipeline = (
            Pipeline(network, seed=2)
            .load(photos, batch_size=6, image_size=32, workers=1, on_error="skip")
            .optimize("sgd", lr=0.01)
            .distribute("ddp", devices=devices, device="cpu")
        )
        result = pipeline.fit(epochs=2, out=tmp_path / str(devices))
        histories.append(result.history.epochs)
        assert (
            "2 of the epoch's samples cannot be decoded, and others took their places: 4, 9." in capfd.readouterr().out
        )
    assert [one.replaced for one in histories[0]] == [one.replaced for one in histories[1]] == [2, 2]
    for one, other in zip(*histories, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-6)


def test_a_resumed_epoch_counts_those_before(photos: Path, tmp_path: Path) -> None:
    pipeline = Pipeline(network, seed=2).load(photos, batch_size=6, image_size=32, workers=1, on_error="skip")
    pipeline = pipeline.optimize("sgd", lr=0.01)
    every = Checkpoints(every_steps=1, keep=9, background=False)
    pipeline.fit(epochs=1, out=tmp_path, checkpoints=every, progress=False)
    for step in (1, 2, 3):
        place = tmp_path / f"checkpoints/step-{step:08d}"
        assert pipeline.fit(epochs=1, resume=place, progress=False).history.epochs[0].replaced == len(BAD)
