"""WebDataset tar shards as a source: their content, and errors that name shard and key."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain import DataError
from drivetrain.loaders import convert, open_beton
from drivetrain.loaders.conversion.sample_source import expand_shards
from loader_pictures import beton_of, file_bytes, jpeg_bytes, npy_bytes, picture, refused, tar_file


def sample(key: str, label: int, **further: bytes) -> dict[str, bytes]:
    image = jpeg_bytes(picture(label, 70, 90))
    members = {"jpg": image, "cls": str(label).encode(), **further}
    return {f"{key}.{extension}": data for extension, data in members.items()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards of four samples each, their label the sample's number; `train-{000..002}.tar`."""
    for number in range(3):
        members: dict[str, bytes] = {}
        for label in range(4 * number, 4 * number + 4):
            members |= sample(f"dir/{label:05}", label)
        tar_file(tmp_path / f"train-{number:03}.tar", members)
    return tmp_path


@pytest.mark.parametrize("pattern", ["train-{000..002}.tar", "train-*.tar", "train-{000,001,002}.tar"])
def test_patterns(shards: Path, pattern: str) -> None:
    report = convert(str(shards / pattern), shards / "out.beton")
    beton = open_beton(shards / "out.beton")
    assert report.treatments == {"copied unchanged": 12}
    assert beton.labels.tolist() == list(range(12))
    for index in range(12):
        assert beton.stored(index) == jpeg_bytes(picture(index, 70, 90))


def test_one_shard_a_list_and_any_number_of_workers(shards: Path) -> None:
    paths = [shards / "train-002.tar", shards / "train-000.tar"]
    files = []
    for workers in (1, 3):
        convert(paths, shards / "out.beton", workers=workers, classes=list("abcdefghijkl"))
        files.append((shards / "out.beton").read_bytes())
    beton = open_beton(shards / "out.beton")
    assert files[0] == files[1]
    assert beton.labels.tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert beton.classes[8] == "i"
    assert beton_of(shards / "train-001.tar", shards / "one.beton").labels.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("extension", "text", "label"),
    [
        ("cls", b"007\n", 7),
        ("cls", b" -1.5 ", -1.5),
        ("json", b"3", 3),
        ("json", b'{"label": 4, "cls": 9}', 4),
        ("json", b'{"text": "x", "class": 5}', 5),
        ("json", b'{"cls": [0.5, 2]}', [0.5, 2.0]),
    ],
)
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_labels(tmp_path: Path, extension: str, text: bytes, label: Any, form: int) -> None:
    key = "a" * (80 if form == tarfile.USTAR_FORMAT else 300)  # long names have headers of their own
    path = tar_file(
        tmp_path / "a.tar",
        {f"{key}.{extension}": text, f"{key}.PNG": file_bytes(picture(1, 9, 9), "PNG")},
        form,
    )
    beton = beton_of(path, tmp_path / "a.beton")
    assert beton.labels.tolist() == [label]
    assert np.array_equal(np.asarray(beton.image(0)), picture(1, 9, 9))


