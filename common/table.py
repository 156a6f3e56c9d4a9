"""A table for terminals and notebooks."""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

NARROWEST = 12  # minimum width of a column that is narrowed to fit the terminal
FIRST = 16  # minimum width of the first column of figures
READABLE = 30  # width below which a column of sentences is hard to read; see `Table.stacks`


@dataclass(frozen=True)
class Table:
    """A table of strings, one per column, possibly of several lines. `print` fits it to the width of the terminal."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    figures: bool = False  # in all columns but the first: right-aligned; below each other if too wide
    line_after: int | None = None  # number of the row, starting at 1, below which a line is drawn
    spaced: bool = False  # a line below every row
    stacks: bool = False  # put columns after the first below each other where they would be too narrow

    def __str__(self) -> str:
        return self.text(screen_width())

    def text(self, width: int) -> str:
        """Return the table with drawn lines, wrapped to fit `width` characters, except the first column and figures."""
        widths = self._widths(width)
        if self.figures and len(widths) > 1 and _whole(widths) > width:
            folded = self._folded()
            widths = folded._widths(10**6)
            widths[0] = min(widths[0], max(width - _whole(widths) + widths[0], FIRST))
            return folded._text(widths, width) if _whole(widths) <= width else self._listed().text(width)
        if self.stacks and len(widths) > 2:
            full = self._widths(10**6)
            if any(now < min(READABLE, each) for now, each in zip(widths, full, strict=True)):
                return self._stacked().text(width)
        return self._text(widths, width)

    def _text(self, widths: Sequence[int], width: int) -> str:
        whole = max(_whole(widths), min(width, 80))  # of title and caption
        lines = _wrapped(self.title, whole) if self.title else []
        if self.heads:
            lines += [_rule(widths, *"┏━┳┓"), *self._cells(self.heads, widths, "┃"), _rule(widths, *"┡━╇┩")]
        else:
            lines.append(_rule(widths, *"┌─┬┐"))
        for number, row in enumerate(self.rows, 1):
            lines += self._cells(row, widths, "│")
            if number < len(self.rows) and (self.spaced or number == self.line_after):
                lines.append(_rule(widths, *"├─┼┤"))
        lines.append(_rule(widths, *"└─┴┘"))
        return "\n".join([*lines, *(_wrapped(self.caption, whole) if self.caption else [])])

    def _widths(self, width: int) -> list[int]:
        """Return the width of each column. The widest one is narrowed until all of them fit."""
        lines = [self.heads, *self.rows] if self.heads else self.rows
        columns = zip(*lines, strict=True)
        widths = [max(1, *(len(line) for cell in column for line in cell.split("\n"))) for column in columns]
        while _whole(widths) > width:
            widest = max(widths[1:], default=0)
            if self.figures or widest <= NARROWEST:
                break
            widths[widths.index(widest, 1)] -= 1
        return widths

    def _stacked(self) -> Table:
        heads = [self.heads[0], " / ".join(filter(None, self.heads[1:]))] if self.heads else []
        rows = [(first, "\n".join(filter(None, rest))) for first, *rest in self.rows]
        return replace(self, heads=heads, rows=rows, spaced=True)

    def _folded(self) -> Table:
        """Return the table with intervals below their figures, and each word of a head below the other."""
        rows = [[cell.replace("  (", "\n(") for cell in row] for row in self.rows]
        return replace(self, heads=[head.replace(" ", "\n") for head in self.heads], rows=rows)

    def _listed(self) -> Table:
        """Return one column: of each row the first cell, and below it the others, each after its head."""
        first, *heads = self.heads
        longest = max(map(len, heads))
        rows = []
        for name, *cells in self.rows:
            own = [f"  {head:{longest}}  {cell}" for head, cell in zip(heads, cells, strict=True) if cell]
            rows.append(["\n".join([name, *own])])
        return replace(self, heads=[first] if first else [], rows=rows, figures=False, spaced=True)

    def _cells(self, row: Sequence[str], widths: Sequence[int], bar: str) -> Iterator[str]:
        texts = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in zip_longest(*texts, fillvalue=""):
            cells = [
                text.rjust(width) if self.figures and number else text.ljust(width)
                for number, (text, width) in enumerate(zip(line, widths, strict=True))
            ]
            yield f"{bar} {f' {bar} '.join(cells)} {bar}"

    def markdown(self) -> str:
        """Return the table in Markdown; the title, as bold text, and the caption are paragraphs."""

        def line(cells: Sequence[str]) -> str:
            return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), '<br>') for cell in cells)} |"

        heads = self.heads or [""] * len(self.rows[0])
        sides = ["---:" if self.figures and number else "---" for number in range(len(heads))]
        text = "\n".join([line(heads), line(sides), *map(line, self.rows)])
        return "\n\n".join(filter(None, [f"**{self.title}**" if self.title else "", text, self.caption]))

    def html(self) -> str:
        """Return the table as HTML, aligned as in a terminal rather than by the notebook's style."""
        title = f"<caption style='text-align:left'>{html.escape(self.title)}</caption>" if self.title else ""
        head = self._line("th", self.heads) if self.heads else ""
        lines = (self._line("td", row, number == self.line_after) for number, row in enumerate(self.rows, 1))
        body = "".join(lines)
        foot = f"<p><i>{html.escape(self.caption)}</i></p>" if self.caption else ""
        return f"<table>{title}{head}{body}</table>{foot}"

    def _line(self, tag: str, cells: Sequence[str], line_below: bool = False) -> str:
        more = ";white-space:nowrap" if self.figures else ""
        more += ";border-bottom:1px solid" if line_below else ""
        sides = ["right" if self.figures and number else "left" for number in range(len(cells))]
        texts = (
            f"<{tag} style='text-align:{side}{more}'>{html.escape(cell).replace(chr(10), '<br>')}</{tag}>"
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(texts)}</tr>"


