"""Load the result of a finished run from its folder."""

from __future__ import annotations

from pathlib import Path

from ...common.errors import CheckpointError
from ..checkpoints.remote import opened
from ..checkpoints.weights import load_model
from ..describe.pipeline_spec import PipelineSpec, sort_transforms
from ..describe.plan import Plan
from ..recipes.convert import build_pipeline
from ..training.build import rebuild_model
from .folder import HISTORY, MODEL, RECIPE, UNLISTED, read_history
from .result import FitResult


def load_run(folder: str | Path) -> FitResult:
    """Return the result of a run, from `recipe.yaml`, `model.safetensors` and `history.json` in its folder.

    The recipe may name a model in a module, which is imported: load only runs that you trust.

    Args:
        folder: the run's folder, or its address.

    Raises:
        CheckpointError: if one of these files is missing or damaged, or they are not of one run.
        RecipeError: if the recipe cannot be built.

    Example::

        >>> result = load_run("runs/photos")
        >>> sorted(result.metrics)
        ['top1', 'val_loss']
    """
    place, folder = folder, opened(folder, RECIPE, HISTORY, MODEL, UNLISTED)
    history = read_history(folder)
    if history is None or not history.epochs:
        raise CheckpointError(
            f"{place} has no finished epoch of a run: its {HISTORY} is missing or damaged. Pass the folder of a "
            "run (fit(out=…), --out)."
        )
    if not (folder / RECIPE).exists():
        raise CheckpointError(
            f"{place} has no {RECIPE}, because its pipeline could not be written as one. Build the pipeline again, "
            "and load model.safetensors into its model."
        )
    spec = build_pipeline(folder / RECIPE, {}, PipelineSpec)
    transforms = sort_transforms(spec.transforms)
    state = load_model(folder / MODEL, epochs=len(history.epochs))
    if not state:
        raise CheckpointError(
            f"{folder / MODEL} does not have the weights after epoch {len(history.epochs)}, the last in {HISTORY}. "
            "Resume the run (--resume), which writes them again."
        )
    try:
        model, reports = rebuild_model(spec, transforms, state)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder / MODEL} does not fit the model of {folder / RECIPE}: {error}"
        ) from error
    return FitResult(model.eval(), history, reports, Plan(()), transforms, spec)
