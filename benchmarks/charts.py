"""Draw the pictures of the README and of `docs/` from the JSON files in `results/`, as SVG, and those of the gallery
from the committed notebooks.

    python benchmarks/charts.py [--check]

A picture has one style for light and one for dark pages, chosen by the browser, and its text is readable on a
telephone. `--check` writes nothing, and fails if a picture differs from the files.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from drivetrain.common import pictures
from drivetrain.common.errors import DataError
from drivetrain.pipeline import Ledger, RaceResult
from drivetrain.pipeline.measuring.race.result import RaceRun
from drivetrain.transforms import TRANSFORMS, BatchContext, ColOut, CutMix, CutOut, MixUp
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
WIDTH, MARGIN, ROW = 720, 16, 44
STYLE = """<style>
text { font: 20px system-ui, sans-serif; fill: #1a1a1a } .title { font-weight: 600 } .small { font-size: 17px }
.ours { fill: #0072b2 } .other { fill: #b8b8b8 } .end { text-anchor: end }
.spread { stroke: #1a1a1a; stroke-width: 2 } .grid { stroke: #e0e0e0 } .middle { text-anchor: middle }
.plain { fill: #767676; stroke: #767676 } .curve { fill: none; stroke-width: 2 } .dashed { stroke-dasharray: 6 5 }
circle.ours, .ours.curve { stroke: #0072b2 }
@media (prefers-color-scheme: dark) {
text { fill: #ececec } .ours { fill: #56b4e9 } .other { fill: #6b6b6b } .spread { stroke: #ececec }
.grid { stroke: #34393d }
.plain { fill: #9a9a9a; stroke: #9a9a9a } circle.ours, .ours.curve { stroke: #56b4e9 } .curve { fill: none }
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


def ledger() -> str:
    """The ledger of the quickstart, as `ledger.save("….svg")` draws it."""
    found = Ledger.load(RESULTS / "quickstart-ledger.json")
    times = found.rows[-1].ratio
    assert times is not None
    title = f"What each stage of the quickstart contributes; all train {times.value:.2f} times as fast as plain"
    svg = pictures.drawn(found.show(), ".svg", bbox_inches="tight").decode()
    return svg.replace("<style>", f"<title>{html.escape(title)}</title>\n<style>", 1)


class Curve(NamedTuple):
    name: str
    style: str
    runs: list[RaceRun]


def race(data: str, name: str) -> str:
    """Accuracy over seconds of training, of a race with plain PyTorch: each evaluation a point, and a line through the
    means of the epochs. The dashed line is the target."""
    found = RaceResult.load(RESULTS / f"race-{name}.json")
    target, about = found.target, found.provenance
    styles = {"Drivetrain": "ours", "plain PyTorch": "plain"}
    curves = [
        Curve(label, style, found.of(row.variant))
        for (label, style), row in zip(styles.items(), found.rows, strict=True)
    ]
    points = [point for curve in curves for run in curve.runs for point in run.points]
    wide, high, left, top = 560, 300, 78, 56
    longest = max(point.seconds for point in points)
    lowest, highest = min(point.accuracy for point in points) - 0.02, max(point.accuracy for point in points) + 0.02

    def across(seconds: float) -> float:
        return left + wide * seconds / (1.05 * longest)

    def down(accuracy: float) -> float:
        return top + high * (highest - accuracy) / (highest - lowest)

    title = f"Time to {100 * target:g} % on {data}: two CPU cores, the same network"
    drawn = [f'<text class="title" x="{MARGIN}" y="{MARGIN + 18}">{html.escape(title)}</text>']
    for percent in range(math.ceil(20 * lowest) * 5, int(100 * highest) + 1, 5):
        at = down(percent / 100)
        drawn += [
            f'<line class="grid" x1="{left}" x2="{left + wide}" y1="{at:.1f}" y2="{at:.1f}"/>',
            f'<text class="end small" x="{left - 8}" y="{at + 6:.1f}">{percent} %</text>',
        ]
    every = next(step for step in (1, 2, 5, 10, 20, 60) if longest < 480 * step)
    for minutes in range(0, int(longest // 60) + 1, every):
        drawn.append(
            f'<text class="middle small" x="{across(60 * minutes):.1f}" y="{top + high + 24}">{minutes} min</text>'
        )
    at = down(target)
    drawn.append(f'<line class="spread dashed" x1="{left}" x2="{left + wide}" y1="{at:.1f}" y2="{at:.1f}"/>')
    told = []
    for number, curve in enumerate(curves):
        epochs = list(zip(*(run.points for run in curve.runs), strict=False))
        line = [(mean(one.seconds for one in each), mean(one.accuracy for one in each)) for each in epochs]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        drawn.append(f'<polyline class="{curve.style} curve" points="{path}"/>')
        drawn += [
            f'<circle class="{curve.style}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="4"/>'
            for each in epochs for x, y in ((one.seconds, one.accuracy) for one in each)
        ]  # fmt: skip
        x, y = left + wide - 240, top + high - 14 - 28 * (len(curves) - 1 - number)
        drawn += [
            f'<polyline class="{curve.style} curve" points="{x},{y - 7} {x + 32},{y - 7}"/>',
            f'<text x="{x + 44}" y="{y}">{curve.name}</text>',
        ]
        told.append(f"{curve.name} {100 * line[-1][1]:.1f} % after {line[-1][0] / 60:.1f} min")
    below = [
        f"{found.rows[0].runs} seeds in turns, every evaluation a point; {about['hardware']['processor']},",
        f"torch {about['versions']['torch']}, {about['date'][:10]}: results/race-{name}.json",
    ]
    drawn += [
        f'<text class="small" x="{MARGIN}" y="{top + high + 54 + 24 * number}">{html.escape(line)}</text>'
        for number, line in enumerate(below)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + high + 44 + 24 * len(below)}" role="img">'
        f"<title>{html.escape(title + ': ' + ', '.join(told))}</title>\n{STYLE}\n" + "\n".join(drawn) + "\n</svg>\n"
    )


CHARTS: dict[str, Callable[[], str]] = {
    "loaders.svg": loaders,
    "quickstart-ledger.svg": ledger,
    "imagenette.svg": partial(race, "Imagenette", "imagenette-5"),
    "time-to-accuracy.svg": partial(race, "CIFAR-10", "cifar10-quickstart"),
}
STRIP = "augmentations.webp"
GALLERY: tuple[str, ...] = ("own-photographs", "segmentation", "multi-label", "self-supervised")
GALLERY += ("from-one-process-to-sharded", "from-s3", "export-and-serve")
"""The notebooks of `docs/gallery.md`, which shows the last picture of each."""
GALLERY_WIDTH = 800  # pixels at most
SIDE, COLUMNS, GAP, LINE = 160, 5, 12, 26  # of the strip, in pixels


def scene(hue: int) -> Image.Image:
    """Return a drawn landscape, since the project has no photographs of its own."""
    image = Image.new("RGB", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    for row in range(SIDE):
        draw.line((0, row, SIDE, row), fill=(120 + row // 2, 170 + row // 4, 235 - row // 5))
    draw.ellipse((105, 14, 140, 49), fill=(255, 226, 120))
    draw.polygon(((0, 110), (45, 42), (82, 104), (112, 62), (SIDE, 118), (SIDE, SIDE), (0, SIDE)), fill=(96, 112, 128))
    draw.rectangle((0, 116, SIDE, SIDE), fill=(86, 148, 78))
    draw.rectangle((34, 96, 92, 140), fill=(hue, 90, 70))
    draw.polygon(((28, 98), (63, 70), (98, 98)), fill=(70, 45, 40))
    draw.rectangle((56, 114, 70, 140), fill=(245, 235, 215))
    return image


def strip() -> Image.Image:
    """Return each augmentation of the catalogue before and after: the image itself comes first."""
    one, other = scene(190), scene(60).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    torch.manual_seed(5)
    cells = {"the image": one}
    for name, kind in TRANSFORMS.items():
        if kind.kind == "image" and hasattr(kind, "image"):
            made: Any = kind()
            cells[name] = made.image(one)
    both = torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) / 255 for each in (one, other)])
    # Seeds with which one sees what the method does.
    for method, seed in ((MixUp(2.0), 3), (CutMix(), 1), (CutOut(), 3), (ColOut(0.3, 0.3), 3)):
        context = BatchContext(generator=torch.Generator().manual_seed(seed), classes=2)
        found = method.batch(both, torch.tensor([0, 1]), context)[0][0]
        pixels = (found.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        cells[type(method).__name__] = Image.fromarray(pixels).resize((SIDE, SIDE))
    lines = -(-len(cells) // COLUMNS)
    drawn = Image.new("RGB", (COLUMNS * (SIDE + GAP) + GAP, lines * (SIDE + LINE + GAP) + GAP), "white")
    font = ImageFont.load_default(15)
    for number, (name, image) in enumerate(cells.items()):
        left = GAP + number % COLUMNS * (SIDE + GAP)
        top = GAP + number // COLUMNS * (SIDE + LINE + GAP)
        drawn.paste(image, (left, top))
        ImageDraw.Draw(drawn).text((left, top + SIDE + 4), name, fill="black", font=font)
    return drawn


def last_picture(notebook: str) -> Image.Image:
    """Return the last picture that a committed notebook shows, at most as wide as a page."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    shown = [
        out["data"]["image/png"]
        for cell in cells
        for out in cell.get("outputs", ())
        if "image/png" in out.get("data", {})
    ]
    image = Image.open(io.BytesIO(base64.b64decode(shown[-1]))).convert("RGB")
    image.thumbnail((GALLERY_WIDTH, GALLERY_WIDTH))
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name, draw in CHARTS.items():
        path, drawn = PICTURES / name, draw()
        if not check:
            path.write_text(drawn)
        elif not path.exists() or path.read_text() != drawn:
            raise DataError(f"{path} is not what results/ says. Run benchmarks/charts.py.")
    if not check:  # pixels of these depend on Pillow's version
        strip().save(PICTURES / STRIP, quality=85)
        for notebook in GALLERY:
            last_picture(notebook).save(PICTURES / f"{notebook}.webp", quality=70, method=6)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(str(error))
