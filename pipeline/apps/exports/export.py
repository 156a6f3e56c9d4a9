"""Export a trained model: its weights, or a program that needs none of its code; with a model card."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ....common.checks import check_number
from ....common.errors import CheckpointError, DataError, RecipeError, require_suffix, suggest
from ....common.model_state import load_state
from ....loaders.image_size import height_width
from ...describe.inputs import Inputs, metadata
from ...recipes.files import RECIPE, read_recipe
from ...recipes.script import modules_named
from ...runs.checkpoints.directory import CheckpointDir
from ...runs.checkpoints.format import Checkpoint
from ...runs.checkpoints.remote import STATE, opened
from ...runs.checkpoints.state import ModelArg, chosen, evaluated_state, plain_names, rebuild
from ...runs.checkpoints.weights import save_model
from ...runs.folder import MODEL, PLAN, provide_code
from ...tasks.target_scale import BUFFERS
from ...telemetry.history import HISTORY
from .card import CARD, LEDGER, check_card, write_card
from .programs import Difference, write_program

Names = Literal["plain", "trained"]
Format = Literal["safetensors", "torch-export", "onnx"]
SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
"""The formats, with the suffixes of their files."""
IMAGES = 8  # to compare on: enough to differ, few enough for any model
TOLERANCE = 1e-3
"""Largest difference of a program's outputs, relative to the largest output. Other kernels sum in another order: of
fp32 networks, 1e-6 to 1e-5; what computes something else differs by much more."""


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        path: the file.
        checkpoint: where it is from.
        card: the model card.
        difference: between the file's program and the model; None for safetensors.

    Example::

        >>> export("runs/photos", "model.safetensors").card.name
        'MODEL_CARD.md'
    """

    path: Path
    checkpoint: Checkpoint
    card: Path
    difference: Difference | None = None

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.checkpoint.path.name}", self.difference, f"model card: {self.card}"]
        return "\n  ".join(str(line) for line in lines if line is not None)


def export(
    place: str | Path, out: str | Path, *, format: Format | None = None, names: Names = "plain",
    best: bool = False, model: ModelArg = None, data: str | Path | None = None, tolerance: float | None = None,
    trust_code: bool = False,
) -> Exported:  # fmt: skip
    """Write a trained model as one file, with the evaluated weights: averages (EMA, SWA) if there are any. Next to it,
    write its model card, `MODEL_CARD.md`.

    The file's metadata has the preprocessing with the names of the classes (`inputs`) and the task (`task`), as JSON.
    The programs (`"torch-export"`, `"onnx"`) contain the model after surgery, in fp32, for any number of images:
    float32 `(N, C, H, W)`, normalized, as the evaluation loader gives them. Before such a file appears, it is run on
    the same images as the model.

    Args:
        place: a checkpoint, or the folder of a run, which stands for its newest complete checkpoint; also its address.
        out: the file to write, which ends in `.safetensors`, `.pt2` or `.onnx`; an existing one is replaced.
        format: `"safetensors"`, the weights; `"torch-export"`, a program for `torch.export.load`; `"onnx"`, a program
            for any ONNX runtime. None: by the suffix of `out`.
        names: of safetensors. `"plain"`: the parameter names of the model before surgery, which can load the file with
            `load_state_dict`. Tensors that a surgery adds and the plain model does not have keep their names, see
            `Transform.to_plain`. `"trained"`: the names of the model after surgery.
        best: for the folder of a run, take the checkpoint with the best monitored metric instead.
        model: the model before surgery, as `Pipeline` takes it: `"module:factory"`, a factory, called with the options
            that it was trained with, or a module. None: the model that the checkpoint names, which must be one of
            Drivetrain's, torchvision's, timm's or Hugging Face's, because opening a checkpoint runs no code.
        data: a `.beton` file, to compare a program with the model on its first images. None: the validation data that
            the run's `recipe.yaml` names, else its training data; random images if neither is a `.beton` file that
            exists.
        tolerance: largest difference between a program's outputs and the model's, relative to the largest output, or to
            1 if all are smaller. In (0, 1]. None: 0.001.
        trust_code: as `load_run` takes it, for a run whose model its training script defined.

    Returns:
        What was written, and from which checkpoint.

    Raises:
        CheckpointError: if there is no checkpoint, if it is damaged, if its model is unknown, if `model` is not the
            trained one, for other `names`, or if `out` has another suffix, or is the `model.safetensors` of a run.
        ExportError: if the model cannot be exported, or the program computes something else. Nothing is written.
        MissingExtra: for ONNX without the extra `onnx`.
        RecipeError: if `model` cannot be imported.

    Example::

        >>> exported = export("runs/photos", "photos.safetensors")
        >>> exported.path.name
        'photos.safetensors'
    """
    where, place, out = place, opened(place, RECIPE, LEDGER), Path(out)
    kind = _format(format, out)
    if out.name == MODEL and all((out.parent / name).exists() for name in (PLAN, HISTORY)):
        raise CheckpointError(
            f"{out} has the weights of a run, without which neither load_run nor drivetrain predict could open it. "
            "Pass another name, or another folder."
        )
    if tolerance is not None:
        check_number("tolerance", tolerance, CheckpointError, "(0, 1]")
    if names not in get_args(Names):
        raise CheckpointError(f"names={names!r:.80} (--names) is not known. Pass plain or trained.")
    if kind != "safetensors" and names != "plain":
        raise CheckpointError(f"names={names!r} (--names) are of safetensors. Leave them out for {kind}.")
    if model is not None and names != "plain":
        raise CheckpointError(f"names={names!r} (--names) takes no model. Remove model= (--model).")
    for option, given in (("data", data is not None), ("tolerance", tolerance is not None)):
        if given and kind == "safetensors":
            raise CheckpointError(
                f"{option}= (--{option}) compares a program with the model. Leave it out for safetensors."
            )
    card = out.parent / CARD
    check_card(card)
    checkpoint = chosen(place, best=best)
    folder = run_folder(checkpoint)
    recipe, difference, scaled = _recipe(folder), None, False
    facts = checkpoint.content.history.facts
    if model is None and names == "plain" and modules_named({"model": recipe.get("model")}):
        assert folder is not None
        model = provide_code(where, folder, trust=trust_code)["model"]
    if kind == "safetensors":
        state = plain_names(checkpoint, model) if names == "plain" else evaluated_state(checkpoint)
        scaled = {*BUFFERS} <= state.weights.keys()
        save_model(state, out, about=metadata(facts))
    else:
        source = None if data is None else Path(data)
        allowed = TOLERANCE if tolerance is None else tolerance
        difference = _program(checkpoint, out, kind, model, source, recipe, allowed)
    write_card(card, out, kind, names, checkpoint, folder, recipe, difference, scaled=scaled)
    return Exported(out, checkpoint, card, difference)


