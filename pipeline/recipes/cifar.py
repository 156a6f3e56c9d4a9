"""Recipes for CIFAR-10, which is downloaded by name."""

from __future__ import annotations

from typing import Any

_LOADING: dict[str, Any] = {
    "crop": "padded",
    "padding": 4,
    "eval_ratio": 1.0,
    "mean": [0.4914, 0.4822, 0.4465],
    "std": [0.247, 0.2435, 0.2616],
}

_DATA: dict[str, Any] = {"train": "cifar10:train", "val": "cifar10:test", "image_size": 32}

_SMALL: dict[str, Any] = {
    **_DATA,
    "model": "cifar_resnet",
    "model_options": {"num_classes": 10, "width": 16},
    "batch_size": 256,
    "loading": _LOADING,
    "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
    "schedule": "linear",
    "warmup": 0.25,
    "epochs": 5,
}
_SMALL_NOTES = {
    "model": "the shape of Page's ResNet-9, with width 16 instead of 64 for CPUs",
    "batch_size": "ours; Page: 512",
    "loading.padding": "the standard CIFAR augmentation, He et al. 2016, arXiv:1512.03385, section 4.2",
    "optimizer.lr": "ours, tuned on a CPU at this width",
    "optimizer.weight_decay": "Page, per image and learning rate: 5e-4 · batch, for a summed loss",
    "schedule": "Page: linear to the peak in a fifth of training, then linear to 0",
    "warmup": "a quarter, ours",
    "epochs": "ours: minutes on a CPU",
}

