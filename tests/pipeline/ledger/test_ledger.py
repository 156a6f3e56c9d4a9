"""The ledger as a value: its arithmetic on synthetic rounds, its table, files and comparison."""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import call
from drivetrain import DrivetrainError
from drivetrain.pipeline import Ledger, compare
from drivetrain.pipeline.ledger.comparison import differences
from drivetrain.pipeline.ledger.data import Accuracies, Trained
from drivetrain.pipeline.ledger.statistics import ratio, ratio_of_means, t_quantile
from drivetrain.pipeline.ledger.variant import (
    COPY,
    EXTRAS,
    LOADER,
    MODEL,
    PLAIN,
    SPLIT,
    Trial,
    VariantId,
    in_turn,
    only,
    same_samples,
    without,
)
from ledgers import WHOLE, made_up, of_speeds, trials_of

pytestmark = pytest.mark.usefixtures("wide")


def test_rows_hold_ratios_within_rounds_with_their_intervals() -> None:
    plain, whole = made_up().rows
    assert (plain.id, whole.id) == (PLAIN, WHOLE)
    assert (plain.ratio.value, plain.ratio.low, plain.ratio.high) == (1.0, 1.0, 1.0)
    assert (plain.images_per_s.low, plain.images_per_s.n) == (150, 3)
    assert plain.images_per_s.value == pytest.approx(200)
    # Student's t with two degrees of freedom, on the logarithms of the three rounds' ratios.
    logs = np.log([2, 2.5, 3])
    half = 4.302653 * logs.std(ddof=1) / 3**0.5
    expected = np.exp([logs.mean() - half, logs.mean(), logs.mean() + half])
    assert (whole.ratio.low, whole.ratio.value, whole.ratio.high) == pytest.approx(expected, rel=1e-4)
    # The speeds are to each other as the ratio is.
    assert whole.images_per_s.value == pytest.approx(200 * whole.ratio.value)
    assert whole.gain == whole.ratio
    assert made_up().waiting == pytest.approx(0.25)


def test_a_gain_is_over_the_row_before() -> None:
    rounds = [one | {in_turn("more"): Trial(1200, one[WHOLE].seconds / 1.5, 0)} for one in made_up().rounds]
    rows = Ledger(rounds, {}).rows
    assert [row.id for row in rows] == [PLAIN, WHOLE, in_turn("more")]
    assert rows[-1].gain.value == pytest.approx(1.5)
    assert rows[-1].ratio.value == pytest.approx(1.5 * rows[-2].ratio.value)


@pytest.mark.parametrize(
    ("speeds", "start"),
    [
        ({"model": 900, "loader": 4000}, "The model is the bottleneck: "),
        ({"model": 900, "loader": 600}, "The loader is the bottleneck: "),
        ({"model": 900, "loader": 950}, "Loader and model are both the bottleneck: "),
        ({"model": 900, "loader": 850}, "Loader and model are both the bottleneck: "),
    ],
)
def test_the_bound_names_the_lower_ceiling(speeds: dict[str, float], start: str) -> None:
    bound = made_up(**speeds).bound
    assert bound.startswith(start)
    reached = f"The full pipeline reaches {made_up().speed(WHOLE).value:,.0f} images/s, which fraction of that limit"
    assert f"{reached} is not resolved" in bound
    assert f"{speeds['loader']:,.0f} images/s" in bound
    assert f"{speeds['model']:,.0f}" in bound


def of_rounds(**speeds: tuple[float, ...]) -> Ledger:
    """A ledger of these images/s of the full pipeline, the loader and the model in each round."""
    names = {"whole": WHOLE, "loader": LOADER, "model": MODEL}
    rounds = zip(*speeds.values(), strict=True)
    return Ledger(
        [
            {PLAIN: Trial(100, 1.0, 0)} | {names[n]: Trial(100, 100 / s, 0) for n, s in zip(speeds, one, strict=True)}
            for one in rounds
        ]
    )  # fmt: skip


