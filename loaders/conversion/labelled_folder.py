"""A folder of images with a table of labels: one row of a CSV file for each image."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import DataError
from .folders import EXTENSIONS, PictureFiles, and_more, files_below, read_file

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d+")

Rows = dict[str, tuple[int, list[str]]]
"""Maps an image's path in the folder to its line in the table, and its values as text."""


class LabelledFolder(PictureFiles):
    """Images anywhere below a folder, labelled by a CSV file with a header and exactly one row per image.

    The first column is the image's path in the folder, with `/`. The others are its labels:

    - one column of text: class names, whose indices follow the sorted names, or those given as `classes`;
    - one column of integers: class indices;
    - one column of other numbers: a target;
    - several columns of numbers: a vector, for several labels (0 and 1) or targets. The columns' names become the
      class names.

    Samples are in the order of their paths, whatever that of the rows. Names that begin with a dot, and `__MACOSX`, are
    ignored.

    Args:
        root: the folder.
        table: the CSV file, in UTF-8.
        classes: class names in label order, for one column of text.

    Attributes:
        ignored: the other files in the folder, which are not images by their suffixes.

    Raises:
        DataError: naming the line, the image and the remedy.
    """

    kind = "folder with a table of labels"

    def __init__(self, root: Path, table: Path, classes: Sequence[str] = ()) -> None:
        if not root.is_dir():
            raise DataError(f"{root} is not a folder. With labels, pass the folder of the images.")
        columns, rows = _read(table)
        paths, others = files_below(root)
        if not paths:
            raise DataError(f"{root} contains no images ({', '.join(EXTENSIONS)}).")
        names = [Path(path).relative_to(root).as_posix() for path in paths]
        _match(root, table, names, rows)
        self._files = paths
        self.ignored = [path for path in others if Path(path) != table]
        ordered = [rows[name] for name in names]
        self.classes, self._labels = _labels(table, columns, ordered, classes)

    def get(self, index: int) -> tuple[bytes, Any]:
        return read_file(self._files[index]), self._labels[index]


def _read(table: Path) -> tuple[list[str], Rows]:
    """Return the names of the label columns, and the rows by path."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if header is None:
                raise DataError(f"{table} is empty. Write a header, and one row per image.")
            columns = _columns(table, header)
            rows: Rows = {}
            for cells in reader:
                if cells:  # a blank line
                    _add(table, reader.line_num, header, cells, rows)
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


def _add(table: Path, line: int, header: list[str], cells: list[str], rows: Rows) -> None:
    if len(cells) != len(header):
        raise DataError(
            f"{table}, line {line}: it has {len(cells)} columns, but the header has {len(header)}: "
            f"{','.join(header):.80}."
        )
    path = os.path.normpath(cells[0].strip().replace("\\", "/")) if cells[0].strip() else ""
    if not path:
        raise DataError(f"{table}, line {line}: the image's path is empty.")
    if path in rows:
        raise DataError(
            f"{table}: lines {rows[path][0]} and {line} are both for {path}. Keep one row per image."
        )
    rows[path] = line, [cell.strip() for cell in cells[1:]]


def _match(root: Path, table: Path, names: list[str], rows: Rows) -> None:
    """Raise DataError unless each image has a row, and each row an image."""
    there = set(names)
    if gone := [path for path in rows if path not in there]:
        path, more = gone[0], and_more(len(gone), "rows")
        why = "is not an image" if (root / path).is_file() else "does not exist"
        if path.startswith(f"{root.name}/"):
            why += f"; paths are those in {root}, without its name"
        raise DataError(
            f"{table}, line {rows[path][0]}: {root / path} {why}{more}. Correct or remove the row."
        )
    if left := [name for name in names if name not in rows]:
        raise DataError(
            f"{root / left[0]} has no row in {table}{and_more(len(left), 'images')}. Add a row, or move the image away."
        )


def _labels(
    table: Path, columns: list[str], rows: list[tuple[int, list[str]]], classes: Sequence[str]
) -> tuple[list[str], Any]:
    """Return class names, and the labels: int64 `(N,)`, float64 `(N,)` or float32 `(N, K)`."""
    if len(columns) > 1:
        if classes:
            raise DataError(
                f"{table} names its columns, so classes={list(classes)!r:.80} cannot. Leave classes out."
            )
        values = [[_number(table, line, name, cell) for name, cell in zip(columns, cells, strict=True)]
                  for line, cells in rows]  # fmt: skip
        return columns, np.array(values, dtype=np.float64)
    cells = [(line, values[0]) for line, values in rows]
    numeric = [bool(_NUMBER.fullmatch(cell)) for _, cell in cells]
    if classes or not any(numeric):
        return _indices(table, columns[0], cells, classes)
    numbers = [_number(table, line, columns[0], cell) for line, cell in cells]
    if all(_INTEGER.fullmatch(cell) for _, cell in cells):
        return [], [int(cell) for _, cell in cells]
    return [], numbers


def _indices(
    table: Path, column: str, cells: list[tuple[int, str]], classes: Sequence[str]
) -> tuple[list[str], NDArray[np.int64]]:
    names = list(classes) or sorted({name for _, name in cells})
    index = {name: number for number, name in enumerate(names)}
    for line, name in cells:
        if not name:
            raise DataError(f"{table}, line {line}: {column} is empty. Write a class name.")
        if name not in index:
            raise DataError(
                f"{table}, line {line}: {column} is {name!r}, which is not in classes={names!r:.200}."
            )
    return names, np.array([index[name] for _, name in cells], dtype=np.int64)


def _number(table: Path, line: int, column: str, cell: str) -> float:
    if not _NUMBER.fullmatch(cell):
        what = "empty" if not cell else f"{cell!r}, which is not a number"
        raise DataError(
            f"{table}, line {line}: {column} is {what}. Write numbers (0 and 1 for labels) in every row; class names "
            "must be the only column of labels, and none of them a number."
        )
    return float(cell)
