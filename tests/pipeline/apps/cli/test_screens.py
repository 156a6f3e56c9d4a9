"""What each command prints in terminals of 60, 80 and 120 columns, compared with the approved files in `screens/`.

`APPROVE=1 pytest tests/pipeline/apps/cli/test_screens.py` writes the files; read what changes before it is committed.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import COMMANDS, call, toy_values
from drivetrain import Pipeline
from drivetrain.pipeline import Ledger, RaceResult
from drivetrain.pipeline.measuring.race.result import Point, RaceRun
from drivetrain.pipeline.measuring.tuning.result import Tried, Tuned
from pipeline_data import Toy
from places import ROOT

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (60, 80, 120)
COPIED = ("  torchrun ", "      -m drivetrain ", "  drivetrain ", "  model.")  # whole lines, for a shell

SCREEN: dict[str, list[str]] = {
    "help": ["--help"],
    **{f"help-{command}": [command, "--help"] for command in COMMANDS},
    "recipes": ["recipes"],
    "recipes-keys": ["recipes", "--keys"],
    "recipes-cifar10-quickstart": ["recipes", "cifar10-quickstart"],
    "plan": ["plan", "cifar10-quickstart", "base_batch_size=null"],
    "plan-with-cautions": ["plan", "cifar10-quickstart", "accumulate=4", "transforms=[]"],
}
"""The arguments of each; `plan` gets small data."""


def race() -> RaceResult:
    """Of two seeds; the third run did not get there."""
    times = {
        ("quickstart", 0): 61.0,
        ("plain PyTorch", 0): 118.5,
        ("plain PyTorch", 1): 121.0,
        ("quickstart", 1): None,
    }
    runs = [
        RaceRun(name, seed, (Point(seconds or 400.0, 50_000, 0.4 if seconds is None else 0.81),),
                limit=305.0 if seconds is None else None)
        for (name, seed), seconds in times.items()
    ]  # fmt: skip
    return RaceResult(0.75, ("quickstart", "plain PyTorch"), runs, give_up=5.0, stopped="4 of 4 runs have ended.")


def tuned() -> Tuned:
    changes = [
        Tried("ChannelsLast", "step", "accepted", 1.214, 1.108, 1.331, rounds=6, images_per_s=2_431.0),
        Tried("compile=True", "step", "dropped", 0.995, 0.973, 1.008, rounds=12, images_per_s=2_420.0),
        Tried(
            "workers=1",
            "data",
            "not tried",
            reason="the loader alone is 94 times as fast: less than 1% to gain",
        ),
    ]
    limits = {"training": 2_431.0, "loader": 228_000.0, "model": 2_510.0}
    return Tuned(Pipeline("resnet18"), changes, limits, 2_002.0, stopped="Every change was tried.")


RESULTS: dict[str, Callable[[], object]] = {
    "ledger": lambda: Ledger.load(ROOT / "benchmarks" / "results" / "quickstart-ledger.json"),
    "race": race,
    "tuned": tuned,
}
"""What prints itself."""


def shown(name: str, width: int, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    if name in RESULTS:
        return f"{RESULTS[name]()}\n"
    command = SCREEN[name]
    if command[0] == "plan":
        command = [*command, *toy_values(toy)]
    end = call(*command)
    assert (end.code, end.err) == (0, "")
    return end.out


@pytest.fixture
def here(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """The data at paths that are the same in every run."""
    for name in ("train", "val"):
        (tmp_path / f"{name}.beton").symlink_to(getattr(toy, name))
    monkeypatch.chdir(tmp_path)
    short: Toy = object.__new__(Toy)
    short.__dict__.update(toy.__dict__, train="train.beton", val="val.beton")
    return short


@pytest.mark.parametrize("name", [*SCREEN, *RESULTS])
def test_a_screen_is_the_approved_one(name: str, here: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {width: shown(name, width, here, monkeypatch) for width in WIDTHS}
    for width, text in texts.items():
        long = [line for line in text.splitlines() if len(line) > width and not line.startswith(COPIED)]
        assert not long, (width, long)
        assert "\033" not in text  # no color where nobody looks
    found = "\n".join(f"{'═' * width} {width} columns\n{text}" for width, text in texts.items())
    file = SCREENS / f"{name}.txt"
    if os.environ.get("APPROVE"):
        SCREENS.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text(), f"see the head of {Path(__file__).name}"


def test_every_approved_file_has_a_screen() -> None:
    assert {file.stem for file in SCREENS.iterdir()} == {*SCREEN, *RESULTS}


@pytest.mark.parametrize("name", [name for name in SCREEN if name.startswith("recipes")])
def test_no_word_is_broken_where_it_could_wrap(name: str, here: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow terminal shows the words of a wide one, but for paths and other long words."""
    narrow, wide = (re.sub(r"[^\w%.]+", " ", shown(name, width, here, monkeypatch)) for width in (60, 200))
    assert {word for word in wide.split() if len(word) <= 12} <= {*narrow.split()}