def test_the_bound_says_what_the_intervals_support() -> None:
    steady = of_rounds(whole=(95, 95.2, 95.1), loader=(300, 301, 299), model=(100, 100.2, 99.8))
    assert steady.bound.startswith("The model is the bottleneck: ")
    assert " images/s, 95% of that limit" in steady.bound
    above = of_rounds(whole=(101, 104, 100), loader=(300, 301, 299), model=(100, 97, 102))
    assert "all of that limit, which is uncertain (" in above.bound
    assert above.bound.startswith("The model is the bottleneck: ")
    noisy = of_rounds(whole=(90, 40, 95), loader=(90, 200, 110), model=(100, 90, 170))
    assert noisy.bound.startswith("Which of ")
    assert "is the bottleneck is not known, as their intervals overlap" in noisy.bound
    busy = of_rounds(whole=(122, 123, 122), loader=(300, 301, 299), model=(100, 100.2, 99.8))
    assert busy.bound.startswith("The bottleneck is not known: ")
    for one in (above, noisy, busy):
        assert not re.search(r"1\d\d% of", one.bound)


@pytest.mark.parametrize("part", ["transforms", "loss", "hooks"])
def test_the_bound_blames_what_takes_the_time(part: str) -> None:
    """And not the model's precision, for a batch transform that takes two thirds of it."""
    parts = dict.fromkeys(("transforms", "forward", "loss", "backward", "step", "hooks"), 0.05) | {part: 0.65}
    base = of_rounds(whole=(95, 95.2, 95.1), loader=(300, 301, 299), model=(100, 100.2, 99.8))
    rounds = [one | {SPLIT: Trial(100, 1.0, 0.0, parts=parts)} for one in base.rounds]
    ledger = Ledger(rounds, {"asked": {"precision": "fp32", "compile": False}})
    words = {"transforms": "The batch transforms are", "loss": "The loss is", "hooks": "The hooks around "}
    assert ledger.bound.startswith(words[part])
    assert "with 65% of the time" in ledger.bound
    assert "100 with its batch transforms, loss and hooks, and about 400 without" in ledger.bound
    assert "bf16" not in ledger.bound
    assert ledger.time_breakdown[part] == pytest.approx(0.65)
    row = next(line for line in str(ledger).splitlines() if "ceiling: model alone, without" in line)
    assert "about 400" in row


def test_a_ledger_prints_and_is_json(tmp_path: Path) -> None:
    ledger = made_up()
    text = str(ledger)
    assert "× 2.47" in text
    assert "What follows is uncertain, with intervals this wide" in text
    assert text.endswith(ledger.bound)
    assert text.index(str(PLAIN)) < text.index(str(WHOLE)) < text.index(str(LOADER))
    page = ledger._repr_html_()
    assert "2.47  (1.49 to 4.08)" in page
    assert "made &lt;up&gt;" in page
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    assert [row.split("</td>")[0].split(">")[-1] for row in rows if "border-bottom" in row] == [str(WHOLE)]
    assert all(row.count("text-align:left") == 1 for row in rows)  # figures stand below one another
    ledger.save(tmp_path / "ledger.json")
    written = json.loads((tmp_path / "ledger.json").read_text())
    assert written == json.loads(json.dumps(ledger.to_dict()))
    assert [row["name"] for row in written["rows"]] == [str(PLAIN), str(WHOLE)]
    trial = {"images": 1200, "seconds": 12.0, "waited": 3.0, "samples": "", "parts": None}
    assert written["rounds"][2][str(PLAIN)] == trial
    assert (written["recipe"], written["waiting"]) == ("made <up>", pytest.approx(0.25))
    found = Ledger.load(tmp_path / "ledger.json")
    assert (found.rounds, found.facts, found.level) == (ledger.rounds, ledger.facts, ledger.level)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, r"must end in \.json, \.png, \.svg or \.pdf") for name in ("ledger.txt", "ledger", "ledger.jpg")),
        ("no/ledger.json", r"no/ledger\.json could not be written: No such file"),
    ],
)
def test_files_that_cannot_be_written(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match=message):
        made_up().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_stage_has_its_gain_alone_in_turn_and_last() -> None:
    speeds = {
        PLAIN: 100.0, in_turn("a"): 200, in_turn("b"): 220, in_turn("c"): 330,
        only("b"): 150, only("c"): 160, without("a"): 250, without("b"): 320,
    }  # fmt: skip
    a, b, c = of_speeds(speeds, speeds).stages
    assert [gain.stage for gain in (a, b, c)] == ["a", "b", "c"]
    found = [(gain.alone.value, gain.in_turn.value, gain.last.value) for gain in (a, b, c)]  # type: ignore[union-attr]
    expected = [(2, 2, 330 / 250), (1.5, 1.1, 330 / 320), (1.6, 1.5, 1.5)]
    assert np.allclose(found, expected)
    # Of two stages, the full pipeline without one is the other alone.
    first, second = of_speeds({PLAIN: 100, in_turn("a"): 200, in_turn("b"): 300, only("b"): 120}).stages
    assert first.last is not None
    assert second.last is not None
    assert (first.last.value, second.last.value) == pytest.approx((300 / 120, 300 / 200))


