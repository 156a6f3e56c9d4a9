"""`drivetrain new`: each template trains on real files by the commands that it prints; what is refused."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from command_line import ENVIRONMENT, call, call_several, done, run
from drivetrain.pipeline.apps.projects.project import FILES, TEMPLATES
from loader_pictures import jpeg_bytes, jpeg_folder
from PIL import Image
from places import ROOT
from process_state import output_of
from segmentation_jobs import scene

SMALL = ("epochs=1", "image_size=32", "model_options.width=4")
"""What only takes long on a CPU."""


def photos_of_classes(folder: Path) -> list[Path]:
    return sorted(jpeg_folder(folder / "photos" / "train", per_class=12).rglob("*.jpg"))


def photos_with_masks(folder: Path) -> list[Path]:
    places = folder / "photos" / "train", folder / "masks" / "train"
    for place in places:
        place.mkdir(parents=True)
    for number in range(20):
        image, mask = scene(number)
        (places[0] / f"{number}.jpg").write_bytes(jpeg_bytes(image))
        Image.fromarray(mask).save(places[1] / f"{number}.png")
    return sorted(places[0].iterdir())


DATA = {"classification": photos_of_classes, "segmentation": photos_with_masks}


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=pytest.mark.slow if task == "segmentation" else ()) for task in TEMPLATES],
)
def test_a_project_trains_as_it_is(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = call("new", "flowers", "--task", task)
    assert (made.code, made.err) == (0, "")
    project = tmp_path / "flowers"
    assert {path.name for path in project.iterdir()} == {*FILES.values()}
    assert [path.name for path in tmp_path.iterdir()] == ["flowers"]
    folder, convert, train, plan = re.findall(r"^  (cd .*)$|drivetrain ((?:convert|train|plan) .*)$", made.out, re.M)
    assert folder[0] == "cd flowers"
    readme = (project / "README.md").read_text()
    assert all(f"drivetrain {each[1]}" in readme for each in (convert, train, plan))
    assert not re.search(r"@\w+@", "".join(path.read_text() for path in project.iterdir()))

    ruff = Path(sys.executable).with_name("ruff")
    for command in ("check", "format --check"):
        output_of(ruff, *command.split(), "--no-cache", "--config", ROOT / "pyproject.toml", project / "model.py")

    photos = DATA[task](project)
    monkeypatch.chdir(project)
    converted = call(*shlex.split(convert[1]))
    assert converted.code == 0, converted.err
    command = [*shlex.split(train[1]), *SMALL]
    if task == "segmentation":
        trained = run(*command, cwd=project)
    else:  # as there, the folder itself is not on the path: the recipe leads to the model
        monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(project))])
        (trained,) = call_several(command)
        sys.modules.pop("model")  # which the commands below find again
    assert (trained.code, trained.err) == (0, ""), trained.err
    assert "classes auto: 3, as in train.beton" in " ".join(re.sub("│", " ", trained.out).split())
    assert "runs/first: curves.png" in trained.out
    recipe = yaml.safe_load((project / "runs" / "first" / "recipe.yaml").read_text())
    assert (recipe["model"], recipe["model_options"]["num_classes"]) == ("model:Net", 3)
    assert recipe.get("task", {"classes": 3})["classes"] == 3
    row = json.loads(done("predict", "runs/first", str(photos[0]), "--json"))
    del sys.modules["model"]
    if task == "classification":
        assert {*row["probabilities"]} == {"ant", "bee", "cat"}
    else:
        assert {value for line in row["prediction"] for value in line} <= {0, 1, 2}


@pytest.mark.slow  # two interpreters, and nothing that the commands do not do
def test_the_guide_works_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of docs/guide/project.md, in a process of its own, as a user's script is."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / "project.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert call("new", "flowers").code == 0
    monkeypatch.chdir(tmp_path / "flowers")
    photos_of_classes(Path())
    assert call("convert", "photos/train", "train.beton").code == 0
    small = text.replace('"recipe.yaml"', '"recipe.yaml", epochs=1, image_size=32').replace(
        "photo.jpg", "photos/train/ant/000.jpg"
    )
    assert small != text
    script = Path("script.py")
    script.write_text(f"{small}\nprint(found[0]['class'])\n")
    printed = output_of(sys.executable, script, timeout=120, env=ENVIRONMENT)
    assert printed.split()[-1] in ("ant", "bee", "cat")


def test_an_empty_folder_is_taken_and_a_path_too(tmp_path: Path) -> None:
    folder = tmp_path / "Blüten-2_a"
    folder.mkdir()
    assert call("new", str(folder)).code == 0
    assert (folder / "README.md").read_text().startswith("# Blüten-2_a\n")
    compile((folder / "model.py").read_text("utf-8"), "model.py", "exec")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my flowers", " Did you mean 'my-flowers'?"), ("2flowers", " Did you mean 'flowers'?"),
        ("_x", " Did you mean 'x'?"),
        (".hidden", " Did you mean 'hidden'?"), ("a'b\"", " Did you mean 'a-b'?"), (".", ""), ("..", ""), ("/", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_a_name(name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("new", name).line.endswith(f"begin with a letter, and have only letters, digits, - and _.{hint}\n")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/mine").write_text("mine")
    Path("file").write_text("mine")
    Path("link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("full", "file", "link"):
        assert f"{name} exists already. Pass another name, or move it." in call("new", name).line
    assert "none/flowers could not be written: No such file or directory." in call("new", "none/flowers").line
    assert "could not be written: File name too long." in call("new", "a" * 300).line
    assert (
        "There is no template for the task 'segmentaton'. Did you mean 'segmentation'?"
        in call("new", "x", "--task", "segmentaton").line
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("full/mine").read_text() == Path("file").read_text() == "mine"
