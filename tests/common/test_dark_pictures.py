"""An SVG that Drivetrain writes can be read on a light page and on a dark one."""

import re

import pytest
from drivetrain.common.pictures import DARK, PALETTE, SUFFIXES, drawn
from drivetrain.pipeline import Ledger
from places import ROOT, load_script

RESULTS = ROOT / "benchmarks" / "results"
contrast = load_script("legibility", ROOT / "docs").contrast


@pytest.fixture(scope="module")
def svg() -> str:
    return drawn(Ledger.load(RESULTS / "quickstart-ledger.json").show(), ".svg").decode()


def colors(svg: str, element: str) -> set[str]:
    """The colors of an element's style, as on a light page; the caps of error bars are lines, so only strokes show."""
    styles = re.findall(rf'<{element}[^>]*style="([^"]*)"', svg)
    shown = "stroke" if element == "use" else "fill|stroke"
    return {color for style in styles for color in re.findall(rf"(?:{shown}): (#\w{{6}})", style)}


def test_every_color_has_a_rule_or_shows_on_both_pages(svg: str) -> None:
    drawn_colors = colors(svg, "path") | colors(svg, "use") | colors(svg, "g")
    assert len(drawn_colors) > 6
    assert drawn_colors <= {*DARK, *PALETTE}


def test_letters_can_be_read_on_both_pages(svg: str) -> None:
    """Text: 4.5 to 1; what is colored like its line or bar, and the white letters within bars: 3 to 1 (WCAG, 1.4.3)."""
    letters = colors(svg, "g") - {"#ffffff"}
    for color in letters:
        least = 3 if color in PALETTE else 4.5
        assert contrast(color, "#ffffff") >= least
        assert contrast(DARK.get(color, color), DARK["#ffffff"]) >= least
    assert contrast(DARK["#000000"], DARK["#ffffff"]) >= 4.5  # letters without a color of their own
    for bar in colors(svg, "path") & set(PALETTE[:1]):
        assert contrast(DARK.get(bar, bar), "#ffffff") >= 3


def test_the_rules_name_the_colors_as_matplotlib_writes_them(svg: str) -> None:
    style = svg[svg.index("<style>@media (prefers-color-scheme: dark)") :]
    style = style[: style.index("</style>")]
    for color in {*DARK} & colors(svg, "path"):
        assert f'path[style*="fill: {color}"]{{fill:{DARK[color]}!important}}' in style
    assert 'g[style*="fill: #ffffff"]' not in style  # letters within bars stay white


def test_the_same_figure_is_the_same_file(svg: str) -> None:
    ledger = Ledger.load(RESULTS / "quickstart-ledger.json")
    assert drawn(ledger.show(), ".svg").decode() == svg
    assert b"prefers-color-scheme" not in b"".join(drawn(ledger.show(), each) for each in SUFFIXES if each == ".png")
