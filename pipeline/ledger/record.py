"""What a measurement has found so far: figures and reasons only, so that an error or Ctrl-C can carry it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import DrivetrainError
from .data import COPY, MODEL, PLAIN, Costs, Trial, VariantId
from .ledger import Ledger

NO_TIME = "the time does not allow it; give more seconds"
NOT_REACHED = "the ledger was interrupted before its trial"


NOT_INTERLEAVED = (
    "No round that interleaves the variants is complete: these are their first trials, one after the other, and a "
    "machine whose speed changed in between favours some of them."
)


@dataclass
class Record:
    """The state of a measurement.

    Attributes:
        variants: all of them, in the order of a round: plain PyTorch first.
        first: the first trial of each variant, from which the time of a round is known; they are not interleaved.
        rounds: the rounds that are complete. All have the same variants.
        failed, left_out, costs, missing_costs, stopped: see `LedgerData`.
    """

    variants: list[VariantId]
    first: dict[VariantId, Trial] = field(default_factory=dict)
    rounds: list[dict[VariantId, Trial]] = field(default_factory=list)
    failed: dict[VariantId, str] = field(default_factory=dict)
    left_out: dict[VariantId, str] = field(default_factory=dict)
    costs: dict[VariantId, Costs] = field(default_factory=dict)
    missing_costs: dict[str, str] = field(default_factory=dict)
    stopped: str = ""

    @property
    def in_turn(self) -> list[VariantId]:
        """The variants of the rows, plain PyTorch first and the full pipeline last."""
        return [one for one in self.variants if one.is_row]

    def fail(self, one: VariantId, reason: str) -> None:
        """Take a variant out of every round, those before included, so that all rounds have the same ones."""
        count = len(self.rounds)
        after = f" (after {count} round{'s' * (count > 1)})" if count and one in self.rounds[0] else ""
        self.failed[one] = f"{reason}{after}"
        self.costs.pop(one, None)
        for trials in (self.first, *self.rounds):
            trials.pop(one, None)

    def enough(self) -> bool:
        """Whether it is a ledger: plain PyTorch and the full pipeline have had a trial, or the latter failed."""
        whole = self.in_turn[-1]
        return bool(self.rounds) or (PLAIN in self.first and (whole in self.first or whole in self.failed))

    def ledger(self, facts: Mapping[str, Any], interrupted: bool = False) -> Ledger | None:
        """Return the ledger of what is known; None if it is not `enough`."""
        if not self.enough():
            return None
        rounds = self.rounds or [{one: self.first[one] for one in self.variants if one in self.first}]
        known = {*rounds[0], *self.failed, *self.left_out}
        missing = [one for one in self.variants if one not in known]
        return Ledger(
            rounds,
            facts,
            self.variants,
            stopped="Interrupted (Ctrl-C)" if interrupted else self.stopped,
            failed=dict(self.failed),
            left_out=self.left_out | dict.fromkeys(missing, NOT_REACHED if interrupted else NO_TIME),
            costs={one: self.costs[one] for one in self.variants if one in self.costs},
            missing_costs=dict(self.missing_costs),
            notes=() if self.rounds else (NOT_INTERLEAVED,),
        )


def same_samples(trials: dict[VariantId, Trial]) -> None:
    """Hold the trials of a round to one and the same samples in the same batches.

    Raises:
        DrivetrainError: naming two variants that were given different ones; their speeds do not compare.
    """
    first, *others = [one for one in trials if one not in (MODEL, COPY)]  # which repeat one batch
    for other in others:
        if (trials[other].samples, trials[other].images) != (trials[first].samples, trials[first].images):
            raise DrivetrainError(
                f"In one round '{first}' had {trials[first].images} images (labels {trials[first].samples}) and "
                f"'{other}' {trials[other].images} (labels {trials[other].samples}): they cannot be compared. Use a "
                "data set, seed and loader settings that give both the same samples."
            )
