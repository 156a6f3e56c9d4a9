"""Everything known in advance is checked before the plan: files by `plan()`; epochs, folder and model by `train`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import call, toy_values
from drivetrain import DataError, Pipeline, PlanError
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.transforms import ProgressiveResizing
from pipeline_data import BATCH, CLASSES, SIDE, TRAIN, Toy, plain_model, write_toy


def of(train: object, val: object = None, loader: str = "ffcv", batch_size: int = BATCH) -> Pipeline:
    names = [str(name) if name is not None else None for name in (train, val)]
    return Pipeline(plain_model).load(
        str(names[0]), names[1], batch_size=batch_size, image_size=SIDE, loader=loader
    )


def cut(path: Path) -> Path:
    path.write_bytes(b"\0" * 10)
    return path


BAD: dict[str, tuple[Callable[[Toy, Path], Pipeline], str]] = {
    "missing": (lambda *_: of("no.beton"), "no.beton does not exist in the working directory"),
    "missing validation": (lambda toy, _: of(toy.train, "no.beton"), "no.beton does not exist"),
    "missing for torch": (lambda *_: of("no.beton", loader="torch"), "no.beton does not exist"),
    "name": (lambda *_: of("cifar10:tain"), "Did you mean 'cifar10:train'"),
    "folder": (lambda toy, tmp: of(toy.train, tmp), "is a folder. Convert it first"),
    "cut off": (lambda _, tmp: of(cut(tmp / "cut.beton")), "has 10 bytes, too few"),
    "samples": (lambda toy, _: of(toy.train, batch_size=256), f"larger than the data set of {TRAIN} samples"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_plan_looks_at_the_files(name: str, toy: Toy, tmp_path: Path) -> None:
    make, message = BAD[name]
    pipeline = make(toy, tmp_path)
    assert resolve(pipeline, files=False).steps  # the rules have nothing against it
    with pytest.raises(DataError, match=message):
        pipeline.plan()


def test_a_plan_fetches_and_makes_nothing(
    no_network: None,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRIVETRAIN_DATA", str(tmp_path))
    assert of("cifar10:train", "cifar10:test").plan().steps
    assert of(tmp_path, loader="torch").plan().steps  # a folder, which the baseline reads as it is
    assert list(tmp_path.iterdir()) == []


def test_a_plan_checks_the_epochs_that_the_pipeline_has(toy: Toy) -> None:
    resizing = toy.pipeline(plain_model).transform(ProgressiveResizing())
    assert resizing.plan().steps  # fit(epochs=…) may be anything yet
    short = resizing.replace(epochs=1)
    for refused in (short.plan, short.build, lambda: short.fit(progress=False), short.ledger):
        with pytest.raises(PlanError, match="epochs=1 none would have full size"):
            refused()
    with pytest.raises(PlanError, match="epochs=1 none would have full size"):
        resizing.fit(epochs=1, progress=False)
    with pytest.raises(PlanError, match="epochs=0 must be a positive integer"):
        resizing.replace(epochs=0).plan()
    assert len(short.fit(epochs=3, progress=False).history.epochs) == 3  # another number is another matter


def test_the_command_prints_no_plan_of_what_is_refused(toy: Toy, tmp_path: Path) -> None:
    """Nor is a folder left of it."""
    (tmp_path / "file").write_text("mine")
    other = write_toy(tmp_path / "other.beton", 40, 0, "abdc")
    train, values = ["train", "cifar10-quickstart"], [*toy_values(toy), "--out", str(tmp_path / "run")]
    resizing = 'transforms=[{"name": "ProgressiveResizing"}]'
    here = values[: values.index("--train")]
    commands = (
        [*train, *values, resizing, "--logger", "csv"],
        [*train, *(v if v != "epochs=2" else "epochs=1" for v in values), resizing],
        [*train, *here, "--train", "no.beton"],
        [*train, *here, "--train", toy.train, "--val", str(other)],
        [*train, *toy_values(toy), "--out", str(tmp_path / "file" / "run")],
        [*train, *toy_values(toy), "--logger", "csv"],
        [*train, *(v.replace(f"classes={CLASSES}", "classes=9") for v in toy_values(toy))],
        ["ledger", "cifar10-quickstart", *here, "--train", "no.beton", "--out", str(tmp_path / "run2")],
    )
    ends = [call(*command) for command in commands]
    assert ends[0].code == 0, ends[0].err
    assert re.match("Plan\n", ends[0].out)
    messages = (
        "none would have full size", "no.beton does not exist", "Class 2 is 'c' in", "is a file", "Pass fit(out=…)",
        f"has {CLASSES} classes. Build it", "no.beton does not exist",
    )  # fmt: skip
    for end, message in zip(ends[1:], messages, strict=True):
        assert message in end.line  # one line on stderr, and nothing on stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "file",
        "other.beton",
        "other.beton.json",
        "run",
    ]
