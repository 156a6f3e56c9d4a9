"""Check that model, data and loss match, before any training."""

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
    """Return the number of classes: that of the class names if a file has any, else the largest training label plus
    one.

    Validation data without names may lack the last classes.

    Raises:
        PlanError: if labels are not class indices, or the two files index their classes differently.
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
            f"{data.train} has {classes} classes, but {data.val} has the label {int(val_labels.max())}, which a model "
            f"of {classes} classes cannot predict. Convert both from data of the same classes."
        )
    return classes


def _names_and_labels(loader: EpochLoader, source: str) -> tuple[list[str], NDArray[Any]]:
    """Return the class names (none for a file without a manifest) and all labels."""
    labels = loader.labels
    if not np.issubdtype(labels.dtype, np.integer):
        raise PlanError(
            f"{source} has float labels, but a pipeline trains with cross entropy, which needs class indices. "
            "Convert it with integer labels; for regression targets, use FFCVLoader in a custom loop."
        )
    if labels.min() < 0:
        raise PlanError(
            f"{source} has the label {labels.min()}, but class indices start at 0. Convert it again."
        )
    return loader.classes, labels


def _difference(data: DataConfig, names: list[str], val_names: list[str]) -> str:
    remedy = "Convert both from data of the same classes."
    if len(names) != len(val_names):
        return f"{data.train} has {len(names)} classes, {data.val} has {len(val_names)}. {remedy}"
    number = next(i for i, (one, other) in enumerate(zip(names, val_names, strict=True)) if one != other)
    return f"Class {number} is {names[number]!r} in {data.train} and {val_names[number]!r} in {data.val}. {remedy}"


def check_output(model: nn.Module, classes: int, data: DataConfig, precision: Precision) -> None:
    """Check that the model returns one logit per class, by a forward of two images in each mode.

    The model's buffers do not change. The model may draw random numbers.

    Raises:
        PlanError: if it does not, or if the forward fails.
    """
    training, side = model.training, data.eval_size
    context = nullcontext() if precision == "fp32" else torch.autocast("cpu", dtype=HALF[precision])
    try:
        with torch.no_grad(), context:
            output = model.eval()(torch.zeros(2, 3, side, side))
            # Lazy modules have their shapes now. BatchNorm's statistics change only in the copies.
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            side = data.image_size
            trained = torch.func.functional_call(model.train(), buffers, torch.zeros(2, 3, side, side))
    except Exception as error:  # a model may raise anything
        raise PlanError(
            f"The model does not accept images of {side} × {side} pixels: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(training)
    if not isinstance(output, torch.Tensor):
        raise PlanError(
            f"The model returns a {type(output).__name__}, but a loss needs one tensor of logits. Wrap it in a module "
            f"whose forward returns only the logits, {classes} for each image."
        )
    if not isinstance(trained, torch.Tensor):
        raise PlanError(
            f"The model returns a {type(trained).__name__} in training mode, but a loss needs one tensor of logits. "
            "Disable its auxiliary outputs (torchvision: aux_logits=False)."
        )
    if output.shape != (2, classes):
        raise PlanError(
            f"The model returns {tuple(output.shape)} for 2 images, but {data.train} has {classes} classes. Build it "
            f"with num_classes={classes}, so that it returns (2, {classes}); in a recipe: "
            f"model_options.num_classes={classes}."
        )


def check_loss(loss: Loss, classes: int, device: torch.device, *, soft: bool) -> None:
    """Test the training loss on two rows of logits.

    Args:
        loss: the loss, including loss transforms.
        classes: number of classes.
        device: the device of the logits in training.
        soft: whether batch transforms turn class indices into probabilities.

    Raises:
        PlanError: if it does not accept logits and targets, or does not return a scalar.
    """
    labels = torch.tensor([0, classes - 1], device=device)
    targets = F.one_hot(labels, classes).float() if soft else labels
    what = f"probabilities (2, {classes})" if soft else "class indices (2,)"
    try:
        with torch.no_grad():
            value = loss(torch.zeros(2, classes, device=device), targets)
    except DrivetrainError:
        raise
    except Exception as error:  # a custom loss may raise anything
        raise PlanError(
            f"The loss does not accept logits (2, {classes}) and {what}: {type(error).__name__}: {error}. Targets are "
            "class indices; with LabelSmoothing, MixUp or CutMix, probabilities (B, C)."
        ) from error
    if not isinstance(value, torch.Tensor) or value.dim():
        returned = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PlanError(
            f"The loss returns {returned} for 2 images, but must return their mean: a tensor of shape ()."
        )
