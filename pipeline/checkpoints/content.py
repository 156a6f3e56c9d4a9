"""What each field of a checkpoint's `state.json` may hold: checked as a whole, before any of it is used.

The digests of a checkpoint prove that it is as somebody wrote it; not that what was written makes sense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...checks import ANY, is_flag, is_number, is_whole
from ...errors import CheckpointError
from ..telemetry.history import Epoch

REMEDY = "Use another checkpoint, or start from scratch with resume=None."
_EXACT = 2**53  # beyond it not every integer is a float

Rule = Callable[[str, Any], None]
"""Raises `_Wrong` if the value at that place cannot be used."""


class _Wrong(Exception):
    """A value that cannot be used: its place, itself, and what belongs there."""

    def __init__(self, place: str, value: Any, expected: str) -> None:
        super().__init__(f"its {place} is {value!r:.60}, which is not {expected}")


def fault_of(state: Mapping[str, Any]) -> str:
    """Return the first field of a state whose type, range or agreement with the others is wrong, with its value; ""
    if there is none."""
    try:
        _STATE("state", state)
        _check_position(state)
        _check_methods(state)
    except _Wrong as wrong:
        return str(wrong)
    return ""


def check_length(path: Path, state: Mapping[str, Any], steps: int) -> None:
    """Checks the place in a training whose epochs have so many steps.

    Raises:
        CheckpointError: if it cannot be a place in it.
    """
    step, expected = state["step"], state["epoch"] * steps + state["step_in_epoch"]
    if step != expected or state["step_in_epoch"] >= steps:
        raise CheckpointError(
            f"{path} is damaged: its step is {step}, after {state['epoch']} epochs and {state['step_in_epoch']} steps "
            f"of a run with {steps} steps in an epoch. {REMEDY}"
        )


def _anything(place: str, value: Any) -> None: ...


def _text(place: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise _Wrong(place, value, "a text")


def _string(place: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _Wrong(place, value, "a text")


def _flag(place: str, value: Any) -> None:
    if not is_flag(value):
        raise _Wrong(place, value, "true or false")


def _whole(least: int = 0, most: int = _EXACT) -> Rule:
    def rule(place: str, value: Any) -> None:
        if not is_whole(value, least, most):
            raise _Wrong(place, value, f"an integer from {least} to {most}")

    return rule


def _number(interval: str = ANY) -> Rule:
    def rule(place: str, value: Any) -> None:
        if not is_number(value, interval):
            raise _Wrong(place, value, f"a finite number in {interval}")

    return rule


def _state_number(place: str, value: Any) -> None:
    """What an optimizer may count with, infinity included."""
    if not isinstance(value, int | float) or value != value:
        raise _Wrong(place, value, "a number")


def _or_null(rule: Rule) -> Rule:
    def checked(place: str, value: Any) -> None:
        if value is not None:
            rule(place, value)

    return checked


def _several(rule: Rule, least: int = 0, most: int | None = None) -> Rule:
    def checked(place: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) < least or (most is not None and len(value) > most):
            count = "" if not least else f" of {least}" if least == most else f" of {least} or more"
            raise _Wrong(place, value, f"a list{count}")
        for number, each in enumerate(value):
            rule(f"{place}[{number}]", each)

    return checked


def _named(rule: Rule) -> Rule:
    def checked(place: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _Wrong(place, value, "an object")
        for key, each in value.items():
            rule(f"{place}.{key}", each)

    return checked


def _record(
    fields: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None, *, more: bool = False
) -> Rule:
    """An object with these fields; with others only if `more`."""
    extra = optional or {}

    def checked(place: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _Wrong(place, value, "an object")
        inside = "" if place == "state" else f"{place}."
        for key, rule in {**fields, **extra}.items():
            if key in value:
                rule(f"{inside}{key}", value[key])
            elif key in fields:
                raise _Wrong(f"{inside}{key}", None, "there")
        odd = [] if more else sorted(set(value) - set(fields) - set(extra))
        if odd:
            raise _Wrong(f"{inside}{odd[0]}", value[odd[0]], "a field that this version knows")

    return checked


def _places(*rules: Rule) -> Rule:
    def checked(place: str, value: Any) -> None:
        _several(_anything, len(rules), len(rules))(place, value)
        for number, (rule, each) in enumerate(zip(rules, value, strict=True)):
            rule(f"{place}[{number}]", each)

    return checked


def _is(expected: object) -> Rule:
    def checked(place: str, value: Any) -> None:
        if value != expected or type(value) is not type(expected):
            raise _Wrong(place, value, repr(expected))

    return checked


def _words(place: str, value: Any) -> None:
    """The state of a Mersenne twister; in one pass, as there are many."""
    whole = isinstance(value, list) and all(type(word) is int and 0 <= word < 2**32 for word in value)
    if not whole or len(value) not in (624, 625):
        raise _Wrong(place, value, "a list of 624 words")
    if len(value) == 625 and value[-1] > 624:  # Python's, with the position in it
        raise _Wrong(f"{place}[624]", value[-1], "a position in 624 words")


def _loss_scale(place: str, value: Any) -> None:
    """Of `torch.amp.GradScaler`; empty in precisions without one."""
    if value == {} and isinstance(value, dict):
        return
    positive = _number("(0, inf)")
    _record(
        {
            "scale": positive, "growth_factor": _number("[1, inf)"), "backoff_factor": _number("(0, 1]"),
            "growth_interval": _whole(1), "_growth_tracker": _whole(),
        }
    )(place, value)  # fmt: skip


_COUNT, _SPAN = _whole(), _number("[0, inf)")
_EPOCH: dict[str, Rule] = {
    "epoch": _whole(1), "loss": _number(), "val_loss": _or_null(_number()), "accuracy": _or_null(_number("[0, 1]")),
    "images_per_s": _SPAN, "data_wait_fraction": _SPAN, "seconds": _SPAN, "lr": _SPAN, "skipped": _COUNT,
}  # fmt: skip
_DEFAULTS = {f.name for f in dataclasses.fields(Epoch) if f.default is not dataclasses.MISSING}
_STATE = _record(
    {
        "format": _whole(1),
        "run": _text,
        "epoch": _COUNT,
        "step_in_epoch": _COUNT,
        "step": _COUNT,
        "strategy": _text,
        "facts": _record({"epochs": _whole(1), "batch_size": _whole(1)}, more=True),
        "optimizer": _record(
            {
                "groups": _several(_record({"params": _several(_text)}, {"lr": _SPAN}, more=True), 1),
                "loss_scale": _loss_scale,
            }
        ),
        "methods": _record({"counts": _named(_COUNT)}, more=True),
        "loader": _record(
            {
                "epoch": _COUNT, "position": _COUNT, "seed": _whole(0, 2**63), "batch_size": _whole(1),
                "samples": _whole(1), "order": _text,
            },
            {"batches": _whole(1)},
            more=True,
        ),
        "meter": _record(
            {
                "total": _number("(-3e38, 3e38)"), "counted": _COUNT, "skipped": _COUNT, "overflowed": _COUNT,
                "images": _COUNT, "seconds": _SPAN, "data_wait_s": _SPAN,
            }
        ),
        "history": _record(
            {
                "epochs": _several(
                    _record(
                        {name: rule for name, rule in _EPOCH.items() if name not in _DEFAULTS},
                        {name: rule for name, rule in _EPOCH.items() if name in _DEFAULTS},
                    )
                )
            },
            {"resumed": _several(_named(_anything)), "provenance": _named(_anything)},
            more=True,
        ),
        "files": _named(_record({"bytes": _COUNT, "sha256": _string})),
        "ranks": _several(
            _record(
                {
                    "random": _record(
                        {
                            "python": _places(_is(3), _words, _or_null(_number())),
                            "numpy": _places(_is("MT19937"), _words, _whole(0, 624), _whole(0, 1), _number()),
                        }
                    ),
                    "numbers": _named(_named(_state_number)),
                }
            ),
            1,
        ),
    },
    {"drivetrain": _text, "parameters": _several(_text), "description": _or_null(_named(_anything))},
    more=True,
)  # fmt: skip


def _check_position(state: Mapping[str, Any]) -> None:
    """Whether epochs, steps, the loader's place, the meter and the history are of one moment."""
    epoch, within, step = state["epoch"], state["step_in_epoch"], state["step"]
    steps, rest = divmod(step - within, epoch) if epoch else (within + 1, step - within)
    if rest or within >= steps:
        raise _Wrong("step", step, f"possible after {epoch} epochs and {within} steps")
    place = (epoch, within) if within or not epoch else (epoch - 1, steps)
    loader, meter, history = state["loader"], state["meter"], state["history"]["epochs"]
    for name, value, expected in (
        ("loader.epoch", loader["epoch"], place[0]), ("loader.position", loader["position"], place[1]),
        ("number of history.epochs", len(history), epoch),
        ("meter.counted and skipped", meter["counted"] + meter["skipped"], within),
        *((f"history.epochs[{n}].epoch", each["epoch"], n + 1) for n, each in enumerate(history)),
    ):  # fmt: skip
        if value != expected:
            raise _Wrong(name, value, f"{expected}, as after {epoch} epochs and {within} steps")
    images = within * (state["facts"]["batch_size"] + len(state["ranks"]))  # a share is rounded up
    if meter["overflowed"] > meter["counted"]:
        raise _Wrong("meter.overflowed", meter["overflowed"], f"possible in {meter['counted']} steps")
    if meter["images"] > images:
        raise _Wrong("meter.images", meter["images"], f"possible in {within} steps")


_TENSORS = _record({"tensors": _text})


def _averages(place: str, value: Any) -> None:
    """The names of averages, or none."""
    if value != {} or not isinstance(value, dict):
        _TENSORS(place, value)


_AVERAGED = _record({"steps": _COUNT, "averages": _averages})
_METHODS: dict[str, Rule] = {
    "EMA": _AVERAGED,
    "Lookahead": _AVERAGED,
    "SWA": _record({"steps": _COUNT, "counted": _COUNT, "ended": _flag, "mean": _averages}),
}
"""Of the transforms that are ours; what another keeps, its own session knows."""


def _check_methods(state: Mapping[str, Any]) -> None:
    for name, kept in state["methods"].items():
        place = f"methods.{name}"
        _METHODS.get(name, _named(_anything))(place, kept)
        if name not in _METHODS:
            continue
        if not kept.get("counted", 0) <= kept["steps"] <= state["step"]:
            raise _Wrong(f"{place}.steps", kept["steps"], f"possible after {state['step']} steps")
        if name == "SWA" and bool(kept["mean"]) != (kept["counted"] > 0 and not kept["ended"]):
            raise _Wrong(f"{place}.mean", kept["mean"], f"that of {kept['counted']} weights")