CIFAR: dict[str, dict[str, Any]] = {
    "baseline": {
        "description": "CIFAR-10 in plain PyTorch: torchvision data set, DataLoader, NCHW, fp32, no extras. "
        "The baseline of the other recipes.",
        "source": "David Page, How to train your ResNet (2018), https://myrtle.ai/learn/how-to-train-your-resnet/: "
        "its network at a quarter of the width, its augmentation and its schedule",
        "published": "94 % at width 64 (26 s on one V100, according to airbench's README); nothing at width 16",
        "measured": "1,418 images/s (quartiles 1,412 to 1,426, n = 8) on two cores of an AMD EPYC, torch 2.15, "
        "2026-11-20: benchmarks/results/quickstart-ledger.json. Accuracy: not measured.",
        "notes": {**_SMALL_NOTES, "loader": "the baseline to compare with"},
        **_SMALL,
        "loader": "torch",
    },
    "cifar10-quickstart": {
        "description": "CIFAR-10 on two CPU cores or any GPU in a few minutes, using every stage.",
        "source": "the baseline recipe; BlurPool arXiv:1904.11486, label smoothing arXiv:1512.00567",
        "published": "nothing for this combination",
        "measured": "2,991 images/s (quartiles 2,957 to 3,029, n = 8), 2.10 times plain PyTorch, on two cores of an "
        "AMD EPYC, torch 2.15, 2026-11-20: benchmarks/results/quickstart-ledger.json. The accuracy of "
        "that run is in docs/ledger.md. On a GPU: not measured.",
        "notes": {
            **_SMALL_NOTES,
            "transforms.LabelSmoothing": "0.1, the value of its source",
            "precision": "ours: bf16 where the device computes it natively, as in the measurement",
        },
        **_SMALL,
        "transforms": [
            {"name": "BlurPool"},
            {"name": "ChannelsLast"},
            {"name": "LabelSmoothing", "smoothing": 0.1},
        ],
        "precision": "auto",
    },
    "cifar10-simclr": {
        "description": "Features of CIFAR-10 without labels: two views of each image, contrastive loss. Then train on "
        "labels with --init-from.",
        "source": "Chen et al., A simple framework for contrastive learning of visual representations (2020), "
        "arXiv:2002.05709: its loss, projection and crops",
        "published": "94.0 % with a linear classifier on ResNet-50 after 1000 epochs (appendix B.9); nothing for this "
        "model",
        "measured": "44.0 % with a linear classifier (35.0 % on random weights) after 10 epochs, and 65.1 % instead of "
        "63.2 % after one epoch of cifar10-quickstart that begins with the features, three seeds, torch 2.15, "
        "2026-11-23: benchmarks/results/features.json",
        "notes": {
            "model": "the quickstart's small network; SimCLR: ResNet-50 with a 3 × 3 first layer",
            "loading.color_jitter": "SimCLR, strength 0.5: brightness, contrast and saturation 0.4, without hue and "
            "grayscale",
            "loading.scale": "SimCLR: (0.08, 1); ours for few epochs",
            "batch_size": "SimCLR: 256 to 4096 on CIFAR-10",
            "optimizer": "ours; SimCLR: LARS, lr 1.0, weight decay 1e-6",
            "epochs": "ours: minutes on a CPU; SimCLR: 1000",
        },
        "train": "cifar10:train",
        "image_size": 32,
        "model": "projected",
        "model_options": {"name": "cifar_resnet", "width": 16},
        "task": {"name": "Contrastive", "temperature": 0.5},
        "batch_size": 512,
        "loading": {
            "views": 2,
            "scale": [0.2, 1.0],
            "color_jitter": [0.4, 0.4, 0.4],
            "eval_ratio": 1.0,
            "mean": _LOADING["mean"],
            "std": _LOADING["std"],
        },
        "transforms": [{"name": "ChannelsLast"}],
        "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 1e-4},
        "schedule": "cosine",
        "warmup": 0.1,
        "epochs": 10,
    },
    "cifar10-fast": {
        "description": "94 % on CIFAR-10 on one GPU, after airbench94; the notes list the differences.",
        "source": "Keller Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU (2024), arXiv:2404.00498; values "
        "from https://github.com/KellerJordan/cifar10-airbench, legacy/airbench94.py",
        "published": "94.01 % (mean of 1,000 runs) after 9.9 epochs in 3.83 s on one A100, 3.09 s compiled",
        "measured": "93.99 % after 9.6 min of training (12.8 with an evaluation of six views in each epoch) on two "
        "cores of an AMD EPYC, torch 2.15, 2026-11-20: benchmarks/results/cifar10-fast.json; with seed=1 94.10 %. On a "
        "GPU: not measured.",
        "notes": {
            "model": "airbench94's network; its frozen first layer whitens with a fixed basis, which airbench computes "
            "from the images",
            "model_options.bias_lr": "airbench's bias_scaler: BatchNorm's shifts train at 64 times the learning rate",
            "loading.padding": "airbench: translate 2, with reflected edges",
            "loading.flip": "airbench's alternating flip",
            "optimizer.lr": "airbench's 11.5 per 1,024 images, decoupled and for a summed loss: 11.5 / (1 + 1 / (1 - "
            "0.85)) = 1.5 for a mean",
            "optimizer.weight_decay": "0.0153 / 11.5, converted likewise",
            "transforms.LabelSmoothing": "airbench: 0.2",
            "transforms.Lookahead": "airbench: every 5 steps, 0.95^5 times progress cubed",
            "transforms.TestTimeFlip": "airbench: tta_level 2",
            "schedule": "airbench starts at 0.2 of the peak and ends at 0.07 of it; this starts and ends at 0",
            "warmup": "airbench: 0.23",
            "precision": "airbench: everything except BatchNorm in fp16; this is autocast",
            "epochs": "airbench: 9.9; one more here, because ten reached 93.92 %",
        },
        **_DATA,
        "model": "airbench_net",
        "model_options": {"num_classes": 10, "bias_lr": 64.0},
        "batch_size": 1024,
        "loading": {**_LOADING, "padding": 2, "flip": "alternating"},
        "transforms": [
            {"name": "ChannelsLast"},
            {"name": "LabelSmoothing", "smoothing": 0.2},
            {"name": "Lookahead", "interval": 5, "decay": 0.774, "power": 3.0},
            {"name": "TestTimeFlip", "shift": 1},
        ],
        "optimizer": {"name": "sgd", "lr": 1.5, "momentum": 0.85, "weight_decay": 1.33e-3, "nesterov": True},
        "schedule": "linear",
        "warmup": 0.23,
        "precision": "bf16",
        "epochs": 11,
    },
}
"""By name."""
