"""Tiny Hugging Face models in folders, as `save_pretrained` writes them."""

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is imported: tests never ask the hub

SIDE = 16


def config(kind: str, **options: Any) -> Any:
    """The configuration of a model with some ten thousand weights, for images of 16 × 16 pixels."""
    import transformers

    if kind == "vit":
        return transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=SIDE,
            patch_size=4, **options,
        )  # fmt: skip
    if kind == "resnet":
        return transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **options
        )
    return transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], patch_size=2, image_size=SIDE, **options
    )


def save(folder: Path, kind: str, num_labels: int, **options: Any) -> str:
    """Save a model with random weights, and return `"hf:FOLDER"`."""
    import transformers

    model = transformers.AutoModelForImageClassification
    model.from_config(config(kind, num_labels=num_labels, **options)).save_pretrained(folder)
    return f"hf:{folder}"
