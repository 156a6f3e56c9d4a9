"""Measure the step time of each surgery, relative to the unmodified model and to Composer's version of it.

    python benchmarks/transforms.py [--rounds 9] [--seconds 0.4] [--only BlurPool …] [--mode eager compiled]

A step is forward, backward and SGD on one batch of 16 images (on a GPU: 256) of 64 × 64 pixels, under bf16 autocast for
the low-precision norms. All contenders of a surgery are interleaved in one run; ratios are taken round by round.
Without Composer, its versions are left out. "compiled" uses torch.compile (inductor); the compile time is reported
separately, and is shorter from the second run on, because inductor caches on disk. Everything takes about 15 minutes on
two cores.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torchvision
from drivetrain.common.signals import handlers_kept
from drivetrain.common.table import Table
from drivetrain.transforms import (
    ALiBi,
    BlurPool,
    ChannelsLast,
    Factorize,
    GatedLinearUnits,
    GhostBatchNorm,
    GyroDropout,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    PatchDropout,
    SqueezeExcite,
    StochasticDepth,
    Transform,
    WeightStandardization,
)
from measuring import Contender, measure, save, summarize
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a GPU, the kernel launches would dominate a step of 16 images.
BATCH, SIDE = (256 if DEVICE == "cuda" else 16), 64
MODES = ("eager", "compiled")
PLAIN, OURS, COMPOSER = "unmodified", "Drivetrain", "Composer"


def resnet() -> nn.Module:
    """Return torchvision's ResNet-18."""
    return torchvision.models.resnet18(num_classes=10)


def resnet50() -> nn.Module:
    """Return torchvision's ResNet-50: Composer's stochastic depth requires Bottleneck blocks."""
    return torchvision.models.resnet50(num_classes=10)


def vit() -> nn.Module:
    """Return a small vision transformer."""
    return torchvision.models.VisionTransformer(SIDE, 8, 4, 4, 128, 512, num_classes=10)


def composer() -> Any:
    """Return Composer's functional interface, with its signal handlers removed."""
    with handlers_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import composer.functional as functional
    return functional


def group_norm_resnet() -> nn.Module:
    """Return a ResNet-18 with group norm instead of batch norm."""
    return torchvision.models.resnet18(num_classes=10, norm_layer=partial(nn.GroupNorm, 32))


def perceptron() -> nn.Module:
    """Return a network with two hidden layers and dropout over features, which Composer's gyro dropout requires."""
    hidden = [
        nn.Linear(3 * SIDE**2, 512),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Dropout(),
    ]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10))


class Case(NamedTuple):
    """A surgery, the model it is measured on, Composer's function and its arguments, and the precision."""

    build: Callable[[], nn.Module]
    ours: Transform
    theirs: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 — never written to
    autocast: bool = False


BOTTLENECKS = {"target_layer_name": "ResNetBottleneck"}
GYRO = {"iters_per_epoch": 100, "max_epoch": 10, "p": 0.5, "sigma": 256, "tau": 16}
CASES: dict[str, Case] = {
    "BlurPool": Case(resnet, BlurPool(), "apply_blurpool"),
    "ChannelsLast": Case(resnet, ChannelsLast(), "apply_channels_last"),
    "SqueezeExcite": Case(resnet, SqueezeExcite(), "apply_squeeze_excite"),
    "GhostBatchNorm": Case(resnet, GhostBatchNorm(8), "apply_ghost_batchnorm", {"ghost_batch_size": 8}),
    "WeightStandardization": Case(resnet, WeightStandardization(), "apply_weight_standardization"),
    "Factorize": Case(resnet, Factorize(), "apply_factorization"),
    "StochasticDepth": Case(resnet50, StochasticDepth(), "apply_stochastic_depth", BOTTLENECKS),
    "GyroDropout": Case(perceptron, GyroDropout(total_steps=1000), "apply_gyro_dropout", GYRO),
    "LowPrecisionLayerNorm": Case(vit, LowPrecisionLayerNorm(), "apply_low_precision_layernorm", {}, True),
    "LowPrecisionGroupNorm": Case(
        group_norm_resnet, LowPrecisionGroupNorm(), "apply_low_precision_groupnorm", {}, True
    ),
    "ALiBi": Case(vit, ALiBi()),  # Composer has this and the next one only for language models of `transformers`
    "GatedLinearUnits": Case(vit, GatedLinearUnits()),
    "PatchDropout": Case(vit, PatchDropout()),
}


