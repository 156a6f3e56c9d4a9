"""A folder of images with a CSV file of labels: classes by name, indices, targets, several labels; and exact errors."""

from pathlib import Path

import numpy as np
import pytest
from command_line import call
from drivetrain import DataError
from drivetrain.loaders import convert, inspect, open_beton
from loader_pictures import beton_of, jpeg_bytes, picture, refused

NAMES = ["a.jpg", "b.JPG", "deep/c.png", "deep/er/d.jpeg"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images at several depths, and what is not one."""
    root = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg_bytes(picture(number, 20, 24)))
    (root / ".hidden.jpg").write_bytes(b"")
    (root / "notes.txt").write_text("")
    return root


def table(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "labels.csv"
    path.write_text(text, encoding=encoding)
    return path


ACCEPTED = {
    "class names": (
        "file,animal\nb.JPG,dog\na.jpg,cat\ndeep/c.png,dog\ndeep/er/d.jpeg,ant\n",
        [1, 2, 2, 0],
        ["ant", "cat", "dog"],
    ),
    "class indices": (
        "file,class\r\na.jpg,3\r\nb.JPG,0\r\n\r\ndeep/c.png,1\r\n./deep/er/d.jpeg,3",
        [3, 0, 1, 3],
        [],
    ),
    "a target": (
        "file,age\na.jpg,3\nb.JPG, -0.5\ndeep/c.png,1e1\ndeep/er/d.jpeg,.25\n",
        [3, -0.5, 10, 0.25],
        [],
    ),
    "several labels": (
        'file,sun,"sea, deep",fish\na.jpg,1,0,0\nb.JPG,0,1,1\ndeep\\c.png,0,0,0\ndeep/er/d.jpeg,1,1,1\n',
        [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]],
        ["sun", "sea, deep", "fish"],
    ),
    "several targets": (
        "file,x,y\na.jpg,1.5,0\nb.JPG,0,-2\ndeep/c.png,3,4\ndeep/er/d.jpeg,5,6.25\n",
        [[1.5, 0], [0, -2], [3, 4], [5, 6.25]],
        ["x", "y"],
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_labels_are_those_of_the_rows(name: str, encoding: str, folder: Path, tmp_path: Path) -> None:
    text, labels, classes = ACCEPTED[name]
    out = tmp_path / "out.beton"
    report = convert(folder, out, labels=table(tmp_path, text, encoding))
    beton = open_beton(out)
    np.testing.assert_array_equal(beton.labels, np.array(labels, dtype=beton.labels.dtype))
    assert report.classes == list(beton.classes) == classes
    for number, path in enumerate(NAMES):  # JPEG files whatever they are called, in the order of their paths
        assert beton.read("image", np.array([number]))[0] == (folder / path).read_bytes()
    shown = repr(inspect(out))
    assert name == "several targets" or all(each in shown for each in classes)


def test_classes_given_by_name_keep_their_order(folder: Path, tmp_path: Path) -> None:
    text, *_ = ACCEPTED["class names"]
    names = ["dog", "whale", "cat", "ant"]
    beton = beton_of(folder, tmp_path / "out.beton", labels=table(tmp_path, text), classes=names)
    assert beton.labels.tolist() == [2, 0, 0, 3]
    assert list(beton.classes) == names
    numbers = table(tmp_path, "file,house\na.jpg,7\nb.JPG,8\ndeep/c.png,7\ndeep/er/d.jpeg,7\n")
    beton = beton_of(folder, tmp_path / "out.beton", labels=numbers, classes=["7", "8"])
    assert beton.labels.tolist() == [0, 1, 0, 0]


ROWS = "a.jpg,1\nb.JPG,0\ndeep/c.png,1\n"
LAST = "deep/er/d.jpeg,1\n"
PAIRS = "file,x,y\na.jpg,1,1\nb.JPG,0,0\ndeep/c.png,1,0\ndeep/er/d.jpeg,0,0\n"
START, FULL = f"file,label\n{ROWS}deep/er/d.jpeg", f"file,label\n{ROWS}{LAST}"
REFUSED = {
    "an image without a row": (f"file,label\n{ROWS}", r"d\.jpeg has no row in .*labels\.csv\. Add a row"),
    "images without rows": ("file,label\na.jpg,1\n", r"b\.JPG has no row in .* \(3 such images\)"),
    "a row without an image": (
        f"file,label\nno.jpg,1\n{ROWS}{LAST}",
        r"line 2: .*no\.jpg does not exist\. Correct",
    ),
    "paths with the folder": (
        "file,label\nFOLDER/a.jpg,1\n",
        r"does not exist; paths are those in .*, without its name",
    ),
    "a row of what is not an image": (f"{FULL}notes.txt,1\n", r"line 6: .*notes\.txt is hidden, or not an image by"),
    "a path that leads out": (f"file,label\n../x.jpg,1\n{ROWS}{LAST}", r"line 2: .*x\.jpg is not a path in the folder"),
    "an absolute path": (f"{FULL}ROOT/a.jpg,1\n", r"a\.jpg is not a path in the folder, such as a\.jpg"),
    "an image twice": (f"{FULL}./a.jpg,1\n", r"lines 2 and 6 are both for a\.jpg"),
    "text among numbers": (f"{START},yes\n", r"line 5: label is 'yes', which is not a number.*0 and 1"),
    "text in one of several": (PAIRS.replace("1,1", "1,high"), r"line 2: y is 'high'"),
    "no number": (f"{START},nan\n", "line 5: label is 'nan', which is not a number"),
    "a number too large": (PAIRS.replace("1,1", "1,1e99"), "must be finite"),
    "an empty number": (f"{START},\n", "line 5: label is empty. Write numbers"),
    "an empty name": (
        "file,kind\na.jpg,x\nb.JPG,\ndeep/c.png,x\ndeep/er/d.jpeg,x\n",
        "line 3: kind is empty. Write a class",
    ),
    "an empty path": (f"file,label\n{ROWS},1\n", "line 5: the image's path is empty"),
    "a short row": (f"{START}\n", r"line 5: it has 1 columns, but the header has 2: file,label"),
    "a long row": (f"{START},1,2\n", "line 5: it has 3 columns, but the header has 2"),
    "nothing": ("", r"labels\.csv is empty"),
    "a header alone": ("file,label\n", "has a header, but no rows"),
    "no header": (f"{ROWS}{LAST}", r"line 1: it is a row of the image 'a\.jpg'\. Write a header"),
    "other separators": (
        f"file;label\n{ROWS}",
        "line 1: it has one column, 'file;label'. Separate columns by commas",
    ),
    "a column without a name": (f"file,\n{ROWS}", "line 1: column 2 has no name"),
    "a name twice": (f"file,x,x\n{ROWS}", "line 1: two columns are named 'x'"),
    "an open quote": (f'file,label\na.jpg,"1\n{ROWS}', r"line \d: it is not CSV"),
    "a negative whole number": (
        f"{START},-5\n",
        r"Sample 3 has the class index -5, but classes start at 0\. Targets are floats, such as -5\.0\.$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, folder: Path, tmp_path: Path) -> None:
    text, words = REFUSED[case]
    text = text.replace("FOLDER", folder.name).replace("ROOT", str(folder))
    refused(folder, tmp_path, words, labels=table(tmp_path, text))


def test_refused_arguments(folder: Path, tmp_path: Path) -> None:
    good = table(tmp_path, ACCEPTED["several labels"][0])
    names = table(tmp_path / "..", ACCEPTED["class names"][0])
    latin = tmp_path / "latin.csv"
    latin.write_bytes("file,größe\n".encode("latin-1"))
    empty = tmp_path / "empty"
    empty.mkdir()
    pair = np.zeros((2, 4, 4, 3), dtype=np.uint8), np.zeros(2, dtype=np.int64)
    for source, labels, options, words in (
        (folder, tmp_path / "none.csv", {}, r"none\.csv cannot be read: No such file"),
        (folder, latin, {}, "not UTF-8"),
        (tmp_path / "nowhere", good, {}, "nowhere is not a folder"),
        (empty, good, {}, "contains no images"),
        (pair, good, {}, "are for a folder of images"),
        ("train-{0..1}.tar", good, {}, "are for a folder of images"),
        (folder, good, {"fields": ["json"]}, "has only image and label"),
        (folder, good, {"classes": ["a", "b", "c"]}, "names its columns"),
        (folder, names, {"classes": ["cat", "dog"]}, r"line 5: animal is 'ant', which is not in classes"),
        (folder, names, {"classes": ["ant", "cat", "ant", "dog"]}, r"has 'ant' twice"),
    ):
        with pytest.raises(DataError, match=words):
            convert(source, tmp_path / "out.beton", labels=labels, **options)  # type: ignore[arg-type]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    labels, out = table(tmp_path, ACCEPTED["several labels"][0]), tmp_path / "out.beton"
    end = call("convert", str(folder), str(out), "--labels", str(labels))
    assert end.code == 0, end.err
    assert "4 images" in end.out
    assert list(open_beton(out).classes) == ["sun", "sea, deep", "fish"]
    assert "sea, deep" in call("inspect", str(out)).out
    assert "none.csv cannot be read" in call("convert", str(folder), str(out), "--labels", "none.csv").line
