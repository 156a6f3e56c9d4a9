"""`open_beton` rejects files that are missing, truncated, of another format, unfinished or inconsistent."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from drivetrain.common.errors import BetonError
from drivetrain.loaders import FFCVLoader, convert, open_beton
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.beton.layout import ALLOCATION, FIELD, HEADER, MIN_PAGE, Field, metadata_dtype
from drivetrain.loaders.beton.manifest import manifest_path
from loader_pictures import beton_of, file_bytes, jpeg_bytes, picture, raw_beton, raw_pictures
from PIL import Image

COUNT, SIDE = 9, 12
FIELDS = [Field("image", "rgb_image"), Field("label", "int")]
METADATA = HEADER.itemsize + 2 * FIELD.itemsize
ROW = metadata_dtype(FIELDS).itemsize


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw_beton(tmp_path_factory.mktemp("sound") / "sound.beton", COUNT, SIDE)


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage, without the manifest, which would notice all."""
    return shutil.copy(sound, tmp_path / "copy.beton")


def refused(path: Path, words: str) -> None:
    with pytest.raises(BetonError, match=words) as caught:
        open_beton(path)
    assert path.name in str(caught.value)


def header_of(path: Path) -> np.ndarray:
    return np.fromfile(path, HEADER, 1)


def patch(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def patch_header(path: Path, **values: int) -> None:
    header = header_of(path)
    for name, value in values.items():
        header[name] = value
    patch(path, 0, header.tobytes())


def patch_rows(path: Path, change: Callable[[np.ndarray], None]) -> None:
    rows = np.fromfile(path, metadata_dtype(FIELDS), COUNT, offset=METADATA)
    change(rows)
    patch(path, METADATA, rows.tobytes())


def patch_table(path: Path, change: Callable[[np.ndarray], None]) -> None:
    start = int(header_of(path)["alloc_table_ptr"][0])
    table = np.fromfile(path, ALLOCATION, offset=start)
    change(table)
    patch(path, start, table.tobytes())


def test_sound_file_gives_what_was_written(sound: Path) -> None:
    beton = open_beton(sound)
    images, labels = raw_pictures(COUNT, SIDE)
    assert len(beton) == COUNT
    assert beton.labels.tolist() == labels.tolist()
    for index in range(COUNT):
        assert beton.stored(index) == images[index].tobytes()
        assert np.array_equal(np.asarray(beton.image(index)), images[index])
    assert beton.manifest["samples"] == COUNT
    assert not beton.data.flags.writeable


def test_missing_folder_empty_and_foreign(tmp_path: Path) -> None:
    refused(tmp_path / "none.beton", "does not exist.*drivetrain convert")
    (tmp_path / "folder.beton").mkdir()
    refused(tmp_path / "folder.beton", "is not a file")
    (tmp_path / "empty.beton").touch()
    refused(tmp_path / "empty.beton", "0 bytes")
    (tmp_path / "text.beton").write_text("These are words, not a data set. " * 9)
    refused(tmp_path / "text.beton", "not a .beton file of version 2")


def test_truncated_at_every_kind_of_length(copy: Path) -> None:
    data = copy.read_bytes()
    table = int(header_of(copy)["alloc_table_ptr"][0])
    lengths = [1, 23, 24, 500, METADATA - 1, METADATA, METADATA + ROW * COUNT - 1, METADATA + ROW * COUNT]
    size = len(data)
    lengths += [table // 2, table - 1, table, table + 1, table + ALLOCATION.itemsize, size - 24, size - 1]
    for length in lengths:
        copy.write_bytes(data[:length])
        refused(copy, "truncated|too few|samples need|fields|never written|outside")
    copy.write_bytes(data + b"\0" * 24)
    refused(copy, "row 9 of the allocation table")
    copy.write_bytes(data)
    assert len(open_beton(copy)) == COUNT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alloc_table_ptr": 0}, "unfinished"),
        ({"version": 3}, "version 2: it begins with .*x03"),
        ({"page_size": MIN_PAGE + 1}, "power of two"),
        ({"page_size": MIN_PAGE // 2}, "2 MiB"),
        ({"page_size": 0}, "power of two"),
        ({"num_samples": 0}, "no samples"),
        ({"num_samples": COUNT - 1}, "row 8 of the allocation table"),
        ({"num_samples": COUNT + 1}, f"sample {COUNT}"),
        ({"num_samples": 1 << 63}, "truncated"),
        ({"num_fields": 1}, "the 1 fields"),
        ({"num_fields": 3}, "one of its 3 field descriptors is invalid"),
        ({"num_fields": 65535}, "fields|ASCII"),
        ({"alloc_table_ptr": 1 << 63}, "truncated"),
    ],
    ids=str,
)
def test_header(copy: Path, change: dict[str, int], words: str) -> None:
    patch_header(copy, **change)
    refused(copy, words)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (2, "requires one image"),
        (3, "data that was never written"),  # a mask
        (4, "ndarray field has the invalid shape"),
        (5, r"image \(rgb_image\), label \(json\)\. Drivetrain requires one image \(rgb_image; or"),
        (6, "unknown type 6"),
        (255, "unknown type 255"),
    ],
)
def test_field_of_another_type(copy: Path, kind: int, words: str) -> None:
    patch(copy, HEADER.itemsize + FIELD.itemsize, bytes([kind]))
    refused(copy, words)


