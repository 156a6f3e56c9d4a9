"""`drivetrain predict`: single images through a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ....common.errors import DataError
from ....common.table import Table
from .options import FILES, Command, Place, argument, option

_SHOWN = 3  # most probable classes in the table


@click.command(cls=Command)
@argument("run", "Folder or address of a finished run (train --out).", Place())
@argument("image", "Image files.", FILES, nargs=-1)
@option("--json", "Print one JSON object per image, with all probabilities.", name="as_json")
def predict(run: Path | str, image: tuple[str, ...], as_json: bool) -> None:
    """Predict images with a trained model.

    Each image is cropped, resized and normalized as in the run's evaluation.
    """
    from json import dumps

    from ...recipes.importing import modules_of
    from ...runs.result import load_run

    if not image:
        raise DataError("predict needs at least one image: drivetrain predict RUN image.jpg …")
    missing = [path for path in image if not Path(path).is_file()]
    if missing:
        folder = f", e.g. {missing[0].rstrip('/')}/*.jpg" if Path(missing[0]).is_dir() else ""
        raise DataError(f"{missing[0]} is not a file. Pass the paths of images{folder}.")
    with modules_of():
        result = load_run(run)
    rows = result.predict(list(image))
    if as_json:
        for row in rows:
            print(dumps(row, ensure_ascii=False))
        return
    print(Table(("image", "prediction"), [(str(row["image"]), _text(row)) for row in rows]))


def _text(row: dict[str, Any]) -> str:
    if "class" in row:
        best = [*row["probabilities"].items()][:_SHOWN]
        return ", ".join(f"{name} {probability:.1%}" for name, probability in best)
    if "labels" in row:
        chosen = [f"{name} {row['probabilities'][name]:.1%}" for name in row["labels"]]
        return ", ".join(chosen) or "none"
    if "values" in row:
        return ", ".join(f"{name} {each:.4g}" for name, each in row["values"].items())
    value = row.get("value", row.get("prediction"))
    return ", ".join(f"{each:.4g}" for each in value) if isinstance(value, list) else f"{value:.4g}"
