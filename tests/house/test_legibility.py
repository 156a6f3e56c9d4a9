"""The site's build warns of pictures without a description, and of letters that are hard to see."""

import pytest
from places import ROOT, load_script

legibility = load_script("legibility", ROOT / "docs")


def test_the_contrast_is_that_of_the_guidelines() -> None:
    assert legibility.contrast("#000", "#ffffff") == pytest.approx(21)
    assert legibility.contrast("#767676", "#fff") == pytest.approx(4.54, abs=0.01)  # the palest gray that passes
    assert legibility.contrast("#fff", "#767676") == legibility.contrast("#767676", "#fff")


def test_letters_of_code_are_compared_with_the_background_of_their_block() -> None:
    css = """.highlight { background: #f2f2f2; color: #1E1E1E }
.highlight .c { color: #aaaaaa } /* Comment */
.highlight .w { color: #f2f2f2 } /* Text.Whitespace */
.highlight .err { color: #fff; background-color: #a00000 } /* Error */
body[data-theme="dark"] .highlight { background: #202020; color: #d0d0d0 }
body[data-theme="dark"] .highlight .c { color: #aaaaaa } /* Comment */
"""
    dark = 'body[data-theme="dark"] .highlight'
    assert list(legibility.code_colors(css)) == [
        (".highlight", "#1E1E1E", "#f2f2f2"),
        (".highlight .c", "#aaaaaa", "#f2f2f2"),
        (".highlight .err", "#fff", "#a00000"),
        (dark, "#d0d0d0", "#202020"),
        (f"{dark} .c", "#aaaaaa", "#202020"),
    ]


def test_colors_of_a_dark_page_are_its_own_or_those_of_the_light_one() -> None:
    values = dict.fromkeys(legibility.LETTERS, "#000") | dict.fromkeys(legibility.BEHIND, "#fff")
    light = "".join(f"--color-{name}:{value};" for name, value in values.items() if name != "link")
    dark = "--color-background-primary:#131416;--color-brand:#5ca5ff"
    css = f"body{{{light}--color-brand:#00f;--color-link:var( --color-brand )}}body[data-theme=dark]{{{dark}}}"
    found = {name: (letters, behind) for name, letters, behind in legibility.theme_colors(css)}
    assert found["link on background-primary (light)"] == ("#00f", "#fff")
    assert found["link on background-primary (dark)"] == ("#5ca5ff", "#131416")
    assert found["link on background-secondary (dark)"] == ("#5ca5ff", "#fff")
    assert len(found) == 2 * len(legibility.LETTERS) * len(legibility.BEHIND)
