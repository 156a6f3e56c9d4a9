"""Write the figures of the README and of `docs/` from the JSON files in `results/`.

    python benchmarks/figures.py [--check]

A figure is followed by a comment that names its source, which a page does not show:

    2.65<!-- peers: scale 0.25 / stock FFCV / ours_is_times_as_fast --> times as fast

The source is a file, and the keys in it. An entry of a list is selected by its number or its name; of a summary, the
median is meant, unless `low`, `high` or `n` follows. The figure keeps its shape: as many decimals as before, times 100
before ` %`. `<!-- computed: NAME -->` is a figure of `COMPUTED`. What stands between `<!-- table: NAME -->` and
`<!-- end of table -->` is a table of `TABLES`. `--check` writes nothing, and fails if a page differs from the files.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from drivetrain.common.errors import DataError
from drivetrain.pipeline import RaceResult
from drivetrain.pipeline.measuring.race.result import RaceRun
from drivetrain.transforms import TRANSFORMS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(
    r"(?P<figure>\d{4}-\d\d-\d\d|\d[\d,]*(?:\.\d+)?)(?P<percent> %)?<!-- (?P<file>[\w-]+): (?P<keys>[^>]+?) -->"
)
TABLE = re.compile(r"(?<=<!-- table: )(?P<name>[^>]+?) -->\n.*?(?=<!-- end of table -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages whose figures are written."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@functools.cache
def result(name: str) -> Any:
    """Return the content of a file of `results/`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def entry(name: str, keys: str) -> Any:
    """Return what a file of `results/` has at these keys, separated by " / "."""
    found: Any = result(name)
    for key in keys.split(" / "):
        if isinstance(found, list):
            named = [each for each in found if key in (each.get("name"), each.get("stage"))]
            found = named[0] if named else found[int(key)]
        else:
            found = found[key]
    return found


def figure(name: str, keys: str) -> float | str:
    """Return one figure, or a text such as a date.

    Raises:
        DataError: if there is none.
    """
    try:
        found: Any = COMPUTED[keys]() if name == "computed" else entry(name, keys)
        if isinstance(found, dict):
            found = found.get("median", found.get("value", found))
    except (KeyError, IndexError, ValueError, FileNotFoundError) as error:
        raise DataError(
            f"No figure is at <!-- {name}: {keys} -->: {error!r}. "
            "Name a file of benchmarks/results/ and keys in it, or a name in COMPUTED of benchmarks/figures.py."
        ) from None
    if not isinstance(found, int | float | str):
        there = list(found) if isinstance(found, dict) else found
        raise DataError(f"<!-- {name}: {keys} --> is not one figure; continue with a key of {there}.")
    return found


def written(text: str) -> str:
    """Return a page with the figures and tables of the files.

    Raises:
        DataError: if a figure or a table has no source.
    """

    def one(match: re.Match[str]) -> str:
        now = figure(match["file"], match["keys"])
        if isinstance(now, str):
            shaped = now[: len(match["figure"])]
        else:
            decimals = len(match["figure"].partition(".")[2])
            shaped = f"{100 * now if match['percent'] else now:,.{decimals}f}"
        return shaped + match.group()[len(match["figure"]) :]

    def table(match: re.Match[str]) -> str:
        if match["name"] not in TABLES:
            raise DataError(f"No table is named {match['name']!r}. Those of figures.py are {', '.join(TABLES)}.")
        return f"{match['name']} -->\n\n{TABLES[match['name']]()}\n\n"

    return TABLE.sub(table, MARKED.sub(one, text))


def spread(summary: dict[str, Any], digits: int = 2) -> str:
    """Return a summary's middle with its limits."""
    middle = summary["median"] if "median" in summary else summary["value"]
    if summary["low"] == summary["high"]:
        return f"{middle:,.{digits}f}"
    return f"{middle:,.{digits}f} ({summary['low']:,.{digits}f} to {summary['high']:,.{digits}f})"


def rows(head: str, lines: list[list[str]]) -> str:
    """Return a Markdown table; `head` separates its cells by " | "."""
    count = len(head.split(" | "))
    return "\n".join([f"| {head} |", "|" + "---|" * count, *(f"| {' | '.join(cells)} |" for cells in lines)])


@functools.cache
def race(recipe: str) -> RaceResult:
    """Return a recipe's race with plain PyTorch."""
    return RaceResult.load(RESULTS / f"race-{recipe}.json")


