"""One picture for the curves of many runs. matplotlib takes four times as long for it as a toy model to train."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any
from unittest import mock

from drivetrain.pipeline.telemetry import curves
from drivetrain.pipeline.telemetry.history import History


@contextmanager
def drawn_once() -> Iterator[None]:
    """Inside the block, curves are drawn once for all runs whose histories differ in nothing but finite numbers, how
    many epochs of a kind there are, and facts that are not drawn. Tests of curves have imported `draw` before it."""
    real, drawn = curves.draw, dict[str, bytes]()

    def draw(history: Any) -> bytes:
        if (key := _key(history)) not in drawn:
            drawn[key] = real(history)
        return drawn[key]

    with mock.patch.object(curves, "draw", draw):
        yield


def _key(history: History) -> str:
    kinds = {repr([_kind(value) for value in astuple(epoch)]) for epoch in history.epochs}
    title = [type(history.facts.get(name)) for name in ("recipe", "provenance")]
    return repr((sorted(kinds), len(history.epochs) > 1, history.monitor, title))


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _kind(each) for name, each in value.items()}
    return math.isfinite(value) if isinstance(value, int | float) else value
