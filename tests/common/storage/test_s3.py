"""Files of an object store that speaks S3: moto's server, in a thread of this process, by s3fs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import s3fs
import torch
from drivetrain import DataError
from drivetrain.common.storage import addresses as sources
from drivetrain.loaders import FFCVLoader, convert, open_beton
from moto.server import ThreadedMotoServer

SAMPLES = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("s3")
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 150, 160, 3), dtype=np.uint8)
    convert((images, np.arange(SAMPLES) % 3), made / "train.beton", progress=False)
    return made


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    """An object store whose bucket has the file and its manifest; credentials and endpoint are in the environment."""
    one = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    one.start()
    host, port = one.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1", "DRIVETRAIN_DATA": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sources, "_PAUSE", 0.01)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for file in folder.iterdir():
        client.upload_file(str(file), "bucket", file.name)
    yield one
    one.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def pixels(path: Any) -> torch.Tensor:
    with FFCVLoader(path, batch_size=10, image_size=32, workers=2, dtype=torch.uint8) as loader:
        return torch.cat([images for images, _ in loader])


@pytest.mark.usefixtures("server")
def test_the_samples_of_the_local_file(folder: Path) -> None:
    assert torch.equal(pixels("s3://bucket/train.beton"), pixels(folder / "train.beton"))
    beton = open_beton("s3://bucket/train.beton")
    assert beton.checksums is not None
    assert beton.file.mirror is not None
    assert beton.file.mirror.version.startswith("ETag=")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("address", ["s3://bucket/missing.beton", "s3://nowhere/train.beton"])
def test_what_is_not_there(address: str) -> None:
    with pytest.raises(DataError, match=f"{address} does not exist"):
        open_beton(address)


@pytest.mark.slow  # s3fs tries again for itself
def test_a_store_that_goes_away(server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SECONDS", 2.0)
    loader = FFCVLoader("s3://bucket/train.beton", batch_size=10, image_size=32, workers=1, patience=3)
    server.stop()
    with loader, pytest.raises(DataError, match="requests failed"):
        list(loader)
