"""Files of an object store that speaks S3: moto's server, in a thread of this process, by s3fs."""

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch
from drivetrain import CheckpointError, DataError
from drivetrain.common.storage import addresses as sources
from drivetrain.loaders import FFCVLoader, convert, open_beton
from drivetrain.pipeline.runs.checkpoints.remote import RemoteRun, UnreachedError
from fsspec.implementations.local import LocalFileSystem
from object_store import Store, object_store

SAMPLES = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("s3")
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 150, 160, 3), dtype=np.uint8)
    convert((images, np.arange(SAMPLES) % 3), made / "train.beton", progress=False)
    return made


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An object store whose bucket has the file and its manifest; credentials and endpoint are in the environment."""
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path))
    monkeypatch.setattr(sources, "_PAUSE", 0.01)
    with object_store() as store:
        for file in folder.iterdir():
            boto3.client("s3").upload_file(str(file), "bucket", file.name)
        yield store


def pixels(path: Any) -> torch.Tensor:
    with FFCVLoader(path, batch_size=10, image_size=32, workers=2, dtype=torch.uint8) as loader:
        return torch.cat([images for images, _ in loader])


@pytest.mark.usefixtures("server")
def test_the_samples_of_the_local_file(folder: Path) -> None:
    assert torch.equal(pixels("s3://bucket/train.beton"), pixels(folder / "train.beton"))
    beton = open_beton("s3://bucket/train.beton")
    assert beton.checksums is not None
    assert beton.file.mirror.version.startswith("ETag=")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("address", ["s3://bucket/missing.beton", "s3://nowhere/train.beton"])
def test_what_is_not_there(address: str) -> None:
    with pytest.raises(DataError, match=f"{address} does not exist"):
        open_beton(address)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("length", [20 << 20, 100])
@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_file_that_is_replaced_while_it_is_copied(
    kind: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is the new file, also if that is shorter, not ranges of both."""
    address = "s3://bucket/run" if kind == "s3" else f"file://{tmp_path}/run"
    folder, old, new = sources.RemoteFolder(address, CheckpointError), b"o" * (20 << 20), b"n" * length
    folder.write("weights", old)
    read, reads = sources.RemoteFile.read, count()

    def replaced_after_one(self: sources.RemoteFile, start: int, size: int) -> bytes:
        data = read(self, start, size)
        if next(reads) == 0:
            folder.write("weights", new)
        return data

    monkeypatch.setattr(sources.RemoteFile, "read", replaced_after_one)
    folder.download("weights", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == new


@pytest.mark.slow  # s3fs tries again for itself
def test_a_store_that_goes_away(server: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SECONDS", 2.0)
    loader = FFCVLoader("s3://bucket/train.beton", batch_size=10, image_size=32, workers=1, patience=3)
    server.gone = True
    with loader, pytest.raises(DataError, match="requests failed"):
        list(loader)


def test_missing_credentials_are_an_error_at_once(server: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    before = len(server.requests)
    with pytest.raises(DataError, match=r"cannot be read: Unable to locate credentials.* Check the credentials"):
        open_beton("s3://bucket/train.beton")
    assert len(server.requests) == before


@pytest.mark.parametrize("full", [False, True])
def test_a_disk_that_takes_a_part_of_what_is_downloaded(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a nearly full one does: only the next write fails."""
    folder, content = sources.RemoteFolder(f"file://{tmp_path}/run", CheckpointError), bytes(range(256)) * 99
    pwrite = os.pwrite
    folder.write("weights", content)
    written = []

    def part(file: int, data: Any, start: int) -> int:
        if full and written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(start)
        return pwrite(file, data[: -(-len(data) // 2)], start)

    monkeypatch.setattr(os, "pwrite", part)
    if full:
        with pytest.raises(CheckpointError, match="copy could not be written: No space left"):
            folder.download("weights", tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
    else:
        folder.download("weights", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == content


@pytest.mark.parametrize("fails", [True, False])
def test_a_file_is_replaced_where_renaming_replaces_none(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SMB it fails, and by WebHDFS it does nothing."""
    move = LocalFileSystem.mv  # of fsspec.implementations.local

    def mv(self: LocalFileSystem, source: str, target: str, **options: Any) -> None:
        if not Path(target).exists():
            move(self, source, target, **options)
        elif fails:
            raise FileExistsError(target)

    monkeypatch.setattr(LocalFileSystem, "mv", mv)
    monkeypatch.setattr(sources, "_NOT_REPLACING", frozenset({"file"}))
    folder = sources.RemoteFolder(f"file://{tmp_path}/run", CheckpointError)
    for content in (b"old", b"new"):
        folder.write("history.json", content)
        assert folder.read("history.json") == content


@pytest.mark.parametrize("place", ["of a file", "full"])
def test_a_copy_that_cannot_be_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run at an address: nothing is half there, and the run is not taken for a damaged one."""
    address = f"file://{tmp_path}/run"
    folder = sources.RemoteFolder(address, CheckpointError)
    folder.write("checkpoints/step-00000001/state.json", b"{}")
    (tmp_path / "file").write_text("")
    create = partial(RemoteRun.create, tmp_path / ("copy" if place == "full" else "file/copy"), address)
    call: Callable[[], object] = create
    if place == "full":
        call = partial(create().pull_checkpoint, "step-00000001")

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnreachedError, match=r"on this machine .*(Not a directory|No space).*DRIVETRAIN_DATA"):
        call()
    assert not list((tmp_path / "copy").rglob("*.json"))
