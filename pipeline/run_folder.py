"""What a run leaves in its folder beside weights and checkpoints: how it was asked for, its plan, its curves."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import yaml

from ..errors import DrivetrainError, MissingExtra, RecipeError
from ..files import atomic_file
from .builder import Pipeline
from .result import Epoch, History

PLAN, RECIPE, HISTORY, CURVES = "plan.txt", "recipe.yaml", "history.json", "curves.png"


def descriptions(pipeline: Pipeline, epochs: int) -> tuple[dict[str, str], str]:
    """The text of `plan.txt` and `recipe.yaml` by their names, and a note on what cannot be written, or ""."""
    texts, note = {PLAN: f"{pipeline.plan()!r}\n"}, ""
    try:
        recipe = pipeline._with(epochs=epochs).to_recipe()
    except RecipeError as error:  # a model of one's own, and the like
        note = f"There is no {RECIPE}: {error}"
    else:
        texts[RECIPE] = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    return texts, note


def write(folder: Path, texts: dict[str, str]) -> None:
    """Writes each text under its name. What an earlier run left under these names, and has not, goes."""
    for name in {PLAN, RECIPE} - set(texts):
        (folder / name).unlink(missing_ok=True)
    for name, text in texts.items():
        with atomic_file(folder / name) as file:
            file.write(text.encode())


def draw_curves(folder: Path) -> str:
    """Draws `curves.png` of the history that is in the folder; of several ranks under torchrun, by the first.

    Returns:
        A note if there is no picture because matplotlib is not there, else "".
    """
    if os.environ.get("RANK", "0") != "0" or not (folder / HISTORY).exists():
        return ""
    saved = json.loads((folder / HISTORY).read_text())
    history = History([Epoch(**epoch) for epoch in saved.pop("epochs")], saved)
    from .curves import draw

    try:
        picture = draw(history)
        with atomic_file(folder / CURVES) as file:
            file.write(picture)
    except MissingExtra as error:
        return f"There is no {CURVES}: {error}"
    except DrivetrainError as error:  # the training is done; its result is worth more than its picture
        warnings.warn(f"There is no {CURVES}: {error}", stacklevel=2)
    return ""
