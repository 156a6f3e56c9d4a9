"""Step time of each surgery, relative to the unmodified model and to Composer's version of it.

    python benchmarks/transforms.py [--rounds 7] [--seconds 0.3] [--compiled BlurPool …] [--out benchmarks/results]

A step is forward, backward and SGD on one batch of 16 images of 64 pixels (transformers: a ViT of 4 blocks).
All contenders of one surgery take turns in one run; ratios are taken round by round. `--compiled` adds those
surgeries under torch.compile (inductor), whose compile time is told apart.
"""

from __future__ import annotations

import argparse
import copy
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torchvision
from drivetrain.transforms import (
    BlurPool,
    ChannelsLast,
    Factorize,
    GatedLinearUnits,
    GhostBatchNorm,
    LowPrecisionLayerNorm,
    SqueezeExcite,
    StochasticDepth,
    Transform,
    WeightStandardization,
)
from measuring import Contender, measure, save, summarise
from rich.table import Table
from torch import nn

BATCH, SIDE = 16, 64
PLAIN, OURS, COMPOSER = "unmodified", "Drivetrain", "Composer"


def resnet() -> nn.Module:
    """torchvision's ResNet-18."""
    return torchvision.models.resnet18(num_classes=10)


def resnet50() -> nn.Module:
    """torchvision's ResNet-50, whose Bottlenecks Composer's stochastic depth needs."""
    return torchvision.models.resnet50(num_classes=10)


def vit() -> nn.Module:
    """A small vision transformer."""
    return torchvision.models.VisionTransformer(SIDE, 8, 4, 4, 128, 512, num_classes=10)


def composer() -> Any:
    """Composer's functional interface; its signal handlers are taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import composer.functional as functional
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return functional


CASES: dict[str, tuple[Callable[[], nn.Module], Transform, str | None, dict[str, Any]]] = {
    "BlurPool": (resnet, BlurPool(), "apply_blurpool", {}),
    "ChannelsLast": (resnet, ChannelsLast(), "apply_channels_last", {}),
    "SqueezeExcite": (resnet, SqueezeExcite(), "apply_squeeze_excite", {}),
    "GhostBatchNorm": (resnet, GhostBatchNorm(8), "apply_ghost_batchnorm", {"ghost_batch_size": 8}),
    "WeightStandardization": (resnet, WeightStandardization(), "apply_weight_standardization", {}),
    "Factorize": (resnet, Factorize(), "apply_factorization", {}),
    "StochasticDepth": (
        resnet50,
        StochasticDepth(),
        "apply_stochastic_depth",
        {"target_layer_name": "ResNetBottleneck"},
    ),
    "LowPrecisionLayerNorm": (vit, LowPrecisionLayerNorm(), None, {}),
    "GatedLinearUnits": (vit, GatedLinearUnits(), None, {}),
}
"""Surgery to the model it is measured on, ours, Composer's function and its arguments."""


def contenders(name: str) -> dict[str, nn.Module]:
    """The same weights: as they are, with our surgery, and with Composer's where it has one."""
    build, ours, theirs, options = CASES[name]
    torch.manual_seed(0)
    model = build()
    found = {PLAIN: model, OURS: copy.deepcopy(model)}
    ours.apply(found[OURS])
    if theirs is not None:
        changed = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(composer(), theirs)(changed, **options)
        found[COMPOSER] = changed
    return found


def steps_of(model: nn.Module, images: torch.Tensor, seconds: float) -> Contender:
    """Steps/s over about so many seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    labels = torch.arange(len(images)) % 10

    def turn() -> float:
        count, start = 0, perf_counter()
        while perf_counter() - start < seconds:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
        return count / (perf_counter() - start)

    return turn


def run(name: str, seconds: float, rounds: int, compiled: bool) -> dict[str, Any]:
    """Steps/s of each contender, its ratio to the unmodified model, and ours to Composer's."""
    images = torch.randn(BATCH, 3, SIDE, SIDE)
    models, rows = contenders(name), {}
    turns: dict[str, Contender] = {}
    for who, model in models.items():
        began = perf_counter()
        if compiled:
            torch._dynamo.reset()
            model.compile()
        turns[who] = steps_of(model, images, seconds)
        steps_of(model, images, 0.0)()
        turns[who]()
        rows[who] = {"compile_s": perf_counter() - began if compiled else 0.0}
    speeds = measure(turns, rounds)
    for who, values in speeds.items():
        pairs = list(zip(values, speeds[PLAIN], speeds[OURS], strict=True))
        rows[who] |= {
            "steps_per_s": summarise(values),
            "step_time_over_unmodified": summarise([plain / own for own, plain, _ in pairs]),
            "ours_is_times_as_fast": summarise([ours / own for own, _, ours in pairs]),
        }
    return rows


def table_of(title: str, results: dict[str, dict[str, Any]]) -> Table:
    table = Table("surgery", "version", "step time over unmodified", "ours is … times as fast", title=title)
    for name, rows in results.items():
        for who, row in rows.items():
            if who == PLAIN:
                continue
            cost, ratio = row["step_time_over_unmodified"], row["ours_is_times_as_fast"]
            table.add_row(
                name, who, f"{cost['median']:.2f} ({cost['low']:.2f} to {cost['high']:.2f})",
                f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--compiled", nargs="*", choices=CASES, default=[])
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    results, tables = {}, []
    for mode, names in {"eager": options.only, "compiled": options.compiled}.items():
        results[mode] = {
            name: run(name, options.seconds, options.rounds, mode == "compiled") for name in names
        }
        tables.append(table_of(f"a training step, {mode}", results[mode]))
    save(tables, results, options.out / "transforms.json")


if __name__ == "__main__":
    main()
