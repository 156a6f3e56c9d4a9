"""One table for terminals and notebooks."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        heads: of the columns; without, there is no head.
        rows: one text per column.
        title, caption: above and below it.
        figures: whether all columns but the first hold figures: aligned to the right, never wrapped.
        line_after: the number of the row, from 1, below which a line is drawn.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    figures: bool = False
    line_after: int | None = None

    def text(self, width: int) -> str:
        """Return the table drawn with lines, at most `width` columns wide, without colors."""
        from rich.console import Console  # here, because importing Drivetrain should not import rich
        from rich.markup import escape
        from rich.table import Table as Drawn

        drawn = Drawn(
            title=escape(self.title) or None,
            caption=escape(self.caption) or None,
            title_justify="left",
            caption_justify="left",
        )
        for number, head in enumerate(self.heads):
            justify = "right" if self.figures and number else "left"
            drawn.add_column(head, justify=justify, overflow="fold", no_wrap=self.figures)  # type: ignore[arg-type]
        for number, row in enumerate(self.rows, 1):
            drawn.add_row(*map(escape, row), end_section=number == self.line_after)
        # Both arguments: in a notebook rich would by itself show the table in the cell and leave the file empty, and
        # FORCE_COLOR, which Jupyter sets, would put escape sequences into it.
        console = Console(
            file=(file := io.StringIO()), width=width, force_jupyter=False, force_terminal=False
        )
        console.print(drawn)
        return file.getvalue().rstrip()

    def html(self) -> str:
        """Return the table as HTML, aligned as in a terminal, which notebooks do not do by themselves."""
        title = f"<caption style='text-align:left'>{html.escape(self.title)}</caption>" if self.title else ""
        head = self._line("th", self.heads) if self.heads else ""
        body = "".join(
            self._line("td", row, number == self.line_after) for number, row in enumerate(self.rows, 1)
        )
        foot = f"<p><i>{html.escape(self.caption)}</i></p>" if self.caption else ""
        return f"<table>{title}{head}{body}</table>{foot}"

    def _line(self, tag: str, cells: Sequence[str], line_below: bool = False) -> str:
        more = ";white-space:nowrap" if self.figures else ""
        more += ";border-bottom:1px solid" if line_below else ""
        sides = ["right" if self.figures and number else "left" for number in range(len(cells))]
        found = (
            f"<{tag} style='text-align:{side}{more}'>{html.escape(cell)}</{tag}>"
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(found)}</tr>"
