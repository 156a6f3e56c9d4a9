"""Write predictions: a table as CSV or Parquet, or masks as a folder of PNG files. Never half of one."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...common.errors import DataError, require
from ...common.storage.files import atomic_file
from ...loaders.beton.targets import palette
from ..describe.inputs import Inputs
from ..tasks.standard import Segmentation
from ..tasks.task import Task, names_of
from .prediction import Predicted

TABLES = (".csv", ".parquet")
UNSEEN = 255  # of a mask where the model saw nothing


def check_out(out: Path, task: Task) -> None:
    """Raise unless the predictions of this task can be written there: before anything is predicted."""
    masks = isinstance(task, Segmentation)
    if out.suffix.lower() in TABLES:
        if masks:
            raise DataError(f"{out} is a table, but the predictions are masks. Pass a folder, e.g. {out.stem}/.")
        if out.is_dir() or not out.parent.is_dir():
            wrong = f"{out} is a folder" if out.is_dir() else f"The folder {out.parent} does not exist"
            raise DataError(f"{wrong}. Pass the name of a file in a folder that exists.")
        if out.suffix.lower() == ".parquet":
            require("pyarrow.parquet", "parquet", "write Parquet")
    elif not masks:
        raise DataError(f"{out} must end in {' or '.join(TABLES)}; a folder is for the masks of Segmentation.")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists. Pass a new folder for the masks.")
    elif out.is_symlink() or (out.exists() and (out.is_mount() or out.samefile("."))):
        raise DataError(
            f"{out} is a link, a mount or the working directory, which the folder of the masks cannot replace when all "
            f"are written. Pass a new folder in it: {out / 'masks'}."
        )


def write_table(out: Path, rows: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> None:
    """Write a row per picture. Values by name become a column each: `probabilities.cat`."""
    flat = [_flat(row, classes) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row)) or ["image"]
    with atomic_file(out) as file:
        if out.suffix.lower() == ".parquet":
            arrow = require("pyarrow", "parquet", "write Parquet")
            table = arrow.table({name: [row.get(name) for row in flat] for name in columns})
            require("pyarrow.parquet", "parquet", "write Parquet").write_table(table, file)
            return
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        for row in flat:
            writer.writerow({name: _cell(value) for name, value in row.items()})
        text.flush()
        text.detach()


def _flat(row: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            known = [name for name in names_of(len(value), classes) if name in value]  # in the order of the classes
            flat |= {f"{key}.{name}": value[name] for name in dict.fromkeys([*known, *value])}
        else:
            text = str(value) if key == "image" else value
            flat[key] = _utf8(text) if isinstance(text, str) else text
    return flat


def _utf8(text: str) -> str:
    """Return a text as a table can have it: bytes in the name of a file that are not UTF-8 become U+FFFD."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def write_masks(out: Path, names: Sequence[str], masks: Iterable[Predicted], inputs: Inputs) -> list[dict[str, Any]]:
    """Write each mask as a PNG file with a palette, of the picture's size: its values are the classes, and 255 where
    the model saw nothing. It is under the path of the picture, one of `names`, below the folder that all have in
    common. The folder appears when all are written. Return a row per picture: `image` and `mask`, or `error`."""
    rows, targets, taken = list[dict[str, Any]](), _below(names), set[str]()
    for name, target in zip(names, targets, strict=True):
        if target in taken:
            raise DataError(f"{name}: another image has the same mask, {target}. Rename one of them.")
        taken.add(target)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for target, one in zip(targets, masks, strict=True):
            if one.error:
                rows.append({"image": one.name, "error": one.error})
                continue
            (partial / target).parent.mkdir(parents=True, exist_ok=True)
            mask_of(one, inputs).save(partial / target, format="PNG")
            rows.append({"image": one.name, "mask": str(out / target)})
        partial.chmod(0o755)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return rows


def mask_of(one: Predicted, inputs: Inputs) -> Image.Image:
    """Return the mask of a picture, in its size and with a palette: classes, and 255 where the model saw nothing."""
    values = one.prediction.numpy()
    if values.max(initial=0) >= UNSEEN:
        raise DataError(
            f"{one.name}: class {values.max()} does not fit into a mask file, which has 0 to {UNSEEN - 1}. "
            "Use predict() without out=."
        )
    image = Image.fromarray(inputs.transform().back(values.astype(np.uint8), one.size))
    image.putpalette(palette(inputs.colors).tobytes())
    return image


def _below(names: Sequence[str]) -> list[str]:
    """Return the mask's path of each picture: below the folder that all have in common."""
    paths = [os.path.abspath(name) for name in names]  # noqa: PTH100  resolves no links
    common = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""  # noqa: PTH120
    return [str(Path(os.path.relpath(path, common)).with_suffix(".png")) if "[" not in Path(path).name
            else f"{os.path.relpath(path, common)}.png" for path in paths]  # fmt: skip
