"""A `.beton` that another program truncates or replaces while it is open raises an error; the process survives."""

import copy
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.common.errors import BetonError
from drivetrain.loaders import Beton, FFCVLoader, TorchLoader, convert, open_beton, verify
from drivetrain.loaders.beton import inspection, reader
from drivetrain.loaders.beton.open_file import OpenFile
from drivetrain.loaders.datasets.torch_dataset import BetonDataset
from loader_pictures import raw_pictures, run_python

TRUNCATE = """
import os, sys
from drivetrain.common.errors import BetonError
from drivetrain.loaders import FFCVLoader, TorchLoader, open_beton
from drivetrain.loaders.beton import reader

def refused(function, kind="open"):
    try:
        function()
    except BetonError as error:
        print(f"{kind}: {error}")
    else:
        raise AssertionError("no error")

def one(kind, path, between, **options):
    data = open(path, "rb").read()
    last = int(open_beton(path).pointers.max()) + 10
    for length in (last, 100, 0):
        loader = kind(path, batch_size=3, image_size=12, order="sequential", batches_ahead=1, **options)
        if between:
            list(loader)
            os.truncate(path, length)
            refused(lambda: next(iter(loader)))
        else:
            batches = iter(loader)
            next(batches)
            os.truncate(path, length)
            refused(lambda: list(batches))
        beton = loader.beton.files[0]
        refused(lambda: beton.image(len(beton) - 1))
        refused(lambda: beton.read("image", [len(beton) - 1]))
        refused(lambda: beton.checksum(len(beton) - 1))
        loader.close()
        open(path, "wb").write(data)

for path in sys.argv[1:]:
    for between in (True, False):
        one(FFCVLoader, path, between, workers=2)
        one(FFCVLoader, path, between, workers=1, verify=True)
        one(TorchLoader, path, between, workers=0)
    inner = reader.read_columns
    def shrink(*arguments):
        os.truncate(path, 16)
        return inner(*arguments)
    reader.read_columns = shrink  # whose tables were read through a memory map
    refused(lambda: open_beton(path), "opened")
    reader.read_columns = inner
"""


@pytest.fixture(scope="module")
def raws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("truncated") / "raws.beton"
    images, _ = raw_pictures(18)
    convert((images, np.eye(18, 5, dtype=np.float32)), path)  # vector labels, which lie on pages too
    return path


@pytest.mark.slow
@pytest.mark.process
def test_truncated_between_epochs_within_one_and_while_it_is_opened(photos: Path, raws: Path, tmp_path: Path) -> None:
    """In a process of its own, which SIGBUS would end."""
    copies = []
    for path in (photos, raws):
        copies.append(shutil.copy(path, tmp_path / path.name))
        shutil.copy(f"{path}.json", f"{copies[-1]}.json")
    run = run_python(TRUNCATE, *copies, timeout=200)
    assert run.returncode == 0, (run.returncode, run.stdout, run.stderr)
    lines = run.stdout.splitlines()
    opened = [line for line in lines if line.startswith("opened: ")]
    assert len(opened) == 2
    assert all("bytes" in line for line in opened), opened
    lines = [line for line in lines if line.startswith("open: ")]
    assert len(lines) == 2 * 2 * 3 * 3 * 4
    assert all("bytes when it was opened and now has" in line for line in lines), lines


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("verified", [False, True])
def test_a_sample_behind_the_end(photos: Path, tmp_path: Path, on_error: str, verified: bool) -> None:
    """It is named, not replaced: such a file is damaged as a whole; to replace many samples would hide it."""
    path = Path(shutil.copy(photos, tmp_path / "copy.beton"))
    shutil.copy(f"{photos}.json", f"{path}.json")
    options: dict[str, Any] = {"image_size": 12, "workers": 1, "batches_ahead": 1, "order": "sequential"}
    with FFCVLoader(path, batch_size=3, on_error=on_error, verify=verified, **options) as loader:
        batches = iter(loader)
        next(batches)
        last = len(loader.beton) - 1
        os.truncate(path, int(loader.beton.pointers[last]) + 10)
        words = f"Sample {last} cannot be read: .*copy.beton had .* and now has"
        with pytest.raises(BetonError, match=words):
            list(batches)
        assert loader.replaced == []


@pytest.mark.parametrize("grown", [True, False])
def test_a_length_that_changed_before_an_epoch(photos: Path, tmp_path: Path, grown: bool) -> None:
    path = Path(shutil.copy(photos, tmp_path / "copy.beton"))
    size = path.stat().st_size
    with FFCVLoader(path, batch_size=3, image_size=12, workers=1) as loader:
        list(loader)
        os.truncate(path, size + 1 if grown else size - 24)
        with pytest.raises(BetonError, match=f"had {size} bytes when it was opened and now has"):
            iter(loader)
        assert loader.state_dict()["epoch"] == 0
        os.truncate(path, size)


