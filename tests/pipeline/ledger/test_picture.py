"""The ledger's picture: its elements, read from matplotlib's axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drivetrain.pipeline import Ledger
from drivetrain.pipeline.ledger.picture import picture
from drivetrain.pipeline.measuring.variant import LOADER, MODEL, PLAIN, SPLIT, Trial, in_turn, only, without
from ledgers import trials_of

SPEEDS = {
    PLAIN: 100.0, in_turn("a"): 200.0, in_turn("b"): 220.0, in_turn("c"): 330.0, LOADER: 5000.0, MODEL: 350.0,
    only("b"): 150.0, without("a"): 250.0, without("b"): 320.0,
}  # fmt: skip


def made_up() -> Ledger:
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
    throughput, *_ = picture(made_up()).axes
    bars = [bar.get_width() for bar in throughput.patches]
    assert bars == pytest.approx([100, 200, 220, 330])
    assert [label.get_text() for label in throughput.get_yticklabels()] == [str(PLAIN), "+ a", "+ b", "+ c"]
    # The model's ceiling is a line at its place; the loader's is far beyond, and said at the edge.
    (line,) = [line for line in throughput.lines if line.get_linestyle() == "--"]
    assert line.get_xdata() == pytest.approx([350, 350])
    assert {"model alone: 350 ", "loader alone: 5,000 →"} <= set(texts(throughput))
    assert any("330 images/s    3.30 ×" in text for text in texts(throughput))


def test_marginal_gains_and_where_the_time_goes() -> None:
    _, gains, split = picture(made_up()).axes
    drawn = {place.get_label(): place.lines[0].get_xdata().tolist() for place in gains.containers}
    assert drawn["alone"] == pytest.approx([2.0, 1.5])
    assert drawn["added in turn"] == pytest.approx([2.0, 1.1, 1.5])
    assert drawn["added last"] == pytest.approx([330 / 250, 330 / 320, 1.5])
    shares = {bars.get_label(): bars.patches[0].get_width() for bars in split.containers}
    expected = {"waiting": 0.1, "forward": 0.3, "backward": 0.4, "step": 0.15, "other": 0.05}
    assert shares == pytest.approx({f"{name} {share:.0%}": share for name, share in expected.items()})


def test_the_caption_holds_findings_and_provenance(tmp_path: Path) -> None:
    figure = picture(made_up())
    caption = " ".join(figure.texts[0].get_text().split())
    assert made_up().bound in caption
    machine = "2 interleaved rounds on a processor, 2 cores; torch 2, Drivetrain 1, 2026-01-01: the command"
    assert machine in caption
    nowhere = Ledger(made_up().rounds, {"recipe": None})
    nowhere.save(tmp_path / "ledger.svg")
    assert picture(nowhere).texts[0].get_text().endswith("2 interleaved rounds")
