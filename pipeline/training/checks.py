"""Whether a model, its data and the loss go together, found out before any training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from ...errors import DrivetrainError, PlanError
from ...loaders.epochs import EpochLoader
from ...strategies import Precision
from ...strategies.options import HALF
from ...transforms import Loss
from ..spec.config import DataConfig


def count_classes(train: EpochLoader, val: EpochLoader | None, data: DataConfig) -> int:
    """The number of classes: of the names, where a file has some, else the largest training label plus one.

    Validation data without names may lack the last classes.

    Raises:
        PlanError: if labels are no class numbers, or the two files number their classes differently.
    """
    names, labels = _names_and_labels(train, data.train)
    classes = len(names) or int(labels.max()) + 1
    if val is None or data.val is None:
        return classes
    val_names, val_labels = _names_and_labels(val, data.val)
    if names and val_names and names != val_names:
        raise PlanError(_difference(data, names, val_names))
    classes = classes if names else max(len(val_names), classes)
    if val_labels.max() >= classes or labels.max() >= classes:
        raise PlanError(
            f"{data.train} has {classes} classes, and {data.val} has the label {int(val_labels.max())}: a model of "
            f"{classes} classes cannot give it. Convert both from data of the same classes."
        )
    return classes


def _names_and_labels(loader: EpochLoader, source: str) -> tuple[list[str], NDArray[Any]]:
    """Class names (none in a file without a manifest) and all labels."""
    labels = loader.labels
    if not np.issubdtype(labels.dtype, np.integer):
        raise PlanError(
            f"{source} has float labels, and a pipeline trains with cross entropy, which needs class numbers. "
            "Convert it with integer labels; for targets, use FFCVLoader in a loop of your own."
        )
    if labels.min() < 0:
        raise PlanError(
            f"{source} has the label {labels.min()}; classes are numbered from 0. Convert it anew."
        )
    return loader.classes, labels


def _difference(data: DataConfig, names: list[str], val_names: list[str]) -> str:
    remedy = "Convert both from data of the same classes."
    if len(names) != len(val_names):
        return f"{data.train} has {len(names)} classes, {data.val} has {len(val_names)}. {remedy}"
    number = next(i for i, (one, other) in enumerate(zip(names, val_names, strict=True)) if one != other)
    return f"Class {number} is {names[number]!r} in {data.train} and {val_names[number]!r} in {data.val}. {remedy}"


def check_output(model: nn.Module, classes: int, data: DataConfig, precision: Precision) -> None:
    """Compares the model's output with the number of classes, by a forward of two images in either mode.

    The model's buffers stay as they are. Random numbers are drawn if the model draws some.

    Raises:
        PlanError: if they differ, or the model cannot take the images.
    """
    training, side = model.training, data.eval_size
    context = nullcontext() if precision == "fp32" else torch.autocast("cpu", dtype=HALF[precision])
    try:
        with torch.no_grad(), context:
            output = model.eval()(torch.zeros(2, 3, side, side))
            # Lazy modules have their shapes now. BatchNorm's statistics move in the copies only.
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            side = data.image_size
            trained = torch.func.functional_call(model.train(), buffers, torch.zeros(2, 3, side, side))
    except Exception as error:  # whatever a model does with images that it cannot take
        raise PlanError(
            f"The model cannot take images of {side} × {side} pixels: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(training)
    if not isinstance(output, torch.Tensor):
        raise PlanError(
            f"The model gives a {type(output).__name__}, and a loss needs one tensor of logits. Wrap it in a module "
            f"whose forward returns them alone, {classes} for each image."
        )
    if not isinstance(trained, torch.Tensor):
        raise PlanError(
            f"The model gives a {type(trained).__name__} in training, and a loss needs one tensor of logits. "
            "Turn its further outputs off (torchvision's: aux_logits=False)."
        )
    if output.shape != (2, classes):
        raise PlanError(
            f"The model gives {tuple(output.shape)} for 2 images, and {data.train} has {classes} classes. Build it "
            f"with num_classes={classes}, so that it gives (2, {classes}); in a recipe: "
            f"model_options.num_classes={classes}."
        )


def check_loss(loss: Loss, classes: int, device: torch.device, *, soft: bool) -> None:
    """Tries the training's loss on two logits, where it will compute.

    Args:
        loss: with all that loss transforms made of it.
        classes: their number.
        device: where the training's logits are.
        soft: whether batch methods make probabilities of the class numbers.

    Raises:
        PlanError: if it cannot take them, or gives no single number.
    """
    labels = torch.tensor([0, classes - 1], device=device)
    targets = F.one_hot(labels, classes).float() if soft else labels
    what = f"probabilities (2, {classes})" if soft else "class numbers (2,)"
    try:
        with torch.no_grad():
            value = loss(torch.zeros(2, classes, device=device), targets)
    except DrivetrainError:
        raise
    except Exception as error:  # whatever a user's loss does with targets that it cannot take
        raise PlanError(
            f"The loss cannot take logits (2, {classes}) and {what}: {type(error).__name__}: {error}. It is given "
            "class numbers, and probabilities (B, C) where LabelSmoothing, MixUp or CutMix is used."
        ) from error
    if not isinstance(value, torch.Tensor) or value.dim():
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PlanError(
            f"The loss gives {given} for 2 images, and must give one number, their mean: a tensor ()."
        )
