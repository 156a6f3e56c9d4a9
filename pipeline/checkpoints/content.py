"""The content of a checkpoint's `state.json`: one type, written, read and checked here.

A digest proves that a file is unchanged since it was written, not that its values are usable. Every field is
therefore checked on reading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_args, get_type_hints

from ...common.checks import ANY, is_flag, is_number, is_whole
from ...common.version import __version__
from ..tasks.metrics import Unit
from ..telemetry.history import History

FORMAT = 1
STATE = "state.json"
TENSORS = {"tensors": True}
"""Placeholder in the state of a method for averages, which are in `methods.safetensors`."""
REMEDY = "Use another checkpoint, or start from scratch with resume=None."
_EXACT = 2**53  # floats represent every integer up to here exactly

Rule = Callable[[str, Any], None]
"""Called with a field's path and its value; raises `Fault` if the value is invalid."""


class Fault(ValueError):
    """An invalid field. The message follows "is damaged: "."""


def _fault(place: str, value: Any, expected: str) -> Fault:
    return Fault(f"its {place} is {value!r:.60}, which is not {expected}")


def _satisfies(fits: Callable[[Any], bool], expected: str) -> Rule:
    def check(place: str, value: Any) -> None:
        if not fits(value):
            raise _fault(place, value, expected)

    return check


def _integer(least: int = 0, most: int = _EXACT) -> Rule:
    return _satisfies(lambda value: is_whole(value, least, most), f"an integer from {least} to {most}")


def _number(interval: str = ANY) -> Rule:
    return _satisfies(lambda value: is_number(value, interval), f"a finite number in {interval}")


def _equals(expected: object, why: str = "") -> Rule:
    return _satisfies(lambda value: value == expected and type(value) is type(expected), f"{expected!r}{why}")


def _optional(rule: Rule) -> Rule:
    def check(place: str, value: Any) -> None:
        if value is not None:
            rule(place, value)

    return check


def _list_of(rule: Rule, least: int = 0) -> Rule:
    def check(place: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) < least:
            raise _fault(place, value, f"a list of {least} or more")
        for number, each in enumerate(value):
            rule(f"{place}[{number}]", each)

    return check


def _tuple_of(*rules: Rule) -> Rule:
    def check(place: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) != len(rules):
            raise _fault(place, value, f"a list of {len(rules)}")
        for number, (rule, each) in enumerate(zip(rules, value, strict=True)):
            rule(f"{place}[{number}]", each)

    return check


def _dict_of(rule: Rule) -> Rule:
    def check(place: str, value: Any) -> None:
        _object(place, value)
        for key, each in value.items():
            rule(f"{place}.{key}", each)

    return check


def _record(rules: Mapping[str, Rule], *, more: bool = False) -> Rule:
    """Return a rule for an object with these fields. `more` allows others."""

    def check(place: str, value: Any) -> None:
        _object(place, value)
        inside = place and f"{place}."
        for key, rule in rules.items():
            if key not in value:
                raise _fault(f"{inside}{key}", None, "there")
            rule(f"{inside}{key}", value[key])
        for key in [] if more else sorted(set(value) - set(rules)):
            raise _fault(f"{inside}{key}", value[key], "a field that this version knows")

    return check


def _record_of(cls: type) -> Rule:
    """Return a rule for an object with the fields of a dataclass whose annotations hold the rules."""
    hints = get_type_hints(cls, include_extras=True)
    return _record({each.name: hints[each.name].__metadata__[0] for each in fields(cls)})


def _twister(place: str, value: Any) -> None:
    """Check the state of a Mersenne Twister, in one pass for speed."""
    whole = isinstance(value, list) and all(type(word) is int and 0 <= word < 2**32 for word in value)
    if not whole or len(value) not in (624, 625):
        raise _fault(place, value, "a list of 624 words")
    if len(value) == 625 and value[-1] > 624:  # Python appends the position
        raise _fault(f"{place}[624]", value[-1], "a position in 624 words")


def _loss_scale(place: str, value: Any) -> None:
    """Check the state dict of a `torch.amp.GradScaler`; it is empty for precisions without loss scaling."""
    if value != {}:
        _SCALE(place, value)


_COUNT, _SPAN = _integer(), _number("[0, inf)")
_text = _satisfies(lambda value: isinstance(value, str) and value != "", "a text")
_object = _satisfies(lambda value: isinstance(value, dict), "an object")
_anything = _satisfies(lambda _: True, "")
_state_number = _satisfies(lambda value: isinstance(value, int | float) and value == value, "a number")
"""A number in an optimizer's state: infinite values are valid, NaN is not."""
_SCALE = _record(
    {
        "scale": _number("(0, inf)"), "growth_factor": _number("[1, inf)"), "backoff_factor": _number("(0, 1]"),
        "growth_interval": _integer(1), "_growth_tracker": _COUNT,
    }
)  # fmt: skip


