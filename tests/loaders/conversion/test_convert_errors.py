"""`convert` rejects unusable sources, images, labels and arguments by name, and leaves no file."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import TorchLoader, convert, open_beton, verify
from loader_pictures import image_folder, jpeg_bytes, jpeg_folder, picture, raw_pictures, refused
from PIL import Image
from torchvision.datasets import ImageFolder

IMAGES, LABELS = raw_pictures(5, 12)
PICTURE = picture(3, 90, 120)


def truncated_jpeg(path: Path) -> None:
    path.write_bytes(jpeg_bytes(PICTURE)[:1500])


def text(path: Path) -> None:
    path.write_text("words, not pixels")


def empty(path: Path) -> None:
    path.touch()


def pipe_nobody_writes(path: Path) -> None:
    os.mkfifo(path)


def folder_named_so(path: Path) -> None:
    path.mkdir()


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def cut_png(path: Path) -> None:
    Image.fromarray(PICTURE).save(path, "PNG")
    os.truncate(path, 3000)


def postscript(path: Path) -> None:
    Image.fromarray(PICTURE).save(path, "EPS")


def jpeg_header_only(path: Path) -> None:
    path.write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF")


BAD = {
    truncated_jpeg: "it cannot be decoded: .*truncated",
    text: "not an image that Pillow can read",
    empty: "not an image that Pillow can read",
    pipe_nobody_writes: "not an image that Pillow can read",
    folder_named_so: "it cannot be read: Is a directory",
    dangling_link: "it cannot be read: No such file",
    cut_png: "it cannot be decoded",
    jpeg_header_only: "not an image|cannot be decoded",
    postscript: "it is PostScript",
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_bad_image(tmp_path: Path, make: Any) -> None:
    folder = jpeg_folder(tmp_path / "images")
    bad = folder / "bee" / "0010.jpg"
    make(bad)
    message = refused(folder, tmp_path, BAD[make], workers=2)
    assert message.startswith(f"{bad}: ")
    assert message.endswith("Repair or remove it, or use on_error='skip' (--skip-bad).")
    assert ".." not in message

    report = convert(folder, tmp_path / "out.beton", on_error="skip")
    assert report.samples == len(open_beton(tmp_path / "out.beton")) == 18
    ((name, reason),) = report.skipped
    assert name == str(bad)
    assert re.search(BAD[make], reason)
    assert f"skipped {bad}" in str(report)


def test_all_images_bad(tmp_path: Path) -> None:
    image_folder(tmp_path / "images", {"x.jpg": b"words, not pixels"})
    refused(tmp_path / "images", tmp_path, "None of the 1 samples.*x.jpg: it is not", on_error="skip")


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    refused(tmp_path / "none", tmp_path, "none does not exist")
    root = tmp_path / "images"
    root.mkdir()
    refused(root, tmp_path, "images contains no folders")
    Image.fromarray(PICTURE).save(root / "stray.jpg")
    refused(root, tmp_path, "images contains no folders")
    refused(root / "stray.jpg", tmp_path, "stray.jpg is a file")
    (root / "a").mkdir()
    refused(root, tmp_path, "a contains no images")
    (root / "b").mkdir()
    Image.fromarray(PICTURE).save(root / "b" / "x.jpg")
    (root / "a" / "notes.txt").touch()
    refused(str(root), tmp_path, "a contains no images.*remove it")


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (IMAGES.astype(np.float32), LABELS, "float32"),
        (torch.rand(5, 3, 12, 12), LABELS, "float32"),
        (IMAGES.astype(np.int64), LABELS, "int64"),
        (IMAGES[0, 0], LABELS, r"shape \(12, 3\)"),
        (IMAGES[None], LABELS, r"shape \(1, 5, 12, 12, 3\)"),
        (IMAGES[..., :2], LABELS, r"sample 0: its shape is \(12, 12, 2\)"),
        (IMAGES[:, :0], LABELS, "sample 0: its shape is"),
        (IMAGES, LABELS[:4], "5 images and 4 labels"),
        (IMAGES, LABELS[:, None, None, None], r"shape \(5, 1, 1, 1\)"),
        (IMAGES, np.zeros((5, 0)), r"shape \(5, 0\)"),
        (
            IMAGES,
            np.array([[0.0, 1]] * 4 + [[np.nan, 0]]),
            "sample 4: its label is float64 of shape .*finite",
        ),
        (IMAGES[:0], LABELS[:0], "no samples"),
        (IMAGES, LABELS - 1, "Sample 0 has the class index -1, but classes start at 0"),
        (IMAGES, np.array([0, 1, np.nan, 1, 0]), "sample 2: its label is nan"),
        (IMAGES, np.array([0, 1, 2, np.inf, 0]), "sample 3: its label is inf"),
        (IMAGES, np.array([0, 1, 2, 1e300, 0]), "sample 3: its label is 1e.300"),
        (IMAGES, LABELS + (1 << 40), "sample 0: its label is 1099511627776"),
        (IMAGES, LABELS > 2, "sample 0: its label is False"),
        (IMAGES, np.array(list("abcde")), "sample 0: its label is 'a'"),
        (IMAGES, list("abcde"), "sample 0: its label is 'a'"),
        (IMAGES, [0, 1, 2], "5 images and 3 labels"),
        (IMAGES, [[0], [0, 1], [1], [1], [0]], "labels are a list of values that differ in shape"),
        (IMAGES, LABELS.astype(complex), "sample 0: its label is 0j"),
    ],
)
def test_arrays(tmp_path: Path, images: Any, labels: Any, words: str) -> None:
    refused((images, labels), tmp_path, words)


@pytest.mark.parametrize("labels", [LABELS, LABELS / 2, np.eye(5)[LABELS]], ids=["classes", "targets", "vectors"])
def test_labels_in_a_list(tmp_path: Path, labels: Any) -> None:
    convert((IMAGES, labels.tolist()), tmp_path / "out.beton", progress=False)
    assert np.array_equal(open_beton(tmp_path / "out.beton").labels, labels)


def test_labels_of_which_none_has_a_class(tmp_path: Path) -> None:
    words = "Sample 4 has the class index 9, but there are 5 classes"
    refused((IMAGES, LABELS + 5), tmp_path, words, classes=list("abcde"))


@pytest.mark.parametrize("names", ["abcd", "abcdef"])
def test_other_numbers_of_names_than_of_values(tmp_path: Path, names: str) -> None:
    words = f"has {len(names)} names, but each label has 5 values"
    refused((IMAGES, np.eye(5)[LABELS]), tmp_path, words, classes=list(names))


def test_targets_have_no_names(tmp_path: Path) -> None:
    refused((IMAGES, LABELS / 2), tmp_path, "names class indices, but the labels are floats", classes=list("abcde"))


def test_a_later_target_has_no_name(tmp_path: Path) -> None:
    samples = list(zip(IMAGES, [0, 1, 0.5, 1, 0], strict=True))
    refused(samples, tmp_path, r"sample 2: its label is 0\.5, a target, but classes=", classes=["a", "b"])


def test_fewer_classes_than_labels(tmp_path: Path) -> None:
    refused((IMAGES, LABELS), tmp_path, "Sample [34] has the class index 4", classes=list("abcd"))


def test_a_folder_that_lacks_classes(tmp_path: Path) -> None:
    """Its labels are those of the names that data with all classes has."""
    folder, out = jpeg_folder(tmp_path / "images", 1, classes=("ant", "cat")), tmp_path / "out.beton"
    report = convert(folder, out, classes=["ant", "bee", "cat"], progress=False)
    assert report.classes == ["ant", "bee", "cat"]
    assert open_beton(out).labels.tolist() == [0, 2]
    words = r"the folder .*cat 'bee', and another one 'cat'\. Labels follow the sorted names"
    refused(folder, tmp_path, words, classes=["bug", "bee", "cat"])
    twice = r"classes= \(--classes\) has 'ant' twice, so the label of .*ant is not known"
    refused(folder, tmp_path, twice, classes=["ant", "ant", "bee", "cat"])


def test_torchvisions_folder_that_lacks_classes(tmp_path: Path) -> None:
    """As a folder that is given by its path."""
    data = ImageFolder(str(jpeg_folder(tmp_path / "images", 1, classes=("ant", "cat"))))
    for classes, labels in ((["ant", "bee", "cat"], [0, 2]), (["an ant", "a cat"], [0, 1])):
        report = convert(data, tmp_path / "out.beton", classes=classes, progress=False)
        assert report.classes == classes
        assert open_beton(tmp_path / "out.beton").labels.tolist() == labels
    words = r"the folder .*cat 'bee', and another one 'cat'\. Labels follow the sorted names"
    refused(data, tmp_path, words, classes=["bug", "bee", "cat"])


class Synonyms(ImageFolder):
    """Its names are not those of its folders, as torchvision's ImageNet has them."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.classes: Any = [("ant", "emmet"), ("cat",)]
        self.class_to_idx = {name: n for n, names in enumerate(self.classes) for name in names}


