"""Some forty small trainings, each of which a rebuilding of the house must leave as it is, bit for bit: `make same`.

They use nothing but what users do, so that an earlier revision can run this file, too. See `.ci/same.py`.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import segmentation_jobs
import torch
from drivetrain import Pipeline
from drivetrain import transforms as t
from drivetrain.loaders import convert
from drivetrain.pipeline import Checkpoints, Classification, Contrastive, MultiLabel, Regression, Segmentation
from drivetrain.transforms import Transform
from pipeline_data import CLASSES, SIDE, toy_arrays, write_toy
from torch import nn
from torchvision.models import ResNet, VisionTransformer
from torchvision.models.resnet import BasicBlock

WEIGHTS = torch.tensor([1.0, 3.0, 0.5, 8.0])
EPOCHS = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.bn1(self.conv1(images)))
        return torch.relu(images + self.bn2(self.conv2(inner)))


class Net(nn.Module):
    """Has what each surgery looks for."""

    def __init__(self, outputs: int = CLASSES, norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16) if norm else nn.GroupNorm(4, 16)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(2))) if norm else nn.Identity()
        self.down = nn.Conv2d(16, 32, 3, 2, 1)
        self.drop, self.tokens = nn.Dropout(0.1), nn.LayerNorm(32)
        self.fc = nn.Linear(32, outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.down(self.blocks(self.pool(torch.relu(self.norm(self.stem(images))))))
        result: torch.Tensor = self.fc(self.tokens(self.drop(maps.mean((2, 3)))))
        return result


def no_batch_norm(outputs: int = CLASSES) -> nn.Module:
    return Net(outputs, norm=False)


def resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def vit() -> nn.Module:
    return VisionTransformer(SIDE, 4, 2, 3, 24, 48, num_classes=CLASSES)


class Data:
    """The files that the cases read, written once."""

    def __init__(self, folder: Path) -> None:
        self.train, self.val = (str(write_toy(folder / f"{name}.beton", count, seed)) for name, count, seed in (
            ("train", 128, 1), ("val", 50, 2)
        ))  # fmt: skip
        images, labels = toy_arrays(64, 3)
        rng = np.random.default_rng(4)
        for name, values in (
            ("numbers", labels + rng.normal(size=64)),
            ("many", (rng.random((64, CLASSES)) > 0.5).astype(np.float32)),
        ):
            convert((images, values.astype(np.float32)), folder / f"{name}.beton", progress=False)
        self.numbers, self.many = str(folder / "numbers.beton"), str(folder / "many.beton")
        scenes = folder / "scenes"
        scenes.mkdir()
        self.scenes = segmentation_jobs.write(scenes)


@dataclass(frozen=True)
class Case:
    """One training: what differs from SGD with momentum on one device in fp32. If `resumed`, it is continued from a
    checkpoint within its second epoch."""

    transforms: tuple[Transform, ...] = ()
    model: Callable[..., nn.Module] = Net
    task: Any = None
    files: Callable[[Data], tuple[str, str | None]] = lambda data: (data.train, data.val)
    load: dict[str, Any] = field(default_factory=dict)
    optimize: dict[str, Any] = field(default_factory=dict)
    distribute: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False

    def pipeline(self, data: Data) -> Pipeline:
        load = {"batch_size": 32, "image_size": SIDE, "flip": True, "workers": 1} | self.load
        optimize = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3} | self.optimize
        made = Pipeline(self.model).load(*self.files(data), **load).transform(*self.transforms)
        if optimize["optimizer"] not in ("sgd", "sgdw"):
            optimize.pop("momentum")
        made = made if self.task is None else made.task(self.task)
        return made.optimize(**optimize).distribute(**({"strategy": "single"} | self.distribute))


def on_ranks(strategy: str, model: Callable[..., nn.Module] = no_batch_norm, **options: Any) -> Case:
    return Case(model=model, distribute={"strategy": strategy, "devices": 2, **options})


SCENES: Callable[[Data], Any] = lambda data: data.scenes  # noqa: E731
NUMBERS: Callable[[Data], Any] = lambda data: (data.numbers, data.numbers)  # noqa: E731
MANY: Callable[[Data], Any] = lambda data: (data.many, data.many)  # noqa: E731

CASES: dict[str, Case] = {
    "plain": Case(),
    "surgery": Case((
        t.BlurPool(min_channels=4), t.SqueezeExcite(min_channels=8, latent_channels=8), t.ChannelsLast(),
        t.NoWeightDecay(), t.WeightStandardization(),
    )),
    "surgery of a transformer": Case((t.ALiBi(), t.GatedLinearUnits(), t.LowPrecisionLayerNorm()), vit),
    "Factorize, GyroDropout": Case((
        t.Factorize(min_channels=16, latent_channels=0.25, min_features=16, latent_features=0.5),
        t.GyroDropout(sigma=8, tau=4),
    )),
    "GhostBatchNorm": Case((t.GhostBatchNorm(8),)),
    "StochasticDepth": Case((t.StochasticDepth(drop_rate=0.5, method="sample"),), model=resnet),
    "PatchDropout": Case((t.PatchDropout(),), vit),
    "low precision norms": Case(
        (t.LowPrecisionLayerNorm(), t.LowPrecisionGroupNorm()), no_batch_norm, distribute={"precision": "bf16"}
    ),
    "LabelSmoothing, EMA": Case((t.LabelSmoothing(0.1), t.EMA(half_life=2))),
    "BinaryCrossEntropy": Case((t.BinaryCrossEntropy(),)),
    "MixUp, SAM": Case((t.MixUp(0.2), t.SAM(0.05, interval=2))),
    "CutMix, SWA": Case((t.CutMix(1.0), t.SWA(start=0.4, end=0.9))),
    "ColOut, CutOut": Case((t.ColOut(), t.CutOut())),
    "RandAugment": Case((t.RandAugment(),), load={"image_size": 32}),
    "TrivialAugment": Case((t.TrivialAugment(),)),
    "AugMix": Case((t.AugMix(),)),
    "ThreeAugment": Case((t.ThreeAugment(),)),
    "GradientClipping": Case((t.GradientClipping("adaptive", 0.05),)),
    "clip_norm, accumulate": Case(distribute={"clip_norm": 0.1, "accumulate": 2}),
    "Lookahead, LayerFreezing": Case((t.Lookahead(2), t.LayerFreezing(freeze_start=0.2))),
    "EfficientTrain": Case(
        (t.EfficientTrain(size_increment=4), t.RandAugment()), fit={"epochs": 3}
    ),
    "ProgressiveResizing": Case((t.ProgressiveResizing(delay=0.2, finetune=0.4),), fit={"epochs": 3}),
    "SelectiveBackprop": Case((t.SelectiveBackprop(start=0.2, end=0.9),)),
    "TestTimeFlip": Case((t.TestTimeFlip(shift=1),)),
    "bf16": Case(distribute={"precision": "bf16"}),
    "activation checkpointing": Case(distribute={"activation_checkpointing": True}),
    "adamw, cosine, warmup": Case(
        optimize={"optimizer": "adamw", "lr": 0.01, "schedule": "cosine", "warmup": 0.25}
    ),
    "muon, groups": Case(
        optimize={"optimizer": "muon", "lr": 0.02, "schedule": "linear", "groups": {"fc.*": {"lr": 0.1}}}
    ),
    "adamuon": Case(optimize={"optimizer": "adamuon", "lr": 0.002}),
    "schedulefree_sgd": Case(optimize={"optimizer": "schedulefree_sgd", "lr": 0.5, "schedule": "constant"}),
    "schedulefree_adamw": Case(optimize={"optimizer": "schedulefree_adamw", "lr": 0.01, "schedule": "constant"}),
    "sgdw, step": Case(optimize={"optimizer": "sgdw", "schedule": "step", "schedule_options": {"every": 1}}),
    "torch loader": Case(load={"loader": "torch", "workers": 0, "crop": "resized"}),
    "quasi-random order, crop": Case(load={"order": "quasi_random", "crop": "resized", "scale": (0.3, 1.0)}),
    "color jitter": Case(load={"color_jitter": (0.4, 0.4, 0.2), "crop": "padded"}),
    "mix of sources": Case(files=lambda data: ({data.train: 3.0, data.val: 1.0}, data.val)),  # type: ignore[dict-item,return-value]
    "weighted loss, MixUp, accumulate": Case(
        (t.EMA(half_life=2), t.MixUp(0.2)), no_batch_norm,
        Classification(loss=nn.CrossEntropyLoss(weight=WEIGHTS)), distribute={"accumulate": 2},
    ),
    "ignored labels, accumulate": Case(
        (t.SAM(0.05),), no_batch_norm,
        Classification(loss=nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1)), distribute={"accumulate": 2},
    ),
    "metrics": Case(task=Classification(metrics=("top1", "f1"), monitor="f1"), fit={"eval_every": 1}),
    "regression": Case((), lambda: Net(1), Regression(), NUMBERS),
    "multi-label": Case((), Net, MultiLabel(), MANY),
    "segmentation": Case((), lambda: segmentation_jobs.Net(3), Segmentation(3), SCENES, {"image_size": 24}),
    "contrastive": Case((), lambda: Net(8), Contrastive(), lambda data: (data.train, None), {"views": 2}),
    "resumed": Case((t.EMA(half_life=2), t.CutMix(1.0)), resumed=True),
    "resumed, SAM, accumulate": Case(
        (t.SAM(0.05), t.LabelSmoothing(0.1)), distribute={"accumulate": 2}, resumed=True
    ),
    "two ranks, ddp": on_ranks("ddp", accumulate=2, clip_norm=0.5),
    "two ranks, ddp, sync_batchnorm": on_ranks("ddp", Net, sync_batchnorm=True),
    "two ranks, fsdp": on_ranks("fsdp"),
    "two ranks, zero_redundancy": on_ranks("zero_redundancy"),
    "two ranks, fairscale_oss": on_ranks("fairscale_oss"),
    "two ranks, fsdp, resumed": Case(
        (t.EMA(half_life=2),), no_batch_norm, distribute={"strategy": "fsdp", "devices": 2}, resumed=True
    ),
}  # fmt: skip
if hasattr(t, "InfoBatch"):  # which the first revision that this file is compared with lacks
    CASES["InfoBatch, resumed"] = Case(
        (t.InfoBatch(0.7, 0.25),), load={"batch_size": 16}, optimize={"schedule": "cosine"}, fit={"epochs": 4},
        resumed=True,
    )  # fmt: skip
"""Each transform, strategy, task, optimizer and loader at least once, except DeepSpeed, which takes minutes to compile,
and SeqLengthWarmup, which is for text."""


def numbers(case: Case, data: Data, folder: Path) -> dict[str, Any]:
    """Train it, and return what must stay: losses and metrics of each epoch, and a digest of the weights."""
    pipeline = case.pipeline(data)
    options: dict[str, Any] = {"epochs": EPOCHS, "progress": False} | case.fit
    if case.resumed:
        pipeline.fit(**options, out=folder, checkpoints=Checkpoints(every_steps=1, keep=99))
        within = sorted((folder / "checkpoints").iterdir())[-2]  # a step before the end
        options |= {"resume": within}
    result = pipeline.fit(**options)
    digest = hashlib.sha256()
    for name, tensor in sorted(result.model.state_dict().items()):
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(name.encode() + values.numpy().tobytes())
    epochs = [
        {"loss": epoch.loss.hex(), "val_loss": float(epoch.val_loss).hex() if epoch.val_loss is not None else None,
         "metrics": {name: float(value).hex() for name, value in epoch.metrics.items()}}
        for epoch in result.history.epochs
    ]  # fmt: skip
    return {"epochs": epochs, "weights": digest.hexdigest()}


def main(out: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Data(Path(folder))
        for number, name in enumerate(name for name in names if name in CASES):
            found[name] = numbers(CASES[name], data, Path(folder) / str(number))
            Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(list(CASES)))
    else:
        main(sys.argv[1], sys.argv[2:])
