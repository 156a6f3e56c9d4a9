"""The ledger's raw figures: turns, the names that they have in a round, and that their samples are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import DrivetrainError

PLAIN, LOADER, MODEL, COPY = "plain PyTorch", "loader alone", "model alone", "copy alone"
SPLIT, EXTRAS = "the whole, its parts timed", "the whole with fit's extras"
CEILINGS = (LOADER, MODEL, COPY)


def only(stage: str) -> str:
    """Name of the turns of plain PyTorch with only that stage."""
    return f"only {stage}"


def without(stage: str) -> str:
    """Name of the turns of the whole without that stage."""
    return f"without {stage}"


@dataclass(frozen=True)
class Turn:
    """One measurement: images over all ranks, seconds, and seconds of these spent waiting for data.

    `samples` is a digest of the labels that were trained on, in order; `parts` has the seconds of forward,
    backward and step, or of the extras, where they were timed.
    """

    images: int
    seconds: float
    waited: float
    samples: str = ""
    parts: dict[str, float] | None = None

    @property
    def speed(self) -> float:
        """Images/s."""
        return self.images / self.seconds


def same_samples(turns: dict[str, Turn]) -> None:
    """Holds the turns of a round to one and the same samples in the same batches.

    Raises:
        DrivetrainError: naming two variants that were given different ones; their speeds do not compare.
    """
    first, *others = [name for name in turns if name not in (MODEL, COPY)]  # which repeat one batch
    for name in others:
        if (turns[name].samples, turns[name].images) != (turns[first].samples, turns[first].images):
            raise DrivetrainError(
                f"In one round {first!r} had {turns[first].images} images (labels {turns[first].samples}) and "
                f"{name!r} {turns[name].images} (labels {turns[name].samples}): they cannot be compared. Use a "
                "data set, seed and loader settings that give both the same samples."
            )


def mean_turn(turns: Sequence[Turn], shares: Sequence[float]) -> Turn:
    """Turns on the same samples as one, the time of each counted by its share; the shares add up to 1."""

    def mixed(seconds: Sequence[float]) -> float:
        return float(np.dot(shares, seconds))

    parts = [turn.parts or {} for turn in turns]
    return dataclasses.replace(
        turns[0],
        seconds=mixed([turn.seconds for turn in turns]),
        waited=mixed([turn.waited for turn in turns]),
        parts={name: mixed([part[name] for part in parts]) for name in parts[0]} or None,
    )