class ToPlainsBest(NamedTuple):
    """By seed: accuracies at the end, and the seconds of training to the best accuracy of plain PyTorch, which is that
    of the same seed."""

    accuracies: list[float]
    seconds: list[float]
    times_as_fast: list[float]  # empty for plain PyTorch itself

    @property
    def cells(self) -> list[str]:
        best = [100 * accuracy for accuracy in self.accuracies]
        accuracy = f"{mean(best):.1f} % ({min(best):.1f} to {max(best):.1f}, n = {len(best)})"
        times = self.times_as_fast
        faster = f"{mean(times):.1f} ({min(times):.1f} to {max(times):.1f})" if times else ""
        return [accuracy, f"{mean(self.seconds) / 60:.1f}", faster]


def raced(recipe: str) -> tuple[ToPlainsBest, ToPlainsBest]:
    """Return a recipe and plain PyTorch, of their race."""
    found = race(recipe)
    plain = {run.seed: run for run in found.of(found.rows[1].variant)}
    own = [run for run in found.of(recipe) if run.seed in plain]
    goals = {seed: max(point.accuracy for point in run.points) for seed, run in plain.items()}
    needed, reached = (
        [run.seconds_to(goals[run.seed], found.monitor) or math.inf for run in runs] for runs in (plain.values(), own)
    )
    ends, plain_ends = ([run.points[-1].accuracy for run in runs] for runs in (own, plain.values()))
    longest = dict(zip(plain, needed, strict=True))
    ratios = [longest[run.seed] / seconds for run, seconds in zip(own, reached, strict=True)]
    return ToPlainsBest(ends, reached, ratios), ToPlainsBest(plain_ends, needed, [])


def imagenette_runs() -> list[RaceRun]:
    """Return the runs of imagenette-5: of its race with plain PyTorch, and from further seeds."""
    return [run for name in ("imagenette-5", "imagenette-5-seeds") for run in race(name).of("imagenette-5")]


def to_the_board() -> list[tuple[float, float]]:
    """Return the seconds of training to the board's accuracy by seed: of `imagenette-5`, and of plain PyTorch in 12
    epochs."""
    plain = race("imagenette-plain")
    fast = {run.seed: run for run in race("imagenette-5").of("imagenette-5")}

    def needed(run: RaceRun) -> float:
        return run.seconds_to(plain.target, plain.monitor) or math.inf

    return [(needed(fast[slow.seed]), needed(slow)) for slow in plain.of("imagenette-plain")]


def seconds_of(recipe: str, row: int = 0) -> list[float]:
    """Return the seconds of training of a recipe's runs; `row` 1: those of plain PyTorch."""
    found = race(recipe)
    return [run.points[-1].seconds for run in found.of(found.rows[row].variant)]


def imagenette_table() -> str:
    """Return the race on Imagenette, with the accuracies of further seeds."""
    own, plain = raced("imagenette-5")
    own = own._replace(accuracies=[run.points[-1].accuracy for run in imagenette_runs()])
    minutes, plain_minutes = (mean(seconds) / 60 for seconds in zip(*to_the_board(), strict=True))
    lines = [
        ["Drivetrain (`imagenette-5`)", *own.cells, f"{minutes:.1f}"],
        ["plain PyTorch (`imagenette-plain`)", *plain.cells, f"{plain_minutes:.1f} (12 epochs)"],
        ["the board's best, a larger network (github.com/fastai/imagenette)", "85.77 % (n = 5)", "", "", ""],
    ]
    head = (
        "Imagenette, 5 epochs, two cores | top-1 | minutes of training to plain PyTorch's best | times as fast | "
        "minutes to 85.77 %"
    )
    return rows(head, lines)


def races_table() -> str:
    """Return the races of other recipes."""
    names = {"camvid-segmentation": "road scenes, mean IoU", "vit-tiny-imagenette": "Imagenette, top-1"}
    lines = []
    for recipe, metric in names.items():
        own, plain = raced(recipe)
        found = [f"{kind.cells[0]} in {mean(seconds_of(recipe, n)) / 60:.1f}" for n, kind in enumerate((own, plain))]
        lines.append([f"`{recipe}`, {metric}", *found, own.cells[2]])
    head = "recipe | trained, minutes | plain PyTorch, minutes | to plain PyTorch's best: times as fast"
    return rows(head, lines)


