"""Recipes for ResNets on ImageNet: FFCV's twelve, and Composer's mild, medium and hot."""

from __future__ import annotations

from typing import Any

_DATA: dict[str, Any] = {"train": "train.beton", "val": "val.beton"}

# By number of epochs: the first epoch (from 0) at 192 pixels; then top-1, top-5 and minutes of ResNet-18 (on one A100)
# and of ResNet-50 (on eight).
_FFCV = {
    16: (12, (66.9, 86.8, 35.0), (73.8, 90.8, 14.9)),
    24: (19, (68.8, 88.1, 51.6), (75.6, 92.1, 21.7)),
    32: (25, (70.0, 88.9, 68.9), (76.6, 92.7, 28.7)),
    40: (32, (70.6, 89.4, 85.5), (77.2, 93.2, 35.6)),
    56: (45, (71.3, 89.9, 119.4), (78.0, 93.7, 49.4)),
    88: (71, (72.4, 90.3, 187.3), (78.4, 94.1, 77.2)),
}

_FFCV_NOTES = {
    "image_size": "FFCV: max_res 192; ProgressiveResizing starts at min_res 160",
    "eval_image_size": "FFCV: resolution 256, to match training on crops, arXiv:1906.06423",
    "loading.scale": "the default of FFCV's RandomResizedCropRGBImageDecoder. FFCV resizes by area interpolation, this "
    "loader by an antialiased bilinear filter",
    "loading.eval_ratio": "FFCV: DEFAULT_CROP_RATIO, 224/256",
    "transforms.BlurPool": "FFCV: strided convolutions of 16 channels or more, no max-pools",
    "transforms.ProgressiveResizing": "FFCV interpolates from start_ramp to end_ramp and rounds to multiples of 32 "
    "pixels: one step, in the same epoch as here",
    "transforms.NoWeightDecay": "FFCV: bn_wd 0, by parameter name: unlike this, it decays the shortcuts' BatchNorms "
    "and the last layer's bias",
    "transforms.TestTimeFlip": "FFCV: lr_tta",
    "transforms.LabelSmoothing": "FFCV: label_smoothing 0.1",
    "schedule": "FFCV: cyclic: linear to the peak after 2 epochs, and to 0 at the end",
    "warmup": "FFCV: lr_peak_epoch 2",
    "precision": "FFCV: fp16 autocast with a loss scale",
}


def _ffcv(model: str, epochs: int) -> dict[str, Any]:
    switch, *results = _FFCV[epochs]
    big = model == "resnet50"
    top1, top5, minutes = results[big]
    data = "--max-resolution 500, half of the images JPEG" if big else "--max-resolution 400, a tenth JPEG"
    size = {"initial_scale": 160 / 192, "delay": switch / epochs, "finetune": 1 - switch / epochs}
    return {
        "description": f"{'ResNet-50' if big else 'ResNet-18'} on ImageNet in {epochs} epochs, after FFCV. Set "
        "train= and val=.",
        "source": "https://github.com/libffcv/ffcv-imagenet, "
        f"rn{model[6:]}_configs/rn{model[6:]}_{epochs}_epochs.yaml and train_imagenet.py",
        "published": f"{top1} % top-1, {top5} % top-5 in {minutes} min on {'8 A100' if big else 'one A100'}",
        "measured": "not measured",
        "notes": {
            "train": f"FFCV's file: {data} (convert --write-mode proportion)",
            "batch_size": "FFCV: 512 on each of 8 GPUs" if big else "FFCV: 1024 on one GPU",
            "optimizer.lr": f"FFCV: lr {1.7 if big else 0.5}",
            "optimizer.weight_decay": f"FFCV: weight_decay {1e-4 if big else 5e-5}",
            **_FFCV_NOTES,
        },
        **_DATA,
        "model": model,
        "model_options": {"num_classes": 1000},
        "batch_size": 4096 if big else 1024,
        "image_size": 192,
        "eval_image_size": 256,
        "loading": {"scale": [0.08, 1.0], "eval_ratio": 0.875},
        "transforms": [
            {"name": "BlurPool", "replace_maxpools": False},
            {"name": "ChannelsLast"},
            {"name": "NoWeightDecay"},
            {"name": "ProgressiveResizing", **size},
            {"name": "LabelSmoothing", "smoothing": 0.1},
            {"name": "TestTimeFlip"},
        ],
        "optimizer": {
            "name": "sgd",
            "lr": 1.7 if big else 0.5,
            "momentum": 0.9,
            "weight_decay": 1e-4 if big else 5e-5,
        },
        "schedule": "linear",
        "warmup": 2 / epochs,
        "strategy": "ddp" if big else "single",
        "devices": 8 if big else 1,
        "precision": "fp16",
        "epochs": epochs,
    }


