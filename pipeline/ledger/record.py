"""What a measurement has found so far: figures and reasons only, so that an error or Ctrl-C can carry it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .ledger import Ledger
from .rounds import PLAIN, Turn

NO_TIME = "the time does not allow it; give more seconds"
NOT_REACHED = "the ledger was interrupted before its turn"


@dataclass
class Record:
    """The state of a measurement.

    Attributes:
        names: of all variants, in the order of a round: plain PyTorch first.
        in_turn: of these the rows, plain PyTorch first and the full pipeline last.
        first: the first turn of each variant, from which the time of a round is known; they are not interleaved.
        rounds: the rounds that are complete. All have the same variants.
        failed, left_out: variants without figures, with the reasons.
        costs: of each variant; see `ledger_crew.Costs`.
        stopped: why there are no more rounds.
    """

    names: list[str]
    in_turn: list[str]
    first: dict[str, Turn] = field(default_factory=dict)
    rounds: list[dict[str, Turn]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""

    def fail(self, name: str, reason: str) -> None:
        """Takes a variant out of every round, those before included, so that all rounds have the same ones."""
        count = len(self.rounds)
        after = f" (after {count} round{'s' * (count > 1)})" if count and name in self.rounds[0] else ""
        self.failed[name] = f"{reason}{after}"
        self.costs.pop(name, None)
        for turns in (self.first, *self.rounds):
            turns.pop(name, None)

    def enough(self) -> bool:
        """Whether it is a ledger: plain PyTorch and the full pipeline have had a turn, or the latter failed."""
        whole = self.in_turn[-1]
        return bool(self.rounds) or (PLAIN in self.first and (whole in self.first or whole in self.failed))

    def ledger(self, interrupted: bool = False) -> Ledger | None:
        """The ledger of what is known; None if it is not `enough`."""
        if not self.enough():
            return None
        rounds = self.rounds or [{name: self.first[name] for name in self.names if name in self.first}]
        missing = [
            n for n in self.names if n not in rounds[0] and n not in self.failed and n not in self.left_out
        ]
        left_out = self.left_out | dict.fromkeys(missing, NOT_REACHED if interrupted else NO_TIME)
        facts: dict[str, Any] = {
            "in_turn": self.in_turn,
            "stopped": "it was interrupted" if interrupted else self.stopped,
            "failed": self.failed,
            "left_out": left_out,
            "costs": {name: self.costs[name] for name in self.names if name in self.costs},
        }
        if not self.rounds:
            facts["notes"] = [
                "No round in which the variants take turns is complete: these are their first turns, one "
                "after the other, and a machine whose speed changed in between favours some of them."
            ]
        return Ledger(rounds, facts)
