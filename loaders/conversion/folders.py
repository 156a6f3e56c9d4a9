"""Folders of images as sources: with a folder for each class, with a folder of masks, or with a table of labels."""

import csv
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as in torchvision

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")

Row = tuple[int, list[str]]  # the line of an image in a table of labels, and its values as text


def _is_hidden(name: str) -> bool:
    """Whether a file or folder is not the user's data: `.ipynb_checkpoints`, `._0.jpg`, `__MACOSX`."""
    return name.startswith(".") or name == "__MACOSX"


def files_below(folder: Path) -> tuple[list[str], list[str]]:
    """Return all images below a folder, except hidden ones, and the other files; sorted as paths: by folder, then name.
    Folders are also followed where they are links, as in torchvision. Takes a third of the time of `rglob`."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None

    images: list[str] = []
    others: list[str] = []
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        root = "" if root == os.curdir else root.removeprefix(os.path.join(os.curdir, ""))  # noqa: PTH118
        folders[:] = [name for name in folders if not _is_hidden(name)]  # os.walk descends into these
        for name in folders:
            _refuse_loop(Path(root, name))
        images += [os.path.join(root, name) for name in folders if _is_image(name)]  # noqa: PTH118 — for speed
        for name in files:
            if not _is_hidden(name):
                (images if _is_image(name) else others).append(os.path.join(root, name))  # noqa: PTH118
    return _in_order(images), _in_order(others)


def _refuse_loop(folder: Path) -> None:
    """Raise DataError for a link to a folder that it is in: its images would be found again and again."""
    if folder.is_symlink() and any(folder.samefile(above) for above in folder.parents):
        raise DataError(f"{folder} is a link to a folder that it is in. Remove the link.")


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in EXTENSIONS  # noqa: PTH122


def _is_stray(path: Path) -> bool:
    """Whether it is an image directly in the folder of the classes. Other files there, as tables, are no samples."""
    return _is_image(path.name) and not _is_hidden(path.name) and not path.is_dir()


def why_ignored(path: str) -> str:
    return "in no folder of a class" if _is_image(path) else "not an image by its suffix"


def _in_order(paths: list[str]) -> list[str]:
    return sorted(paths, key=lambda path: path.split(os.sep))  # noqa: PTH206


def _read_file(path: str, name: str = "it") -> bytes:
    try:
        with open(path, "rb", opener=without_waiting) as file:  # takes half the time of Path.open
            return file.read()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from None


def without_waiting(path: str, flags: int) -> int:
    """Open a pipe, too, which nobody may ever write: it is read as an empty file."""
    return os.open(path, flags | os.O_NONBLOCK)


def _and_more(count: int, what: str) -> str:
    return f" ({count} such {what})" if count > 1 else ""


def refuse_odd_names(classes: Sequence[str], remedy: str = "Rename it, or its folder.") -> None:
    """Raise DataError for a class whose name has bytes which are not UTF-8, as of a folder from an old archive: a run
    could neither save it in its history nor open weights with it."""
    for name in classes:
        if name != name.encode(errors="replace").decode():
            raise DataError(f"The name of the class {name!r} is not UTF-8. {remedy}")


class PictureFiles:
    """Samples that each have a file of their own, by whose path messages name them. `ignored`: the other files in the
    folder, which are not images by their suffixes, or have no class."""

    _files: list[str]  # strings, not Path objects: a tenth of the memory
    ignored: list[str]

    def __len__(self) -> int:
        return len(self._files)

    def describe(self, index: int) -> str:
        return self._files[index]

    def _find_images(self, root: Path) -> None:
        if not root.is_dir():
            raise DataError(f"{root} is not a folder. With labels, pass the folder of the images.")
        self._files, self.ignored = files_below(root)


class FolderSource(PictureFiles):
    """A folder with one folder per class; class indices follow the sorted names, as in torchvision's ImageFolder, or
    the names in `classes`, if there are more. Other names must not be those of the folders in another order."""

    kind = "folder"

    def __init__(self, root: Path, classes: Sequence[str] = ()) -> None:
        if not root.exists():
            raise DataError(f"{root} does not exist. Pass a folder that contains one folder of images per class.")
        if not root.is_dir():
            raise DataError(f"{root} is a file. Pass a folder that contains one folder of images per class.")
        folders = sorted(child for child in root.iterdir() if child.is_dir() and not _is_hidden(child.name))
        if not folders:
            raise DataError(f"{root} contains no folders. Put the images of each class into a separate folder there.")
        self.root, self.classes = root, [folder.name for folder in folders]
        self._numbers = class_numbers(root, self.classes, classes)
        self.ignored = [str(path) for path in sorted(root.iterdir()) if _is_stray(path)]
        self._files = []
        self._starts = array("q")  # first index of each class in `_files`
        for folder in folders:
            files, others = files_below(folder)
            self.ignored += others
            if not files:
                raise DataError(
                    f"{folder} contains no images ({', '.join(EXTENSIONS)}). Add some, or remove it: each folder "
                    "in the root is a class."
                )
            self._starts.append(len(self._files))
            self._files += files

    def get(self, index: int) -> tuple[bytes, int]:
        return _read_file(self._files[index]), self._label(index)

    def listed(self) -> list[tuple[str, int]]:
        return [(path, self._label(index)) for index, path in enumerate(self._files)]

    def _label(self, index: int) -> int:
        return self._numbers[bisect_right(self._starts, index) - 1]


def class_numbers(root: Path, folders: list[str], classes: Sequence[str]) -> Sequence[int]:
    """Return the class index of each folder: its place among them; or that of its name in `classes`, if these have the
    names of all folders, and further ones."""
    names, known = set(classes), set(folders)
    if known < names:
        for name in folders:
            if list(classes).count(name) > 1:
                raise DataError(f"classes= (--classes) has {name!r} twice, so the label of {root / name} is not known.")
        places = {name: number for number, name in enumerate(classes)}
        return [places[name] for name in folders]
    for name, own in zip(classes, folders, strict=False):
        if name != own and (name in known or own in names):
            like = "like another folder" if name in known else f"and another one {own!r}"
            raise DataError(
                f"classes={list(classes)!r:.200} (--classes) names the images of the folder {root / own} {name!r}, "
                f"{like}. Labels follow the sorted names of the folders: leave classes out."
            )
    return range(len(folders))


class MaskFolder(PictureFiles):
    """Images anywhere below a folder, in the order of their paths, each with its own mask in another folder: `a/1.jpg`
    has `a/1.png`, or `a/1.PNG`. Images in that folder, if it is below the other, are ignored."""

    kind = "folder with masks"
    classes: list[str] = []  # noqa: RUF012 — they are in no file, and nothing is ever added

    def __init__(self, root: Path, masks: Path) -> None:
        self._find_images(root)
        if root.resolve() == masks.resolve():
            raise DataError(f"{root} is the folder of images and of masks. Move the masks to a folder of their own.")
        inside = os.path.relpath(masks.resolve(), root.resolve())
        own = f"{masks}{os.sep}", f"{root / inside}{os.sep}"  # the folder of masks may be a link
        self._files = [path for path in self._files if not path.startswith(own)]
        self.ignored = [path for path in self.ignored if not path.startswith(own)]
        if not self._files:
            raise DataError(f"{root} contains no images ({', '.join(EXTENSIONS)}).")
        wanted = [str(masks / Path(path).relative_to(root).with_suffix(".png")) for path in self._files]
        self._masks = _match_masks(root, masks, self._files, wanted)

    def get(self, index: int) -> tuple[bytes, bytes]:
        image, mask = self._files[index], self._masks[index]
        return _read_file(image, image), _read_file(mask, mask)

    def describe(self, index: int) -> str:
        return f"{self._files[index]}, mask {self._masks[index]}"


def _match_masks(root: Path, folder: Path, images: list[str], masks: list[str]) -> list[str]:
    """Return the files of the masks, whose suffixes may have capitals."""
    there: dict[str, str] = {}
    for path in files_below(folder)[0]:
        if path.lower().endswith(".png"):
            name = str(Path(path).with_suffix(".png"))
            if there.setdefault(name, path) != path:
                raise DataError(f"{there[name]} and {path} are masks of the same image. Remove one of them.")
    missing = [(image, mask) for image, mask in zip(images, masks, strict=True) if mask not in there]
    if missing:
        image, mask = missing[0]
        raise DataError(
            f"{image} has no mask {mask}{_and_more(len(missing), 'images')}. Masks are PNG files in {folder} with the "
            "names of the images. Add the mask, or move the image away."
        )
    users: dict[str, str] = {}
    for image, mask in zip(images, masks, strict=True):
        if users.setdefault(mask, image) != image:
            raise DataError(f"{users[mask]} and {image} have the same mask, {mask}. Rename one of them.")
    if left := sorted(there.keys() - users.keys()):
        raise DataError(
            f"The mask {there[left[0]]} has no image in {root}{_and_more(len(left), 'masks')}. Add the image, or move "
            "the mask away."
        )
    return [there[mask] for mask in masks]


class LabeledFolder(PictureFiles):
    """Images anywhere below a folder, in the order of their paths, labeled by a CSV file in UTF-8 with a header and
    exactly one row per image; see `labels` of `convert`."""

    kind = "folder with a table of labels"

    def __init__(self, root: Path, table: Path, classes: Sequence[str] = ()) -> None:
        self._find_images(root)
        columns, rows = _read_table(table)
        if not self._files:
            raise DataError(f"{root} contains no images ({', '.join(EXTENSIONS)}).")
        names = [Path(path).relative_to(root).as_posix() for path in self._files]
        _match_rows(root, table, names, rows)
        self.ignored = [path for path in self.ignored if Path(path) != table]
        self.classes, self._labels = _labels(table, columns, [rows[name] for name in names], classes)

    def get(self, index: int) -> tuple[bytes, Any]:
        return _read_file(self._files[index]), self._labels[index]


def _read_table(table: Path) -> tuple[list[str], dict[str, Row]]:
    """Return the names of the label columns, and the rows by path."""
    rows: dict[str, Row] = {}
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if header is None:
                raise DataError(f"{table} is empty. Write a header, and one row per image.")
            columns = _columns(table, header)
            for cells in reader:
                if cells:  # a blank line
                    _add_row(table, reader.line_num, header, cells, rows)
    except OSError as error:
        raise DataError(f"The table of labels {table} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DataError(f"{table} is not UTF-8. Save it as CSV in UTF-8.") from None
    except csv.Error as error:
        raise DataError(f"{table}, line {reader.line_num}: it is not CSV: {error}.") from None
    if not rows:
        raise DataError(f"{table} has a header, but no rows. Write one row per image.")
    return columns, rows


def _columns(table: Path, header: list[str]) -> list[str]:
    columns = [name.strip() for name in header[1:]]
    if not columns:
        raise DataError(
            f"{table}, line 1: it has one column, {header[0] if header else ''!r}. Separate columns by commas: the "
            "image's path in the folder, then its labels."
        )
    if header[0].strip().lower().endswith(EXTENSIONS):
        raise DataError(
            f"{table}, line 1: it is a row of the image {header[0]!r}. Write a header first, e.g. 'file,label'."
        )
    for number, name in enumerate(columns, 2):
        if not name:
            raise DataError(f"{table}, line 1: column {number} has no name. Give each column one.")
        if columns.index(name) != number - 2:
            raise DataError(f"{table}, line 1: two columns are named {name!r}. Give each its own name.")
    return columns


def _add_row(table: Path, line: int, header: list[str], cells: list[str], rows: dict[str, Row]) -> None:
    if len(cells) != len(header):
        raise DataError(
            f"{table}, line {line}: it has {len(cells)} columns, but the header has {len(header)}: "
            f"{','.join(header):.80}."
        )
    path = os.path.normpath(cells[0].strip().replace("\\", "/")) if cells[0].strip() else ""
    if not path:
        raise DataError(f"{table}, line {line}: the image's path is empty.")
    if path in rows:
        raise DataError(f"{table}: lines {rows[path][0]} and {line} are both for {path}. Keep one row per image.")
    rows[path] = line, [cell.strip() for cell in cells[1:]]


def _match_rows(root: Path, table: Path, names: list[str], rows: dict[str, Row]) -> None:
    there = set(names)
    if gone := [path for path in rows if path not in there]:
        path, more = gone[0], _and_more(len(gone), "rows")
        why = "is hidden, or not an image by its suffix" if (root / path).is_file() else "does not exist"
        if os.path.isabs(path) or path.startswith(os.pardir):  # noqa: PTH117
            why = f"is not a path in the folder, such as {names[0]}"
        if path.startswith(f"{root.name}/"):
            why += f"; paths are those in {root}, without its name"
        raise DataError(f"{table}, line {rows[path][0]}: {root / path} {why}{more}. Correct or remove the row.")
    if left := [name for name in names if name not in rows]:
        raise DataError(
            f"{root / left[0]} has no row in {table}{_and_more(len(left), 'images')}. Add a row, or move the image "
            "away."
        )


def _labels(table: Path, columns: list[str], rows: list[Row], classes: Sequence[str]) -> tuple[list[str], Any]:
    """Return class names, and the labels: int64 `(N,)`, float64 `(N,)` or float32 `(N, K)`."""
    if len(columns) > 1:
        if classes:
            raise DataError(f"{table} names its columns, so classes={list(classes)!r:.80} cannot. Leave classes out.")
        values = [[_number(table, line, name, cell) for name, cell in zip(columns, cells, strict=True)]
                  for line, cells in rows]  # fmt: skip
        return columns, np.array(values, dtype=np.float64)
    cells = [(line, values[0]) for line, values in rows]
    if classes or not any(_NUMBER.fullmatch(cell) for _, cell in cells):
        return _class_indices(table, columns[0], cells, classes)
    numbers = [_number(table, line, columns[0], cell) for line, cell in cells]
    integers = all(_INTEGER.fullmatch(cell) for _, cell in cells)
    return [], [int(cell) for _, cell in cells] if integers else numbers


def _class_indices(
    table: Path, column: str, cells: list[tuple[int, str]], classes: Sequence[str]
) -> tuple[list[str], list[int]]:
    names = list(classes) or sorted({name for _, name in cells})
    index = {name: number for number, name in enumerate(names)}
    if len(index) < len(names):
        twice = next(name for number, name in enumerate(names) if index[name] != number)
        raise DataError(f"classes={names!r:.200} has {twice!r} twice. Names are in label order, one per class.")
    for line, name in cells:
        if not name:
            raise DataError(f"{table}, line {line}: {column} is empty. Write a class name.")
        if name not in index:
            raise DataError(f"{table}, line {line}: {column} is {name!r}, which is not in classes={names!r:.200}.")
    return names, [index[name] for _, name in cells]


def _number(table: Path, line: int, column: str, cell: str) -> float:
    if not _NUMBER.fullmatch(cell):
        what = "empty" if not cell else f"{cell!r}, which is not a number"
        raise DataError(
            f"{table}, line {line}: {column} is {what}. Write numbers (0 and 1 for labels) in every row; class names "
            "must be the only column of labels, and none of them a number."
        )
    return float(cell)