def test_names_that_are_not_those_of_folders_are_in_order(tmp_path: Path) -> None:
    data = Synonyms(str(jpeg_folder(tmp_path / "images", 1, classes=("n1", "n2"))))
    convert(data, tmp_path / "out.beton", classes=["cat", "ant, emmet"], progress=False)
    assert open_beton(tmp_path / "out.beton").labels.tolist() == [0, 1]


@pytest.mark.parametrize("classes", ["cats", [0, 1, 2, 3, 4], ["a", None], {"cat"}, 5], ids=repr)
def test_classes_that_are_no_list_of_names(tmp_path: Path, classes: Any) -> None:
    refused((IMAGES, LABELS), tmp_path, re.escape(f"classes={classes!r} must be a list of names"), classes=classes)


def test_a_set_of_fields_has_no_order(tmp_path: Path) -> None:
    fields: Any = {"area"}
    refused([(IMAGES[0], 0, 1)], tmp_path, r"fields=\{'area'\} must be a list of names, or a mapping", fields=fields)


def test_classes_of_an_array(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "e"]
    report = convert((IMAGES, LABELS), tmp_path / "out.beton", classes=np.array(names), progress=False)
    assert report.classes == open_beton(tmp_path / "out.beton").classes == names


def test_names_of_a_folder_in_another_order(tmp_path: Path) -> None:
    folder = jpeg_folder(tmp_path / "images", 1)
    refused(folder, tmp_path, r"the folder .*ant 'bee', like another folder", classes=["bee", "ant", "cat"])
    report = convert(folder, tmp_path / "out.beton", classes=["an ant", "bee", "a cat"], progress=False)
    assert report.classes == ["an ant", "bee", "a cat"]


