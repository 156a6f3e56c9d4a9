"""The ledger as a value: rows, stages, ceilings and findings from the rounds; table, JSON, data frame, picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DrivetrainError, MissingExtra, require
from ..files import atomic_file
from .ledger_rounds import CEILINGS, EXTRAS, PLAIN, SPLIT, Turn, only, without
from .ledger_statistics import LEVEL, Figure, Ratio, figure, ratio


@dataclass(frozen=True)
class Row:
    """One variant: its throughput in images/s, that over plain PyTorch's, and that over the row before."""

    name: str
    images_per_s: Figure
    ratio: Ratio
    gain: Ratio


@dataclass(frozen=True)
class Gains:
    """What a stage brings, as a ratio of throughputs, in three places.

    Attributes:
        alone: plain PyTorch with only it, over plain PyTorch; None if that was left out.
        in_turn: on top of the stages before it.
        last: the whole, over the whole without it; None if that was left out.
    """

    stage: str
    alone: Ratio | None
    in_turn: Ratio
    last: Ratio | None


@dataclass(frozen=True, repr=False)
class Ledger:
    """What `Pipeline.ledger` measured.

    Attributes:
        rounds: one dict per round, from a variant's name to its turn; the raw figures.
        facts: recipe, plan, why it stopped, what was left out, costs of each variant, provenance.
        level: of the confidence intervals.
    """

    rounds: list[dict[str, Turn]]
    facts: dict[str, Any]
    level: float = LEVEL

    @property
    def _names(self) -> list[str]:
        return [name for name in self.rounds[0] if name == PLAIN or name.startswith("+ ")]

    @property
    def rows(self) -> list[Row]:
        """Plain PyTorch first, the whole pipeline last."""
        names = self._names
        return [
            Row(name, self.speed(name), self.ratio(name, PLAIN), self.ratio(name, last))
            for last, name in zip([PLAIN, *names], names, strict=False)
        ]

    @property
    def whole(self) -> str:
        """Name of the whole pipeline's turns."""
        return self._names[-1]

    @property
    def stages(self) -> list[Gains]:
        """What each stage brings alone, in turn, and last of all."""
        names = self._names
        found = []
        for before, name in pairwise(names):
            stage = name.removeprefix("+ ")
            alone, less = self.turns_of_only(stage), self._turns_without(stage)
            found.append(
                Gains(
                    stage,
                    None if alone is None else self.ratio(alone, PLAIN),
                    self.ratio(name, before),
                    None if less is None else self.ratio(self.whole, less),
                )
            )
        return found

    def turns_of_only(self, stage: str) -> str | None:
        """Name of the turns that have that stage alone; the first in turn is one. None: left out."""
        if self._names[1] == f"+ {stage}":
            return self._names[1]
        return only(stage) if only(stage) in self.rounds[0] else None

    def _turns_without(self, stage: str) -> str | None:
        """Name of the whole's turns without that stage; the last but one in turn is one. None: left out."""
        names = self._names
        if names[-1] == f"+ {stage}":
            return names[-2]
        if len(names) == 3:  # of two stages, the whole without the first is the second alone
            return self.turns_of_only(names[2].removeprefix("+ "))
        return without(stage) if without(stage) in self.rounds[0] else None

    @property
    def ceilings(self) -> dict[str, Figure]:
        """Throughput in images/s of the loader without a model, of the model without a loader, and of the
        copies to the device where there is one."""
        return {name: self.speed(name) for name in CEILINGS if name in self.rounds[0]}

    @property
    def waiting(self) -> float:
        """Share of the whole pipeline's time spent waiting for data, 0 to 1; the median."""
        return figure([turns[self.whole].waited / turns[self.whole].seconds for turns in self.rounds]).median

    @property
    def split(self) -> dict[str, float]:
        """Shares of the whole's time, 0 to 1: waiting, forward, backward, step, other; empty if not measured.

        Means over turns of its own, in which the GPU is waited for after each part. "other" is the loss, the
        batch methods' own work and the loop.
        """
        if SPLIT not in self.rounds[0]:
            return {}
        turns = [turns[SPLIT] for turns in self.rounds]
        seconds = sum(turn.seconds for turn in turns)
        shares = {"waiting": sum(turn.waited for turn in turns) / seconds}
        for part in ("forward", "backward", "step"):
            shares[part] = sum((turn.parts or {}).get(part, 0.0) for turn in turns) / seconds
        return shares | {"other": max(1 - sum(shares.values()), 0.0)}

    @property
    def extras(self) -> Ratio | None:
        """Time of a step with what `fit` has beside the steps, over that of the whole without: 1.004 for a cost
        of 0.4 %. Bar, CSV log and guard against losses that are not finite. None if not measured."""
        return self.ratio(self.whole, EXTRAS) if EXTRAS in self.rounds[0] else None

    @property
    def extras_share(self) -> float | None:
        """Share of a training's time inside the extras' own code, 0 to 1; None if not measured.

        Timed within the turns that have them, so it is known far more exactly than `extras`, which compares turns
        and also sees what the extras slow down elsewhere. At most so much: a short turn logs and draws once, and so
        oftener than `fit`, which logs every 50 steps and draws twice a second.
        """
        turns = [turns[EXTRAS] for turns in self.rounds if EXTRAS in turns]
        if not turns or not all(turn.parts for turn in turns):
            return None
        return sum((turn.parts or {})["extras"] for turn in turns) / sum(turn.seconds for turn in turns)

    @property
    def pairs(self) -> dict[str, Ratio]:
        """Of pairs of stages: the gain of both over the product of their gains alone; where it was measured."""
        return {name: ratio(values, self.level) for name, values in self.facts.get("pairs", {}).items()}

    @property
    def bound(self) -> str:
        """One sentence: which of loader, copy and model binds, and what to change next."""
        from .ledger_findings import bound

        return bound(self)

    @property
    def compound(self) -> str:
        """Whether the speedups multiply; where not, which stages stand in each other's way. May be empty."""
        from .ledger_findings import compound

        return compound(self)

    @property
    def spread(self) -> float:
        """The widest interval of a row's ratio, a stage's gain or the extras' cost: 0.02 for ± 2 %."""
        found = [row.ratio for row in self.rows] + ([self.extras] if self.extras else [])
        found += [
            gain
            for stage in self.stages
            for gain in (stage.alone, stage.in_turn, stage.last)
            if gain is not None
        ]
        return max(one.spread for one in found)

    def speed(self, name: str) -> Figure:
        """A variant's images/s."""
        return figure([turns[name].speed for turns in self.rounds])

    def ratio(self, name: str, over: str) -> Ratio:
        """A variant's throughput over another's, taken round by round."""
        return ratio([turns[name].speed / turns[over].speed for turns in self.rounds], self.level)

    def product_alone(self) -> list[float] | None:
        """The product of the stages' gains alone, round by round; None if one was left out."""
        names = [self.turns_of_only(name.removeprefix("+ ")) for name in self._names[1:]]
        if None in names:
            return None
        return [
            float(np.prod([turns[str(name)].speed / turns[PLAIN].speed for name in names]))
            for turns in self.rounds
        ]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types, the raw rounds included."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "stages": [asdict(stage) for stage in self.stages],
            "ceilings": {name: asdict(one) for name, one in self.ceilings.items()},
            "waiting": self.waiting,
            "split": self.split,
            "extras": asdict(self.extras) if self.extras else None,
            "extras_share": self.extras_share,
            "compound": self.compound,
            "bound": self.bound,
            "level": self.level,
            **self.facts,
            "rounds": [{name: asdict(turn) for name, turn in turns.items()} for turns in self.rounds],
        }

    @classmethod
    def load(cls, path: str | Path) -> Ledger:
        """The ledger that `save` wrote as JSON.

        Raises:
            DrivetrainError: if the file is not there, or is no ledger.
        """
        from .ledger_file import read

        return read(path)

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
                {"round": number, "variant": name, **asdict(turn), "images_per_s": turn.speed}
                for number, turns in enumerate(self.rounds, 1)
                for name, turn in turns.items()
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
            from .ledger_picture import draw

            content = draw(self, path.suffix[1:])
        else:
            raise DrivetrainError(f"{path}: a ledger is saved as .json, .png, .svg or .pdf.")
        with atomic_file(path) as file:
            file.write(content)

    def __repr__(self) -> str:
        from .ledger_table import text

        return text(self)

    def _repr_html_(self) -> str:
        from .ledger_table import html_text

        return html_text(self)
