"""The README's example, the quickstart, and the answers of `docs/guide/how-to.md`, run as printed."""

import ast
import builtins
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from drivetrain import DataError, Pipeline, RecipeError, transforms
from drivetrain.loaders import convert
from drivetrain.loaders.datasets.names import cifar10
from drivetrain.pipeline.apps.cli import main
from pipeline_data import Toy, toy_arrays
from places import ROOT, import_ours
from process_state import output_of

README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
DOCS = "\n".join(PAGES.values())
BIN = Path(sys.executable).parent


def _example() -> str:
    """The first Python block: the ten lines."""
    return re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)


def _run_script(text: str, folder: Path, timeout: int) -> str:
    (folder / "example.py").write_text(text)
    return output_of(sys.executable, "example.py", cwd=folder, timeout=timeout)


def _printed(text: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a script prints, run in this process: another one imports torch for seconds."""
    monkeypatch.chdir(folder)
    exec(compile(text, "example.py", "exec", dont_inherit=True), {"__name__": "__main__"})
    return capsys.readouterr().out


def test_the_loaders_example_runs_on_small_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    (text,) = [block for block in blocks if "set_image_size" in block]
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    convert((images, np.arange(12)), tmp_path / "train.beton", progress=False)
    shown = "print(state['position'], images.shape, images.dtype, loader.settings.image_size)"
    told = _printed(text.replace("256", "4") + shown, tmp_path, capsys, monkeypatch)
    assert told == "3 torch.Size([4, 3, 176, 176]) torch.bfloat16 208\n"


def test_every_name_in_the_snippets_is_imported_or_made_there() -> None:
    """All but the reader's model, loader, pipeline and data. Each import of ours is of something that is there."""
    printed = re.findall(r"(?<!-->\n)```python\n(.*?)```", DOCS, re.DOTALL)
    nodes = [node for block in printed for node in ast.walk(ast.parse(block))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {alias.asname or alias.name for alias in node.names}
    assert import_ours(nodes)
    assert used - made - set(dir(builtins)) <= {"model", "train"}


def test_the_readme_is_one_screen_whose_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 70
    guides = {f"guide/{path.name}": path.read_text() for path in (ROOT / "docs/guide").glob("*.md")}
    for name, text in (PAGES | guides).items():
        folder = ROOT if name == "README.md" else (ROOT / "docs" / name).parent
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert (folder / target).exists(), (name, target)
        for target in re.findall(r"`(notebooks/[^`]+)`", text):
            assert (ROOT / target).exists(), (name, target)


def test_the_number_of_transforms_is_that_of_the_catalogue() -> None:
    count = len(transforms.catalogue())
    assert f"{count} immutable transforms" in DOCS
    assert f"| {count}, ordered and checked by a plan" in DOCS


def test_the_libraries_beside_which_it_stands() -> None:
    (head,) = (line for line in DOCS.splitlines() if line.startswith("| | Drivetrain |"))
    columns = [name.strip() for name in head.strip("|").split("|")]
    assert columns == ["", "Drivetrain", "Lightning", "Composer", "Accelerate", "FFCV"]
    table = DOCS.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) >= 8
    for row in table:
        assert len([cell for cell in row.strip("|").split("|") if cell.strip()]) == len(columns), row


@pytest.fixture
def cifar() -> None:
    """Skip where CIFAR-10 is neither cached nor to be had."""
    try:
        cifar10.fetch_cifar10()
    except DataError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.long
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.process])])
def test_the_example_runs_on_small_data(
    apart: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(100) % 10
    text = _example()
    assert "batch_size=500" in text
    text = text.replace("batch_size=500", "batch_size=50")
    for name, count in (("train", 100), ("test", 50)):
        small = images[:count], labels[:count]
        convert(small, tmp_path / f"{name}.beton", classes=cifar10.CLASSES, progress=False)
        assert f'"cifar10:{name}"' in text
        text = text.replace(f'"cifar10:{name}"', f'"{name}.beton"')
    text += "\nprint(len(result.history.epochs), result.accuracy)"
    told = _run_script(text, tmp_path, 200) if apart else _printed(text, tmp_path, capsys, monkeypatch)
    assert "BlurPool" in told
    assert re.search(r"^1 0\.\d+$", told, re.MULTILINE)


# Alone: a step in bf16 on two threads took ten times as long where other tests shared the cores.
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(2700)
@pytest.mark.usefixtures("cifar")
def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    told = _run_script(_example() + "\nprint('accuracy', result.accuracy)", tmp_path, 2600)
    assert float(told.rsplit("accuracy ", 1)[1]) > 0.4


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(2700)
@pytest.mark.usefixtures("cifar")
def test_the_quickstart_trains_evaluates_and_measures(tmp_path: Path) -> None:
    """With half of its epochs, which are minutes."""
    command = [BIN / "drivetrain", "train", "cifar10-quickstart", "epochs=4", "--out", "out"]
    printed = output_of(*command, "--ledger", "--ledger-seconds", "60", cwd=tmp_path, timeout=2600)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"history.json", "model.safetensors", "ledger.json", "ledger.png"}
    last = json.loads((tmp_path / "out" / "history.json").read_text())["epochs"][-1]
    assert last["metrics"]["top1"] >= 0.65
    assert f"{last['metrics']['top1']:.2%}" in printed
    ledger = json.loads((tmp_path / "out" / "ledger.json").read_text())
    assert ledger["bound"] in printed.replace("\n", " ")
    assert [row["name"] for row in ledger["rows"]][:2] == ["plain PyTorch", "+ FFCV loader"]


GUIDE = (ROOT / "docs/guide/how-to.md").read_text()
ANSWERS = dict(re.findall(r"^## … (.*?)\?\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE))


def blocks(answer: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", ANSWERS[answer], re.DOTALL)


@pytest.mark.long
def test_every_answer_runs(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loop of one's own reaches the weights of `fit`, with its schedule, its mixing and its averages."""
    monkeypatch.chdir(tmp_path)
    images, _ = toy_arrays(4, seed=3)
    Path("train.beton").symlink_to(toy.train)
    pipeline = toy.pipeline().transform(transforms.MixUp(0.2), transforms.EMA(half_life=2))
    pipeline = pipeline.optimize("sgd", lr=0.1, momentum=0.9, warmup=0.25)
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
    assert names["Gray"](4)(torch.zeros(2, 3, 16, 16)).shape == (2, 4)
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
        "learning rates by parameter name", "another batch size", "freeze", "gray images", "longer than planned",
        "predict one picture", "model of my own", "my own loop", "Tab",
    )  # fmt: skip
    for words in asked:
        assert sum(words in question for question in ANSWERS) == 1, words
