"""The guide's way from JPEGs with a table of labels to predictions by name, on the command line: convert, train with
weights of a model with other outputs, predict."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torchvision
from command_line import call
from drivetrain.loaders import open_beton
from loader_pictures import jpeg_bytes, picture
from places import ROOT
from safetensors.torch import save_file

GUIDE = (ROOT / "docs/guide/tasks.md").read_text().partition("## Several labels of JPEGs")[2].partition("\n## ")[0]
LABELS = ("sun", "sea", "dog")


def photos(folder: Path, number: int, seed: int) -> None:
    """JPEG files of several sizes in folders, and their table: a label is there if its channel is bright."""
    rng, rows = np.random.default_rng(seed), [",".join(("file", *LABELS))]
    for n in range(number):
        wanted = rng.integers(0, 2, 3)
        pixels = picture(seed * 1000 + n, 40 + n % 3 * 8, 48) // 4 + 40 + 130 * wanted
        name = f"{('beach', 'park')[n % 2]}/{n:04}.jpg"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(jpeg_bytes(pixels.clip(0, 255).astype(np.uint8)))
        rows.append(",".join((name, *map(str, wanted))))
    folder.with_suffix(".csv").write_text("\n".join(rows))


@pytest.mark.slow
@pytest.mark.long
def test_the_lines_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos/train", 64, seed=1)
    photos(tmp_path / "photos/val", 24, seed=2)
    first = torchvision.models.resnet18(num_classes=10)  # of another data set
    save_file(dict(first.state_dict()), "resnet18.safetensors")
    (recipe,) = re.findall(r"```yaml\n# labels\.yaml\n(.*?)```", GUIDE, re.DOTALL)
    Path("labels.yaml").write_text(recipe)
    (lines,) = re.findall(r"```console\n(.*?)```", GUIDE, re.DOTALL)
    commands = [line.split("#")[0].split() for line in lines.splitlines()]
    assert [command[:2] for command in commands[-2:]] == [["drivetrain", "train"], ["drivetrain", "predict"]]
    ends = [call(*command[1:]) for command in commands]
    assert [end.code for end in ends] == [0] * len(ends), ends
    train = open_beton("train.beton")
    assert tuple(train.classes) == LABELS
    assert train.read("image", np.array([0]))[0] == Path("photos/train/beach/0000.jpg").read_bytes()
    epochs = json.loads(Path("runs/labels/history.json").read_text())["epochs"]
    chance = open_beton("val.beton").labels.mean(0).mean()
    assert epochs[-1]["metrics"]["map"] > chance + 0.25
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    (row,) = [json.loads(line) for line in ends[-1].out.splitlines()]
    assert list(row["probabilities"]) == list(LABELS)
    assert set(row["labels"]) <= set(LABELS)
    images = sorted(Path("photos/val").glob("*/*.jpg"))
    Path("resnet18.safetensors").unlink()  # which only the beginning of the training needs
    rows = [json.loads(line) for line in call("predict", "runs/labels", *map(str, images), "--json").out.splitlines()]
    truth = dict(line.split(",", 1) for line in Path("photos/val.csv").read_text().splitlines())
    right = [
        (name in each["labels"]) == (value == "1")
        for each in rows
        for name, value in zip(
            LABELS, truth[Path(each["image"]).relative_to("photos/val").as_posix()].split(","), strict=True
        )
    ]
    assert np.mean(right) > 0.7
