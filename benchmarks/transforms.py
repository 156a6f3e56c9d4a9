"""Step time of each surgery, relative to the unmodified model and to Composer's version of it.

    python benchmarks/transforms.py [--rounds 9] [--seconds 0.4] [--only BlurPool …] [--mode eager compiled]

A step is forward, backward and SGD on one batch of 16 images of 64 pixels (on a GPU: 256), under bf16 autocast for the
norms in low precision. All contenders of one surgery take turns in one run; ratios are taken round by round.
Composer's versions are left out where it is not installed. Compiled is by torch.compile (inductor), whose compile time
is shown separately; from the second run on that is what inductor's cache on disk leaves of it. All of it takes about 15
minutes on two cores.
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
from drivetrain.table import Table
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
    SqueezeExcite,
    StochasticDepth,
    Transform,
    WeightStandardization,
)
from measuring import Contender, handlers_kept, measure, save, summarise
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, SIDE = (
    256 if DEVICE == "cuda" else 16,
    64,
)  # 16 images are too few to show anything of a GPU but its launches
MODES = ("eager", "compiled")
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
    with handlers_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import composer.functional as functional
    return functional


def group_norm_resnet() -> nn.Module:
    """ResNet-18 with group norm in the place of batch norm."""
    return torchvision.models.resnet18(num_classes=10, norm_layer=partial(nn.GroupNorm, 32))


def perceptron() -> nn.Module:
    """Two hidden layers with dropout over features, the only shape that Composer's gyro dropout takes."""
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
    "ALiBi": Case(vit, ALiBi()),  # Composer's and the next are for language models of `transformers`
    "GatedLinearUnits": Case(vit, GatedLinearUnits()),
}


def contenders(name: str) -> dict[str, nn.Module]:
    """The same weights: as they are, with our surgery, and with Composer's where it has one."""
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
    """Steps/s over about so many seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    labels = torch.arange(len(images), device=DEVICE) % 10

    def turn() -> float:
        count, start = 0, perf_counter()
        while perf_counter() - start < seconds:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                logits = model(images)
            nn.functional.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if DEVICE == "cuda" and count % 8 == 0:  # or the host would queue steps without end
                torch.cuda.synchronize()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return count / (perf_counter() - start)

    return turn


def run(name: str, seconds: float, rounds: int, compiled: bool) -> dict[str, Any]:
    """Steps/s of each contender, its ratio to the unmodified model, and ours to Composer's."""
    images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)
    models, rows = contenders(name), {}
    turns: dict[str, Contender] = {}
    for who, model in models.items():
        began = perf_counter()
        if compiled:
            torch._dynamo.reset()
            model.compile()
        turns[who] = steps_of(model, images, seconds, CASES[name].autocast)
        for _ in range(2):  # the second step of a compiled model may compile once more
            steps_of(model, images, 0.001, CASES[name].autocast)()
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        tables.append(table_of(f"a training step, {mode}", results[mode]))
    save(tables, {**results, "device": DEVICE, "batch": BATCH, "side": SIDE}, options.out / "transforms.json")


if __name__ == "__main__":
    main()
