"""Values as text that is the same in every process: functions and objects without addresses."""

import enum
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drivetrain.pipeline.runs.checkpoints.fingerprint import identity
from drivetrain.strategies import launch
from drivetrain.transforms import TRANSFORMS
from torch import nn
from torch.nn import functional as F


def double(x: float) -> float:
    return 2 * x


class Kind(enum.Enum):
    SMALL = object()


class Bare:
    """Without a `__repr__`."""

    def __init__(self, size: int = 3) -> None:
        self.size, self.inner, self._cache = size, object(), object()

    def method(self) -> None: ...

    @classmethod
    def made(cls) -> None: ...


class Slotted:
    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 5


class Pair(NamedTuple):
    first: Any
    second: Any


class Failing:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@dataclass
class Holding:
    function: Any
    cache: Any = field(default_factory=object, repr=False)


def made(factor: float) -> Callable[[float], float]:
    def inner(x: float) -> float:
        return factor * x

    return inner


def values() -> dict[str, Any]:
    itself: list[Any] = []
    itself.append(itself)
    bare = Bare()
    bare.inner = bare
    return {
        "function": double, "torch's": F.relu, "built in": len, "torch built in": torch.relu, "class": Bare,
        "lambda": lambda x: x + 1, "closure": made(2.0), "method": Bare().method, "class method": Bare.made,
        "partial": functools.partial(double, 3.0, flag=double), "bare": Bare(), "slotted": Slotted(),
        "failing": Failing(), "in itself": itself, "object in itself": bare, "enum": Kind.SMALL, "path": Path("a/b"),
        "set": {"a", "b", "c", "d"}, "in a set": lambda x: x in {"a", "b", "c", "d"},
        "holding": Holding(double), "held deeply": [{"a": (Holding(lambda: None),)}], "one": (1,),
        "module": nn.Sequential(nn.Linear(2, 2, bias=False)).requires_grad_(False).apply(zeroed),
        "numpy": np.float32(2), "tensor": torch.arange(2000.0), "array": np.arange(2000),
        "bfloat16": torch.zeros(3, dtype=torch.bfloat16),
        "meta": torch.zeros(3, device="meta"), "empty": torch.zeros(0), "iterator": iter([1]), "module object": json,
        "objects": np.array([double, Bare()], dtype=object), "named": Pair(double, Bare()),
        "sparse": torch.eye(2).to_sparse(), "dtype": torch.float16, "none": None, "bytes": b"\0",
    }  # fmt: skip


def zeroed(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


def identities() -> dict[str, str]:
    return {name: identity(value) for name, value in values().items()}


@pytest.mark.process
def test_it_is_the_same_in_another_process() -> None:
    """With other addresses, and another order of sets."""
    own = identities()
    assert launch(identities, devices=1, device="cpu", timeout=120) == [own]
    assert not [text for text in own.values() if "0x" in text]
    assert own["function"] == f"{__name__}.double"
    assert own["class"] == f"{__name__}.Bare"
    assert own["bare"] == f"{__name__}.Bare(inner=<builtins.object>, size=3)"
    assert own["method"] == f"{own['bare']}.method"
    assert own["holding"] == f"Holding(function={__name__}.double)"
    assert own["partial"] == f"partial({__name__}.double, 3.0, flag={__name__}.double)"
    assert own["torch's"] == "torch.nn.functional.relu"


@pytest.mark.parametrize(("one", "other"), [
    (lambda x: x + 1, lambda x: x - 1), (lambda x: x + 1, lambda x: x + 2), (made(1.0), made(2.0)),
    (lambda x, a=1: x + a, lambda x, a=2: x + a), (lambda x: F.relu(x), lambda x: F.gelu(x)),
    (lambda x: [y + 1 for y in x], lambda x: [y + 2 for y in x]), (Bare(1), Bare(2)), (Bare(1).method, Bare(2).method),
    (functools.partial(double, 1), functools.partial(double, 2)), (torch.arange(2000), -torch.arange(2000)),
    (np.array([double], dtype=object), np.array([made], dtype=object)), (Pair(double, 1), Pair(made, 1)),
    (np.arange(2000), np.arange(2000.0)), (1, True), ("1", 1), (Holding(double), Holding(made)),
    (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]))),
    (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    (nn.Sequential(nn.HuberLoss()), nn.Sequential(nn.HuberLoss(delta=2.0))),
])  # fmt: skip
def test_what_computes_otherwise_is_told_apart(one: Any, other: Any) -> None:
    assert identity(one) != identity(other)
    assert identity(one) == identity(one)


def test_the_ends_of_a_large_array_count() -> None:
    large = np.zeros(6_000_000)
    before = identity(large)
    large[-1] = 1
    assert identity(large) != before


def test_shipped_transforms_are_named_as_they_print() -> None:
    """So that a checkpoint reads well, and those of earlier versions stay good."""
    for cls in TRANSFORMS.values():
        assert identity(cls()) == repr(cls())