_metrics = _dict_of(_number())
_EPOCH = _record(
    {
        "epoch": _integer(1), "loss": _number(), "val_loss": _optional(_number()),
        "metrics": _metrics, "images_per_s": _SPAN, "data_wait_fraction": _SPAN, "seconds": _SPAN,
        "lr": _SPAN, "skipped": _COUNT, "replaced": _COUNT,
    }
)  # fmt: skip
_EVALUATION = _record({"epoch": _integer(1), "step": _COUNT, "val_loss": _number(), "metrics": _metrics})
_STOPPED = _record({"reason": _text, "epoch": _COUNT, "step": _COUNT})


_MONITOR = _record(
    {"name": _text, "higher_is_better": _satisfies(lambda value: isinstance(value, bool), "true or false")},
    more=True,
)


_UNIT = _optional(_satisfies(lambda value: value in get_args(Unit), "'fraction' or 'percent'"))


def _history(place: str, value: Any) -> None:
    _record({"epochs": _list_of(_EPOCH)}, more=True)(place, value)
    _list_of(_EVALUATION)(f"{place}.evaluations", value.get("evaluations", []))
    if "stopped" in value:
        _STOPPED(f"{place}.stopped", value["stopped"])
    _list_of(_dict_of(_anything))(f"{place}.resumed", value.get("resumed", []))
    _dict_of(_anything)(f"{place}.provenance", value.get("provenance", {}))
    if "monitor" in value:
        _MONITOR(f"{place}.monitor", value["monitor"])
        _UNIT(f"{place}.monitor.unit", value["monitor"].get("unit"))
    _dict_of(_UNIT)(f"{place}.units", value.get("units", {}))


_GROUP = _record({"params": _list_of(_text), "lr": _SPAN}, more=True)
_RANDOM = _record(
    {
        "python": _tuple_of(_equals(3), _twister, _optional(_number())),
        "numpy": _tuple_of(_equals("MT19937"), _twister, _integer(0, 624), _integer(0, 1), _number()),
    }
)
_LOADER = _record(
    {
        "epoch": _COUNT, "position": _COUNT, "seed": _integer(0, 2**63), "batch_size": _integer(1),
        "samples": _integer(1), "order": _text, "batches": _integer(1),
    },
    more=True,
)  # fmt: skip
_METER = _record(
    {
        "total": _number("(-3e38, 3e38)"), "counted": _COUNT, "skipped": _COUNT, "overflowed": _COUNT,
        "images": _COUNT, "seconds": _SPAN, "data_wait_s": _SPAN, "evaluation_s": _SPAN,
        "weight": _optional(_SPAN),
    }
)  # fmt: skip
_FILE = _record({"bytes": _COUNT, "sha256": _anything})  # `verify` compares the digest, whatever its type
_Text = Annotated[str, _text]
_Count = Annotated[int, _COUNT]
_Values = dict[str, Any]


@dataclass(frozen=True)
class OptimizerContent:
    """An `OptimizerState` without its entries: each rank saves the tensors and numbers that it holds."""

    groups: Annotated[list[_Values], _list_of(_GROUP, 1)]
    loss_scale: Annotated[Mapping[str, float], _loss_scale]


