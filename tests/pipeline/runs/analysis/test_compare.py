"""Runs beside each other: their figures, what differs, unfinished and damaged ones, curves."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from callback_jobs import OnRankOne
from command_line import call
from drivetrain import DataError, Pipeline, Regression
from drivetrain.pipeline import EarlyStopping, compare_runs, load_run
from drivetrain.pipeline.recipes.flat import flattened
from drivetrain.transforms import LabelSmoothing
from pipeline_data import Toy, plain_model


class Logger:
    def log(self, values: dict[str, Any], step: int) -> None:
        pass


@pytest.fixture(scope="module")
def runs(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    smooth = toy.named(0.05).transform(LabelSmoothing(0.2))
    for name, pipeline, epochs in (("plain", toy.named(), 2), ("smooth", smooth, 1)):
        pipeline.fit(epochs=epochs, out=folder / name, progress=False)
    return folder


def test_figures_and_only_what_differs(runs: Path) -> None:
    comparison = compare_runs([runs / "plain", runs / "smooth"])
    plain, smooth = comparison.runs
    assert (plain.name, plain.epochs, smooth.epochs, plain.problem) == ("plain", 2, 1, "")
    assert comparison.differences == {
        "epochs": (2, 1), "optimizer.lr": (0.1, 0.05), "transforms": ([], None),
        "transforms.LabelSmoothing.smoothing": (None, 0.2),
    }  # fmt: skip
    assert plain.best is not None
    assert plain.best.metrics["top1"] == max(epoch.metrics["top1"] for epoch in plain.history.epochs)
    assert plain.seconds == sum(epoch.seconds for epoch in plain.history.epochs)
    assert max(map(len, str(comparison).splitlines())) <= 80
    assert "best top1" in str(comparison)
    assert comparison._repr_html_().count("<table>") == 2


def test_the_recipe_of_a_run_has_its_options_of_fit_but_not_its_folder(toy: Toy, tmp_path: Path) -> None:
    """Whether they are the recipe's, or given to this run; who trains it again does not replace another run."""
    recipe = toy.pipeline(plain_model).to_recipe() | {
        "epochs": 2, "out": str(tmp_path / "first"), "eval_every": 2, "on_nonfinite": "skip",
        "callbacks": [{"name": "EarlyStopping", "monitor": "loss"}, {"name": "callback_jobs:Sums"}],
    }  # fmt: skip
    pipeline = Pipeline.from_recipe(recipe)
    pipeline.fit(progress=False)
    stopping = EarlyStopping("loss", patience=7)
    result = pipeline.fit(
        out=tmp_path / "second", init_from=tmp_path / "first", on_nonfinite="raise", callbacks=[stopping],
        logger=["csv", Logger()], progress=False,
    )  # fmt: skip
    first, second = (yaml.safe_load((tmp_path / run / "recipe.yaml").read_text()) for run in ("first", "second"))
    assert (first["out"], second["out"]) == (None, None)
    assert first["callbacks"] == recipe["callbacks"]
    assert second["callbacks"] == [{"name": "EarlyStopping", "monitor": "loss", "patience": 7}]
    assert second["logger"] == ["csv"]
    assert (first["eval_every"], second["eval_every"]) == (2, 2)
    comparison = compare_runs([tmp_path / "first", tmp_path / "second"])
    expected = {"init_from": (None, str(tmp_path / "first")), "on_nonfinite": ("skip", "raise")}
    assert comparison.differences.items() >= expected.items()
    assert compare_runs([tmp_path / "second", result]).differences == {}
    again = Pipeline.from_recipe(tmp_path / "second/recipe.yaml").fit(out=tmp_path / "third", progress=False)
    assert again.history.epochs[-1].loss == result.history.epochs[-1].loss


def test_the_recipe_of_a_run_names_custom_callbacks_as_they_were_given(toy: Toy, tmp_path: Path) -> None:
    """Not with the options that the recipe has for the class; of an object, the options are not known."""

    def callbacks_of(pipeline: Pipeline, *given: Any) -> Any:
        pipeline.fit(epochs=1, out=tmp_path, progress=False, checkpoints=None, callbacks=[*given])
        return yaml.safe_load((tmp_path / "recipe.yaml").read_text()).get("callbacks", [])

    one, other = ({"name": "callback_jobs:OnRankOne", "stop": step} for step in (8, 9))
    plain = toy.pipeline(plain_model)
    named = Pipeline.from_recipe(plain.to_recipe() | {"epochs": 1, "callbacks": [one]})
    assert callbacks_of(plain, other) == [other]
    assert callbacks_of(named, other) == [other]
    assert callbacks_of(named, OnRankOne(stop=9)) == []