_COMPOSER_NOTES = {
    "model": "Composer initializes convolutions and classifier Kaiming-normal with fan_in, BatchNorm's weights "
    "uniformly from 0 to 1; here they are torchvision's: fan_out, and 1",
    "batch_size": "Composer: train_batch_size 2048",
    "image_size": "Composer: crop_size 176",
    "eval_image_size": "Composer: crop_size 224",
    "loading.scale": "the default of FFCV's decoder and of torchvision",
    "loading.eval_ratio": "Composer: resize_size 232, crop_size 224",
    "transforms.BlurPool": "Composer: blur_first, min_channels 16, convolutions and max-pools",
    "transforms.BinaryCrossEntropy": "Composer: loss_name binary_cross_entropy, and a classifier whose bias starts at "
    "-log 1000; here the loss subtracts log 1000",
    "transforms.EMA": "Composer: half_life 100ba, update_interval 20ba",
    "transforms.ProgressiveResizing": "Composer's values; it resizes batches after loading, by nearest-neighbor "
    "interpolation, and changes the size at every step; this loader decodes at the size, which changes between epochs",
    "optimizer": "Composer: decoupled_sgdw, lr 2.048, momentum 0.875",
    "schedule": "Composer: cosine_decay_with_warmup",
    "warmup": "Composer: 8 epochs, independent of the number of epochs",
    "precision": "Composer: AMP, i.e. fp16; bf16 needs no loss scale",
}


def _composer(
    name: str, epochs: int, decay: float, published: str, length: str, transforms: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "description": f"ResNet-50 on ImageNet, after Composer's recipe '{name}'. Set train= and val=.",
        "source": f"https://github.com/mosaicml/examples, blogs/resnet/recipes/resnet50_{name}.yaml; Mosaic ResNet "
        "Deep Dive, https://www.databricks.com/blog/mosaic-resnet-deep-dive",
        "published": published,
        "measured": "not measured",
        "notes": {
            **_COMPOSER_NOTES,
            "optimizer.weight_decay": f"Composer: {decay:g}, decoupled: per step, at the peak learning rate",
            "epochs": length,
        },
        **_DATA,
        "model": "resnet50",
        "model_options": {"num_classes": 1000},
        "batch_size": 2048,
        "image_size": 176,
        "eval_image_size": 224,
        "loading": {"scale": [0.08, 1.0], "eval_ratio": 224 / 232},
        "transforms": [
            {"name": "BlurPool"},
            {"name": "ChannelsLast"},
            {"name": "BinaryCrossEntropy"},
            {"name": "EMA", "half_life": 100, "update_every": 20},
            *transforms,
        ],
        "optimizer": {"name": "sgdw", "lr": 2.048, "momentum": 0.875, "weight_decay": decay},
        "schedule": "cosine",
        "warmup": round(8 / epochs, 4),
        "strategy": "ddp",
        "devices": 8,
        "precision": "bf16",
        "epochs": epochs,
    }


_RESIZING = {"name": "ProgressiveResizing", "initial_scale": 0.5, "delay": 0.4, "finetune": 0.2}

RESNETS: dict[str, dict[str, Any]] = {
    **{
        f"ffcv-{model}-{epochs}": _ffcv(model, epochs)
        for model in ("resnet18", "resnet50")
        for epochs in _FFCV
    },
    "resnet50-mild": _composer(
        "mild",
        32,
        5e-4,
        "75 to 78.1 % top-1 in fewer than 60 epochs; 75.9 % in 23.8 min on 8 A100 (MLPerf 2.0, open division)",
        "Composer's file: 0.36 of 90, 32.4",
        [_RESIZING, {"name": "LabelSmoothing", "smoothing": 0.08}],
    ),
    "resnet50-medium": _composer(
        "medium",
        90,
        5e-4,
        "78.1 to 79.5 % top-1 in 60 to 240 epochs on 8 A100",
        "Composer's file: 90",
        [
            _RESIZING,
            {"name": "MixUp", "alpha": 0.2},
            {"name": "LabelSmoothing", "smoothing": 0.1},
            {"name": "SAM", "rho": 0.5, "interval": 10},
        ],
    ),
    "resnet50-hot": _composer(
        "hot",
        270,
        3e-4,
        "for the longest runs, beyond medium's 240 epochs and 79.5 %; the source gives its results only in plots",
        "Composer: more than 2.6 times 90; ours: three times",
        [
            {"name": "StochasticDepth", "method": "sample", "drop_rate": 0.1},
            {"name": "RandAugment", "num_ops": 1, "magnitude": 15},
            {"name": "ProgressiveResizing", "initial_scale": 0.6, "delay": 0.2, "finetune": 0.2},
            {"name": "ColOut", "row": 0.05, "column": 0.05},
            {"name": "MixUp", "alpha": 0.25},
            {"name": "LabelSmoothing", "smoothing": 0.13},
            {"name": "SAM", "rho": 0.5, "interval": 5},
        ],
    ),
}
"""By name."""

RESNETS["resnet50-hot"]["notes"]["transforms.RandAugment"] = (
    "Composer: depth 1, severity 10 of 10: each strength is drawn from 0.1 to 10; here it is the middle, 15 of 30"
)