def test_names_of_variants_are_formatted_as_texts() -> None:
    assert [f"{name:<13}|" for name in made_up().ceilings] == ["loader alone |", "model alone  |"]
    assert f"{WHOLE:>15}" == "  + FFCV loader"


def test_what_was_left_out_is_told() -> None:
    speeds = {PLAIN: 100.0, in_turn("a"): 200, in_turn("b"): 220, in_turn("c"): 330, without("a"): 250}
    ledger = of_speeds(speeds, speeds, left_out={only("b"): "no time", only("c"): "no time"})
    assert [gain.alone is None for gain in ledger.stages] == [False, True, True]
    assert ledger.compound == ""
    assert "Left out: only b, only c: no time." in str(ledger)
    assert "left out" in str(ledger)


@pytest.mark.parametrize(
    ("whole", "start"),
    [
        (
            (410, 395, 400),
            "The speedups compound: alone the stages multiply to 4.00 ×, together they bring 4.02 ×",
        ),
        (
            (400, 300, 480),
            "It is uncertain whether the speedups compound: alone the stages multiply to 4.00 ×",
        ),
        ((500, 505, 495), "The speedups more than compound: "),
        ((300, 305, 295), "The speedups do not compound: "),
    ],
)
def test_whether_the_speedups_compound(whole: tuple[float, ...], start: str) -> None:
    rounds = [{PLAIN: 100.0, in_turn("a"): 200.0, only("b"): 200.0, in_turn("b"): speed} for speed in whole]
    ledger = of_speeds(*rounds)
    assert ledger.compound.startswith(start)
    if "do not" in start:
        assert ledger.compound.endswith("b gives 2.00 × alone and 1.50 × after a.")


def test_the_stage_that_falls_after_the_others_is_named() -> None:
    speeds = {
        PLAIN: 100.0, in_turn("a"): 200, only("b"): 200, in_turn("b"): 400, only("c"): 200, in_turn("c"): 440
    }  # fmt: skip
    ledger = of_speeds(speeds, speeds)
    assert ledger.compound.endswith("c gives 2.00 × alone and 1.10 × after a and b.")


def test_the_sentence_says_what_to_change_next() -> None:
    speeds = {PLAIN: 100.0, in_turn("slow"): 50.0, in_turn("b"): 60.0, only("b"): 120.0}

    def told(asked: dict[str, Any], ceilings: dict[VariantId, float] | None = None) -> str:
        facts = {"asked": {"loader": "ffcv", "precision": "bf16", "compile": False} | asked}
        tops = {LOADER: 1e4, MODEL: 70.0} | (ceilings or {})
        return of_speeds(speeds | tops, speeds | tops, facts=facts).bound

    assert told({"precision": "fp32"}).endswith("in fp32; try precision='bf16'.")
    assert "bf16" not in told({"precision": "fp32", "bf16": False})
    assert told({}).endswith("make the training step faster: without slow it is 2.00 × as fast.")
    speeds |= {in_turn("slow"): 60.0, only("b"): 60.0}
    assert told({}).endswith("try compile=True.")
    assert told({"compile": True}).endswith("Next, make the training step faster.")
    assert told({}, {LOADER: 61}).endswith("load faster: more workers, smaller images.")
    assert told({"loader": "torch"}, {LOADER: 61}).endswith("change the loader: loader='ffcv'.")
    copies = "The copy to the device is the bottleneck: it moves 61 images/s; the loader alone "
    assert told({}, {COPY: 61}).startswith(copies)


