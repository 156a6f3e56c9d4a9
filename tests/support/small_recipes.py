"""Recipes reduced to test size."""

from pathlib import Path
from typing import Any

from drivetrain.loaders import convert
from drivetrain.pipeline.recipes.presets import completed
from pipeline_data import CLASSES, toy_arrays
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

BATCH, SIDE = 4, 32
"""Small, as convolutions in bf16 take long on CPUs without instructions for it."""
TINY_VIT = {
    "num_classes": CLASSES, "image_size": SIDE, "patch_size": 16, "width": 32, "depth": 2, "heads": 2, "mlp": 64,
}  # fmt: skip


def half_resnet(num_classes: int = CLASSES) -> nn.Module:
    """The first half of a ResNet of BasicBlocks."""
    model = ResNet(BasicBlock, [1, 1, 1, 1])
    model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(128, num_classes)
    return model


def stand_ins(folder: Path, train: int, val: int) -> dict[str, str]:
    """Write files of so many images with labels, which are returned, and next to them others with masks."""
    files = {name: str(folder / f"{name}.beton") for name in ("train", "val")}
    for seed, (file, size) in enumerate(zip(files.values(), (train, val), strict=True)):
        images, labels = toy_arrays(size, seed, SIDE)
        convert((images, labels), file, classes=list("abcd"), progress=False)
        convert([*zip(images, images[..., 0] // 64, strict=True)], _masks(file), classes=list("abcd"), progress=False)
    return files


def _masks(file: str) -> str:
    return file.replace(".beton", "-masks.beton")


def shrunk(name: str, files: dict[str, str]) -> dict[str, Any]:
    """What makes a recipe small: its data, images, batch (and with it the learning rate), devices and length.

    Images that grow are twice as large in the end: with torch 2.15, a ResNet-50's gradients in bf16 are undefined on
    some CPUs for images of 16 pixels, which layer4 sees as one (uninitialized memory in oneDNN's convolution of one
    pixel with a stride of 2). Models stay as they are, but for those of billions of parameters. fp16, for which CPUs
    have no fast convolutions, becomes bf16.
    """
    recipe = completed(name).values
    grows = any(entry["name"] == "ProgressiveResizing" for entry in recipe["transforms"])
    overrides: dict[str, Any] = {
        **files, "batch_size": BATCH, "image_size": 2 * SIDE if grows else SIDE, "eval_image_size": None,
        "devices": 1, "accumulate": 1,
        "workers": 0 if recipe["loader"] == "torch" else 1, "strategy_options": {"device": "cpu"},
        "optimizer.lr": recipe["optimizer"]["lr"] * BATCH / recipe["batch_size"],
        # Each epoch is a step. Of three, growing images have one epoch at full size.
        "epochs": 3 if grows else 2,
    }  # fmt: skip
    if (recipe["task"] or {}).get("name") == "Segmentation":
        overrides |= {key: _masks(file) for key, file in files.items()} | {"task.classes": CLASSES}
    if recipe["val"] is None:  # it learns without labels
        overrides["val"] = None
    if recipe["precision"] == "fp16":
        overrides["precision"] = "bf16"
    if recipe["model"] == "vit":
        return overrides | {"model_options": TINY_VIT}
    if recipe["model"] == "vit_s16":
        overrides["model_options.image_size"] = SIDE
    if recipe["model"] == "pretrained":
        overrides["model_options.weights"] = None  # to be fetched
    return overrides | {"model_options.num_classes": CLASSES}
