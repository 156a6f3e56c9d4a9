"""Compare Muon with the optimizer of a CIFAR-10 recipe: accuracy after the same epochs, over several seeds.

    python benchmarks/muon.py [--recipe cifar10-quickstart] [--seeds 3] [--epochs 5] [--lrs 0.02 0.05]
                              [--precision fp32] [--out benchmarks/results]

Every contender trains with the recipe's batch size, schedule and epochs; with one seed, all start from the same weights
and see the same batches. Muon trains matrices and convolutions; the last layer, norms and biases are AdamW's, as Jordan
recommends. Of several learning rates, Muon first trains a few epochs with each and a seed of its own; the best one by
training loss competes, so that the choice does not see the validation data. The default is one, Jordan's. SGD keeps the
recipe's learning rate, which was tuned for it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from drivetrain import Pipeline
from drivetrain.common.table import Table
from measuring import save, summarize

TUNING_SEED = 1000
HEAD = {"11.*": {"orthogonalize": False}}
"""The last layer of `cifar_resnet`."""


def muon(lr: float) -> dict[str, Any]:
    """Return the overrides that replace a recipe's optimizer."""
    return {"optimizer": {"name": "muon", "lr": lr, "adamw_lr": 3e-3, "weight_decay": 0.01}, "groups": HEAD}


def run(recipe: str, seed: int, overrides: dict[str, Any], epochs: int | None = None) -> dict[str, Any]:
    """Train; return accuracy, losses and seconds of training."""
    pipeline = Pipeline.from_recipe(recipe, seed=seed, **overrides)
    history = pipeline.fit(epochs=epochs, progress=False).history
    last = history.epochs[-1]
    return {
        "accuracy": last.metrics["top1"], "val_loss": last.val_loss, "loss": last.loss,
        "by_epoch": [epoch.metrics["top1"] for epoch in history.epochs],
        "seconds": sum(epoch.seconds for epoch in history.epochs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10-quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.02])
    parser.add_argument("--epochs", type=int, help="default: the recipe's")
    parser.add_argument("--tuning-epochs", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    common = {"precision": options.precision}
    tuning = {}
    for lr in options.lrs if len(options.lrs) > 1 else ():
        tuning[lr] = run(options.recipe, TUNING_SEED, common | muon(lr), options.tuning_epochs)
        print(f"Muon, lr {lr}: training loss {tuning[lr]['loss']:.4f}", flush=True)
    best = min(tuning, key=lambda lr: tuning[lr]["loss"]) if tuning else options.lrs[0]
    contenders = {"the recipe's optimizer": common, f"Muon, lr {best}": common | muon(best)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for seed in range(options.seeds):
        for name in list(contenders)[:: -1 if seed % 2 else 1]:
            runs[name].append(run(options.recipe, seed, contenders[name], options.epochs))
            print(f"{name}, seed {seed}: {runs[name][-1]['accuracy']:.2%}", flush=True)
    rows: list[tuple[str, ...]] = []
    for name, results in runs.items():
        accuracy = [one["accuracy"] for one in results]
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        seconds = statistics.median(one["seconds"] for one in results)
        rows.append((name, f"{statistics.mean(accuracy):.2%}", f"{spread:.2%}", f"{seconds:.0f}"))
    table = Table((options.recipe, "accuracy", "standard deviation", "seconds"), rows)
    result = {
        "recipe": options.recipe, "epochs": len(next(iter(runs.values()))[0]["by_epoch"]), "overrides": contenders,
        "tuning": {str(lr): one for lr, one in tuning.items()}, "runs": runs,
        "accuracy": {name: summarize([one["accuracy"] for one in results]) for name, results in runs.items()},
    }  # fmt: skip
    save([table], result, options.out / "muon.json")


if __name__ == "__main__":
    main()
