"""The ledger's file: damaged ones are rejected, naming the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import call
from drivetrain import DrivetrainError
from drivetrain.pipeline import Ledger, compare
from drivetrain.pipeline.ledger.comparison import differences
from drivetrain.pipeline.measuring.variant import LOADER, MODEL, PLAIN, in_turn
from ledgers import trials_of

WHOLE = in_turn("FFCV loader")


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """The content of a ledger's file."""
    trials = trials_of({PLAIN: 100.0, WHOLE: 200.0, LOADER: 900.0, MODEL: 300.0}, waited=0.01)
    Ledger([trials, trials], {"recipe": None}).save(tmp_path / "good.json")
    found: dict[str, Any] = json.loads((tmp_path / "good.json").read_text())
    return found


def trial(**wrong: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["rounds"][1][str(WHOLE)].update(wrong)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (trial(seconds=0), "its rounds[1][...].seconds: expected `float` > 0.0"),
        (trial(seconds=-5.0), "its rounds[1][...].seconds: expected `float` > 0.0"),
        (trial(seconds=float("nan")), "its rounds[1][...].seconds: expected `float` > 0.0"),
        (trial(seconds=float("inf")), "its rounds[1][...].seconds: expected `float` < 1000000000.0"),
        (trial(images=0), "its rounds[1][...].images: expected `int` >= 1"),
        (trial(waited=-1.0), "its rounds[1][...].waited: expected `float` >= 0.0"),
        (trial(waited=True), "its rounds[1][...].waited: expected `float`, got `bool`"),
        (lambda content: content.update(level=2), "its level: expected `float` < 1.0"),
        (
            lambda content: content["rounds"][0].update(odd=content["rounds"][0][str(PLAIN)]),
            "'odd' is not among",
        ),
        (
            lambda content: content["rounds"][0].pop(str(MODEL)),
            "its rounds do not all have the same variants",
        ),
        (lambda content: content.update(left_out=["b"]), "its left_out: expected `object`, got `array`"),
        (
            lambda content: content.update(costs={str(PLAIN): 5}),
            "its costs[...]: expected `object`, got `int`",
        ),
        (lambda content: content.update(accuracy={}), "its accuracy: object missing required field `epochs`"),
        (
            lambda content: content.update(
                provenance={"hardware": [1], "versions": {}, "date": "", "command": ""}
            ),
            "its provenance.hardware: expected `object`, got `array`",
        ),
        (
            lambda content: content.update(provenance={"hardware": {}}),
            "its provenance.hardware: object missing required field `gpus`",
        ),
        (
            lambda content: content.update(failed={str(WHOLE): 5}),
            "its failed[...]: expected `str`, got `int`",
        ),
        (lambda content: content.update(failed={"+ b": "no"}), "'+ b' is not among its variants"),
        (lambda content: content.update(variants="x"), "its variants: expected `array`, got `str`"),
        (lambda content: content["variants"].pop(0), "'plain PyTorch' is not among its variants"),
        (lambda content: content["variants"][1].update(stage="b"), "'+ b' is named '+ FFCV loader'"),
        (
            lambda content: content["variants"][1].update(kind="pair"),
            "its variants[1].kind: invalid enum value 'pair'",
        ),
        (lambda content: content.pop("variants"), "an earlier version of Drivetrain wrote it"),
        (lambda content: content.update(plan=["train"]), "its plan[0]: expected `object`, got `str`"),
    ],
)
def test_what_nobody_measured_is_no_ledger(
    break_it: Callable[[Any], object], said: str, good: dict[str, Any], tmp_path: Path
) -> None:
    break_it(good)
    (tmp_path / "bad.json").write_text(json.dumps(good))
    with pytest.raises(DrivetrainError, match=r"bad\.json is not a ledger") as caught:
        compare(tmp_path / "good.json", tmp_path / "bad.json")
    assert said in str(caught.value)


def test_a_file_whose_names_were_sorted_is_the_same_ledger(good: dict[str, Any], tmp_path: Path) -> None:
    """`variants` has their order, which determines the full pipeline and the first stage."""
    (tmp_path / "sorted.json").write_text(json.dumps(good, sort_keys=True))
    assert str(Ledger.load(tmp_path / "sorted.json")) == str(Ledger.load(tmp_path / "good.json"))


def test_the_command_says_in_one_line_which_file_is_no_ledger(good: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("deep.json", "no.json", "."):
        names = [str(tmp_path / "good.json"), str(tmp_path / name)]
        assert names[1] in call("ledger", "--compare", *names).line
    assert good["rounds"]


def test_what_differs_between_two_machines_is_told() -> None:
    def facts(recipe: str, revision: str, cores: int) -> dict[str, Any]:
        return {
            "recipe": recipe, "plan": [],
            "provenance": {"git_revision": revision, "hardware": {"cores": cores}, "versions": {"torch": "2"}},
        }  # fmt: skip

    assert differences(facts("a", "x", 2), facts("b", "y", 4)) == [
        "Different recipe: a and b.",
        "Different revision: x and y.",
        "Different hardware, cores: 2 and 4.",
    ]


def test_every_figure_in_the_file_has_its_n_and_spread(good: dict[str, Any]) -> None:
    for row in good["rows"]:
        assert row["images_per_s"].keys() == {"value", "low", "high", "n"}
        assert row["ratio"].keys() == {"value", "low", "high", "n"}
        assert (row["images_per_s"]["n"], row["ratio"]["n"]) == (2, 2)
    assert {stage["in_turn"]["n"] for stage in good["stages"]} == {2}
    assert {one["n"] for one in good["ceilings"].values()} == {2}
