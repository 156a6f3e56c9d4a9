"""Large files, whose tables are read and checked sample by sample: the same batches, and errors at the first use."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader, convert, inspect, open_beton, verify
from drivetrain.loaders.beton import data_set
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.beton.layout import ALLOCATION, HEADER, metadata_dtype, tables_start
from drivetrain.loaders.beton.manifest import BLOCK, LINE, manifest_path
from drivetrain.loaders.beton.reader import Beton
from drivetrain.loaders.beton.shelf import Shelf
from loader_pictures import jpeg_bytes, picture, raw_pictures

COUNT = 1300  # three blocks


class Samples:
    """JPEGs and raw pictures, with fields of every kind; one in five has an empty text."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = picture(index, 30 + index % 7, 40 - index % 5)
        return {
            "image": image if index % 2 else jpeg_bytes(image),
            "label": index % 6,
            "score": index / 4,
            "box": np.arange(4, dtype=np.float32) * index,
            "text": b"some words" * (index % 5),
            "meta": {"index": index},
        }


FIELDS = ["score", "box", "text", "meta"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    convert(Samples(60), folder / "all.beton", fields=FIELDS)
    convert(Samples(60), folder / "part-{0..2}.beton", fields=FIELDS)
    images, _ = raw_pictures(COUNT, 8)
    convert((images, np.arange(COUNT) % 10), folder / "raw.beton", classes=list("abcdefghij"))
    return folder


@pytest.fixture
def lazily(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(data_set, "CHECKED", 0)


@pytest.fixture
def raw(folder: Path, tmp_path: Path, lazily: Callable[[], None]) -> Path:
    """A copy to damage, with its manifest."""
    lazily()
    for path in (folder / "raw.beton", manifest_path(folder / "raw.beton")):
        shutil.copy(path, tmp_path)
    return tmp_path / "raw.beton"


def patch(path: Path, position: int, change: Callable[[bytes], bytes], size: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        old = file.read(size)
        file.seek(position)
        file.write(change(old))


def flipped(old: bytes) -> bytes:
    return bytes([old[0] ^ 1]) + old[1:]


def batches(kind: Any, source: Any, **options: Any) -> Iterator[Any]:
    with kind(source, **{"batch_size": 10, "image_size": 24, "workers": 1, "seed": 5, **options}) as loader:
        if kind is not TorchLoader:
            assert loader.beton.lazy == (data_set.CHECKED == 0)
        yield from loader


@pytest.mark.parametrize(
    ("kind", "source", "options"),
    [
        (FFCVLoader, "all.beton", {"fields": FIELDS, "verify": True}),
        (FFCVLoader, "part-{0..2}.beton", {"fields": FIELDS, "verify": True}),
        (FFCVLoader, "part-{0..2}.beton", {"train": False}),
        (FFCVLoader, {"part-{0..1}.beton": 1.0, "part-2.beton": 2.0}, {"views": 2}),
        (FFCVLoader, "part-{0..2}.beton", {"order": "quasi_random", "indices": range(5, 50)}),
        (FFCVLoader, {"part-{0..1}.beton": 1.0, "part-2.beton": 2.0}, {"order": "quasi_random"}),
        (TorchLoader, "part-{0..2}.beton", {"workers": 0}),
        pytest.param(StockFFCVLoader, "raw.beton", {"train": False}, marks=pytest.mark.slow),  # FFCV draws unseeded
    ],
)
def test_batches_are_those_of_a_file_that_is_checked_when_opened(
    folder: Path, lazily: Callable[[], None], kind: Any, source: Any, options: dict[str, Any]
) -> None:
    here = {str(folder / name): weight for name, weight in source.items()} if isinstance(source, dict) else None
    found = here or folder / source
    whole = list(batches(kind, found, **options))
    lazily()
    for one, other in zip(whole, batches(kind, found, **options), strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_every_column_is_the_same(folder: Path) -> None:
    whole, lazy = open_beton(folder / "all.beton"), open_beton(folder / "all.beton", most=0)
    assert whole.tables is None
    assert lazy.tables is not None
    assert whole.manifest == lazy.manifest
    names = ("modes", "widths", "heights", "pointers", "sizes", "checksums", "labels")
    for name in names:
        assert np.array_equal(getattr(whole, name), np.asarray(getattr(lazy, name))), name
    chosen = np.array([59, 3, 4, 5, 3])
    for name, column in whole.columns.items():
        other = lazy.columns[name]
        assert np.array_equal(column.pointers, np.asarray(other.pointers)[: len(column.pointers)])
        assert np.array_equal(column.values[chosen], other.values[chosen])
        assert str(whole.read(name, chosen)) == str(lazy.read(name, chosen))
    for index in (0, 7, 59):
        assert whole.checksum(index) == lazy.checksum(index) == lazy.checksums[index]
        assert np.array_equal(whole.pixels(index), lazy.pixels(index))
    rows = whole.rows(chosen), lazy.rows(chosen)
    for name in ("modes", "widths", "heights", "pointers", "sizes"):
        assert np.array_equal(*(getattr(each, name) for each in rows))
    with pytest.raises(IndexError):
        lazy.widths[60]


@pytest.mark.parametrize("names", ["raw.beton", "{raw,raw}.beton", "part-{0..2}.beton"])
def test_the_checksum_of_all_samples_is_that_of_their_checksums(
    folder: Path, lazily: Callable[[], None], names: str
) -> None:
    whole = open_files(folder / names)
    lazily()
    lazy = open_files(folder / names)
    checksums = [np.asarray(one.checksums) for one in whole.files]
    assert lazy.lazy
    assert lazy.checksum == whole.checksum == zlib.crc32(np.concatenate(checksums).astype("<u4").tobytes())


def test_a_file_without_blocks_is_checked_when_opened(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "raw.beton", manifest_path(folder / "raw.beton")):
        shutil.copy(path, tmp_path)
    manifest = manifest_path(tmp_path / "raw.beton")
    text = manifest.read_text()
    start = text.index(' "blocks"')
    manifest.write_text(text[:start] + text[text.index('"crc32"') - 1 :])
    assert open_beton(tmp_path / "raw.beton", most=0).tables is None
    manifest.unlink()
    assert open_beton(tmp_path / "raw.beton", most=0).tables is None


def sample_of(beton: Beton, index: int) -> int:
    """Where a sample's metadata begins."""
    row = metadata_dtype([column.field for column in beton.columns.values()]).itemsize
    return tables_start(len(beton.columns)) + index * row


def test_damaged_tables_are_refused_at_the_first_use(raw: Path) -> None:
    """A label, a size and a row of the allocations; blocks without damage can be read."""
    sound = open_beton(raw, most=0)
    table = int(np.fromfile(raw, HEADER, 1)["alloc_table_ptr"][0])
    label = sample_of(sound, BLOCK + 9) + 16
    for position in (label, sample_of(sound, BLOCK + 9) + 2, table + (BLOCK + 9) * ALLOCATION.itemsize + 8):
        patch(raw, position, flipped)
        beton = open_beton(raw, most=0)
        assert beton.pixels(7).shape == (8, 8, 3)
        words = rf"raw.beton: what its tables contain of samples {BLOCK} to {2 * BLOCK - 1} has another CRC-32"
        with pytest.raises(BetonError, match=words):
            beton.pixels(BLOCK + 1)
        with pytest.raises(BetonError, match=words):
            list(batches(FFCVLoader, raw))
        with pytest.raises(BetonError, match=r"raw\.beton"):
            inspect(raw)
        with pytest.raises(BetonError, match=r"raw\.beton"):
            verify(raw, progress=False)
        patch(raw, position, flipped)
    assert len(list(batches(FFCVLoader, raw))) == COUNT / 10


def test_a_damaged_manifest(raw: Path) -> None:
    manifest = manifest_path(raw)
    lines = manifest.read_bytes().index(b'"crc32": [\n') + len(b'"crc32": [\n')
    for changed, words in (
        (b'"blocks": {\n  "samples": 512', b'"blocks": {\n  "samples": 511'),
        (b'"samples": 1300', b'"samples": 1301'),
    ):
        whole = manifest.read_bytes()
        assert changed in whole
        manifest.write_bytes(whole.replace(changed, words, 1))
        with pytest.raises(BetonError, match=r"raw\.beton"):
            open_files(raw)
        manifest.write_bytes(whole)
    at = manifest.read_bytes().index(b'"metadata": "') + 15
    patch(manifest, at, lambda old: b"0" if old != b"0" else b"1")
    with pytest.raises(BetonError, match="the digest of its blocks differs"):
        open_files(raw)
    manifest.write_bytes(whole)
    patch(manifest, lines + (BLOCK + 3) * LINE + 11, lambda old: b"0" if old != b"0" else b"1")
    assert len(list(batches(FFCVLoader, raw))) == COUNT / 10
    with pytest.raises(BetonError, match=rf"samples {BLOCK} to {2 * BLOCK - 1} has another CRC-32"):
        list(batches(FFCVLoader, raw, verify=True))
    with pytest.raises(BetonError, match=r"raw\.beton"):
        open_beton(raw)


def test_impossible_numbers_under_valid_digests(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is checked, whatever the digests say: of a file that somebody made so."""
    from drivetrain.loaders.beton import tables

    monkeypatch.setattr(tables.Tables, "_check_blocks", lambda *_: None)
    beton = open_beton(raw, most=0)
    table = int(np.fromfile(raw, HEADER, 1)["alloc_table_ptr"][0])
    own, row = sample_of(beton, 600), table + 600 * ALLOCATION.itemsize
    for position, words in (
        (own + 1, "sample 600 has mode 1, 9 × 8 pixels in 192 bytes, which is impossible"),
        (own + 8, "sample 600 points to data that was never written"),
        (own + 23, "sample 600 has the label .* which is not a class index from 0 to 9"),
        (row, "sample 600 points to data that was never written"),
        (row + 15, "sample 600 points to data that was never written"),
        (row + 22, "row 600 of the allocation table .* points outside the data"),
    ):
        patch(raw, position, flipped)
        with pytest.raises(BetonError, match=rf"raw.beton: {words}"):
            list(batches(FFCVLoader, raw))
        patch(raw, position, flipped)


def test_sizes_that_a_crop_cannot_take(folder: Path, lazily: Callable[[], None]) -> None:
    lazily()
    with pytest.raises(DataError, match=r"crop='random' cuts .* but sample \d+ of .*all.beton has \d\d × \d\d"):
        list(batches(FFCVLoader, folder / "all.beton", crop="random", image_size=36))


def test_a_file_that_becomes_shorter(raw: Path) -> None:
    with FFCVLoader(raw, batch_size=10, image_size=24, workers=1, order="sequential") as loader:
        epoch = iter(loader)
        next(epoch)
        os.truncate(raw, 10_000)
        with pytest.raises(BetonError, match=r"raw.beton had \d+ bytes when it was opened and now has 10000"):
            list(itertools.islice(epoch, 200))


def descriptors_of(folder: Path) -> int:
    """How many files of the folder this process has open."""
    files = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it
            files.append(link.readlink())
    return sum(file.is_relative_to(folder) for file in files)


def test_many_files_are_opened_once_on_a_machine(
    folder: Path, tmp_path: Path, lazily: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(Samples(60), tmp_path / "{00..11}.beton", fields=FIELDS)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lazily()
    monkeypatch.setattr(data_set, "MOST_OPEN", 2)
    opened: list[str] = []

    def noted(path: Any, *others: Any) -> Beton:
        opened.append(Path(path).name)
        return open_beton(path, *others)

    monkeypatch.setattr(data_set, "open_beton", noted)
    source, names = tmp_path / "{00..11}.beton", [f"{number:02}.beton" for number in range(12)]
    first = open_files(source)
    assert opened == [*names, "00.beton"]  # of which the first is used
    del opened[:]
    second = open_files(source)
    assert second.checksum == first.checksum == open_files(folder / "all.beton").checksum
    assert [*second.identities] == [*first.identities]
    assert second.read("label", np.arange(54, 60)).tolist() == first.read("label", np.arange(54, 60)).tolist()
    assert {*opened} <= {"00.beton", "10.beton", "11.beton", "all.beton"}  # those that are used
    del opened[:]
    manifest_path(tmp_path / "07.beton").unlink()
    third = open_files(source)
    assert {*opened} == {*names}
    assert (third.checksum, third.has_checksums) == (None, False)
    (tmp_path / "08.beton").unlink()
    with pytest.raises(BetonError, match=r"08.beton does not exist"):
        open_files(source)


def test_files_of_two_conversions_are_used_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, level in (("a", 10), ("b", 200)):
        convert((np.full((16, 8, 8, 3), level, np.uint8), np.arange(16) % 4), tmp_path / f"{name}-{{0..3}}.beton")
    monkeypatch.setattr(data_set, "MOST_OPEN", 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for source in (tmp_path / "{a,b}-{0..3}.beton", {str(tmp_path / f"{name}-{{0..3}}.beton"): 1 for name in "ab"}):
        files = open_files(source)
        for index in (4, 16 + 8, 16 + 4, 8):  # of a-1, b-2, b-1 and a-2
            assert files.read("label", np.array([index])).tolist() == [index % 4]


def test_a_file_that_is_used_is_closed_with_the_others(folder: Path) -> None:
    shelf = Shelf(lambda number: open_beton(folder / f"part-{number}.beton"), 3, 1)
    used, _ = shelf[0], shelf[1]
    assert used in shelf.open, "a thread may wait for it"


def test_of_many_files_some_are_open(
    folder: Path, tmp_path: Path, lazily: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(Samples(60), tmp_path / "{00..11}.beton", fields=FIELDS)
    source, options = tmp_path / "{00..11}.beton", {"fields": FIELDS, "verify": True, "drop_last": True}
    whole = list(batches(FFCVLoader, folder / "all.beton", **options))
    lazily()
    monkeypatch.setattr(data_set, "MOST_OPEN", 2)
    with FFCVLoader(source, batch_size=10, image_size=24, workers=2, seed=5, **options) as loader:
        assert descriptors_of(tmp_path) == 2
        for expected, found in zip(whole, loader, strict=True):
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])
            # Those of the batches in preparation, of 10 samples each, besides, and as many manifests
            assert descriptors_of(tmp_path) <= 2 * (2 + 12)
        loader.close()
        assert loader.beton.labels.tolist() == [index % 6 for index in range(60)]
        assert descriptors_of(tmp_path) <= 4
        first = loader.beton.files[0]
        assert loader.beton.files[0] is first
        del first
        loader.beton.files[10], loader.beton.files[11]
        shutil.copy(tmp_path / "00.beton", tmp_path / "copy.beton")
        (tmp_path / "copy.beton").replace(tmp_path / "00.beton")
        with pytest.raises(BetonError, match=r"00.beton is no longer the file that the loader opened"):
            list(loader)
        (tmp_path / "00.beton").unlink()
        with pytest.raises(BetonError, match=r"00.beton does not exist"):
            list(loader)
    for path in (folder / "raw.beton", manifest_path(folder / "raw.beton")):
        shutil.copy(path, tmp_path / path.name.replace("raw", "04"))
    with pytest.raises(BetonError, match=r"04.beton has the fields"):
        open_files(tmp_path / "{01..05}.beton")
