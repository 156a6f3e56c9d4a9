"""Measure what each method contributes to the time to an accuracy: a recipe, and the same recipe with each of them.

    python benchmarks/methods.py [GROUP …] [KEY=VALUE …] [--seeds 3] [--runs .build/records] [--out benchmarks/results]

There are four groups: `methods`, `methods-others` and `methods-averages` add to `cifar10-quickstart`, `methods-vit` to
`vit-tiny-imagenette`, of which train= and val= must be given. All variants of a group train from the same seeds in
turns (`Pipeline.race`): the recipe, and the recipe with one method more, or with another optimizer. Values are the
defaults, which are those of the papers; `EfficientTrain (4 pixels)` has sides in multiples of 4 instead of 16 pixels,
as its docstring recommends for images of 32. Learning rates of optimizers are ours: of AdaMuon the better of 0.003 and
0.01, of Schedule-Free of 1 and 5, after two epochs from another seed; Muon's is Jordan's.
Finished runs are kept in the folder `--runs`, from which a second call continues. Measured: seconds of training until
the target is reached, as a ratio within each seed, and the difference of the accuracies after the last epoch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import drivetrain.transforms as transforms
from drivetrain import Pipeline
from drivetrain.common.table import Table
from drivetrain.pipeline import RaceResult
from drivetrain.pipeline.ledger.statistics import Figure, interval_of_mean
from drivetrain.pipeline.recipes.presets import parse_overrides
from measuring import save

Change = Callable[[Pipeline], Pipeline]


HEAD = {"11.*": {"orthogonalize": False}}  # the last layer of `cifar_resnet` is AdamW's, as Jordan recommends for Muon


def muon(name: str, lr: float) -> Change:
    return lambda pipeline: pipeline.optimize(
        name, schedule="linear", warmup=0.25, groups=HEAD, lr=lr, adamw_lr=3e-3, weight_decay=0.01
    )


@dataclass(frozen=True)
class Group:
    """Methods that are measured with one recipe, in `epochs` epochs, by the time to `target`."""

    recipe: str
    epochs: int
    target: float
    methods: dict[str, Change]


GROUPS = {
    "methods": Group("cifar10-quickstart", 5, 0.8, {
        "EfficientTrain": lambda pipeline: pipeline.transform(transforms.EfficientTrain()),
        "InfoBatch": lambda pipeline: pipeline.transform(transforms.InfoBatch()),
        "ThreeAugment": lambda pipeline: pipeline.transform(transforms.ThreeAugment()),
        "AdaMuon": muon("adamuon", 0.01),
        "Schedule-Free SGD": lambda pipeline: pipeline.optimize(
            "schedulefree_sgd", schedule="constant", lr=1.0, weight_decay=5e-4, warmup=0.05
        ),
    }),
    "methods-others": Group("cifar10-quickstart", 5, 0.8, {
        "EfficientTrain (4 pixels)": lambda pipeline: pipeline.transform(transforms.EfficientTrain(size_increment=4)),
        "SqueezeExcite": lambda pipeline: pipeline.transform(transforms.SqueezeExcite()),
        "Muon": muon("muon", 0.02),
    }),
    "methods-averages": Group("cifar10-quickstart", 5, 0.8, {
        "EMA": lambda pipeline: pipeline.transform(transforms.EMA(half_life=100, update_every=20)),
        "Lookahead": lambda pipeline: pipeline.transform(transforms.Lookahead(interval=5, decay=0.774, power=3.0)),
    }),
    "methods-vit": Group("vit-tiny-imagenette", 5, 0.5, {
        "PatchDropout": lambda pipeline: pipeline.transform(transforms.PatchDropout()),
    }),
}  # fmt: skip


def gain(race: RaceResult, method: str) -> Figure | None:
    """Return the mean difference of the last accuracies within each seed, and its 95 % interval; None without a seed
    from which both have accuracies."""
    own, base = (
        {run.seed: run.points[-1].accuracy for run in race.of(variant) if run.points}
        for variant in (method, race.variants[0])
    )
    differences = [own[seed] - base[seed] for seed in own if seed in base]
    return interval_of_mean(differences) if differences else None


def finite(figure: Figure | None) -> dict[str, float | None] | None:
    """Return a figure for JSON, which has no infinity: None is an unbounded end of an interval."""
    if figure is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in asdict(figure).items()}


def measure(name: str, changes: dict[str, Any], seeds: int, runs: Path, out: Path) -> None:
    group = GROUPS[name]
    pipeline = Pipeline.from_recipe(group.recipe, epochs=group.epochs, **changes)
    against = {method: change(pipeline) for method, change in group.methods.items()}
    race = pipeline.race(target=group.target, seeds=seeds, against=against, give_up=None, out=runs / f"{name}.json")
    print(race)
    rows, methods = [], {}
    for row in race.rows[1:]:
        figures = {"ratio": row.ratio, "accuracy": gain(race, row.variant)}
        methods[row.variant] = {"reached": row.reached} | {name: finite(each) for name, each in figures.items()}
        time, more = (f"{each.value:{kind}} ({each.low:{kind}} to {each.high:{kind}})" if each else missing
                      for each, kind, missing in zip(
                          figures.values(), (".2f", "+.3f"), ("not reached", "failed"), strict=True
                      ))  # fmt: skip
        rows.append((row.variant, time, more, f"{row.reached} of {row.runs}"))
    columns = ("method", "time to the target, over that without", "accuracy, over that without", "reached")
    results = {
        "recipe": group.recipe,
        "epochs": group.epochs,
        "target": group.target,
        "methods": methods,
    }
    save([Table(columns, rows, figures=True)], results, out / f"{name}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP or KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path(".build/records"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = [each for each in options.groups if "=" not in each] or list(GROUPS)
    for name in names:
        if name not in GROUPS:
            parser.error(f"there is no group {name!r}: choose from {', '.join(GROUPS)}")
    changes = parse_overrides([each for each in options.groups if "=" in each])
    options.runs.mkdir(parents=True, exist_ok=True)
    for name in names:
        measure(name, changes, options.seeds, options.runs, options.out)


if __name__ == "__main__":
    main()