def contenders(name: str) -> dict[str, nn.Module]:
    """Return models with the same weights: unmodified, with our surgery, and with Composer's if it has one."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    found = {PLAIN: model, OURS: copy.deepcopy(model)}
    case.ours.apply(found[OURS])
    if case.theirs is not None and importlib.util.find_spec("composer") is not None:
        changed = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = getattr(composer(), case.theirs)
            if case.autocast:
                from composer.core import Precision

                function = partial(function, precision=Precision.AMP_BF16)
            function(changed, **case.options)
        found[COMPOSER] = changed
    return {who: model.to(DEVICE) for who, model in found.items()}


def steps_of(model: nn.Module, images: torch.Tensor, seconds: float, autocast: bool) -> Contender:
    """Return a contender that measures steps/s over about `seconds`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    labels = torch.arange(len(images), device=DEVICE) % 10

    def trial() -> float:
        count, start = 0, perf_counter()
        while perf_counter() - start < seconds:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                logits = model(images)
            nn.functional.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if DEVICE == "cuda" and count % 8 == 0:  # bounds the queue of steps
                torch.cuda.synchronize()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return count / (perf_counter() - start)

    return trial


def run(name: str, seconds: float, rounds: int, compiled: bool) -> dict[str, Any]:
    """Measure steps/s of each contender, its ratio to the unmodified model, and ours to Composer's."""
    images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)
    models, rows = contenders(name), dict[str, dict[str, Any]]()
    trials: dict[str, Contender] = {}
    for who, model in models.items():
        began = perf_counter()
        if compiled:
            torch._dynamo.reset()
            model.compile()
        trials[who] = steps_of(model, images, seconds, CASES[name].autocast)
        for _ in range(2):  # the second step of a compiled model may compile again
            steps_of(model, images, 0.001, CASES[name].autocast)()
        rows[who] = {"compile_s": perf_counter() - began if compiled else 0.0}
    speeds = measure(trials, rounds)
    for who, values in speeds.items():
        pairs = list(zip(values, speeds[PLAIN], speeds[OURS], strict=True))
        rows[who] |= {
            "steps_per_s": summarize(values),
            "step_time_over_unmodified": summarize([plain / own for own, plain, _ in pairs]),
            "ours_is_times_as_fast": summarize([ours / own for own, _, ours in pairs]),
        }
    return rows


def table_of(title: str, results: dict[str, dict[str, Any]]) -> Table:
    cells = []
    for name, rows in results.items():
        for who, row in rows.items():
            if who == PLAIN:
                continue
            cost, ratio = row["step_time_over_unmodified"], row["ours_is_times_as_fast"]
            cells.append((
                name, who, f"{cost['median']:.2f} ({cost['low']:.2f} to {cost['high']:.2f})",
                f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            ))  # fmt: skip
    heads = ("surgery", "version", "step time over unmodified", "ours is … times as fast")
    return Table(heads, cells, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    results, tables = {}, []
    for mode in options.mode:
        compiled = mode == "compiled"
        results[mode] = {name: run(name, options.seconds, options.rounds, compiled) for name in options.only}
        tables.append(table_of(f"training step, {mode}", results[mode]))
    save(tables, {**results, "device": DEVICE, "batch": BATCH, "side": SIDE}, options.out / "transforms.json")


if __name__ == "__main__":
    main()