def test_the_time_is_split() -> None:
    parts = {"forward": 3.0, "backward": 4.0, "step": 1.0}
    trials = made_up().rounds[0] | {SPLIT: Trial(1200, 10.0, 1.5, parts=parts), EXTRAS: Trial(1200, 3.03, 0)}
    ledger = Ledger([trials, trials], {"recipe": None})
    assert ledger.time_breakdown == pytest.approx(
        {"waiting": 0.15, "forward": 0.3, "backward": 0.4, "step": 0.1, "other": 0.05}
    )
    assert "waiting 15%, forward 30%, backward 40%, step 10%, other 5%" in str(ledger)


def test_what_the_extras_cost() -> None:
    ledger = made_up()
    assert ledger.extras is None
    assert "extras" not in str(ledger)
    more = (1.01, 1.012, 1.014)
    plain = ledger.rounds

    def with_extras(*trials: Trial) -> Ledger:
        return Ledger([{**own, EXTRAS: trial} for own, trial in zip(plain, trials, strict=True)])

    longer = [trials[WHOLE].seconds * factor for trials, factor in zip(plain, more, strict=True)]
    ledger = with_extras(*(Trial(1200, seconds, 0) for seconds in longer))
    assert ledger.extras is not None
    assert astuple(ledger.extras) == pytest.approx(astuple(ratio(more)))
    assert ledger.to_dict()["extras"]["value"] == pytest.approx(1.012, abs=1e-4)
    assert ledger.extras_share is None  # as in a ledger that was saved before they were timed
    assert "fit's extras (" not in str(ledger)
    ledger = with_extras(*(Trial(1200, seconds, 0, parts={"extras": 0.0125 * seconds}) for seconds in longer))
    assert ledger.extras_share == pytest.approx(0.0125)
    assert ledger.to_dict()["extras_share"] == pytest.approx(0.0125)
    assert "non-finite losses) take at most 1.25% of the time.\n" in str(ledger)
    whole = [trials[WHOLE].seconds for trials in plain]
    ledger = with_extras(*(Trial(1200, seconds * 4, 0, parts={"extras": seconds}) for seconds in whole))
    assert "non-finite losses) take at most 25.00% of the time.\n" in str(ledger)
    # The rows are the requested ones, the last one the full pipeline; the extras are a separate row.
    assert [row.id for row in ledger.rows] == [PLAIN, WHOLE]
    (row,) = (line for line in str(ledger).splitlines() if str(EXTRAS) in line)
    assert "0.62  (0.37 to 1.02)" in row
    assert "× 0.25" in row


def test_a_round_has_the_same_samples_throughout() -> None:
    def trial(samples: str, images: int = 8) -> Trial:
        return Trial(images, 1.0, 0.0, samples)

    repeated = {MODEL: trial(""), COPY: trial("")}  # these repeat one batch
    same_samples({PLAIN: trial("x"), WHOLE: trial("x"), LOADER: trial("x"), **repeated})
    for odd in (trial("y"), trial("x", 16)):
        with pytest.raises(DrivetrainError, match=r"'plain PyTorch' had 8 images .*'\+ FFCV loader'"):
            same_samples({PLAIN: trial("x"), WHOLE: odd})