def test_names_of_classes_that_are_not_utf8(tmp_path: Path) -> None:
    """A run would fail after its first epoch, when it saves its history."""
    folder = jpeg_folder(tmp_path / "images", 1, classes=(os.fsdecode(b"caf\xe9"), "tea"))
    words = r"The name of the class 'caf\\udce9' is not UTF-8\. Rename it, or its folder"
    refused(folder, tmp_path, words)
    with pytest.raises(DataError, match=words):
        TorchLoader(folder, batch_size=1, image_size=16, workers=0)
    report = convert(folder, tmp_path / "out.beton", classes=["café", "tea"], progress=False)
    assert report.classes == open_beton(tmp_path / "out.beton").classes == ["café", "tea"]


def test_a_label_without_a_class_in_a_later_file(tmp_path: Path) -> None:
    """Samples are numbered through all files, as a data set of them does."""
    with pytest.raises(DataError, match="Sample 3 has the class index 5, but there are 2 classes"):
        convert((IMAGES[:4], np.array([0, 1, 0, 5])), tmp_path / "{a,b}.beton", classes=["x", "y"], progress=False)


@pytest.mark.parametrize("out", ["a.beton", "{a,b}.beton"])
@pytest.mark.parametrize("at", range(6))
def test_a_label_without_a_class_after_skipped_samples(tmp_path: Path, out: str, at: int) -> None:
    """The number is the sample's in the source."""
    samples: list[Any] = [(IMAGES[0], 0) for _ in range(8)]
    samples[1] = samples[4] = (b"", 0)
    number = [0, 2, 3, 5, 6, 7][at]
    samples[number] = IMAGES[0], 7
    with pytest.raises(DataError, match=f"Sample {number} has the class index 7, but there are 2 classes"):
        convert(samples, tmp_path / out, classes=["x", "y"], on_error="skip", progress=False)


