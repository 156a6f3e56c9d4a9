"""The content of a checkpoint's `state.json`: one type, by which it is written and read.

Its digest signs the values. Reading therefore checks only that it has the type's fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct, structs

from ...common.storage.json_files import ShapeError, convert
from ...common.version import __version__
from ..telemetry.history import History

STATE = "state.json"
TENSORS = {"tensors": True}
"""Placeholder in the state of a method for averages, which are in `methods.safetensors`."""
REMEDY = "Use another checkpoint, or start from scratch with resume=None."

Values = dict[str, Any]
Count = Annotated[int, Meta(ge=0)]
Number = bool | int | float  # as `float`, msgspec would convert an integer, such as an optimizer's count


class Meter(TypedDict):
    """`EpochMeter.state_dict()`."""

    total: float
    counted: Count
    skipped: Count
    overflowed: Count
    images: Count
    seconds: float
    data_wait_s: float
    evaluation_s: float
    weight: NotRequired[float | None]
    """Older versions, which counted each step once, lack it."""


class FileFacts(TypedDict):
    """Size and digest of a file."""

    bytes: int
    sha256: str


class OptimizerContent(Struct, frozen=True, forbid_unknown_fields=True):
    """An `OptimizerState` without its entries: each rank saves the tensors and numbers that it holds."""

    groups: list[Values]
    loss_scale: Mapping[str, Number]


class RankContent(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's random states of Python and NumPy, its non-tensor optimizer state, and its callbacks' states by
    class."""

    random: Values
    numbers: dict[str, dict[str, Number]]
    callbacks: dict[str, Values] = {}


class CheckpointContent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `state.json`. The position is that of `TrainState`; `facts` and `description`: see
    `fingerprint`."""

    format: Literal[1] = 1
    drivetrain: str = __version__
    run: str
    epoch: Count
    step_in_epoch: Count
    step: Count
    strategy: str
    facts: Values
    description: Values | None
    optimizer: OptimizerContent
    methods: dict[str, Values]
    loader: Values
    meter: Meter
    history: History
    files: dict[str, FileFacts] = {}
    ranks: list[RankContent] = []

    def to_json(self) -> bytes:
        """Return the text of `state.json`, including its own digest."""
        state = {**structs.asdict(self), "history": self.history.to_dict()}
        return _canonical({**state, "sha256": _digest(state)})

    @classmethod
    def from_json(cls, text: bytes) -> CheckpointContent:
        """Parse a `state.json`; ShapeError names the first field that is missing, unknown, or of another type."""
        state = json.loads(text)
        if not isinstance(state, dict) or state.pop("sha256", None) != _digest(state):
            raise ShapeError(f"{STATE} was modified after it was written")
        if "history" in state:
            state["history"] = History.from_dict(state["history"])
        return convert(state, cls)


def _canonical(state: Values) -> bytes:
    return json.dumps(state, sort_keys=True, separators=(",", ":"), default=structs.asdict).encode()


def _digest(state: Values) -> str:
    return hashlib.sha256(_canonical(state)).hexdigest()