def test_further_members_are_fields(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for label in range(3):
        members |= sample(
            f"{label}", label, json=json.dumps({"n": label}).encode(), npy=npy_bytes(np.full((2, 2), label, "<f4")),
            txt=b"words " * label, **{"seg.png": file_bytes(picture(label, 8, 8), "PNG")},
        )  # fmt: skip
    path = tar_file(tmp_path / "a.tar", members)
    some = np.array([2, 0])
    beton = beton_of(path, tmp_path / "a.beton", fields=["json", "npy", "txt", "seg.png"])
    assert list(beton.fields.values())[2:] == ["json", "ndarray", "bytes", "bytes"]
    assert beton.read("json", some) == [{"n": 2}, {"n": 0}]
    assert beton.read("npy", some)[0].tolist() == [[2, 2], [2, 2]]
    assert beton.read("txt", some) == [b"words words ", b""]
    assert beton.read("seg.png", some)[1] == file_bytes(picture(0, 8, 8), "PNG")
    refused(path, tmp_path, r"a\.tar: key 0: it has no member \.flac", fields=["flac"])


def test_a_further_field_is_the_image_only_if_there_is_no_other(tmp_path: Path) -> None:
    """Such as masks in PNG of pictures in WebP, which is looked for after it."""
    image, mask = picture(1, 8, 9), np.full((8, 9), 1, np.uint8)
    members = {"0.webp": file_bytes(image, "WEBP", lossless=True), "0.png": file_bytes(mask, "PNG"), "0.cls": b"3"}
    beton = beton_of(tar_file(tmp_path / "a.tar", members), tmp_path / "a.beton", fields={"png": "mask"})
    assert np.array_equal(np.asarray(beton.image(0)), image)
    assert np.array_equal(beton.mask("png", 0), mask)
    members = {"0.png": file_bytes(image, "PNG"), "0.cls": b"3"}
    beton = beton_of(tar_file(tmp_path / "b.tar", members), tmp_path / "b.beton", fields=["png"])
    assert np.array_equal(np.asarray(beton.image(0)), image)
    assert beton.read("png", np.array([0])) == [members["0.png"]]


def test_several_json_members(tmp_path: Path) -> None:
    values = {"boxes.json": [[1, 2, 30, 40]], "points.json": [[5, 6], [7, 8]], "meta.json": {"n": 3}}
    kinds = {"boxes.json": "boxes", "points.json": "keypoints", "meta.json": "json"}
    further = {name: json.dumps(value).encode() for name, value in values.items()}
    path = tar_file(tmp_path / "a.tar", sample("0", 0, **further) | sample("1", 1, **further))
    beton = beton_of(path, tmp_path / "a.beton", fields=kinds)
    assert beton.targets == {"boxes.json": "boxes", "points.json": "keypoints"}
    for name, value in values.items():
        assert beton.read(name, np.array([1])) == [value]
    for name, words in (("boxes.json", "its boxes 'boxes.json': Expecting value"), ("meta.json", "should be json")):
        path = tar_file(tmp_path / "b.tar", sample("0", 0, **further) | sample("1", 1, **further | {name: b"no"}))
        refused(path, tmp_path, f"key 1: .*{words}", fields=kinds)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b.jpg": None}, "it has no image"),
        ({"b.cls": None}, "it has no label"),
        ({"b.cls": b"cat"}, "its member .cls cannot be read"),
        ({"b.cls": None, "b.json": b'{"text": 1}'}, "its .json has the keys"),
        ({"b.cls": b'"cat"'}, "its label is 'cat'"),
        ({"b.jpg": b"words"}, "it is not an image"),
    ],
    ids=str,
)
def test_sample_that_lacks_something(tmp_path: Path, change: dict[str, bytes | None], words: str) -> None:
    members = sample("a", 0) | sample("b", 1) | sample("c", 2) | change
    path = tar_file(tmp_path / "x.tar", {name: data for name, data in members.items() if data is not None})
    refused(path, tmp_path, rf"x\.tar: key b: {words}")
    report = convert(path, tmp_path / "a.beton", on_error="skip")
    assert [name for name, _ in report.skipped] == [f"{path}: key b"]
    assert open_beton(tmp_path / "a.beton").labels.tolist() == [0, 2]


def test_truncated_at_every_length_is_named(shards: Path) -> None:
    path = shards / "train-001.tar"
    data = path.read_bytes()
    last = data.rstrip(b"\0")
    for length in [0, 1, 511, 512, 600, 1024, len(data) // 2, len(last) - 1000, len(last) - 1, len(last)]:
        path.write_bytes(data[:length])
        refused(str(shards / "train-*.tar"), shards, r"train-001\.tar is truncated")


def test_what_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "words.tar").write_text("words, no archive " * 100)
    refused(tmp_path / "words.tar", tmp_path, r"words\.tar is truncated or not a tar file")
    refused(tmp_path / "none.tar", tmp_path, r"none\.tar does not exist")
    refused(str(tmp_path / "no-{00..02}.tar"), tmp_path, r"no-00\.tar does not exist")
    refused([tmp_path / "words.tar", tmp_path / "none.tar"], tmp_path, "does not exist")
    refused(tar_file(tmp_path / "empty.tar", {}), tmp_path, "the tar shards contains no samples|contains no samples")
    twice = tmp_path / "twice.tar"
    with tarfile.open(twice, "w") as tar:
        for _ in range(2):
            info = tarfile.TarInfo("a.cls")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"1"))
    refused(twice, tmp_path, r"twice\.tar contains the member a\.cls twice")
    damaged = bytearray(tar_file(tmp_path / "d.tar", sample("a", 0) | sample("b", 1)).read_bytes())
    damaged[damaged.index(b"b.jpg") + 3] ^= 1  # a checksum that fails ends tarfile's reading without a word
    (tmp_path / "d.tar").write_bytes(damaged)
    refused(tmp_path / "d.tar", tmp_path, r"d\.tar is truncated or damaged at byte")


def test_members_without_a_key_and_folders_are_no_samples(tmp_path: Path) -> None:
    path = tar_file(tmp_path / "a.tar", {"README": b"words", ".hidden": b"x", **sample("a", 5)})
    with tarfile.open(path, "a") as tar:
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    assert beton_of(path, tmp_path / "a.beton").labels.tolist() == [5]


def test_expanding(tmp_path: Path) -> None:
    for name in ("a-08.tar", "a-09.tar", "a-10.tar", "b-08.tar"):
        (tmp_path / name).touch()
    for pattern, names in (
        ("{a,b}-{08..08}.tar", ["a-08.tar", "b-08.tar"]),
        ("a-{08..10}.tar", ["a-08.tar", "a-09.tar", "a-10.tar"]),
    ):
        assert [Path(path).name for path in expand_shards(str(tmp_path / pattern))] == names
    with pytest.raises(DataError, match=r"a-09.tar is named 2 times"):
        expand_shards([tmp_path / "a-*.tar", tmp_path / "a-09.tar"])
