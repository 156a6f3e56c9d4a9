"""The ledger as users have it: the figures with what they mean, as table, JSON, data frame and picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from ...errors import DrivetrainError, MissingExtra, require
from ...files import atomic_file
from . import findings as findings
from .data import LedgerData
from .file import read, to_dict
from .picture import draw
from .table import html_text, text


class Ledger(LedgerData):
    """What `Pipeline.ledger` measured; see `LedgerData` for the attributes."""

    @property
    def bound(self) -> str:
        """One sentence: which of loader, copy and model is the bottleneck, and what to change next."""
        return findings.bound(self)

    @property
    def compound(self) -> str:
        """Whether the speedups multiply; where not, which stages stand in each other's way. May be empty."""
        return findings.compound(self)

    @property
    def caveats(self) -> list[str]:
        """What has to be known to read the figures, one sentence each: why it stopped, how wide the intervals are,
        what failed, what was left out, what is not resolved. Table, picture and JSON have them all."""
        return findings.caveats(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types, the raw rounds included. An interval without an upper end ends in None."""
        return to_dict(self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The ledger that `save` wrote as JSON.

        Raises:
            DrivetrainError: if the file is not there, or is not a ledger.
        """
        return read(path, cls)

    def to_pandas(self) -> Any:
        """A data frame with a line per variant and round: round, variant, images, seconds, waited, images_per_s.

        Raises:
            MissingExtra: without pandas.
        """
        try:
            pandas = require("pandas", "all", "make a data frame")
        except MissingExtra as error:
            raise MissingExtra("pandas is needed to make a data frame: pip install pandas") from error
        return pandas.DataFrame(
            [
                {"round": number, "variant": str(one), **asdict(trial), "images_per_s": trial.speed}
                for number, trials in enumerate(self.rounds, 1)
                for one, trial in trials.items()
            ]
        ).drop(columns=["samples", "parts"])

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
            content = draw(self, path.suffix[1:])
        else:
            raise DrivetrainError(f"{path}: a ledger is saved as .json, .png, .svg or .pdf.")
        with atomic_file(path) as file:
            file.write(content)

    def __repr__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return html_text(self)


class LedgerInterrupted(KeyboardInterrupt):
    """Ctrl-C during `Pipeline.ledger`. `ledger` has what was measured by then; None if that is not one round."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        what = "before plain PyTorch and the full pipeline had a trial each: there is nothing to show"
        if ledger is not None:
            what = f"after {len(ledger.rounds)} round(s), which this exception's ledger has"
        super().__init__(f"the ledger was interrupted {what}")
        self.ledger = ledger

    def __reduce__(self) -> Any:
        return type(self), (self.ledger,)