def loaders_table() -> str:
    """Return the loaders of `peers.json`, with both ranges of crops."""
    names = {
        "FFCVLoader": "FFCVLoader",
        "FFCVLoader, verify=True": "FFCVLoader, `verify=True`",
        "DALI": "DALI 2.4 on a CPU, which decodes the crop only",
        "TorchCodec": "TorchCodec 0.17 and transforms v2",
        "stock FFCV": "stock FFCV 1.0.2, behind our interface",
        "torchvision": "torchvision ImageFolder and DataLoader",
        "SPDL": "SPDL 0.8, with FFmpeg's filters",
    }
    lines = []
    for key, name in names.items():
        cells = [name]
        for scale in ("scale 0.25", "scale 0.08"):
            row = entry("peers", f"{scale} / {key}")
            cells += [spread(row["images/s"], 0), spread(row["ours_is_times_as_fast"])]
        lines.append(cells)
    head = (
        "loader | crops of 25 to 100 % of the area: images/s | FFCVLoader is … times as fast | "
        "of 8 to 100 %: images/s | …"
    )
    return rows(head, lines)


def ledger_table(name: str) -> str:
    """Return the rows of a ledger."""

    def speed(summary: dict[str, Any]) -> str:
        return spread(summary, int(summary["value"] < 100))

    ledger = result(name)
    described = {"plain PyTorch": "plain PyTorch (torchvision, DataLoader, NCHW, fp32)"}
    lines = [
        [described.get(row["name"], row["name"]), speed(row["images_per_s"]), spread(row["ratio"])]
        for row in ledger["rows"]
    ]
    lines += [[f"ceiling: {name}", speed(each), ""] for name, each in ledger["ceilings"].items()]
    return rows(" | images/s (trimmed mean, quartiles) | over plain PyTorch (95 % interval)", lines)


CHANGES = {
    "image": "training images",
    "batch": "training batches",
    "loss": "training loss",
    "optimizer": "updates",
    "schedule": "which weights are trained, or on which samples",
    "loop": "weights",
    "evaluation": "evaluation",
}
"""What a method of a kind changes, if it does not change the model."""
OUTPUTS = {
    "ALiBi": "outputs",
    "BlurPool": "outputs",
    "ChannelsLast": "nothing, up to rounding",
    "Factorize": "outputs",
    "GatedLinearUnits": "outputs, from the first step; the gate begins as 1",
    "GhostBatchNorm": "outputs in training",
    "GyroDropout": "outputs in training",
    "LowPrecisionGroupNorm": "rounding, under autocast",
    "LowPrecisionLayerNorm": "rounding, under autocast",
    "PatchDropout": "outputs in training",
    "SqueezeExcite": "outputs",
    "StochasticDepth": "outputs in training",
    "WeightStandardization": "outputs",
}
"""What a method that changes the model does to its outputs, with the same weights; a test compares it with models."""


def purpose(method: type) -> str:
    """Return the first sentence of a class's docstring."""
    return " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split()).removesuffix(" In a loop::")


def methods_table() -> str:
    """Return all transforms: purpose, what each changes, and the measured step times."""
    order = ["surgery", "memory_format", *CHANGES]
    lines = []
    for name, method in sorted(TRANSFORMS.items(), key=lambda item: (order.index(item[1].kind), item[0])):
        cells = [f"`{name}`", method.kind.replace("_", " "), purpose(method)]
        cells.append(OUTPUTS[name] if name in OUTPUTS else CHANGES[method.kind])
        for file, mode in (("transforms", "eager"), ("transforms-compiled", "compiled")):
            measured = result(file)[mode].get(name)
            cells.append(spread(measured["Drivetrain"]["step_time_over_unmodified"]) if measured else "not measured")
        lines.append(cells)
    return rows("method | kind | what it does | changes | step time, eager | compiled", lines)


def effects_table(*files: str) -> str:
    """Return what each method changes in the time to an accuracy, and in the last accuracy; the files are of one
    recipe."""

    def ends(figure: dict[str, float | None], kind: str) -> str:
        known = [figure[end] for end in ("low", "high") if figure[end] is not None]
        return f" ({' to '.join(format(end, kind) for end in known)})" if len(known) == 2 else ""

    found = [result(file) for file in files]
    lines = []
    for name, row in (each for one in found for each in one["methods"].items()):
        ratio, more = row["ratio"], row["accuracy"]
        time = "not from every seed" if ratio is None else f"{ratio['value']:.2f}{ends(ratio, '.2f')}"
        last = "failed"  # from every seed
        if more is not None:
            points = {key: None if end is None else 100 * end for key, end in more.items()}
            last = f"{points['value']:+.1f}{ends(points, '+.1f')}"
        lines.append([name, time, last])
    ((target, epochs),) = {(each["target"], each["epochs"]) for each in found}
    head = f"with it, over without | time to {target:.0%} | percentage points after {epochs} epochs"
    return rows(head.replace("%", " %"), lines)


