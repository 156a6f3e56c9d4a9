"""A run's report: one file that is well formed, holds its results, and names what is missing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command_line import call
from drivetrain import CheckpointError, DrivetrainError, Pipeline
from drivetrain.pipeline.apps.report import write_report
from drivetrain.pipeline.measuring.variant import PLAIN, in_turn
from ledgers import of_speeds
from pipeline_data import BATCH, SIDE, Toy, write_toy

VOID = {"meta", "img", "br"}


class Balanced(HTMLParser):
    """Fails unless every element is closed; collects tags and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert "script" not in parser.tags
    assert all(link.startswith("data:image/png;base64,") for link in parser.links)
    assert not re.search(r"@import|url\(", page)
    return parser


def trained(toy: Toy, folder: Path) -> Path:
    pipeline = Pipeline("cifar_resnet", num_classes=4, width=4).load(
        toy.train, toy.val, batch_size=BATCH, image_size=SIDE, workers=1
    )
    pipeline.optimize("sgd", lr=0.1).fit(epochs=1, out=folder, progress=False)
    return folder


def test_a_finished_run(toy: Toy, tmp_path: Path) -> None:
    run = trained(toy, tmp_path / "run")
    full = in_turn("compile")
    of_speeds({PLAIN: 100.0, full: 200.0}, {PLAIN: 101.0, full: 202.0}).save(run / "ledger.json")
    end = call("report", str(run), "--out", str(tmp_path / "r.html"))
    assert (end.code, end.err) == (0, "")
    page = (tmp_path / "r.html").read_text()
    assert len(checked(page).links) == 3
    for text in (
        "1 epoch, finished",
        "top1",
        "mistaken for",
        "plain PyTorch",
        "wrap with single",
        "cifar_resnet",
    ):
        assert text in page, text
    assert "Not available" not in page


def test_everything_is_escaped_and_what_is_missing_is_named(toy: Toy, tmp_path: Path) -> None:
    """An interrupted run with classes and texts that are HTML, whose validation data is gone."""
    run = trained(toy, tmp_path / "<i>run")
    other = write_toy(tmp_path / "other.beton", 16, seed=3, classes=("<script>", "b&b", "'c'", '"d"'))
    recipe = run / "recipe.yaml"
    recipe.write_text(re.sub(r"^epochs: 1$", "epochs: 3", recipe.read_text(), flags=re.M))
    (run / "plan.txt").write_text("<script>alert(1)</script>")
    Path(toy.val).rename(tmp_path / "gone.beton")
    (run / "ledger.json").write_text("{}")
    page = write_report(run, tmp_path / "r.html").read_text()
    Path(tmp_path / "gone.beton").rename(toy.val)
    checked(page)
    assert "Unfinished: 1 of 3 epochs." in page
    assert page.count("Not available") == 2  # errors and ledger
    with pytest.raises(DrivetrainError):
        write_report(run, tmp_path / "r.html", other)


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no results of a run"):
        write_report(tmp_path, tmp_path / "r.html")
    with pytest.raises(DrivetrainError, match=r"r\.pdf"):
        write_report(tmp_path, tmp_path / "r.pdf")
