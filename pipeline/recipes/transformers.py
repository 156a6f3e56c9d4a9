"""Recipes for vision transformers, up to billions of parameters, and for fine-tuning."""

from __future__ import annotations

from typing import Any

_DATA: dict[str, Any] = {"train": "train.beton", "val": "val.beton", "image_size": 224}

_BILLION_NOTES = {
    "model_options": "ViT-G/14: Zhai et al., Scaling Vision Transformers (2022), arXiv:2106.04560, table 2. 1.84 "
    "billion parameters. Each rank first builds the model on the CPU, in 7.4 GB of memory",
    "batch_size": "He et al.: 4096",
    "optimizer.lr": "He et al.: 1e-4 · batch / 256",
    "optimizer.weight_decay": "He et al.: 0.3",
    "optimizer.betas": "He et al.: 0.9, 0.95",
    "warmup": "He et al.: 20 epochs of 200",
    "epochs": "He et al.: 200",
    "transforms.RandAugment": "He et al.: (9, 0.5): timm's scale, where 9 of 10 is 27 of 30; timm varies it",
    "transforms.MixUp": "He et al.: 0.8, alternating with CutMix 1.0, which is left out, as is their EMA",
    "transforms.StochasticDepth": "He et al.: drop path 0.2, for ViT-H",
    "transforms.LabelSmoothing": "He et al.: 0.1",
    "activation_checkpointing": "ours: without it, a batch's activations need more memory than the weights",
    "accumulate": "ours: 64 images at a time on each of 8 GPUs; lower it if memory allows",
    "strategy": "ours",
    "devices": "ours",
    "precision": "ours",
}


def _billion(strategy: str, what: str) -> dict[str, Any]:
    return {
        "description": f"A vision transformer of 1.84 billion parameters on 8 GPUs; {what} shards weights, gradients "
        "and optimizer state. Set train= and val=. A starting point, not a tuned recipe.",
        "source": "architecture: Zhai et al. 2022, arXiv:2106.04560; training: He et al., Masked Autoencoders (2022), "
        "arXiv:2111.06377, appendix A.2, training ViT-L and ViT-H from scratch on ImageNet-1k",
        "published": "nothing for this model on ImageNet-1k alone",
        "measured": "not measured",
        "notes": dict(_BILLION_NOTES),
        **_DATA,
        "model": "vit",
        "model_options": {
            "num_classes": 1000,
            "image_size": 224,
            "patch_size": 14,
            "width": 1664,
            "depth": 48,
            "heads": 16,
            "mlp": 8192,
        },
        "batch_size": 4096,
        "loading": {"scale": [0.08, 1.0]},
        "transforms": [
            {"name": "StochasticDepth", "method": "sample", "drop_rate": 0.2},
            {"name": "RandAugment", "num_ops": 2, "magnitude": 27},
            {"name": "MixUp", "alpha": 0.8},
            {"name": "LabelSmoothing", "smoothing": 0.1},
        ],
        "optimizer": {"name": "adamw", "lr": 1.6e-3, "betas": [0.9, 0.95], "weight_decay": 0.3},
        "schedule": "cosine",
        "warmup": 0.1,
        "strategy": strategy,
        "devices": 8,
        "precision": "bf16",
        "accumulate": 8,
        "activation_checkpointing": True,
        "epochs": 200,
    }


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "vit-s16": {
        "description": "ViT-S/16 on ImageNet in 90 epochs. Set train= and val=.",
        "source": "Beyer et al., Better plain ViT baselines for ImageNet-1k (2022), arXiv:2205.01580; values from "
        "https://github.com/google-research/big_vision, configs/vit_s16_i1k.py",
        "published": "76.5 % top-1 after 90 epochs, 6 to 7 h on a TPU-v3-8",
        "measured": "not measured",
        "notes": {
            "model": "torchvision's: class token, learned positions, a linear head; the source averages the tokens, "
            "and has fixed sine and cosine positions and a hidden layer in the head",
            "train": "the source trains on 99 % of the training images",
            "loading.scale": "big_vision: Inception crop, area_min 5 %",
            "loading.mean": "big_vision: value_range(-1, 1)",
            "transforms.RandAugment": "big_vision: randaug(2, 10), where 10 is the maximum magnitude, here 30. Some "
            "operations differ: at the maximum, its solarize does nothing, this one inverts everything",
            "transforms.MixUp": "big_vision: mixup p=0.2, the parameter of the beta distribution",
            "transforms.NoWeightDecay": "big_vision decays kernels only; here positions and class token, too",
            "optimizer.weight_decay": "big_vision: 1e-4 per step at the peak, which is lr · 0.1 in AdamW's terms",
            "clip_norm": "big_vision: grad_clip_norm 1.0",
            "warmup": "big_vision: 10,000 steps; 90 epochs of ImageNet are 112,590",
            "precision": "ours",
            "strategy": "ours",
            "devices": "ours",
        },
        **_DATA,
        "model": "vit_s16",
        "model_options": {"num_classes": 1000},
        "batch_size": 1024,
        "loading": {"scale": [0.05, 1.0], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
        "transforms": [
            {"name": "RandAugment", "num_ops": 2, "magnitude": 30},
            {"name": "NoWeightDecay"},
            {"name": "MixUp", "alpha": 0.2},
        ],
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "schedule": "cosine",
        "warmup": 0.089,
        "strategy": "ddp",
        "devices": 8,
        "precision": "bf16",
        "clip_norm": 1.0,
        "epochs": 90,
    },
    "finetune-pretrained": {
        "description": "A pretrained ResNet-50 with a new last layer, fine-tuned on a small data set of photographs on "
        "one device. Set train=, val= and model_options.num_classes=.",
        "source": "BiT-HyperRule: Kolesnikov et al., Big Transfer (2020), arXiv:1912.11370, and bit_hyperrule.py; "
        "weights: torchvision's IMAGENET1K_V2",
        "published": "for BiT's own models, with GroupNorm and other pretraining; nothing for this one",
        "measured": "not measured",
        "notes": {
            "model_options.num_classes": "set it to that of your data",
            "batch_size": "ours, for a smaller GPU; HyperRule: 512",
            "image_size": "that of the weights' evaluation; HyperRule: 480 for photographs",
            "loading.scale": "ours; HyperRule: a random square of 480 in 512 pixels",
            "optimizer.lr": "HyperRule: 0.003 for a batch of 512; a quarter here, like the batch",
            "schedule": "HyperRule: divided by ten after each fifth of training",
            "warmup": "HyperRule: 100 steps of 500, for data sets below 20,000 images",
            "transforms": "ours",
            "precision": "ours",
            "epochs": "ours; HyperRule counts steps, 500 of 512 images",
        },
        **_DATA,
        "model": "pretrained",
        "model_options": {"name": "resnet50", "num_classes": 1000, "weights": "IMAGENET1K_V2"},
        "batch_size": 128,
        "loading": {"scale": [0.25, 1.0]},
        "transforms": [{"name": "ChannelsLast"}],
        "optimizer": {"name": "sgd", "lr": 7.5e-4, "momentum": 0.9},
        "schedule": "cosine",
        "warmup": 0.2,
        "precision": "bf16",
        "epochs": 20,
    },
    "billion-fsdp": _billion("fsdp", "FSDP2"),
    "billion-deepspeed": _billion("deepspeed_stage_3", "DeepSpeed's ZeRO stage 3"),
}
"""By name."""