def test_students_t_is_that_of_the_tables() -> None:
    for freedom, expected in ((1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (29, 2.045)):
        assert t_quantile(0.95, freedom) == pytest.approx(expected, abs=6e-4)
    assert t_quantile(0.999, 4) == pytest.approx(8.610, abs=2e-3)


def test_one_odd_round_does_not_move_the_ratio() -> None:
    calm = [1.50, 1.52, 1.49, 1.51, 1.50, 1.48]
    found, odd = ratio(calm), ratio([*calm[1:], 0.4])
    assert odd.value == pytest.approx(found.value, rel=0.01)
    assert odd.holds(found.value)
    assert odd.spread < 0.03 < np.exp(np.log([*calm[1:], 0.4]).std()) - 1


@pytest.mark.long
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(7)
    for rounds in (3, 5, 8, 12):
        drawn = 1.3 * np.exp(random.normal(0, 0.1, (2000, rounds)))
        assert np.mean([ratio(one).holds(1.3) for one in drawn]) == pytest.approx(0.95, abs=0.02)
        other = np.exp(random.normal(0, 0.03, (2000, rounds + 2)))
        held = [ratio_of_means(one, two).holds(1.3) for one, two in zip(drawn, other, strict=True)]
        assert 0.925 < np.mean(held) < 0.98


@pytest.mark.parametrize("content", [None, "no", "[]", "{}", '{"rounds": [{"a": {"images": 1}}]}', '{"rounds": []}'])
def test_what_is_no_ledger_cannot_be_compared(content: str | None, tmp_path: Path) -> None:
    made_up().save(tmp_path / "good.json")
    if content is not None:
        (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DrivetrainError, match=r"bad\.json (is not a ledger|could not be read: No such file)"):
        compare(tmp_path / "good.json", tmp_path / "bad.json")


def test_two_ledgers_side_by_side(tmp_path: Path) -> None:
    def saved(name: str, factor: float, torch: str, more: dict[VariantId, float] | None = None) -> Path:
        rounds = [
            {
                PLAIN: 100 * drift, in_turn("a"): 200 * drift * factor * shake, without("ChannelsLast"): 150,
                SPLIT: 90, **(more or {}),
            }
            for drift, shake in ((1.0, 1.0), (0.98, 1.01), (1.01, 0.99))
        ]  # fmt: skip
        machine: dict[str, Any] = {
            "hardware": {"cores": 2, "gpus": [], "processor": "one"}, "git_revision": "abc",
            "versions": {"torch": torch, "drivetrain": "1"},
        }  # fmt: skip
        machine |= {"date": "2026-01-01", "command": "drivetrain ledger"}
        plan = [{"what": f"train {name}", "why": "asked for"}]
        of_speeds(*rounds, facts={"provenance": machine, "plan": plan}).save(tmp_path / name)
        return tmp_path / name

    first, second = saved("a.json", 1.0, "2.14"), saved("b.json", 1.5, "2.15", {in_turn("b"): 500.0})
    found = compare(first, second)
    plain, stage = found.rows[:2]
    assert SPLIT not in [row.id for row in found.rows]
    assert (plain.id, plain.overlap, stage.name, stage.overlap) == (PLAIN, True, "+ a", False)
    assert stage.speed.value == pytest.approx(1.5)
    assert stage.speed.low < 1.5 < stage.speed.high
    assert plain.speed.holds(1.0)
    assert found.missing == {in_turn("b"): str(second)}
    assert found.differences == [
        "Only the first's plan has: train a.json.", "Only the second's plan has: train b.json.",
        "Different versions, torch: 2.14 and 2.15."
    ]  # fmt: skip
    assert compare(first, first).differences == []

    done = call("ledger", "--compare", str(first), str(second))
    assert done.code == 0, done
    assert "Different versions, torch: 2.14 and 2.15." in done.out
    assert "1.50  (1." in done.out
    assert "…" not in done.out  # every interval fits
    assert ">+ a</td>" in found._repr_html_()


def test_two_plans_that_differ_in_how_a_step_is_done() -> None:
    same = {"what": "build", "why": "with the seed 0"}
    torch, ffcv = ({"what": "load a.beton", "why": f"{loader} loader"} for loader in ("torch", "ffcv"))
    assert differences({"plan": [torch, same]}, {"plan": [ffcv, same]}) == [
        "Only the first's plan has: load a.beton (torch loader).",
        "Only the second's plan has: load a.beton (ffcv loader).",
    ]
    assert differences({"plan": [torch]}, {"plan": [torch, same]}) == ["Only the second's plan has: build."]


def test_what_differs_between_two_machines_is_told() -> None:
    def facts(recipe: str, revision: str, cores: int) -> dict[str, Any]:
        machine = {"git_revision": revision, "hardware": {"cores": cores}, "versions": {"torch": "2"}}
        return {"recipe": recipe, "plan": [], "provenance": machine}

    assert differences(facts("a", "x", 2), facts("b", "y", 4)) == [
        "Different recipe: a and b.", "Different revision: x and y.", "Different hardware, cores: 2 and 4.",
    ]  # fmt: skip


def test_a_data_frame_has_a_line_per_turn() -> None:
    pytest.importorskip("pandas")
    frame = made_up().to_pandas()
    assert list(frame.columns) == ["round", "variant", "images", "seconds", "waited", "images_per_s"]
    assert len(frame) == 3 * 4
    assert frame.query("variant == 'plain PyTorch'").images_per_s.tolist() == pytest.approx([400, 200, 100])


def test_accuracies_are_told_beside_the_speeds() -> None:
    rows = {PLAIN: Trained(0.8, 10.0, 10.0), WHOLE: Trained(0.7, 5.0, None)}
    made = dataclasses.replace(made_up(), accuracy=Accuracies(2, 0.8, rows))
    assert "70.00%" in str(made)
    assert "not reached" in str(made)
    assert "time to 80.00%" in made._repr_html_()


MACHINE = {"hardware": [1], "versions": {}, "date": "", "command": ""}


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """The content of a ledger's file."""
    trials = trials_of({PLAIN: 100.0, WHOLE: 200.0, LOADER: 900.0, MODEL: 300.0}, waited=0.01)
    Ledger([trials, trials], {"recipe": None}).save(tmp_path / "good.json")
    found: dict[str, Any] = json.loads((tmp_path / "good.json").read_text())
    return found


def trial(**wrong: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["rounds"][1][str(WHOLE)].update(wrong)


def odd_one(content: dict[str, Any]) -> None:
    content["rounds"][0]["odd"] = content["rounds"][0][str(PLAIN)]


def top(**wrong: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.update(wrong)


def second(**wrong: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["variants"][1].update(wrong)


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
        (top(level=2), "its level: expected `float` < 1.0"),
        (odd_one, "'odd' is not among"),
        (
            lambda content: content["rounds"][0].pop(str(MODEL)),
            "its rounds do not all have the same variants",
        ),
        (top(left_out=["b"]), "its left_out: expected `object`, got `array`"),
        (top(costs={str(PLAIN): 5}), "its costs[...]: expected `object`, got `int`"),
        (top(accuracy={}), "its accuracy: object missing required field `epochs`"),
        (top(provenance=MACHINE), "its provenance.hardware: expected `object`, got `array`"),
        (top(provenance={"hardware": {}}), "its provenance.hardware: object missing required field `gpus`"),
        (top(failed={str(WHOLE): 5}), "its failed[...]: expected `str`, got `int`"),
        (top(failed={"+ b": "no"}), "'+ b' is not among its variants"),
        (top(variants="x"), "its variants: expected `array`, got `str`"),
        (lambda content: content["variants"].pop(0), "'plain PyTorch' is not among its variants"),
        (second(stage="b"), "'+ b' is named '+ FFCV loader'"),
        (second(kind="pair"), "its variants[1].kind: invalid enum value 'pair'"),
        (lambda content: content.pop("variants"), "object missing required field `variants`"),
        (top(plan=["train"]), "its plan[0]: expected `object`, got `str`"),
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
    assert "--compare A.JSON B.JSON" in call("ledger").line


def test_every_figure_in_the_file_has_its_n_and_spread(good: dict[str, Any]) -> None:
    for row in good["rows"]:
        assert row["images_per_s"].keys() == {"value", "low", "high", "n"}
        assert row["ratio"].keys() == {"value", "low", "high", "n"}
        assert (row["images_per_s"]["n"], row["ratio"]["n"]) == (2, 2)
    assert {stage["in_turn"]["n"] for stage in good["stages"]} == {2}
    assert {one["n"] for one in good["ceilings"].values()} == {2}


def test_the_accuracies_are_those_of_the_monitored_metric(tmp_path: Path) -> None:
    rows = {PLAIN: Trained(0.5, 10.0, 10.0)}
    made = dataclasses.replace(made_up(), accuracy=Accuracies(2, 0.5, rows, "pixel_accuracy"))
    assert "pixel accuracy" in str(made)
    assert "top-1" not in str(made)
    made.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json").accuracy == made.accuracy