def test_image_field_of_another_type_and_arguments_where_none_belong(copy: Path) -> None:
    patch(copy, HEADER.itemsize, b"\1")
    refused(copy, r"image \(int\), label \(int\)")
    patch(copy, HEADER.itemsize, b"\2")
    patch(copy, HEADER.itemsize + 500, b"\1")
    refused(copy, "field 'image' has arguments")


@pytest.mark.parametrize(
    ("position", "data", "words"),
    [
        (FIELD.itemsize + 1, b"image", "distinct names for all fields"),
        (1, b"\xff", "ASCII"),
        (FIELD.itemsize, b"\0", "label .*float32"),  # ints read as floats
    ],
)
def test_a_field_descriptor_with_other_bytes(copy: Path, position: int, data: bytes, words: str) -> None:
    patch(copy, HEADER.itemsize + position, data)
    refused(copy, words)


def test_a_type_that_numpy_cannot_parse(copy: Path) -> None:
    row = Field("label", "ndarray", np.dtype("<f4"), (3,)).descriptor().tobytes()
    assert row.count(b'"<f4"') == 1
    patch(copy, HEADER.itemsize + FIELD.itemsize, row.replace(b'"<f4"', b'"(,f"'))
    refused(copy, "an ndarray field has an invalid dtype")


def test_float_labels_read_as_ints(tmp_path: Path) -> None:
    images, labels = raw_pictures(3)
    assert beton_of((images, labels + 0.5), tmp_path / "f.beton").labels.tolist() == [0.5, 1.5, 2.5]
    manifest_path(tmp_path / "f.beton").unlink()
    patch(tmp_path / "f.beton", HEADER.itemsize + FIELD.itemsize, b"\1")
    refused(tmp_path / "f.beton", "label .*32-bit")


def _set(row: int, field: str, value: int) -> Callable[[np.ndarray], None]:
    def change(table: np.ndarray) -> None:
        (table["f0"] if field in ("mode", "width", "height", "data_ptr") else table)[field][row] = value

    return change


def test_pointer_outside_and_of_another_sample(copy: Path) -> None:
    original = copy.read_bytes()
    pointers = open_beton(copy).pointers
    for wrong in (0, int(pointers[3]) + 1, 1 << 62, (1 << 64) - 1, int(pointers[4])):
        copy.write_bytes(original)
        patch_rows(copy, _set(3, "data_ptr", wrong))
        refused(copy, "sample 3 points to data that was never written")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ptr", 1 << 62, "outside"),
        ("ptr", (1 << 64) - 8, "outside"),
        ("ptr", METADATA, "outside"),
        ("size", 0, "sample 3 points to data that was never written"),
        ("size", 1 << 40, "outside"),
        ("size", (1 << 64) - 1, "outside"),
        ("size", SIDE * SIDE * 3 + 1, "overlap"),
        ("size", SIDE * SIDE * 3 - 1, "sample 3 has mode 1"),
        ("sample_id", COUNT, "outside"),
        ("sample_id", 5, "sample 3 points"),
    ],
)
def test_allocation_row(copy: Path, field: str, value: int, words: str) -> None:
    patch_table(copy, _set(3, field, value))
    refused(copy, words)


def test_allocation_across_a_page(copy: Path) -> None:
    """Both the table and the metadata agree on a place that FFCV's page reader could not read."""
    across = 2 * int(header_of(copy)["page_size"][0]) - 8
    end = across + int(open_beton(copy).sizes[8])
    patch(copy, end, copy.read_bytes()[int(header_of(copy)["alloc_table_ptr"][0]) :])
    patch_header(copy, alloc_table_ptr=end)
    patch_table(copy, _set(8, "ptr", across))
    patch_rows(copy, _set(8, "data_ptr", across))
    refused(copy, "crosses a page")


@pytest.mark.parametrize(("field", "value"), [("mode", 2), ("width", 13), ("height", 0), ("width", 65535)])
def test_metadata_that_contradicts_the_data(copy: Path, field: str, value: int) -> None:
    patch_rows(copy, _set(2, field, value))
    refused(copy, "sample 2 has mode")


def test_label_out_of_all_bounds(copy: Path) -> None:
    patch_rows(copy, _set(4, "f1", 1 << 40))
    refused(copy, "sample 4 has the label 1099511627776")


def test_manifest_of_another_file(sound: Path, copy: Path, tmp_path: Path) -> None:
    """Also of one with as many samples and the same fields."""
    images, labels = raw_pictures(COUNT, SIDE)
    convert((images[::-1], labels[::-1].copy()), tmp_path / "other.beton")
    shutil.copy(manifest_path(tmp_path / "other.beton"), manifest_path(copy))
    refused(copy, "does not belong")
    shutil.copy(manifest_path(sound), manifest_path(copy))
    assert open_beton(copy).manifest["samples"] == COUNT


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"samples": 9}', '"text"', "\x00", '{"samples": 9, "fields": null}']
)
def test_manifest_that_is_none(copy: Path, text: str) -> None:
    manifest_path(copy).write_text(text)
    refused(copy, "is not a manifest.*Delete it")