class Printed:
    """A result that prints as tables with sentences below them, in terminals and notebooks."""

    def _content(self) -> tuple[Sequence[Table], Sequence[str]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        (tables, sentences), width = self._content(), screen_width()
        return "\n".join([*(table.text(width) for table in tables), *wrapped(sentences, width)])

    def _repr_html_(self) -> str:
        tables, sentences = self._content()
        return "".join([*(table.html() for table in tables), *(f"<p>{html.escape(one)}</p>" for one in sentences)])


def screen_width() -> int:
    """Return the columns of the terminal; of a file or a pipe, what most tables need."""
    return shutil.get_terminal_size((110, 24)).columns


def wrapped(sentences: Iterable[str], width: int) -> list[str]:
    """Return sentences, each wrapped to its own lines."""
    return [
        line
        for one in sentences
        for line in textwrap.wrap(one, width, break_long_words=False, break_on_hyphens=False) or [""]
    ]


def lines_of(pairs: Sequence[tuple[str, str]], width: int | None = None) -> str:
    """Return terms and their texts in two columns without lines, which fit the terminal."""
    width = width or shutil.get_terminal_size().columns
    first = max((len(term) for term, _ in pairs), default=0)
    return "\n".join(
        f"  {'' if number else term:{first}}  {part}".rstrip()
        for term, text in pairs
        for number, part in enumerate(_wrapped(text, max(width - first - 4, NARROWEST)))
    )


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text, wrapped between words; words that are too long, after a sign such as / or -."""
    return [part for words in wrapped(text.split("\n"), width) for part in _broken(words, width)]


def _broken(word: str, width: int) -> Iterator[str]:
    while len(word) > width:
        end = max(word.rfind(sign, width // 3, width) for sign in "/-_.,:=") + 1 or width
        yield word[:end]
        word = word[end:]
    yield word


def _whole(widths: Sequence[int]) -> int:
    """Return the width of a table with columns of these widths."""
    return sum(widths) + 3 * len(widths) + 1


def _rule(widths: Sequence[int], left: str, line: str, crossing: str, right: str) -> str:
    return left + crossing.join(line * (width + 2) for width in widths) + right