def _format(format: str | None, out: Path) -> Format:
    by_suffix = {suffix: kind for kind, suffix in SUFFIXES.items()}
    if format is None:
        if out.suffix not in by_suffix:
            raise CheckpointError(
                f"{out} does not end in {' or '.join(by_suffix)} and might be a file of another kind; nothing was "
                f"written. Pass a name with one of these suffixes, e.g. {out.parent / (out.stem or 'out')}.safetensors."
            )
        return by_suffix[out.suffix]
    for kind, suffix in SUFFIXES.items():
        if kind == format:
            require_suffix(out, suffix, CheckpointError)
            return kind
    raise CheckpointError(f"No format is named {format!r}.{suggest(str(format), SUFFIXES)}")


def _program(
    checkpoint: Checkpoint, out: Path, kind: str, model: ModelArg, data: Path | None,
    recipe: Mapping[str, Any], tolerance: float,
) -> Difference:  # fmt: skip
    facts = checkpoint.content.history.facts
    if "inputs" not in facts:
        raise CheckpointError(
            f"{checkpoint.place} does not know its preprocessing: its run was not trained by this version. Export "
            "safetensors instead."
        )
    state = evaluated_state(checkpoint)
    otherwise = "export safetensors with names='trained' (--names trained)"
    built, _ = rebuild(checkpoint, state.weights, model, otherwise)
    load_state(built, state)
    images, about = _images(Inputs.from_dict(facts["inputs"]), recipe, data)
    return write_program(kind, built.eval(), images, about, out, metadata(facts), tolerance)


def _images(inputs: Inputs, recipe: Mapping[str, Any], data: Path | None) -> tuple[torch.Tensor, str]:
    from ....loaders.datasets.torch_dataset import open_dataset

    of_run = (Path(f"{recipe.get(key)}") for key in ("val", "train"))
    source = data or next((path for path in of_run if path.suffix == ".beton" and path.is_file()), None)
    if source is not None:
        try:
            data_set = open_dataset(source, inputs.transform(), verify=False)
            count = min(IMAGES, len(data_set))
            images = [data_set[index][0] for index in range(count)]
            # At least two, because of one image, torch.export would take the batch size for a constant.
            return torch.stack(images * (2 if count == 1 else 1)), f"{count} image{'s' * (count != 1)} of {source.name}"
        except DataError:
            if data is not None:
                raise  # it is the user's choice
    size = height_width(inputs.image_size)
    random = torch.rand(IMAGES, len(inputs.mean), *size, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (inputs.mean, inputs.std))
    return (random - mean) / std, f"{IMAGES} random images"


def _recipe(folder: Path | None) -> dict[str, Any]:
    try:
        return {} if folder is None else read_recipe(folder / RECIPE)[0]
    except RecipeError:
        return {}


def run_folder(checkpoint: Checkpoint) -> Path | None:
    """Return the folder of the run that wrote a checkpoint; None if it is elsewhere, or holds another run by now."""
    store = CheckpointDir(checkpoint.path.resolve().parent)
    if store.folder.name != "checkpoints" or not (checkpoint.path / STATE).exists():
        return None
    with suppress(CheckpointError):
        if store.run == checkpoint.content.run:
            return store.folder.parent
    return None
