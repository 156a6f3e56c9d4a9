"""The ledger: measurements with their conclusions, as table, JSON, data frame and picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from ...common.errors import DrivetrainError, MissingExtra, require
from ...common.storage.files import atomic_file
from ..measuring.picture import render
from . import findings
from .data import LedgerData
from .file import read, to_dict
from .picture import picture
from .table import html_text, text


class Ledger(LedgerData):
    """The result of `Pipeline.ledger`; see `LedgerData` for the attributes.

    Example::

        >>> ledger = Ledger.load("before.json")
        >>> [str(row.id) for row in ledger.rows]
        ['plain PyTorch', '+ FFCV loader']
    """

    @property
    def bound(self) -> str:
        """One sentence: which of loader, copy and model is the bottleneck, and what to change next."""
        return findings.bound(self)

    @property
    def compound(self) -> str:
        """Whether the speedups multiply; if not, which stages interfere. May be empty."""
        return findings.compound(self)

    @property
    def caveats(self) -> list[str]:
        """What limits the measurements, one sentence each: why measuring stopped, how wide the intervals are, what
        failed, was left out, or is not resolved. Table, picture and JSON contain all of them."""
        return findings.caveats(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the full ledger as plain JSON types, including the raw rounds. An infinite upper end becomes None."""
        return to_dict(self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a ledger that `save` wrote as JSON.

        Raises:
            DrivetrainError: if the file does not exist, or is not a ledger.
        """
        return read(path, cls)

    def to_pandas(self) -> Any:
        """Return a data frame with a row per variant and round: round, variant, images, seconds, waited, images_per_s.

        Raises:
            MissingExtra: if pandas is not installed.
        """
        try:
            pandas = require("pandas", "all", "create a data frame")
        except MissingExtra as error:
            raise MissingExtra("pandas is needed to create a data frame: pip install pandas") from error
        return pandas.DataFrame(
            [
                {"round": number, "variant": str(one), **asdict(trial), "images_per_s": trial.speed}
                for number, trials in enumerate(self.rounds, 1)
                for one, trial in trials.items()
            ]
        ).drop(columns=["samples", "parts"])

    def save(self, path: str | Path) -> None:
        """Write the ledger in the format of the suffix: `.json`, or a picture (`.png`, `.svg`, `.pdf`).

        Raises:
            DrivetrainError: for another suffix, or a missing folder.
            MissingExtra: for a picture without the extra `plot`.
        """
        path = Path(path)
        if path.suffix == ".json":
            content = json.dumps(self.to_dict(), indent=1).encode()
        elif path.suffix in (".png", ".svg", ".pdf"):
            content = render(picture(self), path.suffix[1:])
        else:
            raise DrivetrainError(f"{path} must end in .json, .png, .svg or .pdf.")
        with atomic_file(path) as file:
            file.write(content)

    def __repr__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return html_text(self)


class LedgerInterrupted(KeyboardInterrupt):
    """Ctrl-C during `Pipeline.ledger`. `ledger` has the results so far; None if they are not a full ledger."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        what = "before plain PyTorch and the full pipeline had one trial each: there are no results"
        if ledger is not None:
            what = f"after {len(ledger.rounds)} round(s), which this exception's ledger contains"
        super().__init__(f"the ledger was interrupted {what}")
        self.ledger = ledger

    def __reduce__(self) -> Any:
        return type(self), (self.ledger,)
