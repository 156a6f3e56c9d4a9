"""A run's report: one file that is well formed, holds its results, and names what is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cluster_jobs import Signals
from command_line import call
from drivetrain import Callback, CheckpointError, DrivetrainError, Pipeline
from drivetrain.pipeline import RunView, TrainingInterrupted
from drivetrain.pipeline.apps.report import write_report
from drivetrain.pipeline.ledger.variant import PLAIN, in_turn
from drivetrain.pipeline.recipes.core_yaml import dump
from ledgers import of_speeds
from pipeline_data import BATCH, CLASSES, SIDE, Toy, write_toy

FRAME = """<title></title><script>addEventListener("message", each => document.title = each.data)</script>
<iframe src="copy.html" style="width: 390px; height: 800px"></iframe>"""  # Chromium's windows are wider
MEASURE = """<script>
const images = [...document.images], root = document.documentElement
addEventListener("load", () => parent.postMessage([
  root.clientWidth, root.scrollWidth, images.length, images.filter(each => !each.naturalWidth).length,
  images.filter(each => !each.alt).length, performance.getEntriesByType("resource").filter(each =>
    !each.name.startsWith("data:")).length].join(" "), "*"))
</script></body>"""
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
    toy.named().fit(epochs=1, out=folder, progress=False)
    return folder


def test_a_finished_run(toy: Toy, tmp_path: Path) -> None:
    run = trained(toy, tmp_path / "run")
    full = in_turn("compile")
    of_speeds({PLAIN: 100.0, full: 200.0}, {PLAIN: 101.0, full: 202.0}).save(run / "ledger.json")
    end = call("report", str(run), "--out", str(tmp_path / "r.html"))
    assert (end.code, end.err) == (0, "")
    page = (tmp_path / "r.html").read_text()
    assert len(checked(page).links) == 3 + 2 * 24  # a batch, and the worst samples
    texts = ("1 epoch, finished", "top1", "mistaken for", "plain PyTorch", "wrap with single", "cifar_resnet")
    for text in texts:
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
    assert page.count("Not available") == 3  # a batch, errors and ledger
    with pytest.raises(DrivetrainError):
        write_report(run, tmp_path / "r.html", other)
    recipe.write_bytes(b"epochs: [1\xff")
    assert write_report(run, tmp_path / "r.html").read_text().count("Not available") == 3


def test_before_the_first_epoch_it_has_what_is_there(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        toy.named().fit(epochs=2, out=tmp_path / "run", progress=False, callbacks=[Signals(1, name="SIGINT")])
    page = write_report(tmp_path / "run", tmp_path / "r.html").read_text()
    checked(page)
    for text in ("Unfinished: 0 of 2 epochs.", "No epoch has finished", "wrap with single", "versions torch"):
        assert text in page, text


def test_a_result_reports_itself(toy: Toy, tmp_path: Path) -> None:
    """As the command does, and from what it has itself once its folder is gone."""
    result = toy.named().fit(epochs=1, out=tmp_path / "run", progress=False)
    page = write_report(tmp_path / "run", tmp_path / "r.html").read_text()
    assert result.report(tmp_path / "own.html").read_text() == page
    shutil.rmtree(tmp_path / "run")
    alone = result.report(tmp_path / "alone.html").read_text()
    assert "wrap with single" in alone
    assert "Not available" not in alone


def test_a_batch_needs_no_file_of_weights(toy: Toy, tmp_path: Path) -> None:
    """As on another machine than that of the run."""
    run, weights = tmp_path / "run", str(tmp_path / "gone.pth")
    pipeline = Pipeline("pretrained", name="resnet18", num_classes=CLASSES, weights=weights)
    pipeline = pipeline.load(toy.train, batch_size=BATCH, image_size=SIDE, workers=1)
    run.mkdir()
    (run / "recipe.yaml").write_text(dump(pipeline.to_recipe()))
    page = write_report(run, tmp_path / "r.html").read_text()
    assert len(checked(page).links) == 24
    assert page.count("Not available") == 2  # curves and errors, since no epoch has finished


def test_what_the_users_code_raises_is_named(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model whose files another machine has."""
    run, gone = tmp_path / "run", str(tmp_path / "gone.txt")
    (tmp_path / "reads_a_file.py").write_text(f"def net():\n    return open({gone!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    pipeline = Pipeline("reads_a_file:net").load(toy.train, batch_size=BATCH, image_size=SIDE, workers=1)
    run.mkdir()
    (run / "recipe.yaml").write_text(dump(pipeline.to_recipe()))
    page = write_report(run, tmp_path / "r.html").read_text()
    assert checked(page)
    assert "Not available: FileNotFoundError: " in page


@pytest.mark.process
def test_in_a_browser(toy: Toy, tmp_path: Path) -> None:
    """On a telephone nothing is wider than the page but what scrolls, every picture is drawn and has a text."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    run = trained(toy, tmp_path / ("a-long-name-" * 8))
    of_speeds({PLAIN: 100.0, in_turn("compile"): 200.0}).save(run / "ledger.json")
    page = write_report(run, tmp_path / "r.html").read_text()
    (tmp_path / "copy.html").write_text(page.replace("</body>", MEASURE))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME)
    command = [
        browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=5000", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None
    width, scrolled, pictures, undrawn, mute, requests = map(int, found[1].split())
    assert scrolled <= width <= 390
    assert (pictures, undrawn, mute, requests) == (3 + 2 * 24, 0, 0, 0)


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no results of a run"):
        write_report(tmp_path, tmp_path / "r.html")
    with pytest.raises(DrivetrainError, match=r"r\.pdf"):
        write_report(tmp_path, tmp_path / "r.pdf")


class Fails(Callback):
    def on_step_end(self, view: RunView) -> None:  # noqa: ARG002
        raise RuntimeError("at once")


def test_before_its_first_checkpoint_a_run_has_no_results_of_the_one_before(toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    toy.named().fit(epochs=2, out=run, progress=False)
    with pytest.raises(RuntimeError, match="at once"):
        toy.named().fit(epochs=2, out=run, progress=False, callbacks=[Fails()])
    assert [*(run / "checkpoints").glob("step-*")]  # the earlier run's
    page = write_report(run, tmp_path / "r.html").read_text()
    assert "Unfinished: 0 of 2 epochs." in page
    assert "No epoch has finished" in page