def ranks_table() -> str:
    """Return speed and traffic of `cluster.json`, with ours relative to plain PyTorch."""
    strategies = entry("cluster", "steps / by_strategy")
    lines = []
    for count in strategies["ddp"]:
        of_both = [strategies[name][count] for name in ("ddp", "fsdp")]
        speeds = [spread(each["steps"]["by hand"]["ours_is_times_as_fast"]) for each in of_both]
        sent = [
            f"{each['bytes_per_step_and_rank']['Drivetrain']['median'] / 1e6:.2f} and {each['formula'] / 1e6:.2f}"
            for each in of_both
        ]
        lines.append([count, *speeds, *sent])
    head = (
        "ranks | ddp: speed relative to by hand (quartiles) | fsdp | "
        "ddp: MB per step and rank, ours and a ring's | fsdp"
    )
    return rows(head, lines)


def tuning_table() -> str:
    """Return every change that tuning tried on two recipes, and what both pipelines were measured at afterwards."""
    lines = []
    for name, found in result("tuning")["recipes"].items():
        for one in found["tuning"]["trials"]:
            speed = one["reason"] or "not tried"
            if one["ratio"] is not None:
                interval = "" if one["low"] is None else f" ({one['low']:.3f} to {one['high']:.3f})"
                speed = f"{one['ratio']:.3f}{interval}, {one['rounds']} rounds"
            lines.append([f"`{name}`", one["name"], one["outcome"], speed])
        rate = found["measured afterwards"]
        ratio = rate["as given"]["ours_is_times_as_fast"]
        speeds = " and ".join(spread(rate[which]["images/s"], 0) for which in ("as given", "tuned"))
        lines.append([f"`{name}`", "**all that were accepted**", f"{speeds} images/s", f"**{spread(ratio, 3)}**"])
    return rows("recipe | change | outcome | speed with it over that without", lines)


def scale_table() -> str:
    """Return what one of many ranks pays for data of several sizes."""
    lines = []
    for name, row in result("scale")["scale"].items():
        costs = [
            f"{row[f'{part} {name}']['median']:,.{digits}f}"
            for part, places in (("opening", 2), ("order", 3))
            for name, digits in (("seconds", places), ("cpu_seconds", places), ("megabytes", 0))
        ]
        lines.append([*name.split(" in "), *costs])
    return rows("samples | files | opening: s | CPU s | MB | order of an epoch: s | CPU s | MB", lines)


def faults_table() -> str:
    """Return what a failure on one of two machines costs."""
    lines = []
    for what, row in result("faults")["events"].items():
        seconds, steps = row["seconds"], row["steps repeated"]
        spread = f"{seconds['median']:.1f}"
        if seconds["n"] > 1:
            spread += f" ({min(seconds['values']):.1f} to {max(seconds['values']):.1f})"
        lines.append([what, row["until"], spread, "" if steps is None else f"{steps['median']:g}"])
    return rows("what happens | seconds until | median (least to most; else n = 1) | steps repeated", lines)


def streams_table() -> str:
    """Return Drivetrain, litdata, Streaming and WebDataset on an object store, with a cache of a part of the data."""
    found = result("streams")
    names = {
        "drivetrain": "Drivetrain", "litdata": "litdata", "streaming": "MosaicML's Streaming",
        "webdataset": "WebDataset, without a cache",
    }  # fmt: skip
    lines = []
    for key, name in names.items():
        speeds = [
            cell
            for epoch in ("epoch one", "epoch two")
            for cell in (
                f"{found[epoch][key]['images/s']['median']:,.0f}",
                f"{found[epoch][key]['ours_is_times_as_fast']['median']:.2f}",
            )
        ]
        first = f"{found['first batch'][key]['s']['median']:.2f}"
        sent, memory = (found[part][key]["bytes"]["median"] for part in ("sent in two epochs", "memory"))
        times = f"{sent / found['data']['bytes'][key]:.2f}"
        version = "" if key == "drivetrain" else f" {found['versions'][key]}"
        lines.append([name.replace(",", f"{version},") if "," in name else name + version, *speeds, first, times,
                      f"{memory / 1e6:,.0f}"])  # fmt: skip
    return rows(
        "library | epoch one: images/s | ours is … times as fast | epoch two: images/s | … | first batch, s | "
        "sent in two epochs, times the data | MB of memory",
        lines,
    )


