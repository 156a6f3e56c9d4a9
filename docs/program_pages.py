"""A Sphinx extension for what the program itself lists: the directives `command-line`, `recipe-keys` and `recipe-list`.

Their text is that of `drivetrain --help` and `drivetrain recipes`, so that it stands once.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import yaml
from docutils import nodes
from docutils.statemachine import StringList
from drivetrain.pipeline.apps.cli.app import program
from drivetrain.pipeline.recipes.named import RECIPES
from drivetrain.pipeline.recipes.table import PROSE, keys_table
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

WIDTH = 88  # columns of a code block that fit the page


def block(language: str, text: str) -> list[str]:
    return [
        f".. code-block:: {language}",
        "",
        *(f"   {line}" for line in text.splitlines()),
        "",
    ]


def command_line() -> Iterator[str]:
    context = click.Context(
        program, info_name="drivetrain", terminal_width=WIDTH, show_default=True
    )
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        own = click.Context(
            command, info_name=name, parent=context, terminal_width=WIDTH
        )
        yield from (
            f"drivetrain {name}",
            "-" * (11 + len(name)),
            "",
            *block("text", command.get_help(own)),
        )


def recipe_keys() -> Iterator[str]:
    yield from (".. list-table::", "   :header-rows: 1", "   :widths: 20 20 60", "")
    table = keys_table()
    for row in (table.heads, *table.rows):
        for number, cell in enumerate(row):
            text = cell.replace("*", r"\*").replace("|", r"\|")
            if number < 2 and row is not table.heads:
                text = f"``{cell}``" if cell else ""
            yield f"   {' ' if number else '*'} - " + " ".join(text.split())
    yield ""


def recipe_list() -> Iterator[str]:
    for name, recipe in RECIPES.items():
        yield from (name, "-" * len(name), "", recipe["description"], "")
        for key in ("source", "published", "measured"):
            yield f"- {PROSE[key]}{recipe[key]}"
        values = {
            key: value for key, value in recipe.items() if key not in ("notes", *PROSE)
        }
        yield from (
            "",
            *block("yaml", yaml.safe_dump(values, sort_keys=False, width=WIDTH)),
        )


PAGES = {
    "command-line": command_line,
    "recipe-keys": recipe_keys,
    "recipe-list": recipe_list,
}


class ProgramPage(SphinxDirective):
    """The lines of `PAGES`."""

    def run(self) -> list[nodes.Node]:
        lines = StringList(list(PAGES[self.name]()), source=self.name)
        return self.parse_text_to_nodes(lines, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives."""
    for name in PAGES:
        app.add_directive(name, ProgramPage)
    return {"parallel_read_safe": True}
