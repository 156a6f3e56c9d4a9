"""A Sphinx extension that warns of what some readers cannot see: a picture of a page without a description, and letters
that hardly differ from what is behind them, on light and on dark pages.

The contrast is that of the Web Content Accessibility Guidelines 2.2, 1.4.3: 4.5 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

LEAST = 4.5
WORDS = 4
"""A description with fewer words says what a picture is, but not what it shows."""
LETTERS = ("content-foreground", "foreground-secondary", "link", "link--visited")
LETTERS += (
    "sidebar-link-text",
    "sidebar-link-text--top-level",
    "api-name",
    "api-paren",
)
BEHIND = ("background-primary", "background-secondary")
COLOR = re.compile(r"#(?:[0-9a-fA-F]{3}){1,2}\b")
logger = getLogger(__name__)


def luminance(color: str) -> float:
    """The relative luminance of `#rgb` or `#rrggbb`, 0 to 1."""
    digits = color[1:] if len(color) == 7 else "".join(2 * each for each in color[1:])
    values = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4
        for each in values
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def theme_colors(css: str) -> Iterator[tuple[str, str, str]]:
    """Yield the theme's letters on its backgrounds: a name, both colors; light pages first, then dark ones."""
    values: dict[str, str] = {}
    for page, selector in (("light", "body"), ("dark", "body[data-theme=dark]")):
        for rule in re.findall(
            rf"(?:^|[}}]){re.escape(selector)}\{{([^}}]*)\}}", css, re.MULTILINE
        ):
            values |= dict(re.findall(r"--color-([\w-]+):([^;]+)", rule))
        for letters, behind in product(LETTERS, BEHIND):
            yield (
                f"{letters} on {behind} ({page})",
                resolved(values, letters),
                resolved(values, behind),
            )


def resolved(values: Mapping[str, str], name: str) -> str:
    while found := re.fullmatch(r"var\(\s*--color-([\w-]+)\s*\)", values[name]):
        name = found[1]
    return values[name]


def code_colors(css: str) -> Iterator[tuple[str, str, str]]:
    """Yield the colors of code, each on the background of its block."""
    behind: dict[str, str] = {}
    for prefix, name, style in re.findall(
        r"^(.*)\.highlight(?: \.(\w+))? \{([^}]*)\}", css, re.MULTILINE
    ):
        color = re.search(rf"(?<![-\w])color: ({COLOR.pattern})", style)
        back = re.search(rf"background(?:-color)?: ({COLOR.pattern})", style)
        if not name and back:
            behind[prefix] = back[1]
        if color and prefix in behind and name != "w":  # white space
            yield (
                f"{prefix}.highlight .{name}".rstrip(" ."),
                color[1],
                back[1] if back else behind[prefix],
            )


def check_contrast(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    static = Path(app.outdir, "_static")
    pairs = [
        *theme_colors((static / "styles" / "furo.css").read_text()),
        *code_colors((static / "pygments.css").read_text()),
    ]
    for name, letters, behind in pairs:
        if (ratio := contrast(letters, behind)) < LEAST:
            logger.warning(
                "contrast of %.1f to 1, less than %s: %s, %s on %s",
                ratio, LEAST, name, letters, behind,
            )  # fmt: skip


def check_pictures(app: Sphinx, doctree: nodes.document) -> None:
    if app.env.docname.startswith("notebooks/"):  # those of outputs have none
        return
    for image in doctree.findall(nodes.image):
        if len(str(image.get("alt", "")).split()) < WORDS:
            logger.warning(
                "the picture %s needs a description of %d words or more",
                image["uri"], WORDS, location=image,
            )  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", check_pictures)
    app.connect("build-finished", check_contrast)
    return {"parallel_read_safe": True}
