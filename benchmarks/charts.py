"""Draw the pictures of the README and of `docs/` from the JSON files in `results/`, as SVG.

    python benchmarks/charts.py [--check]

A picture has one style for light and one for dark pages, chosen by the browser, and its text is readable on a
telephone. `--check` writes nothing, and fails if a picture differs from the files.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from drivetrain.common.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
WIDTH, MARGIN, ROW = 720, 16, 44
STYLE = """<style>
text { font: 20px system-ui, sans-serif; fill: #1a1a1a } .title { font-weight: 600 } .small { font-size: 17px }
.ours { fill: #0072b2 } .other { fill: #b8b8b8 } .end { text-anchor: end }
.spread { stroke: #1a1a1a; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #ececec } .ours { fill: #56b4e9 } .other { fill: #6b6b6b } .spread { stroke: #ececec }
}
</style>"""


class Bar(NamedTuple):
    name: str
    value: float
    low: float
    high: float
    ours: bool


def bars(title: str, unit: str, rows: list[Bar], source: list[str]) -> str:
    """Return horizontal bars with their quartiles as an SVG; `source` are the lines below them."""
    left, right = 170, 110
    scale = (WIDTH - left - right - 2 * MARGIN) / max(row.high for row in rows)
    height = 2 * MARGIN + 32 + ROW * len(rows) + 24 * len(source) + 8
    drawn = [f'<text class="title" x="{MARGIN}" y="{MARGIN + 18}">{html.escape(title)}</text>']
    for number, row in enumerate(rows):
        top = MARGIN + 36 + number * ROW
        begin, middle = MARGIN + left, top + ROW // 2 - 6
        end, low, high = (begin + scale * value for value in (row.value, row.low, row.high))
        drawn += [
            f'<text class="end" x="{begin - 10}" y="{middle + 7}">{html.escape(row.name)}</text>',
            f'<rect class="{"ours" if row.ours else "other"}" x="{begin}" y="{top}" width="{end - begin:.1f}" '
            f'height="{ROW - 12}"/>',
            f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>',
            f'<text x="{high + 10:.1f}" y="{middle + 7}">{row.value:,.0f}</text>',
        ]
    below = MARGIN + 36 + ROW * len(rows) + 16
    drawn += [
        f'<text class="small" x="{MARGIN}" y="{below + 24 * number}">{html.escape(line)}</text>'
        for number, line in enumerate(source)
    ]
    told = f"{title}: " + ", ".join(f"{row.name} {row.value:,.0f} {unit}" for row in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{html.escape(told)}</title>\n{STYLE}\n" + "\n".join(drawn) + "\n</svg>\n"
    )


def loaders() -> str:
    """Images per second of an epoch of photographs: ours, and the strongest others."""
    found = json.loads((RESULTS / "peers.json").read_text())
    measured, about = found["scale 0.25"], found["provenance"]
    shown = {
        "FFCVLoader": "Drivetrain", "DALI": "DALI", "TorchCodec": "TorchCodec", "stock FFCV": "FFCV",
        "SPDL": "SPDL", "torchvision": "torchvision",
    }  # fmt: skip
    rows = []
    for key, name in shown.items():
        speed = measured[key]["images/s"]
        rows.append(Bar(name, speed["median"], speed["low"], speed["high"], key == "FFCVLoader"))
    rows.sort(key=lambda row: -row.value)
    rounds, hardware = measured["FFCVLoader"]["images/s"]["n"], about["hardware"]
    return bars(
        "Photographs loaded on a CPU, images per second",
        "images/s",
        rows,
        [
            f"Decode, crop, resize to 224 px: median and quartiles of {rounds} rounds in turns;",
            f"{hardware['cores']} cores, {hardware['processor']}, {about['date'][:10]}: results/peers.json",
        ],
    )


CHARTS: dict[str, Callable[[], str]] = {"loaders.svg": loaders}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name, draw in CHARTS.items():
        path, drawn = PICTURES / name, draw()
        if not check:
            path.write_text(drawn)
        elif not path.exists() or path.read_text() != drawn:
            raise DataError(f"{path} is not what results/ says. Run benchmarks/charts.py.")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(str(error))
