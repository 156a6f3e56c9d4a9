"""Fields of every kind: what is stored, how stock FFCV reads it, and what cannot be stored."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import BetonError
from drivetrain.loaders import Beton, convert, inspect, open_beton, verify
from drivetrain.loaders.beton.layout import Field
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.loaders.conversion.encode import Encoding, encode_image
from drivetrain.loaders.conversion.writer import PAGE_SIZE, Sample, write_betons
from field_values import COUNT, values
from loader_pictures import beton_of, jpeg_bytes, picture, raw_pictures, refused, run_script

pytestmark = pytest.mark.process

KINDS = {
    "image": "rgb_image", "label": "ndarray", "score": "float", "rank": "int", "box": "ndarray",
    "text": "bytes", "meta": "json",
}  # fmt: skip
NAMES = ["score", "rank", "box", "text", "meta"]


class Dicts:
    """Pictures with the fields of `values`, as dicts; `change` replaces one value of one sample."""

    def __init__(self, change: tuple[int, str, Any] | None = None) -> None:
        self.change = change

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = {"image": picture(index, 20, 24), **values(index)}
        if self.change is not None and self.change[0] == index:
            sample[self.change[1]] = self.change[2]
        return sample


class Tuples(Dicts):
    """The same as tuples, the label a tensor."""

    def __getitem__(self, index: int) -> Any:
        image, label, *rest = super().__getitem__(index).values()
        return image, torch.from_numpy(label), *rest


class Large(Dicts):
    """Noise that is stored as large JPEGs, in pages of 8, then 16 and at last 32 MiB."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sides = {2: 2000, 5: 3000}
        side = sides.get(index, 900)
        noise = np.random.default_rng(index).integers(0, 256, (side, side, 3), np.uint8)
        image = noise if index in sides else picture(index, 20, 24)
        return super().__getitem__(index) | {"image": jpeg_bytes(image, quality=100, subsampling=0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of ours."""
    root = tmp_path_factory.mktemp("fields")
    convert(Dicts(), root / "dicts.beton", fields=NAMES)
    convert(Large(), root / "large.beton", fields=NAMES, workers=2)
    convert(Dicts((3, "text", b"")), root / "empty.beton", fields=NAMES)
    return root


@pytest.fixture(scope="module")
def stock(folder: Path) -> Path:
    """The same folder with a file of stock FFCV's, and with what its two memory managers read of each file."""
    run_script("loader_stock_fields.py", folder)
    return folder


def all_of(beton: Beton, name: str) -> Any:
    return beton.read(name, np.arange(len(beton)))


def holds_the_values(beton: Beton) -> None:
    for name in NAMES:
        found = all_of(beton, name)
        expected = [values(index)[name] for index in range(COUNT)]
        if isinstance(found, list):
            assert found == expected
        else:
            assert found.dtype == np.asarray(expected).dtype
            assert np.array_equal(found, np.array(expected))
    labels = np.stack([values(index)["label"] for index in range(COUNT)])
    assert beton.labels.dtype == np.float32
    assert np.array_equal(beton.labels, labels)


@pytest.mark.process
def test_every_kind_is_stored_and_read(folder: Path) -> None:
    beton = open_beton(folder / "dicts.beton")
    assert (beton.fields, beton.label_name, beton.num_classes) == (KINDS, "label", 3)
    assert beton.manifest["fields"] == KINDS
    holds_the_values(beton)
    some = np.array([4, 0, 4])
    assert beton.read("text", some) == [values(index)["text"] for index in (4, 0, 4)]
    assert np.array_equal(beton.read("box", some)[2], values(4)["box"])
    assert beton.read("image", some)[1] == beton.stored(0)
    with pytest.raises(BetonError, match=r"has no field 'txt'.*Did you mean 'text'"):
        beton.read("txt", some)


def test_checksums_cover_all_fields_in_file_order(folder: Path) -> None:
    beton = open_beton(folder / "dicts.beton")
    assert beton.checksums is not None
    for index in range(COUNT):
        of = values(index)
        crc = zlib.crc32(beton.stored(index))
        for part in (
            of["label"].tobytes(), np.float64(of["score"]).tobytes(), np.int64(of["rank"]).tobytes(),
            of["box"].tobytes(), of["text"], json.dumps(of["meta"]).encode() + b"\0",
        ):  # fmt: skip
            crc = zlib.crc32(part, crc)
        assert beton.checksum(index) == beton.checksums[index] == crc
    assert verify(folder / "dicts.beton").sound


@pytest.mark.slow
@pytest.mark.parametrize("os_cache", [True, False])
@pytest.mark.parametrize("name", ["dicts", "empty", "large", "theirs"])
def test_stock_reads_every_field(stock: Path, name: str, os_cache: bool) -> None:
    """Also where the page has grown, so that the first one is tables and samples both."""
    theirs, beton = np.load(stock / f"{name}-{os_cache}.npz"), open_beton(stock / f"{name}.beton")
    for field in ("label", "score", "rank", "box"):
        assert np.array_equal(theirs[field], all_of(beton, field)), field
    assert [json.loads(text) for text in theirs["meta"]] == all_of(beton, "meta")
    for found, text in zip(theirs["text"], all_of(beton, "text"), strict=True):
        assert found[: len(text)].tobytes() == text
    for index, found in enumerate(theirs["image"]):
        image = np.asarray(beton.image(index)).astype(int)
        edge = (image.shape[1] - image.shape[0]) // 2
        crop = image[:, edge : edge + image.shape[0]]
        assert abs(found.astype(int).mean() - crop.mean()) < 2


@pytest.mark.slow
def test_we_read_every_field_that_stock_wrote(stock: Path) -> None:
    beton = open_beton(stock / "theirs.beton")
    assert beton.fields == KINDS
    assert beton.checksums is None
    holds_the_values(beton)
    for index in range(COUNT):
        assert np.array_equal(np.asarray(beton.image(index)), picture(index, 20, 24))
    assert verify(stock / "theirs.beton").sound


def test_pages_grow_in_place(folder: Path) -> None:
    """Small samples in pages of 8 MiB, then larger ones, in one pass."""
    beton = open_beton(folder / "large.beton")
    assert int(beton.sizes[2]) > PAGE_SIZE
    assert beton.page_size == 1 << (int(beton.sizes[5]) - 1).bit_length() >= 2 * PAGE_SIZE
    assert int(beton.pointers[0]) == PAGE_SIZE < beton.page_size
    holds_the_values(beton)
    page = np.uint64(beton.page_size)
    pages = {name: c.pointers // page for name, c in beton.columns.items() if len(c.pointers)}
    for index in range(COUNT):
        assert len({int(column[index]) for column in pages.values()}) == 1


def test_tuples_and_any_number_of_workers_give_the_same_file(folder: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        convert(Tuples(), tmp_path / "t.beton", fields=NAMES, workers=workers)
        assert (tmp_path / "t.beton").read_bytes() == (folder / "dicts.beton").read_bytes()
    convert(Large(), tmp_path / "l.beton", fields=NAMES, workers=1)
    for path in (tmp_path / "l.beton", manifest_path(tmp_path / "l.beton")):
        assert path.read_bytes() == (folder / path.name.replace("l.", "large.", 1)).read_bytes()


def test_inspection_names_fields_and_sizes(folder: Path) -> None:
    found = inspect(folder / "dicts.beton")
    assert found.fields["box"] == "ndarray int16 (2, 3)"
    assert found.field_bytes["text"].largest == COUNT
    assert "text (bytes)" in str(found)
    assert found.classes == {}


def test_verify_notices_a_change_in_any_field(folder: Path, tmp_path: Path) -> None:
    data = bytearray((folder / "dicts.beton").read_bytes())
    columns = open_beton(folder / "dicts.beton").columns
    for sample, name in ((1, "box"), (3, "text"), (5, "meta"), (6, "label")):
        data[int(columns[name].pointers[sample])] ^= 1
    (tmp_path / "changed.beton").write_bytes(data)
    manifest = manifest_path(folder / "dicts.beton").read_bytes()
    manifest_path(tmp_path / "changed.beton").write_bytes(manifest)
    found = verify(tmp_path / "changed.beton")
    assert [number for number, _ in found.bad] == [1, 3, 5, 6]
    manifest_path(tmp_path / "changed.beton").unlink()
    (bad,) = verify(tmp_path / "changed.beton").bad  # without checksums, what shows by itself
    assert bad == (5, "its field 'meta' is not valid JSON")


def test_json_that_is_nested_too_deeply_is_a_bad_sample(tmp_path: Path) -> None:
    fields = [Field("image", "rgb_image"), Field("label", "int"), Field("meta", "json")]
    image = encode_image(picture(0, 12, 12), Encoding())
    samples = [Sample(image, (0, text)) for text in (b"[]\0", b"[" * 100_000 + b"\0")]
    write_betons([tmp_path / "deep.beton"], samples, len(samples), fields, {"classes": []})
    with pytest.raises(BetonError, match="sample 1: its field 'meta' is not valid JSON"):
        all_of(open_beton(tmp_path / "deep.beton"), "meta")
    assert verify(tmp_path / "deep.beton").bad == [(1, "its field 'meta' is not valid JSON")]


def test_kinds_that_are_inferred_and_given(tmp_path: Path) -> None:
    class Mixed:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {
                "img": picture(index, 12, 12), "label": index, "flag": index == 1, "words": f"nr {index}",
                "floats": [0.5, index], "none": None, "small": np.float32(0.25), "count": index,
                "raw": np.arange(index + 2, dtype=np.uint8), "empty": b"" if index else b"x",
            }  # fmt: skip

    wanted = {
        "flag": None, "words": None, "floats": None, "none": None, "small": None, "count": "float",
        "raw": "bytes", "empty": None,
    }  # fmt: skip
    beton = beton_of(Mixed(), tmp_path / "a.beton", fields=wanted)
    assert list(beton.fields.values())[2:] == [
        "int", "json", "ndarray", "json", "float", "float", "bytes", "bytes",
    ]  # fmt: skip
    assert all_of(beton, "words") == ["nr 0", "nr 1"]
    assert all_of(beton, "raw") == [b"\0\1", b"\0\1\2"]
    assert all_of(beton, "empty") == [b"x", b""]
    assert all_of(beton, "floats").tolist() == [[0.5, 0.0], [0.5, 1.0]]
    assert all_of(beton, "count").tolist() == [0.0, 1.0]
    assert verify(tmp_path / "a.beton").sound


def test_numpys_true_and_false_are_integers(tmp_path: Path) -> None:
    """As Python's: what indexing an array of them returns is of NumPy's own type."""
    samples = [(picture(number, 12, 12), number, flag) for number, flag in enumerate(np.array([True, False]))]
    assert all_of(beton_of(samples, tmp_path / "a.beton", fields=["flag"]), "flag").tolist() == [1, 0]
    given = beton_of(samples, tmp_path / "b.beton", fields={"flag": "float"})
    assert all_of(given, "flag").tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            (3, "score", "high"),
            r"sample 3: its field 'score' is 'high', but should be float: it is not a number",
        ),
        ((3, "rank", 0.5), "sample 3: its field 'rank' is 0.5, but should be int"),
        ((3, "rank", 1 << 63), "it does not fit 64 bits"),
        ((3, "box", np.zeros((2, 2), np.int16)), "shape differs"),
        ((3, "box", np.zeros((2, 3), np.int32)), "type differs"),
        ((3, "box", [[1, 2], [3]]), "should be ndarray int16"),
        ((3, "text", "words"), "should be bytes"),
        ((3, "meta", {1, 2}), "should be json"),
        ((3, "label", 4), "its label is 4, but the first sample's has 3 values"),
        ((3, "label", [1.0, 2.0]), "first sample's has 3 values"),
        ((3, "label", [1.0, np.inf, 0]), "must be finite"),
        ((0, "box", np.zeros((0, 3))), "sample 0: its field 'box'|sample 1: its field 'box'"),
        ((0, "meta", object()), "should be json"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_values_that_do_not_fit(tmp_path: Path, change: tuple[int, str, Any], words: str) -> None:
    refused(Dicts(change), tmp_path, words, fields=NAMES)
    if change[0]:
        report = convert(Dicts(change), tmp_path / "a.beton", fields=NAMES, on_error="skip")
        assert [name for name, _ in report.skipped] == ["sample 3"]
        assert len(open_beton(tmp_path / "a.beton")) == COUNT - 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("score", "must be a list of names"),
        (3, "fields=3 must be a list of names"),
        ([["score"]], r"The field \['score'\] must have a name"),
        (["a name longer than 16"], "1 to 16 printable ASCII"),
        ([""], "1 to 16 printable ASCII"),
        (["größe"], "ASCII"),
        (["label"], "is always included"),
        (["score", "score"], "contains a name twice"),
        ({"score": "double"}, "Use one of float, int, bytes, ndarray, json"),
        (["nothing"], r"the fields \['nothing'\] are missing"),
    ],
    ids=str,
)
def test_fields_that_cannot_be(tmp_path: Path, fields: Any, words: str) -> None:
    refused(Dicts(), tmp_path, words, fields=fields)


def test_arrays_have_no_further_fields_but_vector_labels(tmp_path: Path) -> None:
    images, _ = raw_pictures(4)
    words = "pair of arrays has only image and label, no fields"
    refused((images, np.arange(4)), tmp_path, words, fields=["x"])
    hot = np.eye(4, dtype=np.int64)
    beton = beton_of((images, hot), tmp_path / "a.beton", classes=list("abcd"))
    assert np.array_equal(beton.labels, hot)
    assert (beton.labels.dtype, beton.num_classes) == (np.float32, 4)
