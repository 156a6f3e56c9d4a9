"""What takes longer than a toy model trains, and no test looks at: in pytest's process, and in the ranks that it forks.

Curves are drawn once for all runs of a process whose histories differ in nothing but finite numbers, how many epochs of
a kind there are, and facts that are not drawn: matplotlib takes four times as long for them. Their own tests call
`draw` itself.

Files are not flushed to disk, which takes 8 ms for each of a checkpoint: what a loss of power would leave cannot be
tested here. A descriptor must be open all the same. `make test-all` flushes, in the slow tests and one of each file.

Ranks look for what others have posted or written every few milliseconds, not up to four times a second, as is better
for a cluster: each training on ranks waits so several times before its first step.
"""

import math
import os
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from drivetrain.common.storage import files
from drivetrain.pipeline.runs.checkpoints import writer
from drivetrain.pipeline.telemetry import curves
from drivetrain.pipeline.telemetry.history import History
from drivetrain.strategies.launching import meeting


def drawn_once(draw: Callable[[History], bytes]) -> Callable[[History], bytes]:
    drawn: dict[str, bytes] = {}

    def kind(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: kind(each) for name, each in value.items()}
        return math.isfinite(value) if isinstance(value, int | float) else value

    def again(history: History) -> bytes:
        kinds = {repr([kind(value) for value in astuple(epoch)]) for epoch in history.epochs}
        title = [type(history.facts.get(name)) for name in ("recipe", "provenance")]
        key = repr((sorted(kinds), len(history.epochs) > 1, history.monitor, title))
        if key not in drawn:
            drawn[key] = draw(history)
        return drawn[key]

    return again


def replaced() -> list[tuple[Any, str, Any]]:
    """Objects, the names of their attributes, and what stands in for them."""
    pause = 0.004  # seconds
    return [
        (curves, "draw", drawn_once(curves.draw)), (os, "fsync", os.fstat), (files, "_ROUND", pause),
        (writer, "_ROUND", pause), (meeting, "_LOOKS", (pause,) * round(sum(meeting._LOOKS) / pause)),
    ]  # fmt: skip
