"""The live bar of an epoch, and the line it leaves behind."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Self, TextIO

import torch
from tqdm import tqdm as text_bar
from tqdm.auto import tqdm

from .host_copy import HostCopy
from .meter import Sums

_REFRESH = 0.5  # seconds between two losses; each is a copy from the device, which is not waited for


class Progress:
    """A bar over the images of one epoch: loss, accuracy, share of time waiting for data, images/s, time left.

    Args:
        epoch, epochs: counted from 1.
        images: in the epoch, over all ranks.
        accuracy: after the epoch before, 0 to 1; None if there is none.
        show: False shows nothing and costs nothing.
        file: to write the bar to as text; None: where people see it, which in a notebook is the cell.
    """

    def __init__(
        self,
        epoch: int,
        epochs: int,
        images: int,
        accuracy: float | None = None,
        *,
        show: bool,
        file: TextIO | None = None,
    ) -> None:
        self._show, self._next = show, 0.0
        self._loss: HostCopy | None = None
        self._accuracy = "" if accuracy is None else f", accuracy {accuracy:.2%}"
        self._bar = (tqdm if file is None else text_bar)(
            total=images, desc=f"epoch {epoch}/{epochs}", unit=" images", disable=not show, leave=False,
            mininterval=_REFRESH, dynamic_ncols=True, file=file,
        )  # fmt: skip

    def update(self, images: int, loss: torch.Tensor, sums: Sums) -> None:
        """After a step: its images, its loss, and the epoch's sums."""
        if not self._show:
            return
        if self._loss is None and perf_counter() >= self._next:
            self._next = perf_counter() + _REFRESH
            self._loss = HostCopy(loss)
        if self._loss is not None and self._loss.arrived:
            waiting = sums.waited / max(sums.seconds, 1e-9)
            text = f"loss {self._loss.values():.4f}{self._accuracy}, waiting {waiting:.0%}"
            self._bar.set_postfix_str(text, refresh=False)
            self._loss = None
        self._bar.update(images)

    def skip(self, images: int) -> None:
        """Images of the epoch that were trained on before, in another process."""
        if images:
            self._bar.update(images)
            self._bar.unpause()

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        if self._show:
            say(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def in_cell() -> bool:
    """Whether this process is a notebook's kernel; the ranks that it starts are not."""
    return "ipykernel" in sys.modules


def place_of_bar(asked_in_cell: bool) -> TextIO | None:
    """`file` of a Progress in a training that was asked for in a notebook's cell, or not.

    A rank that a cell has started writes to standard output: a cell shows standard error in red, and not in
    order with the lines that stay.
    """
    return sys.stdout if asked_in_cell and not in_cell() else None


def say(text: str) -> None:
    """Prints a line that stays, above any bar."""
    tqdm.write(text)