def selections_table() -> str:
    """Return what a selection costs the first rank of a machine, and each other one."""
    parts, lines = (("opening", 2), ("order", 3), ("megabytes", 0)), []
    for row in result("selections")["selections"].values():
        costs = [f"{row[rank][part]['median']:,.{digits}f}" for rank in ("first", "others") for part, digits in parts]
        lines.append([f"`{row['option']}`", f"{row['samples']:,}", *costs])
    head = (
        "option | samples | first rank: opening, s | order of an epoch, s | MB | "
        "each other: opening, s | order of an epoch, s | MB"
    )
    return rows(head, lines)


TABLES: dict[str, Callable[[], str]] = {
    "time to accuracy": imagenette_table,
    "races of other recipes": races_table,
    "tuned recipes": tuning_table,
    "streams": streams_table,
    "loaders": loaders_table,
    "ledger of the quickstart": functools.partial(ledger_table, "quickstart-ledger"),
    "ledger of imagenette-5": functools.partial(ledger_table, "imagenette-5-ledger"),
    "methods": methods_table,
    "effect of methods": functools.partial(effects_table, "methods"),
    "effect of methods on a transformer": functools.partial(effects_table, "methods-vit"),
    "cost of several ranks": ranks_table,
    "cost of a rank by samples": scale_table,
    "cost of a selection": selections_table,
    "cost of failures": faults_table,
}


def by_round(file: str, ours: str, theirs: str, middle: Callable[[list[float]], float] = median) -> float:
    """Return the median over the rounds of `ours` / `theirs`, keys of lists of values."""
    pairs = zip(entry(file, f"{ours} / values"), entry(file, f"{theirs} / values"), strict=True)
    return middle([one / other for one, other in pairs])


def quartile(number: int) -> Callable[[list[float]], float]:
    """Return the function of the first or third quartile."""
    import numpy as np

    return lambda values: float(np.percentile(values, 25 * number))


def top1(run: str) -> float:
    """Return the mean accuracy of a run's seeds."""
    return mean(each["accuracy"] for each in entry("muon", f"runs / {run}"))


def after(variant: str, epoch: int = -1, recipe: str = "imagenette-5") -> tuple[float, float]:
    """Return the minutes of training until an epoch's end, and its accuracy: means of the race of a recipe."""
    points = [run.points[epoch] for run in race(recipe).of(variant)]
    minutes, _, accuracy = (mean(values) for values in zip(*points, strict=True))
    return minutes / 60, accuracy


def cpu_time_spread(kind: str = "") -> float:
    """Return by how much CPU time per image differs at most between 2 and 16 threads."""
    medians = [
        [row["cpu_over_first"]["median"] for count, row in rows.items() if count != "1"]
        for name, rows in result("threads").items()
        if name != "provenance" and name.startswith(kind)
    ]
    return max(max(each) / min(each) for each in medians) - 1


def cpu_time_of_one() -> float:
    """Return how many times less CPU time one thread takes, at most."""
    return max(
        row["cpu_over_first"]["median"]
        for name, rows in result("threads").items()
        if name != "provenance"
        for row in rows.values()
    )


