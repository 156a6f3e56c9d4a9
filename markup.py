"""HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, aligned to the left, which notebooks do not by themselves; without `heads`, without a head."""

    def line(tag: str, cells: Sequence[str]) -> str:
        found = (f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{''.join(found)}</tr>"

    head = line("th", heads) if heads else ""
    return f"<table>{head}{''.join(line('td', row) for row in rows)}</table>"
