"""Matplotlib figures as files and in notebooks, the same for everything that has `show()`."""

import base64
import html
import io
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .storage.files import write_file
from .storage.json_files import to_json

INK, PALE, GRID, BAND = "#222222", "#b8c4cc", "#e4e8ea", "#f3f3f3"
PALETTE = BLUE, RED, GREEN, PURPLE, ORANGE, SKY = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
)  # fmt: skip
"""Colors that people with any color blindness can tell apart: Okabe and Ito, "Color Universal Design", 2008."""
DARK = {
    "#ffffff": "#131416", "#000000": "#e6e6e6", INK: "#e6e6e6", PALE: "#6b7882", GRID: "#34393d", BAND: "#1f2226",
    BLUE: "#2a8fd0",
}  # fmt: skip
"""What a color of a picture becomes on a dark page; the others of the palette stay, because they show on both."""
SUFFIXES = (".png", ".svg", ".pdf")
SIDE = 160  # pixels of a thumbnail: sharp where it is shown, and two dozen are a megabyte at most


def check_picture(path: str | Path) -> Path:
    """Return the path of a picture; DataError unless its suffix is that of one."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path} must end in .png, .svg or .pdf.")
    return path


def check_result(path: str | Path) -> Path:
    """Return the path of a result; DataError unless its suffix is that of a picture, or JSON's."""
    path = Path(path)
    if path.suffix not in (*SUFFIXES, ".json"):
        raise DataError(f"{path} must end in .json, .png, .svg or .pdf.")
    return path


def drawn(figure: Any, suffix: str = ".png", **options: Any) -> bytes:
    """Return a figure in the format of a suffix; `options` are those of `savefig`. An SVG follows the reader's page,
    light or dark; and the same figure is the same bytes."""
    buffer = io.BytesIO()
    if suffix == ".svg":
        import matplotlib

        with matplotlib.rc_context({"svg.hashsalt": "drivetrain"}):
            figure.savefig(buffer, format="svg", metadata={"Date": None}, **options)
        svg = re.sub(rb"(<svg[^>]*>)", rb"\1\n" + _dark_style().encode(), buffer.getvalue(), count=1)
        # Clips are named by a hash of their place, whose last digits vary with the layout's solver.
        names = dict.fromkeys(re.findall(rb'<clipPath id="(p[0-9a-f]+)"', svg))
        for number, name in enumerate(names):
            svg = svg.replace(name, b"clip%d" % number)
        return svg
    figure.savefig(buffer, format=suffix[1:], **options)
    return buffer.getvalue()


def displayed(figure: Any) -> Any:
    """Return a figure that IPython shows as a picture, also where nobody has called `%matplotlib inline`."""
    figure._repr_png_ = partial(drawn, figure, bbox_inches="tight")
    return figure


def literal(text: str) -> str:
    """Return a text for matplotlib to draw as it is: what is between two `$`, it would take for mathematics."""
    return text.replace("$", r"\$")


def unit_of_time(longest: float) -> tuple[str, int]:
    """Return the unit of an axis of so many seconds, and its length: the largest of which the axis has two."""
    units = {"hours": 3600, "minutes": 60}
    return next((unit for unit in units.items() if longest >= 2 * unit[1]), ("seconds", 1))


def _dark_style() -> str:
    """Matplotlib writes colors into the elements, so the rule finds them there. White letters stand on bars and stay:
    letters are groups (g), and areas are paths."""
    rules = [
        f'{element}[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK.items()
        for kind, elements in (("fill", ("path", "use", "g")), ("stroke", ("path", "use")))
        for element in elements
        if (element, light) != ("g", "#ffffff")
    ]
    rules.append(f"svg{{fill:{DARK['#000000']}}}")  # black letters have no color of their own
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


def save_picture(figure: Any, path: Path, dpi: int = 110, **options: Any) -> Path:
    """Write a figure whole or not at all, in the format of the path's suffix."""
    write_file(path, drawn(figure, path.suffix, dpi=dpi, **options))
    return path


class Shown(Protocol):
    """A result that is a picture, and plain JSON types."""

    def show(self) -> Any: ...
    def to_dict(self) -> dict[str, Any]: ...


def save_result(result: Shown, path: str | Path, **options: Any) -> None:
    """Write a result as JSON, or its picture, by the path's suffix, whole or not at all; `options` are those of
    `savefig`. DataError for another suffix."""
    path = check_result(path)
    if path.suffix in SUFFIXES:
        save_picture(result.show(), path, **options)
    else:
        write_file(path, to_json(result.to_dict(), indent=1))


def image_tag(png: bytes, about: str, style: str = "") -> str:
    """Return an `<img>` that contains the picture; `about` describes it to those who do not see it."""
    style = style and f' style="{style}"'
    return f'<img alt="{html.escape(about)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"{style}>'


def gallery(samples: Iterable[tuple[Sequence[NDArray[np.uint8]], str]]) -> str:
    """Return samples as HTML: the pictures of each, `(H, W, 3)`, beside each other, and a text below. It wraps to the
    width of the page, and takes the page's colors."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px">{"".join(map(_tile, samples))}</div>'


def _tile(sample: tuple[Sequence[NDArray[np.uint8]], str]) -> str:
    pictures, text = sample
    tags = []
    for each in pictures:
        style = "height:112px;max-width:100%;object-fit:contain"
        style += ";image-rendering:pixelated" if len(each) < SIDE // 2 else ""
        tags.append(image_tag(_thumbnail(each), text or "a sample", style))
    caption = html.escape(text).replace("\n", "<br>")
    return (
        '<figure style="margin:0;max-width:100%">'
        f'<div style="display:flex;flex-wrap:wrap;gap:2px">{"".join(tags)}</div>'
        # The caption wraps to the width of the pictures.
        '<figcaption style="width:0;min-width:100%;font-size:11px;line-height:1.3;overflow-wrap:anywhere">'
        f"{caption}</figcaption></figure>"
    )


def _thumbnail(picture: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(picture))
    scale = SIDE / image.height
    if scale < 1:
        image = image.resize((max(round(image.width * scale), 1), SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
