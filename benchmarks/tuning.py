"""Tune two recipes on this machine, and measure what was found against the recipe as given, in processes of their own.

    python benchmarks/tuning.py FOLDER [--seconds 600] [--rounds 8] [--out benchmarks/results]

FOLDER is an ImageFolder tree of JPEGs. The recipes are cifar10-quickstart, and ffcv-resnet18-16 on these photographs,
on one device in fp32, with images of 64 pixels and batches of 16, which two cores train on in half a second. With
`--allow`, changes of what the trainings compute are tried, too. A tuning estimates the gain of each change from the
rounds that accepted it; the measurement afterwards is independent of these.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from drivetrain import Pipeline
from drivetrain.common.table import Table
from drivetrain.loaders import convert
from drivetrain.pipeline import Tuned
from drivetrain.pipeline.ledger.variant import in_turn
from drivetrain.pipeline.measuring.runner import ProcessRunner, Variant
from measuring import compare, measure, save

TUNED, GIVEN = "tuned", "as given"
TRIAL_SECONDS = 5.0


def speed(contender: ProcessRunner, batches: int) -> float:
    return contender.trial(1, batches).speed


def confirmed(given: Pipeline, tuned: Tuned, rounds: int) -> tuple[Table, Any]:
    """Measure both pipelines in turns, the tuned one with the environment variables that were found for it."""
    contenders = {}
    for name, spec, variables in ((TUNED, tuned.pipeline, tuned.variables), (GIVEN, given, {})):
        contenders[name] = ProcessRunner(Variant(in_turn(name), spec), variables, 2, perf_counter() + 3600)
    each = contenders[GIVEN].trial(0, 2).seconds / 2
    batches = max(round(TRIAL_SECONDS / each), 2)
    turns = {name: partial(speed, one, batches) for name, one in contenders.items()}
    figures = measure(turns, rounds)
    for one in contenders.values():
        one.close()
    return compare(given.recipe or "", "images/s", figures, TUNED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--allow", nargs="*", default=[])
    parser.add_argument("--only", choices=("cifar10-quickstart", "ffcv-resnet18-16"), nargs="*")
    parser.add_argument("--train", default="cifar10:train", help="of cifar10-quickstart")
    parser.add_argument("--val", default="cifar10:test", help="of cifar10-quickstart")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    tables, results = [], {}
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos.beton"
        classes = sum(path.is_dir() for path in options.folder.iterdir())
        convert(options.folder, photos, max_resolution=400, progress=False)
        recipes = {
            "cifar10-quickstart": {"train": options.train, "val": options.val},
            "ffcv-resnet18-16": {
                "train": str(photos), "val": str(photos), "image_size": 64, "eval_image_size": 64, "batch_size": 16,
                "devices": 1, "precision": "fp32", "model_options.num_classes": classes,
            },
        }  # fmt: skip
        for name, overrides in recipes.items():
            if options.only and name not in options.only:
                continue
            given = Pipeline.from_recipe(name, **overrides)
            tuned = given.tune(seconds=options.seconds, allow=options.allow, again=True, progress=False)
            print(tuned)
            table, rows = confirmed(given, tuned, options.rounds)
            tables.append(table)
            found = tuned.to_dict()
            del found["recipe"], found["facts"]
            results[name] = {"seconds_asked": options.seconds, "tuning": found, "measured afterwards": rows}
            options.out.mkdir(parents=True, exist_ok=True)
            tuned.save(options.out / f"tuning-{name}.png")
        save(tables, {"recipes": results}, options.out / "tuning.json")


if __name__ == "__main__":
    main()
