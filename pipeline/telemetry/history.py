"""The results of a run after each epoch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...files import atomic_file
from ...table import Table


@dataclass(frozen=True)
class Epoch:
    """One epoch of a history.

    Attributes:
        epoch: counted from 1.
        loss: mean of the training loss function.
        val_loss, accuracy: mean cross entropy and top-1 accuracy (0 to 1) on the validation data; None without, or if
            the epoch was not evaluated (`fit(eval_every=…)`).
        images_per_s: training throughput over all ranks, without evaluation.
        data_wait_fraction: fraction of the training time spent waiting for data, 0 to 1.
        seconds: duration of the full epoch, including evaluation.
        lr: learning rate at its end.
        skipped: steps skipped because their loss was not finite (`fit(on_nonfinite="skip")`), or because their
            gradients overflowed in fp16: a few until the loss scale is calibrated, and one each time it grows too far.
    """

    epoch: int
    loss: float
    val_loss: float | None
    accuracy: float | None
    images_per_s: float
    data_wait_fraction: float
    seconds: float
    lr: float
    skipped: int = 0

    def __str__(self) -> str:
        parts = [f"epoch {self.epoch}", f"loss {self.loss:.4f}"]
        if self.accuracy is not None:
            parts += [f"val loss {self.val_loss:.4f}", f"accuracy {self.accuracy:.2%}"]
        parts += [
            f"{self.images_per_s:,.0f} images/s",
            f"waiting {self.data_wait_fraction:.0%}",
            f"{self.seconds:.1f} s",
        ]
        if self.skipped:
            parts.append(f"{self.skipped} steps skipped")
        return "  ".join(parts)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation within an epoch (`fit(eval_every_steps=…)`, or because the run was stopped there).

    Attributes:
        epoch: number of the epoch, counted from 1.
        step: completed optimizer steps of the full run.
        val_loss, accuracy: mean cross entropy and top-1 accuracy (0 to 1) on the validation data.
    """

    epoch: int
    step: int
    val_loss: float
    accuracy: float

    @property
    def metrics(self) -> dict[str, float]:
        """The results by name, without the position."""
        return {"val_loss": self.val_loss, "accuracy": self.accuracy}

    def __str__(self) -> str:
        return f"epoch {self.epoch}, step {self.step:,}  val loss {self.val_loss:.4f}  accuracy {self.accuracy:.2%}"


COLUMNS = {
    "epoch": ("epoch", "d"),
    "loss": ("loss", ".4f"),
    "val_loss": ("val loss", ".4f"),
    "accuracy": ("accuracy", ".2%"),
    "images_per_s": ("images/s", ",.0f"),
    "data_wait_fraction": ("waiting for data", ".0%"),
    "seconds": ("seconds", ".1f"),
    "lr": ("lr at its end", ".3g"),
    "skipped": ("steps skipped", "d"),
}
"""The fields of an `Epoch` in the order of a log's columns, with heading and format in notebooks."""


@dataclass(repr=False)
class History:
    """The finished epochs, facts about the run that produced them, and its evaluations within epochs."""

    epochs: list[Epoch] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the history as plain JSON types."""
        within = {"evaluations": [asdict(each) for each in self.evaluations]} if self.evaluations else {}
        return {"epochs": [asdict(epoch) for epoch in self.epochs], **within, **self.facts}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> History:
        """Return the history that `to_dict` gave as plain JSON types."""
        facts = {key: value for key, value in saved.items() if key not in ("epochs", "evaluations")}
        within = [Evaluation(**each) for each in saved.get("evaluations", [])]
        return cls([Epoch(**epoch) for epoch in saved["epochs"]], facts, within)

    def save(self, path: str | Path) -> None:
        """Write the history as JSON, atomically."""
        with atomic_file(Path(path)) as file:
            file.write(json.dumps(self.to_dict(), indent=1).encode())

    @property
    def accuracy(self) -> float | None:
        """Top-1 accuracy (0 to 1) of the last evaluation; None without validation data."""
        known = [(epoch.epoch, 1, epoch.accuracy) for epoch in self.epochs if epoch.accuracy is not None]
        known += [
            (each.epoch, 0, each.accuracy) for each in self.evaluations
        ]  # before the one at the epoch's end
        return max(known, key=lambda entry: entry[:2])[2] if known else None

    @property
    def stopped(self) -> str | None:
        """Why a callback stopped the run before its last epoch ended; None if none did."""
        stopped: dict[str, Any] | None = self.facts.get("stopped")
        return None if stopped is None else str(stopped["reason"])

    def __repr__(self) -> str:
        return "\n".join(map(str, self.epochs)) or "no finished epoch"

    def _repr_html_(self) -> str:
        if not self.epochs:
            return "<i>no finished epoch</i>"
        measured = [n for n in COLUMNS if any(getattr(epoch, n) is not None for epoch in self.epochs)]
        rows = [[_cell(name, getattr(epoch, name)) for name in measured] for epoch in self.epochs]
        return Table([COLUMNS[name][0] for name in measured], rows, figures=True).html()


def _cell(name: str, value: Any) -> str:
    return "" if value is None else format(value, COLUMNS[name][1])