def test_unfinished_and_damaged_runs_have_a_row_and_a_reason(runs: Path, tmp_path: Path) -> None:
    for name in ("short", "broken", "begun"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text((runs / "plain" / "recipe.yaml").read_text())
    history = json.loads((runs / "plain" / "history.json").read_text())
    (tmp_path / "short" / "history.json").write_text(json.dumps(history | {"epochs": history["epochs"][:1]}))
    (tmp_path / "broken" / "history.json").write_text("{")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "recipe.yaml").write_text("model: [")
    names = ("short", "broken", "begun", "odd", "none")
    text = str(compare_runs([tmp_path / name for name in names] + [runs / "plain"]))
    for words in (
        "short: it is unfinished, 1 of 2 epochs.", "broken: its history.json is damaged.",
        "begun: it ended before its first epoch did.", "odd: its recipe.yaml is damaged",
        "none: there is no such folder.",
    ):  # fmt: skip
        assert words in text
    with pytest.raises(DataError, match="None of these is the folder of a run"):
        compare_runs([tmp_path / "none", tmp_path])


def test_addresses_results_and_histories(runs: Path, toy: Toy, tmp_path: Path) -> None:
    """Of another task, too, with one name, and twice; a store that is not there has a row."""
    numbers = toy.pipeline(lambda: plain_model(1)).task(Regression()).fit(epochs=1, progress=False)
    plain, saved = load_run(runs / "plain"), f"file://{runs}/plain"
    for number in range(3):
        shutil.copytree(runs / "plain", tmp_path / f"{number}" / "plain")
    given = [saved, f"file://{tmp_path}/none", plain, numbers, plain.history, *tmp_path.glob("*/plain")]
    comparison = Pipeline.compare(*given, runs / "plain", runs / "plain")
    names = [run.name for run in comparison.runs]
    assert len(set(names)) == len(names) == 10
    assert names[2:5] == ["result 3", "result 4", "result 5"]
    assert comparison.runs[0].recipe == comparison.runs[2].recipe == comparison.runs[9].recipe
    assert comparison.runs[0].to_dict()["folder"] == saved
    assert comparison.runs[2].to_dict()["folder"] is None
    text = str(comparison)
    assert " mae " in text or "val loss" in text, text
    assert f"{names[1]}: it is no run: it has no history.json." in text
    assert comparison.show() is not None


@pytest.mark.parametrize(
    ("given", "words"),
    [((), "There is no run"), ((None,), "None is not a run"), ((["a"],), r"\['a'\] is not a run")],
)
def test_what_is_not_a_run(given: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Pipeline.compare(*given)


def test_the_command_and_the_curves(runs: Path, tmp_path: Path) -> None:
    end = call("compare", str(runs / "plain"), str(runs / "smooth"), "--out", str(tmp_path / "c.png"))
    assert (end.code, end.err) == (0, "")
    assert (tmp_path / "c.png").stat().st_size > 10_000
    end = call("compare", str(runs / "plain"), str(runs / "smooth"), "--json")
    assert [run["recipe"]["optimizer.lr"] for run in json.loads(end.out)["runs"]] == [0.1, 0.05]
    assert "must end in .png" in call("compare", str(runs / "plain"), "--out", "c.gif").err
    found = compare_runs([runs / "plain", runs / "smooth"])
    named = [replace(run, name=name) for run, name in zip(found.runs, ("_a", "$_$"), strict=True)]
    legend = replace(found, runs=tuple(named)).show().legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["_a", r"\$_\$"]


def test_flattened() -> None:
    transforms = [{"name": "X"}, {"name": "Y", "k": 2}, {"name": "X"}]
    recipe = {"a": {"b": 1, "c": {}}, "l": [1, 2], "transforms": transforms}
    assert flattened(recipe | {"trained": {"x": 1}}) == {
        "a.b": 1, "a.c": {}, "l": [1, 2], "transforms.X": True, "transforms.Y.k": 2, "transforms.X#2": True,
    }  # fmt: skip
