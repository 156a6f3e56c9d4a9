"""The results of a measurement so far, without models, so that an exception can carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..measuring.variant import PLAIN, Costs, Trial, VariantId
from .ledger import Ledger

NO_TIME = "not enough time; increase seconds"
NOT_REACHED = "the ledger was interrupted before its trial"
NOT_INTERLEAVED = (
    "No interleaved round is complete: these are the variants' first trials, one after the other. If the machine's "
    "speed changed in between, they are biased."
)


@dataclass
class Record:
    """The state of a measurement.

    Attributes:
        variants: all variants, in the order of a round: plain PyTorch first.
        first: the first trial of each variant, not interleaved, from which the duration of a round is estimated.
        rounds: the complete rounds. All have the same variants.
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
        """Remove a variant from all rounds, including earlier ones, so that all have the same variants."""
        count = len(self.rounds)
        after = f" (after {count} round{'s' * (count > 1)})" if count and one in self.rounds[0] else ""
        self.failed[one] = f"{reason}{after}"
        self.costs.pop(one, None)
        for trials in (self.first, *self.rounds):
            trials.pop(one, None)

    def enough(self) -> bool:
        """Return whether there are results for a ledger: plain PyTorch had a trial, and the full pipeline had one or
        failed."""
        whole = self.in_turn[-1]
        return bool(self.rounds) or (PLAIN in self.first and (whole in self.first or whole in self.failed))

    def ledger(self, facts: Mapping[str, Any], interrupted: bool = False) -> Ledger | None:
        """Return the ledger of the results so far; None if they are not `enough`."""
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