def test_a_file_that_is_replaced_stays_readable(photos: Path, raws: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(photos, tmp_path / "copy.beton"))
    with FFCVLoader(path, batch_size=3, image_size=12, workers=1, train=False) as loader:
        first = [labels.tolist() for _, labels in loader]
        shutil.copy(raws, tmp_path / "other.beton").replace(path)
        assert [labels.tolist() for _, labels in loader] == first
        path.unlink()
        assert [labels.tolist() for _, labels in loader] == first


@pytest.mark.slow
@pytest.mark.process
def test_a_worker_process_does_not_take_another_file(photos: Path, tmp_path: Path) -> None:
    """Each opens the file by its name, which another file may have by then."""
    path = Path(shutil.copy(photos, tmp_path / "copy.beton"))
    with TorchLoader(path, batch_size=3, image_size=12, workers=1) as loader:
        shutil.copy(photos, tmp_path / "other.beton").replace(path)
        with pytest.raises(BetonError, match="is no longer the file that the loader opened"):
            list(loader)


def test_a_file_that_was_refused_is_not_read_later(photos: Path, tmp_path: Path) -> None:
    """A worker process returns the error of a sample, and continues with the next one."""
    path = Path(shutil.copy(photos, tmp_path / "copy.beton"))
    dataset = pickle.loads(pickle.dumps(BetonDataset(path)))
    shutil.copy(photos, tmp_path / "other.beton").replace(path)
    for index in range(3):
        with pytest.raises(BetonError, match="is no longer the file that the loader opened"):
            _ = dataset[index]


def test_verify_and_labels_of_a_file_that_became_shorter(raws: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(raws, tmp_path / "copy.beton"))
    beton = open_beton(path)
    os.truncate(path, int(beton.pointers[3]))
    with pytest.raises(BetonError, match="bytes when it was opened"):
        _ = beton.labels
    with pytest.raises(BetonError, match="truncated"):
        verify(path)


@pytest.mark.parametrize(
    "labels", [np.zeros((4, 12, 12), np.uint8), np.eye(4, dtype=np.float32)], ids=["masks", "vectors"]
)
def test_verify_calls_what_cannot_be_read_no_invalid_value(
    labels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file without a manifest, with which checksums would be read first."""
    path, (images, _) = tmp_path / "a.beton", raw_pictures(4)
    convert((images, labels), path)
    Path(f"{path}.json").unlink()

    def opened(path: Path) -> Beton:
        beton = open_beton(path)
        os.truncate(path, int(beton.columns["label"].pointers[1]))
        return beton

    monkeypatch.setattr(inspection, "open_beton", opened)
    with pytest.raises(BetonError, match="bytes when it was opened and now has"):
        verify(path, workers=1)


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    file = OpenFile(path)
    assert file.read(3, 4) == bytes([3, 4, 5, 6])
    assert file.read(100, 0) == b""
    starts: Any = np.array([90, 0], dtype=np.uint64)
    assert file.read_many(starts, 10).tolist() == [list(range(90, 100)), list(range(10))]
    with pytest.raises(BetonError, match="ended at byte 100 during a read"):
        file.read(95, 6)
    descriptor = file.descriptor
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda file: pickle.loads(pickle.dumps(file))])
def test_a_copy_is_open_by_itself(copied: Any, tmp_path: Path) -> None:
    """Else it would read from the file that gets the descriptor's number next."""
    path, other = tmp_path / "bytes", tmp_path / "other"
    path.write_bytes(b"mine")
    other.write_bytes(b"else")
    file = OpenFile(path)
    own = copied(file)
    del file
    with other.open("rb"):
        assert own.read(0, 4) == b"mine"
    other.replace(path)
    with pytest.raises(BetonError, match="is no longer the file that the loader opened"):
        copied(own)


def test_a_file_that_may_not_be_read(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:  # the tests may run as root, whom no file's mode refuses
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BetonError, match=r"photos\.beton cannot be read: Permission denied"):
        open_beton(photos)


def test_emptied_while_it_is_opened(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copy(photos, tmp_path / "x.beton"))
    fetch_tables = reader.fetch_tables

    def emptying(*arguments: Any) -> Any:
        tables = fetch_tables(*arguments)
        os.truncate(path, 0)
        return tables

    monkeypatch.setattr(reader, "fetch_tables", emptying)
    with pytest.raises(BetonError, match=r"is truncated: .* the file has 0"):
        reader._open(path, 1.0, None)
    with pytest.raises(BetonError, match="0 bytes"):
        open_beton(path)