def compound() -> list[float]:
    """Return the figures of the ledger's sentence on whether the speedups compound."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", entry("quickstart-ledger", "compound"))]


TRAINED = 50_000 // 1024 * 1024  # images of an epoch of cifar10-fast: training leaves out what does not fill a batch
AHEAD = ("beyond_memory", "loading / FFCVLoader, quasi_random / images/s")
BEHIND = "loading / FFCVLoader, quasi_random, without read-ahead / images/s"
COMPUTED: dict[str, Callable[[], float]] = {
    "quasi-random read-ahead": lambda: by_round(*AHEAD, BEHIND),
    "quasi-random read-ahead, low": lambda: by_round(*AHEAD, BEHIND, quartile(1)),
    "quasi-random read-ahead, high": lambda: by_round(*AHEAD, BEHIND, quartile(3)),
    "time of two views": lambda: 1 / figured("targets", "views_25 / two loads / ours_is_times_as_fast"),
    "time of a multi-crop": lambda: 1 / figured("targets", "multi_crop / six loads / ours_is_times_as_fast"),
    "cost of a mask": lambda: 1 - figured("targets", "masks / images alone / ours_is_times_as_fast"),
    "spread of CPU time": cpu_time_spread,
    "spread of CPU time, photographs": lambda: cpu_time_spread("photographs"),
    "CPU time of one thread": cpu_time_of_one,
    "conversion with check=structure": lambda: by_round(
        "loaders",
        "converting / FFCV's DatasetWriter / s",
        "converting / drivetrain convert, check=structure / s",
    ),
    "millions of parameters, cluster": lambda: figured("cluster", "steps / parameter_bytes") / 4e6,
    "Muon's top-1": lambda: top1("Muon, lr 0.02"),
    "SGD's top-1": lambda: top1("the recipe's optimizer"),
    "minutes of cifar10-fast": lambda: sum(TRAINED / one["images_per_s"] for one in epochs()) / 60,
    "minutes of cifar10-fast with evaluation": lambda: sum(one["seconds"] for one in epochs()) / 60,
    "imagenette-5, minutes": lambda: mean(run.points[-1].seconds for run in imagenette_runs()) / 60,
    "imagenette-5, accuracy": lambda: mean(run.points[-1].accuracy for run in imagenette_runs()),
    "imagenette-5, lowest accuracy": lambda: min(run.points[-1].accuracy for run in imagenette_runs()),
    "imagenette-5, highest accuracy": lambda: max(run.points[-1].accuracy for run in imagenette_runs()),
    "imagenette-5, times as fast": lambda: mean(raced("imagenette-5")[0].times_as_fast),
    "imagenette-5, minutes of three epochs": lambda: after("imagenette-5", 2)[0],
    "imagenette-5, accuracy after three epochs": lambda: after("imagenette-5", 2)[1],
    "imagenette-20, minutes": lambda: after("imagenette-20", recipe="imagenette-20")[0],
    "imagenette-20, accuracy": lambda: after("imagenette-20", recipe="imagenette-20")[1],
    "imagenette-20, lowest accuracy": lambda: min(run.points[-1].accuracy for run in race("imagenette-20").runs),
    "imagenette-20, highest accuracy": lambda: max(run.points[-1].accuracy for run in race("imagenette-20").runs),
    "imagenette-20, accuracy of whole squares": lambda: after("imagenette-20", recipe="imagenette-20-squares")[1],
    "imagenette-fast, minutes": lambda: after("imagenette-fast", recipe="imagenette-fast")[0],
    "imagenette-fast, accuracy": lambda: after("imagenette-fast", recipe="imagenette-fast")[1],
    "imagenette-plain, minutes next to it": lambda: after("imagenette-plain", recipe="imagenette-fast")[0],
    "imagenette-plain, accuracy next to it": lambda: after("imagenette-plain", recipe="imagenette-fast")[1],
    "imagenette-plain, minutes": lambda: after("imagenette-plain")[0],
    "imagenette-plain, accuracy": lambda: after("imagenette-plain")[1],
    "imagenette-5, times as fast to the board's accuracy": lambda: min(slow / fast for fast, slow in to_the_board()),
    "imagenette-5, … from the second seed": lambda: max(slow / fast for fast, slow in to_the_board()),
    "imagenette-plain, minutes of 12 epochs": lambda: after("imagenette-plain", recipe="imagenette-plain")[0],
    "imagenette-plain, accuracy of 12 epochs": lambda: after("imagenette-plain", recipe="imagenette-plain")[1],
    "share of the model's ceiling": lambda: (
        figured("quickstart-ledger", "rows / + bf16 / images_per_s")
        / figured("quickstart-ledger", "ceilings / model alone")
    ),
    "product of the stages": lambda: compound()[0],
    "share of the product": lambda: compound()[2] / 100,
    "share of the product, low, in percent": lambda: compound()[3],
    "share of the product, high": lambda: compound()[4] / 100,
    "without BlurPool": lambda: 1 / figured("quickstart-ledger", "stages / BlurPool / last"),
}
"""Figures that follow from several of the files'."""


def figured(name: str, keys: str) -> float:
    """Return a figure that is a number."""
    return float(figure(name, keys))


def epochs() -> list[dict[str, float]]:
    """Return the epochs of `cifar10-fast.json`."""
    found: list[dict[str, float]] = entry("cifar10-fast", "epochs")
    return found


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    check = parser.parse_args().check
    stale = [path for path in pages() if written(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'differs from benchmarks/results/' if check else 'rewritten'}")
        if not check:
            path.write_text(written(path.read_text()))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