@pytest.mark.parametrize("source", [7, None, object(), {1, 2}, iter([1])], ids=lambda value: type(value).__name__)
def test_what_is_no_source(tmp_path: Path, source: Any) -> None:
    refused(source, tmp_path, "cannot be converted. Pass a folder")


def test_a_dict_of_data_sets(tmp_path: Path) -> None:
    """As Hugging Face returns them if no split is named."""
    parts = {"train": [(IMAGES[0], 0)], "test": [(IMAGES[1], 1)]}
    refused(parts, tmp_path, r"A dict with the keys 'train' and 1 more has no sample 0\. .* convert\(data\['train'\], ")
    numbered = {number: (IMAGES[number], number) for number in range(3)}
    assert convert(numbered, tmp_path / "out.beton", progress=False).samples == 3


class Awkward:
    """A data set whose third sample is not right."""

    def __init__(self, third: Any) -> None:
        self.third = third

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index != 2:
            return IMAGES[index], index
        if isinstance(self.third, Exception):
            raise self.third
        return self.third


def lazily_opened(tmp_path: Path) -> Image.Image:
    truncated_jpeg(tmp_path / "lazy.jpg")
    return Image.open(tmp_path / "lazy.jpg")


@pytest.mark.parametrize(
    ("third", "words"),
    [
        (KeyError("no such row"), "reading it raised KeyError: 'no such row'"),
        (OSError(5, "Input/output error"), "reading it raised OSError"),
        (RuntimeError("lost."), "reading it raised RuntimeError: lost. Repair"),
        (StopIteration(), "reading it raised StopIteration"),
        (IMAGES[0], "it is a ndarray; expected a pair"),
        ((IMAGES[0], 1, 2), r"it is a tuple of 3; expected a pair \(image, label\)"),
        ((IMAGES[0], "cat"), "its label is 'cat'"),
        ({"picture": 1, "label": 2}, r"keys \['label', 'picture'\]"),
        ({"image": IMAGES[0]}, r"keys \['image'\]"),
        ((None, 1), "sample 2: "),
        (("a/path.jpg", 1), "sample 2: "),
        ((torch.full((3, 12, 12), 0.5), 1), "its pixels are torch.float32|its pixels are float32"),
        ((b"", 1), "not an image"),
        ((Image.fromarray(np.full((9, 9), 1 << 20, np.int32)), 1), "are not in 0 to 65535"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_data_set_with_a_bad_sample(tmp_path: Path, third: Any, words: str) -> None:
    message = refused(Awkward(third), tmp_path, words)
    assert message.startswith("sample 2: ")
    report = convert(Awkward(third), tmp_path / "out.beton", on_error="skip")
    assert [name for name, _ in report.skipped] == ["sample 2"]
    assert open_beton(tmp_path / "out.beton").labels.tolist() == [0, 1, 3, 4]


def test_the_cause_is_kept(tmp_path: Path) -> None:
    cause = KeyError("no such row")
    with pytest.raises(DataError) as caught:
        convert(Awkward(cause), tmp_path / "out.beton")
    assert caught.value.__cause__ is cause


def test_picture_opened_lazily_and_cut(tmp_path: Path) -> None:
    with lazily_opened(tmp_path) as image:
        refused(Awkward((image, 1)), tmp_path, "sample 2: it cannot be decoded: .*truncated")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quality": 0}, "quality=0"),
        ({"quality": 101}, "quality=101 must be an integer from 1 to 100"),
        ({"quality": 90.5}, "quality=90.5"),
        ({"quality": "90"}, "quality='90'"),
        ({"max_resolution": 0}, "max_resolution=0"),
        ({"max_resolution": -5}, "max_resolution=-5"),
        ({"max_resolution": 99.5}, "max_resolution=99.5"),
        ({"workers": 0}, "workers=0"),
        ({"workers": -1}, "workers=-1"),
        ({"workers": 1.5}, "workers=1.5"),
        ({"on_error": "ignore"}, "on_error='ignore' must be 'raise' or 'skip'"),
        ({"write_mode": "jpeg"}, "write_mode='jpeg' is unknown. Did you mean 'jpg'"),
        ({"write_mode": None}, "write_mode=None is unknown"),
        ({"min_resolution": 0}, "min_resolution=0 must"),
        ({"min_resolution": 5, "max_resolution": 5}, "Pass only one of them"),
        ({"smart_threshold": -1}, "smart_threshold=-1"),
        ({"smart_threshold": 0.5}, "smart_threshold=0.5"),
        ({"check": "all"}, "check='all' is unknown. Known: decode, structure"),
        ({"compress_probability": 1.5}, r"compress_probability=1.5 must be in \[0, 1\]"),
        ({"compress_probability": float("nan")}, "compress_probability=nan"),
        ({"compress_probability": "half"}, "compress_probability='half'"),
        (
            {"smart_threshold": 100},
            "smart_threshold=100 is of write_mode='smart', but write_mode='auto' .* use write_mode='smart'",
        ),
        (
            {"compress_probability": 0.3, "write_mode": "jpg"},
            r"compress_probability=0\.3 is of write_mode='proportion', but write_mode='jpg' does not use it",
        ),
        ({"optimize": True, "write_mode": "raw"}, "optimize=True is for JPEGs, but write_mode='raw' stores pixels"),
        ({"keep_bytes": True, "write_mode": "raw"}, "keep_bytes=True is for JPEGs"),
    ],
    ids=str,
)
def test_arguments(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    refused((IMAGES, LABELS), tmp_path, words, **options)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    def to(out: Path, words: str) -> None:
        with pytest.raises(DataError, match=words):
            convert((IMAGES, LABELS), out)

    to(tmp_path, "is a folder. Pass the file")
    to(tmp_path / "no" / "x.beton", "no does not exist. Create it first")
    (tmp_path / "file").touch()
    to(tmp_path / "file" / "x.beton", "does not exist")
    os.mkfifo(tmp_path / "pipe.beton")
    to(tmp_path / "pipe.beton", "not a regular file")
    for name in ("file", "gen.py", ".beton"):
        to(tmp_path / name, rf"{name} does not end in \.beton.*e\.g\. .*\.beton\.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe.beton"]
    assert (tmp_path / "file").read_bytes() == b""


def test_what_each_check_finds(tmp_path: Path) -> None:
    """A truncated JPEG is found by both; one whose data is damaged, by decoding, and later by `verify`."""
    jpeg = jpeg_bytes(picture(0, 90, 120))
    damaged = bytearray(jpeg)
    middle = len(jpeg) // 2
    damaged[middle : middle + 40] = bytes([0x55] * 40)
    files = {"0.jpg": jpeg, "1.jpg": bytes(damaged), "2.jpg": jpeg + b"after the end"}
    folder = image_folder(tmp_path / "images", files)
    whole = convert(folder, tmp_path / "whole.beton")
    assert sum(count for how, count in whole.treatments.items() if how.startswith("re-encoded")) == 1
    quick = convert(folder, tmp_path / "quick.beton", check="structure")
    assert quick.treatments == {"copied unchanged": 3}
    assert [number for number, _ in verify(tmp_path / "quick.beton").bad] == [1]
    (folder / "a" / "3.jpg").write_bytes(jpeg[:-30])
    with pytest.raises(DataError, match=r"3\.jpg: it cannot be decoded: image file is truncated"):
        convert(folder, tmp_path / "quick.beton", check="structure")
