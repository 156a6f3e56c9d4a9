"""`--quiet` and `--verbose`, and output that is short by default."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import call, call_several, toy_values
from drivetrain.common.terminal import SHOWN
from drivetrain.loaders import convert, verify
from drivetrain.pipeline import Pipeline
from drivetrain.pipeline.apps.cli.training import _better
from drivetrain.pipeline.recipes.table import recipe_table
from drivetrain.pipeline.telemetry.history import Epoch, Evaluation, History
from drivetrain.transforms import ColOut, CutMix, MixUp, Report
from loader_pictures import jpeg_bytes, picture
from pipeline_data import Toy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of two classes, and a file that is none."""
    root = tmp_path / "pictures"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        (root / name / "0.jpg").write_bytes(jpeg_bytes(picture(0, 20, 20)))
    (root / "a" / "readme.txt").touch()
    (root / "a" / ".hidden").touch()
    return root


def test_a_report_shows_the_first_names_of_many() -> None:
    names = tuple(f"layer{number}.conv" for number in range(9))
    skipped = tuple((name, "too small") for name in names[:7])
    report = Report("ChannelsLast", names, (*skipped, ("", "other")))
    assert str(report).splitlines() == [
        "ChannelsLast: changed 9 module(s)",
        "  changed: layer0.conv, layer1.conv, layer2.conv, layer3.conv and 5 more",
        "  left alone: layer0.conv, layer1.conv, layer2.conv, layer3.conv and 3 more: too small",
        "  left alone: (the model): other",
    ]
    long = report.text(verbose=True)
    assert all(long.splitlines()[1].count(name) == 1 for name in names)
    assert "more" not in long
    assert "layer4.conv" in str(replace(report, changed=names[:5]))  # five take no more room than "and 1 more"


def test_a_plan_gives_each_reason(toy: Toy) -> None:
    plan = toy.pipeline("cifar_resnet").transform(ColOut(), CutMix()).plan()
    rows = [number for number, step in enumerate(plan.steps, 1) if "on each training batch" in step.why]
    assert len(rows) == 2
    text = " ".join(f"{plan!r}".replace("│", " ").split())
    assert text.count("on each training batch") == 2
    assert "as step" not in text
    both = str(toy.pipeline().transform(MixUp(0.2), CutMix()).plan())
    assert " ".join(both.replace("│", " ").split()).count("MixUp and CutMix both mix every batch") == 2


def test_classes_that_are_named_like_splits_are_reported(folder: Path, tmp_path: Path) -> None:
    """The folder above `train/` and `val/`: its images would have the classes train and val."""
    for split in ("train", "Val"):
        shutil.copytree(folder, tmp_path / "photos" / split)
    shown = call("convert", str(tmp_path / "photos"), str(tmp_path / "out.beton"))
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[-1] == (
        "  warning: the classes Val and train are named like splits of a data set. If they are, convert each folder by "
        "itself: drivetrain convert FOLDER/Val Val.beton; drivetrain convert FOLDER/train train.beton"
    )
    (tmp_path / "photos" / "Val").rename(tmp_path / "photos" / "plane")  # a train is a class, too
    assert "warning" not in str(convert(tmp_path / "photos", tmp_path / "out.beton", progress=False))


def test_one_class_is_reported(folder: Path, tmp_path: Path) -> None:
    """The folder of one class instead of the one above it. No error: views need no labels."""
    (tmp_path / "photos").mkdir()
    shutil.copytree(folder / "a", tmp_path / "photos" / "a")
    shown = call("convert", str(tmp_path / "photos"), str(tmp_path / "out.beton"))
    assert shown.code == 0, shown.err
    assert "  warning: there is one class, a, so a classifier learns nothing from it. " in shown.out


def test_images_that_are_in_no_class_are_listed(folder: Path, tmp_path: Path) -> None:
    (folder / "2.jpg").write_bytes(jpeg_bytes(picture(0, 20, 20)))
    (folder / "labels.csv").touch()  # is not meant as a sample
    report = convert(folder, tmp_path / "out.beton", progress=False)
    assert report.samples == 2
    assert str(report).splitlines()[1:] == [
        f"  ignored {folder / '2.jpg'}: in no folder of a class",
        f"  ignored {folder / 'a' / 'readme.txt'}: not an image by its suffix",
    ]


