"""The ledger as a value: rows, the bound in one sentence, a table, JSON and a picture."""

from __future__ import annotations

import html
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import DrivetrainError
from ..files import atomic_file

PLAIN, LOADER, MODEL = "plain PyTorch", "loader alone", "model alone"
LEVEL = 0.9  # two ceilings closer than this bind alike


@dataclass(frozen=True)
class Turn:
    """One measurement: images over all ranks, seconds, and seconds of these spent waiting for data."""

    images: int
    seconds: float
    waited: float

    @property
    def speed(self) -> float:
        """Images/s."""
        return self.images / self.seconds


@dataclass(frozen=True)
class Figure:
    """A measured figure: the median of `n` rounds, and the quartiles around it."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Row:
    """One variant: its throughput in images/s, that over plain PyTorch's, and that over the row before."""

    name: str
    images_per_s: Figure
    ratio: Figure
    gain: Figure


@dataclass(frozen=True, repr=False)
class Ledger:
    """What `Pipeline.ledger` measured.

    Attributes:
        rounds: one dict per round, from a variant's name to its turn; the raw figures.
        facts: recipe, plan, provenance.
    """

    rounds: list[dict[str, Turn]]
    facts: dict[str, Any]

    @property
    def rows(self) -> list[Row]:
        """Plain PyTorch first, the whole pipeline last."""
        names = [name for name in self.rounds[0] if name not in (LOADER, MODEL)]
        return [
            Row(
                name,
                self._speed(name),
                self._speed(name, over=PLAIN),
                self._speed(name, over=last),
            )
            for last, name in zip([PLAIN, *names], names, strict=False)
        ]

    @property
    def ceilings(self) -> dict[str, Figure]:
        """Throughput in images/s of the loader without a model, and of the model without a loader."""
        return {name: self._speed(name) for name in (LOADER, MODEL)}

    @property
    def waiting(self) -> float:
        """Share of the whole pipeline's time spent waiting for data, 0 to 1; the median."""
        whole = self.rows[-1].name
        return _figure([turns[whole].waited / turns[whole].seconds for turns in self.rounds]).median

    def _speed(self, name: str, over: str | None = None) -> Figure:
        """A variant's images/s, or the ratio to another's, taken round by round."""
        return _figure(
            [turns[name].speed / (1 if over is None else turns[over].speed) for turns in self.rounds]
        )

    @property
    def bound(self) -> str:
        """One sentence: which of loader and model binds, and what to change next."""
        whole, loader, model = self.rows[-1].images_per_s.median, *(f.median for f in self.ceilings.values())
        reach = f"the whole reaches {whole:,.0f} images/s, {whole / min(loader, model):.0%} of"
        alone = f"alone, the loader gives {loader:,.0f} images/s and the model takes {model:,.0f}"
        if min(loader, model) / max(loader, model) > LEVEL:
            return f"Loader and model bind alike: {alone}; {reach} that. To go on, both must get faster."
        if loader > model:
            return f"The model binds: {alone}; {reach} its model. Next, make the training step faster."
        return (
            f"The loader binds: {alone}; {reach} its loader. Next, load faster: more workers, smaller images."
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types, the raw rounds included."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "ceilings": {name: asdict(figure) for name, figure in self.ceilings.items()},
            "waiting": self.waiting,
            "bound": self.bound,
            **self.facts,
            "rounds": [{name: asdict(turn) for name, turn in turns.items()} for turns in self.rounds],
        }

    def save(self, path: str | Path) -> None:
        """Writes the ledger by the name's ending: `.json`, or a picture (`.png`, `.svg`, `.pdf`).

        Raises:
            DrivetrainError: for another ending, or a folder that is not there.
            MissingExtra: a picture needs the extra `plot`.
        """
        path = Path(path)
        if path.suffix == ".json":
            content = json.dumps(self.to_dict(), indent=1).encode()
        elif path.suffix in (".png", ".svg", ".pdf"):
            from .ledger_picture import draw

            content = draw(self, path.suffix[1:])
        else:
            raise DrivetrainError(f"{path}: a ledger is saved as .json, .png, .svg or .pdf.")
        with atomic_file(path) as file:
            file.write(content)

    def _cells(self) -> list[tuple[str, str, str, str]]:
        def spread(figure: Figure, form: str) -> str:
            return f"{figure.median:{form}}  ({figure.low:{form}} to {figure.high:{form}})"

        cells = [
            (row.name, spread(row.images_per_s, ",.0f"), spread(row.ratio, ".2f"),
             "" if row.name == PLAIN else f"× {row.gain.median:.2f}")
            for row in self.rows
        ]  # fmt: skip
        return cells + [
            (f"ceiling: {name}", spread(figure, ",.0f"), "", "") for name, figure in self.ceilings.items()
        ]

    def __repr__(self) -> str:
        n = len(self.rounds)
        table = Table(
            title=f"Ledger: {escape(self.facts.get('recipe') or 'your pipeline')}",
            caption=f"median of {n} interleaved rounds, quartiles in brackets",
            title_justify="left", caption_justify="left",
        )  # fmt: skip
        for column in ("", "images/s", "over plain", "this stage"):
            table.add_column(column, justify="left" if column == "" else "right", no_wrap=True)
        cells = self._cells()
        for number, row in enumerate(cells, 1):
            table.add_row(*row, end_section=number == len(cells) - 2)
        console = Console(file=io.StringIO(), width=100)
        console.print(table)
        return f"{console.file.getvalue().rstrip()}\n{self.bound}"  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._cells()
        )
        head = "<tr><th></th><th>images/s</th><th>over plain</th><th>this stage</th></tr>"
        return f"<table>{head}{rows}</table><p>{html.escape(self.bound)}</p>"


def _figure(values: list[float]) -> Figure:
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return Figure(median, low, high, len(values))
