"""The answers of `docs/guide/how-to.md` run as printed, one after another."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from drivetrain import Pipeline, RecipeError
from drivetrain.pipeline.apps.cli import main
from pipeline_data import Toy, toy_arrays
from places import ROOT

GUIDE = (ROOT / "docs/guide/how-to.md").read_text()
ANSWERS = dict(re.findall(r"^## … (.*?)\?\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE))


def blocks(answer: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", ANSWERS[answer], re.DOTALL)


@pytest.mark.long
def test_every_answer_runs(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loop of one's own reaches the weights of `fit`, with its schedule and its mixing."""
    monkeypatch.chdir(tmp_path)
    images, _ = toy_arrays(4, seed=3)
    Path("train.beton").symlink_to(toy.train)
    from drivetrain.transforms import MixUp

    pipeline = toy.pipeline().transform(MixUp(0.2)).optimize("sgd", lr=0.1, momentum=0.9, warmup=0.25)
    names: dict[str, Any] = {"pipeline": toy.pipeline(), "images": images, "__name__": "guide"}
    for answer in ANSWERS:
        names["pipeline"] = pipeline if answer == "write my own loop" else toy.pipeline()
        for block in blocks(answer):
            exec(compile(block, answer, "exec"), names)
            if answer == "write my own loop":
                epochs = 2 if "train_epoch" in block else 1
                expected = pipeline.fit(epochs=epochs, progress=False).model.state_dict()
                trained = names["built"].engine.plain_model.state_dict()
                assert all(torch.equal(value, expected[name]) for name, value in trained.items())
    assert names["small"].optimized.scale_lr
    assert names["Grey"](4)(torch.zeros(2, 3, 16, 16)).shape == (2, 4)
    assert names["frozen"](4).layer1[0].conv1.weight.requires_grad is False


@pytest.mark.long
def test_the_recipe_with_a_model_beside_it_trains(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = blocks("write a recipe with a model of my own", "yaml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(text)
    factory = "def Net(num_classes):\n    return plain_model(num_classes)\n"
    (tmp_path / "recipes" / "net.py").write_text(f"from pipeline_data import plain_model\n\n\n{factory}")
    Path(tmp_path / "train.beton").symlink_to(toy.train)
    Path(tmp_path / "val.beton").symlink_to(toy.val)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "recipes/mine.yaml", "strategy_options.device=cpu"])
    del sys.modules["net"]  # another test has one of that name
    assert ended.value.code in (0, None), capsys.readouterr().err
    assert "after 2 epochs" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="cannot be imported"):
        Pipeline.from_recipe(yaml.safe_load(text) | {"model": "nett:Net"})


def test_every_question_of_a_new_user_has_an_answer() -> None:
    """What could not be done, or only by hand, in the first version."""
    asked = (
        "weight the classes", "several labels", "top-5 or F1", "every few epochs", "at every step",
        "learning rates by parameter name", "another batch size", "freeze", "grey images", "longer than planned",
        "predict one picture", "model of my own", "my own loop", "Tab",
    )  # fmt: skip
    for words in asked:
        assert sum(words in question for question in ANSWERS) == 1, words
