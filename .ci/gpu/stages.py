"""The stages of `run.py`: the commands of their units, and the summary of the units' results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from units import ROOT, Stage, StageError, Unit

NAMES = ("tests", "ledger", "loaders", "transforms", "fast")
SEEDS = 10
TARGET = 0.94
LOADER_PARTS = ("starting", "converting", "opening", "loading")
SURGERIES = (
    "BlurPool", "ChannelsLast", "SqueezeExcite", "GhostBatchNorm", "WeightStandardization", "Factorize",
    "StochasticDepth", "GyroDropout", "LowPrecisionLayerNorm", "LowPrecisionGroupNorm", "ALiBi", "GatedLinearUnits",
    "PatchDropout",
)  # fmt: skip
"""Those of `benchmarks/transforms.py`; a test compares the two."""
PUBLISHED = {
    "airbench94": {
        "source": "Keller Jordan, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU (2024), arXiv:2404.00498",
        "hardware": "one NVIDIA A100", "n": 1000, "accuracy": 0.9401, "seconds": 3.83, "seconds_compiled": 3.09,
    }
}  # fmt: skip
"""Published results, measured by others on another GPU."""


def make(name: str, state: Path, photos: Path | None, rehearse: bool) -> Stage:
    """Return a stage by its name.

    Args:
        name: one of `NAMES`.
        state: folder for a rehearsal's small data set.
        photos: JPEGs with one folder per class, for the loader benchmark; None: create some from CIFAR-10.
        rehearse: whether to run on the CPU, with small data.
    """
    if name == "tests":
        return _tests(rehearse)
    if name == "loaders" and photos is None:
        photos = state / "pictures"
        _once(photos, "pictures", "64" if rehearse else "2000")
    if rehearse and name in ("ledger", "fast"):
        _once(state / "small", "small", "512")
    makers = {"ledger": _ledger, "loaders": _loaders, "transforms": _transforms, "fast": _fast}
    return makers[name](state, photos, rehearse)


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(ROOT / "benchmarks" / name), *arguments)


def _once(folder: Path, what: str, count: str) -> None:
    """Create a data set for a stage if it does not exist."""
    if folder.exists():
        return
    command = [sys.executable, str(Path(__file__).with_name("data.py")), what, count, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StageError(f"{folder} could not be created:\n{done.stderr[-2000:]}")


def _json(name: str) -> Any:
    """Return a reader of the JSON file of that name, which adds the git revision that an installed wheel lacks."""

    def read(out: Path) -> dict[str, Any]:
        result = json.loads((out / name).read_text())
        facts = result.get("facts", result)
        provenance = facts["provenance"]
        if provenance.get("git_revision") is None:
            provenance["git_revision"] = os.environ.get("DRIVETRAIN_REVISION")
        return {**result, "provenance": provenance}

    return read


def _gathered(results: dict[str, Any]) -> dict[str, Any]:
    """Return the provenance of the first unit, and the command of each."""
    first = next(iter(results.values()))["provenance"]
    return {
        "provenance": first,
        "commands": {name: one["provenance"]["command"] for name, one in results.items()},
    }


def _tests(rehearse: bool) -> Stage:
    files = sorted((ROOT / "tests" / "gpu").glob("test_gpu_*.py"))
    units = tuple(
        Unit(
            file.stem,
            (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(file),
             "--junitxml={out}/junit.xml"),
            _junit,
        )
        for file in files
    )  # fmt: skip
    environment = (("DRIVETRAIN_REHEARSE_GPU", "1"),) if rehearse else ()
    return Stage("tests", units, _test_summary, environment)


def _junit(out: Path) -> dict[str, Any]:
    """Return the number of passed tests, and each skipped test with its reason.

    Raises:
        StageError: if no test ran.
    """
    cases = list(ElementTree.parse(out / "junit.xml").iter("testcase"))
    skipped = {case.get("name", ""): one.get("message", "") for case in cases for one in case.iter("skipped")}
    passed = len(cases) - len(skipped)
    (out / "junit.xml").unlink()
    if not passed:
        raise StageError(f"no test ran; {len(skipped)} were skipped: {sorted(set(skipped.values()))}")
    return {"passed": passed, "skipped": skipped}


def _test_summary(results: dict[str, Any]) -> dict[str, Any]:
    return {
        "passed": sum(one["passed"] for one in results.values()),
        "skipped": {name: why for one in results.values() for name, why in one["skipped"].items()},
    }


def _ledger(state: Path, photos: Path | None, rehearse: bool) -> Stage:  # noqa: ARG001
    small = ("--train", str(state / "small" / "train.beton"), "--val", str(state / "small" / "val.beton"))
    tiny = ("batch_size=32", "model_options.width=2", *small) if rehearse else ()
    command = (
        sys.executable, "-m", "drivetrain", "ledger", "cifar10-quickstart", *tiny,
        "--seconds", "90" if rehearse else "240", "--out", "{out}",
    )  # fmt: skip
    unit = Unit("cifar10-quickstart", command, _json("ledger.json"))
    return Stage("ledger", (unit,), lambda results: results["cifar10-quickstart"])


def _loaders(state: Path, photos: Path | None, rehearse: bool) -> Stage:  # noqa: ARG001
    assert photos is not None
    rounds, workers = "1" if rehearse else "7", str(len(os.sched_getaffinity(0)))
    units = tuple(
        Unit(
            part,
            _script(
                "loaders.py",
                str(photos.resolve()),
                "--only",
                part,
                "--rounds",
                rounds,
                "--workers",
                workers,
                "--out",
                "{out}",
            ),
            _json("loaders.json"),
        )
        for part in LOADER_PARTS
    )

    def summary(results: dict[str, Any]) -> dict[str, Any]:
        return {
            **{part: one[part] for part, one in results.items()},
            **_gathered(results),
            "pictures": photos.name,
        }

    return Stage("loaders", units, summary)


def _transforms(state: Path, photos: Path | None, rehearse: bool) -> Stage:  # noqa: ARG001
    small = ("--rounds", "1", "--seconds", "0.1", "--mode", "eager") if rehearse else ()
    units = tuple(
        Unit(name, _script("transforms.py", "--only", name, *small, "--out", "{out}"), _json("transforms.json"))
        for name in (SURGERIES[:2] if rehearse else SURGERIES)
    )

    def summary(results: dict[str, Any]) -> dict[str, Any]:
        modes = [mode for mode in ("eager", "compiled") if mode in next(iter(results.values()))]
        rows = {mode: {name: one[mode][name] for name, one in results.items()} for mode in modes}
        first = next(iter(results.values()))
        return {**rows, **{key: first[key] for key in ("device", "batch", "side")}, **_gathered(results)}

    return Stage("transforms", units, summary)


def _fast(state: Path, photos: Path | None, rehearse: bool) -> Stage:  # noqa: ARG001
    small = ("--small", str(state / "small")) if rehearse else ()
    units = tuple(
        Unit(
            f"seed-{seed}",
            _script("fast.py", "--seed", str(seed), *small, "--out", "{out}"),
            _json("fast.json"),
        )
        for seed in range(3 if rehearse else SEEDS)
    )
    return Stage("fast", units, fast_summary)


def fast_summary(results: dict[str, Any]) -> dict[str, Any]:
    """Summarize accuracies and times per contender, with the seconds to the target of the seeds that reached it, and
    the ratios of training times by seed."""
    rows = {}
    runs = [one["contenders"] for one in results.values()]
    for name in runs[0]:
        times = [run[name]["seconds_to_target"] for run in runs]
        reached = [seconds for seconds in times if seconds is not None]
        accuracies = [run[name]["accuracy"] for run in runs]
        rows[name] = {
            "n": len(runs),
            "accuracy": {"mean": fmean(accuracies), "deviation": stdev(accuracies), "values": accuracies},
            "training_s": spread([run[name]["training_s"] for run in runs]),
            "reached_target": len(reached),
            "seconds_to_target": spread(reached),
        }
    ratios = [run["plain PyTorch"]["training_s"] / run["Drivetrain"]["training_s"] for run in runs]
    return {
        "target": TARGET, "contenders": rows, "training_plain_over_drivetrain": spread(ratios),
        "published": PUBLISHED, **_gathered(results),
    }  # fmt: skip


def spread(values: list[float]) -> dict[str, Any] | None:
    """Return median, extremes, number and the values themselves; None if there are none."""
    if not values:
        return None
    return {
        "median": median(values),
        "low": min(values),
        "high": max(values),
        "n": len(values),
        "values": values,
    }
