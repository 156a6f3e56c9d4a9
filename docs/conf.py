"""Sphinx's settings for `make docs`.

The source folder is the repository, not `docs/`: the same relative links then work here and on a code host, and the
README, the notebooks and files such as `benchmarks/results/*.json` can be linked to.
"""

from __future__ import annotations

import sys
from pathlib import Path

from drivetrain import __version__

sys.path.insert(
    0, str(Path(__file__).parent)
)  # for public_names and program_pages, below

project = "Drivetrain"
author = "The developers of Drivetrain"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "public_names",
    "program_pages",
    "legibility",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "build", "dist", "gpu-kit", "runs", "tests", "**/__pycache__"]

html_theme = "furo"
pygments_dark_style = "a11y-dark"  # furo's own has comments that are hard to read
html_title = f"Drivetrain {release}"
html_additional_pages = {"index": "to_docs.html"}
templates_path, html_static_path, html_css_files = (
    ["_templates"],
    ["_static"],
    ["site.css"],
)
html_favicon = "_static/favicon.svg"
html_meta = {
    "description": "Train PyTorch vision models faster, and see exactly which part made them faster."
}
copybutton_exclude = (
    ".linenos, .gp, .go"  # what is copied of a session are its commands
)

# Anchors of headings as on a code host.
myst_heading_anchors = 4
# Notebooks are shown with the outputs that they are committed with; nothing is loaded from elsewhere.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

# In docstrings, `single` backticks are code, as in Markdown.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# Annotations name private types, and those of torch, numpy and others, which have no entry here; the second line has
# those that are imported for type checkers only.
nitpick_ignore_regex = [
    (r"py:.*", r"\w+\..*"),
    (
        r"py:class",
        r"Against|HandOver|Image|ImageSize|LoggerArg|Metric|OnNonFinite|Path|RunArg|Starlette|WeightsArg|(list\[)?dict\[str",
    ),
    # The checks that an option's type carries.
    (
        r"py:class",
        r"Check|FLAG|FRACTION|IN_WORDS|Kind|Positive|Within|_check_mode|callable",
    ),
    (
        r"py:class",
        r"AboveZero|Bins|By|Depth|Fraction(AboveZero|BelowOne)?|Fractions|Natural|Operations|ProperFraction|Severity|Sides|Size",
    ),
    (r"py:exc", r"ShapeError"),
]
