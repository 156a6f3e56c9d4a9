"""The picture of a ledger, and what is printed where none can be drawn."""

import sys
from pathlib import Path
from typing import Any

import pytest
from drivetrain import DrivetrainError, MissingExtra
from drivetrain.pipeline import Ledger
from drivetrain.pipeline.apps.cli.training import _show
from drivetrain.pipeline.ledger.picture import picture
from drivetrain.pipeline.ledger.variant import LOADER, MODEL, PLAIN, SPLIT, Trial, in_turn, only, without
from ledgers import made_up, trials_of

pytestmark = pytest.mark.usefixtures("wide")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)
    words = r"matplotlib is needed to draw the ledger.*pip install 'drivetrain\[plot\]'"
    with pytest.raises(MissingExtra, match=f"(?s){words}"):
        made_up().save(tmp_path / "ledger.png")
    assert list(tmp_path.iterdir()) == []


def test_the_picture_has_the_names_as_they_are() -> None:
    """Between two "$", matplotlib would draw mathematics, or fail."""
    pytest.importorskip("matplotlib")
    ledger = Ledger(made_up().rounds, {"recipe": r"$\my$.yaml"}, left_out={in_turn("x"): r"no $\file$"})
    figure = ledger.show()
    assert figure.axes[0].get_title(loc="left") == r"\$\my\$.yaml: each stage added in turn"
    assert any(r"no \$\file\$" in text.get_text() for text in figure.texts)
    assert figure._repr_png_()


SPEEDS = {
    PLAIN: 100.0, in_turn("a"): 200.0, in_turn("b"): 220.0, in_turn("c"): 330.0, LOADER: 5000.0, MODEL: 350.0,
    only("b"): 150.0, without("a"): 250.0, without("b"): 320.0,
}  # fmt: skip


def three_stages() -> Ledger:
    """Three stages, of which c was not measured alone."""
    trials = trials_of(SPEEDS)
    trials[SPLIT] = Trial(1000, 10.0, 1.0, parts={"forward": 3.0, "backward": 4.0, "step": 1.5})
    machine = {
        "hardware": {"gpus": [], "processor": "a processor", "cores": 2}, "date": "2026-01-01T00:00",
        "versions": {"torch": "2", "drivetrain": "1"},
    }  # fmt: skip
    return Ledger([trials, trials], {"recipe": "mine", "provenance": machine | {"command": "the command"}})


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_bars_of_throughput_with_the_ceilings_drawn_in() -> None:
    throughput, *_ = picture(three_stages()).axes
    bars = [bar.get_width() for bar in throughput.patches]
    assert bars == pytest.approx([100, 200, 220, 330])
    assert [label.get_text() for label in throughput.get_yticklabels()] == [str(PLAIN), "+ a", "+ b", "+ c"]
    # The model's ceiling is a line at its place; the loader's is far beyond, and said at the edge.
    (line,) = [line for line in throughput.lines if line.get_linestyle() == "--"]
    assert line.get_xdata() == pytest.approx([350, 350])
    assert {"model alone: 350 ", "loader alone: 5,000 →"} <= set(texts(throughput))
    assert any("330 images/s    3.30 ×" in text for text in texts(throughput))


def test_marginal_gains_and_where_the_time_goes() -> None:
    _, gains, split = picture(three_stages()).axes
    drawn = {place.get_label(): place.lines[0].get_xdata().tolist() for place in gains.containers}
    assert drawn["alone"] == pytest.approx([2.0, 1.5])
    assert drawn["added in turn"] == pytest.approx([2.0, 1.1, 1.5])
    assert drawn["added last"] == pytest.approx([330 / 250, 330 / 320, 1.5])
    shares = {bars.get_label(): bars.patches[0].get_width() for bars in split.containers}
    expected = {"waiting": 0.1, "forward": 0.3, "backward": 0.4, "step": 0.15, "other": 0.05}
    assert shares == pytest.approx({f"{name} {share:.0%}": share for name, share in expected.items()})


def test_the_caption_holds_findings_and_provenance(tmp_path: Path) -> None:
    figure = picture(three_stages())
    caption = " ".join(figure.texts[0].get_text().split())
    assert three_stages().bound in caption
    machine = "2 interleaved rounds on a processor, 2 cores; torch 2, Drivetrain 1, 2026-01-01: the command"
    assert machine in caption
    nowhere = Ledger(three_stages().rounds, {"recipe": None})
    nowhere.save(tmp_path / "ledger.svg")
    assert picture(nowhere).texts[0].get_text().endswith("2 interleaved rounds")


def test_the_command_does_not_fail_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a training, it would not print what it has written."""
    for name in {"matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)
    _show(made_up(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]
    assert "There is no ledger.png: matplotlib is needed to draw the ledger" in capsys.readouterr().out


def test_the_command_prints_what_it_cannot_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may have measured for hours, and the disk be full by now, or the folder be gone."""
    with pytest.raises(DrivetrainError, match=r"ledger\.json could not be written"):
        _show(made_up(), tmp_path / "gone")
    assert made_up().bound in " ".join(capsys.readouterr().out.split())