def test_manifest_not_utf8_or_a_folder(copy: Path) -> None:
    manifest_path(copy).write_bytes(b"\xff\xfe\x80")
    refused(copy, "is not a manifest")
    manifest_path(copy).unlink()
    manifest_path(copy).mkdir()
    refused(copy, "json cannot be read: Is a directory")  # deleting it would not help


def test_manifest_notices_a_label_that_changed(sound: Path, copy: Path) -> None:
    shutil.copy(manifest_path(sound), manifest_path(copy))
    patch_rows(copy, _set(4, "f1", 3))
    refused(copy, "checksum of the tables")


def test_manifest_of_a_file_of_equal_tables(tmp_path: Path) -> None:
    """Raw images of one size and the same labels: the tables are equal to the last byte."""
    images, labels = raw_pictures(COUNT)
    for name, pixels in (("a", images), ("b", 255 - images)):
        convert((pixels, labels), tmp_path / f"{name}.beton")
    shutil.copy(manifest_path(tmp_path / "a.beton"), manifest_path(tmp_path / "b.beton"))
    refused(tmp_path / "b.beton", "does not belong to b.beton.*seal.*Convert the data again")
    one = images.copy()
    one[COUNT // 2 + 1, 3, 3, 1] ^= 1  # a single bit of a single picture
    convert((one, labels), tmp_path / "b.beton")
    shutil.copy(manifest_path(tmp_path / "a.beton"), manifest_path(tmp_path / "b.beton"))
    refused(tmp_path / "b.beton", "does not belong to b.beton.*seal")
    for suffix in ("", ".json"):  # the same pair under another name
        shutil.copy(tmp_path / f"a.beton{suffix}", tmp_path / f"b.beton{suffix}")
    assert open_beton(tmp_path / "b.beton").manifest == open_beton(tmp_path / "a.beton").manifest


def test_manifest_beside_a_file_without_a_seal(sound: Path, copy: Path) -> None:
    """As FFCV writes it, with the same tables."""
    shutil.copy(manifest_path(sound), manifest_path(copy))
    patch(copy, copy.read_bytes().index(bytes.fromhex(open_beton(sound).manifest["seal"])), bytes(32))
    refused(copy, "its seal, a digest of all samples' checksums, differs")
    manifest_path(copy).unlink()
    assert len(open_beton(copy)) == COUNT


def test_manifest_that_was_changed(sound: Path, copy: Path) -> None:
    manifest = json.loads(manifest_path(sound).read_text())
    checksums = [manifest["crc32"][0] ^ 1, *manifest["crc32"][1:]]
    for change, words in (
        ({"crc32": checksums}, "its seal.*differs"),
        ({"seal": manifest["seal"][::-1]}, "its seal.*differs"),
        ({"seal": "no digits"}, "is not a manifest"),
        ({"seal": 7}, "is not a manifest"),
        ({"tables_crc32": -1}, "is not a manifest"),
        ({"seal": ""}, "its seal.*differs"),
    ):
        manifest_path(copy).write_text(json.dumps(manifest | change))
        refused(copy, words)
    manifest_path(copy).write_text(json.dumps(manifest | {"source": "told by hand"}))
    assert open_beton(copy).manifest["source"] == "told by hand"


def test_manifest_with_fewer_classes_than_labels(sound: Path, copy: Path) -> None:
    manifest = json.loads(manifest_path(sound).read_text())
    manifest_path(copy).write_text(json.dumps(manifest | {"classes": ["a", "b"]}))
    refused(copy, "sample 2 has the label 2, which is not a class index from 0 to 1")


def test_loader_raises_the_same(copy: Path) -> None:
    patch_header(copy, alloc_table_ptr=0)
    with pytest.raises(BetonError, match="unfinished"):
        FFCVLoader(copy, batch_size=2, image_size=SIDE)


@pytest.mark.parametrize("name", ["train.beton", "{0000..1024}.beton"])
def test_a_file_whose_folder_cannot_be_looked_into(tmp_path: Path, name: str) -> None:
    with pytest.raises(BetonError, match="cannot be read: File name too long"):
        open_files(tmp_path / ("x" * 300) / name)


def test_only_a_jpeg_is_read_as_one(tmp_path: Path) -> None:
    """Pillow reads many formats, one of which it hands to another program."""
    path = tmp_path / "a.beton"
    place = int(beton_of([(jpeg_bytes(picture(3, 90, 120)), 0)], path).pointers[0])
    with path.open("r+b") as file:
        file.seek(place)
        file.write(file_bytes(Image.new("RGB", (120, 90)), "PNG"))
    with pytest.raises(BetonError, match="sample 0: its JPEG data cannot be decoded"):
        open_beton(path).image(0)