@dataclass(frozen=True)
class RankContent:
    """One rank's random states of Python and NumPy, the non-tensor optimizer state that it saves, and the states of its
    callbacks by class name."""

    random: Annotated[_Values, _RANDOM]
    numbers: Annotated[dict[str, dict[str, float]], _dict_of(_dict_of(_state_number))]
    callbacks: Annotated[dict[str, _Values], _dict_of(_dict_of(_anything))] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointContent:
    """The content of `state.json`.

    Attributes:
        drivetrain: the version that wrote it.
        epoch, step, step_in_epoch, meter: the position of the run, from its `TrainState`.
        facts, description: see `fingerprint`.
        methods: the states of the methods, with `TENSORS` in place of averages.
        files: size and digest of each other file, by name.
        ranks: the state of each rank.
    """

    format: Annotated[int, _equals(FORMAT, ", the one that this version reads")] = FORMAT
    drivetrain: _Text = __version__
    run: _Text
    epoch: _Count
    step_in_epoch: _Count
    step: _Count
    strategy: _Text
    facts: Annotated[_Values, _record({"epochs": _integer(1), "batch_size": _integer(1)}, more=True)]
    description: Annotated[_Values | None, _optional(_dict_of(_anything))]
    optimizer: Annotated[OptimizerContent, _record_of(OptimizerContent)]
    methods: Annotated[_Values, _record({"counts": _dict_of(_COUNT)}, more=True)]
    loader: Annotated[_Values, _LOADER]
    meter: Annotated[_Values, _METER]
    history: Annotated[History, _history]
    files: Annotated[dict[str, _Values], _dict_of(_FILE)] = field(default_factory=dict)
    ranks: Annotated[list[RankContent], _list_of(_record_of(RankContent), 1)] = field(default_factory=list)

    def to_json(self) -> bytes:
        """Return the text of `state.json`, including its own digest."""
        ranks = [vars(rank) for rank in self.ranks]
        nested = {"optimizer": vars(self.optimizer), "history": self.history.to_dict(), "ranks": ranks}
        state = vars(self) | nested
        return _canonical({**state, "sha256": _digest(state)})

    @classmethod
    def from_json(cls, text: bytes) -> CheckpointContent:
        """Parse a `state.json` and check every field.

        Raises:
            Fault: for the first field with an invalid type or value, or one that contradicts another field.
            ValueError: if the text is not JSON.
        """
        state = json.loads(text)
        if not isinstance(state, dict) or state.pop("sha256", None) != _digest(state):
            raise Fault(f"{STATE} was modified after it was written")
        if isinstance(state.get("meter"), dict):
            state["meter"].setdefault("weight", None)  # older versions counted each step once
        _record_of(cls)("", state)
        state["optimizer"] = OptimizerContent(**state["optimizer"])
        state["history"] = History.from_dict(state["history"])
        state["ranks"] = [RankContent(**rank) for rank in state["ranks"]]
        content = cls(**state)
        _check_position(content)
        _check_methods(content)
        return content


def _canonical(state: _Values) -> bytes:
    return json.dumps(state, sort_keys=True, separators=(",", ":")).encode()


def _digest(state: _Values) -> str:
    return hashlib.sha256(_canonical(state)).hexdigest()


def _check_position(content: CheckpointContent) -> None:
    """Check that epochs, steps, the loader's position, the meter and the history agree."""
    epoch, within, step = content.epoch, content.step_in_epoch, content.step
    steps, rest = divmod(step - within, epoch) if epoch else (within + 1, step - within)
    if rest or within > steps:  # all of them: the evaluation is left
        raise _fault("step", step, f"possible after {epoch} epochs and {within} steps")
    position = (epoch, within) if within or not epoch else (epoch - 1, steps)
    loader, meter, history = content.loader, content.meter, content.history.epochs
    for name, value, expected in (
        ("loader.epoch", loader["epoch"], position[0]), ("loader.position", loader["position"], position[1]),
        ("number of history.epochs", len(history), epoch),
        ("meter.counted and skipped", meter["counted"] + meter["skipped"], within),
        *((f"history.epochs[{n}].epoch", each.epoch, n + 1) for n, each in enumerate(history)),
        *((f"history.evaluations[{n}].step", each.step, min(each.step, step))
          for n, each in enumerate(content.history.evaluations)),
    ):  # fmt: skip
        if value != expected:
            raise _fault(name, value, f"{expected}, as after {epoch} epochs and {within} steps")
    images = within * (content.facts["batch_size"] + len(content.ranks))  # each rank's share is rounded up
    if meter["overflowed"] > meter["counted"]:
        raise _fault("meter.overflowed", meter["overflowed"], f"possible in {meter['counted']} steps")
    if meter["images"] > images:
        raise _fault("meter.images", meter["images"], f"possible in {within} steps")


_averages = _satisfies(lambda value: value in ({}, TENSORS), f"{TENSORS}, or {{}} for none")
_AVERAGED = _record({"steps": _COUNT, "averages": _averages})
_METHODS: dict[str, Rule] = {
    "EMA": _AVERAGED,
    "Lookahead": _AVERAGED,
    "SWA": _record(
        {"steps": _COUNT, "counted": _COUNT, "ended": _satisfies(is_flag, "true or false"), "mean": _averages}
    ),
}
"""The state of the built-in transforms. A custom transform's session checks its own state."""


def _check_methods(content: CheckpointContent) -> None:
    for name, kept in content.methods.items():
        place = f"methods.{name}"
        _METHODS.get(name, _dict_of(_anything))(place, kept)
        if name not in _METHODS:
            continue
        if not kept.get("counted", 0) <= kept["steps"] <= content.step:
            raise _fault(f"{place}.steps", kept["steps"], f"possible after {content.step} steps")
        if name == "SWA" and bool(kept["mean"]) != (kept["counted"] > 0 and not kept["ended"]):
            raise _fault(f"{place}.mean", kept["mean"], f"that of {kept['counted']} weights")