def test_files_that_are_no_images_are_listed(folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out.beton")
    shown = call("convert", str(folder), out)
    assert shown.code == 0, shown.err
    _, line = shown.out.splitlines()
    assert line == f"  ignored {folder / 'a' / 'readme.txt'}: not an image by its suffix"
    assert call("convert", str(folder), out, "--quiet").out.count("\n") == 1
    for number in range(30):
        (folder / "b" / f"{number:02}.txt").touch()
    report = convert(folder, out, progress=False)
    assert len(report.ignored) == 31
    assert str(report).splitlines()[-1] == f"  … and {31 - SHOWN} more (--verbose)"
    assert len(call("convert", str(folder), out, "--verbose").out.splitlines()) == 33
    bad = replace(verify(out, progress=False), bad=[(number, "odd") for number in range(40)])
    assert len(str(bad).splitlines()) == 1 + SHOWN + 1
    assert len(bad.text(verbose=True).splitlines()) == 41


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_train_prints_only_its_result(toy: Toy, tmp_path: Path) -> None:
    command = ["train", "cifar10-quickstart", *toy_values(toy), "epochs=1", "--out", str(tmp_path / "run")]
    command.remove("epochs=2")
    quiet = call(*command, "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    (line,) = quiet.out.splitlines()
    assert line.endswith("after 1 epoch")
    assert "top1" in line
    short, long = call(*command), call(*command, "--verbose")
    assert "and 4 more" in short.out
    assert "and 4 more" not in long.out
    assert "%|" not in short.err  # no bar where nobody looks
    # A warning is hidden, an error is not.
    warned = [*command, 'transforms=[{"name": "LowPrecisionLayerNorm"}]']
    assert "NothingChanged: " in call(*warned).err
    assert call(*warned, "--quiet").err == ""
    assert "DataError" in call("convert", str(tmp_path / "nowhere"), str(tmp_path / "x.beton"), "--quiet").line


def test_the_result_of_a_run_that_was_stopped_within_an_epoch(toy: Toy) -> None:
    """How long its weights were trained; and an epoch is named only if it was better than they are."""
    stopping = '{"name": "EarlyStopping", "monitor": "top1", "patience": 1, "min_delta": 1}'
    options = ["--eval-every-steps", "1", "--callback", stopping, "--quiet"]
    (stopped,) = call_several(["train", "cifar10-quickstart", *toy_values(toy), *options])
    assert (stopped.code, stopped.out.count("\n")) == (0, 1), stopped
    assert stopped.out.endswith(" after 0 epochs and 2 steps\n")
    shares = (0.5, 0.4)
    epochs = [Epoch(number, 1.0, 1.0, {"top1": share}, 9, 0.1, 1, 0.1) for number, share in enumerate(shares, 1)]
    for share, text in ((0.3, "; best: top1 0.5 after epoch 1"), (0.5, ""), (0.7, "")):
        assert _better(History(epochs, {}, [Evaluation(3, 10, 1.0, {"top1": share})])) == text
    assert _better(History(epochs)) == "; best: top1 0.5 after epoch 1"


@pytest.mark.parametrize("width", [80, 110])
def test_recipes_can_be_read_in_a_narrow_terminal(width: int) -> None:
    lines = recipe_table("resnet50-mild").text(width).splitlines()
    assert max(map(len, lines)) <= width
    heads = next(line for line in lines if line.startswith("┃"))
    assert heads.count("┃") == (3 if width == 80 else 4)


def test_a_pipeline_has_no_option_named_trained(toy: Toy) -> None:
    """The key is of recipes only."""
    recipe = {**toy.pipeline("cifar_resnet").to_recipe(), "trained": {"classes": ["x"]}}
    assert "trained" not in Pipeline.from_recipe(recipe).to_recipe()
