"""What must hold for all labels of a data set, found in one pass over them, some at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...common.storage.shared import Arrays

FORMAT = 1  # of what is shared


@dataclass(frozen=True)
class LabelFacts:
    """What is known of all labels.

    Attributes:
        shape: of one label; `()` of numbers.
        least, greatest: of whole numbers; of others 0.
        finite: whether all are.
        binary: whether each is 0 or 1.
        whole: whether their type is one of whole numbers.
    """

    shape: tuple[int, ...]
    least: int
    greatest: int
    finite: bool
    binary: bool
    whole: bool

    @classmethod
    def of(cls, parts: Iterable[NDArray[Any]]) -> Self:
        """Return what is known of labels `(n,)` or `(n, …)`, given one after the other."""
        ends, shape, whole, finite, binary = list[int](), tuple[int, ...](), False, True, True
        for part in parts:
            shape, whole = part.shape[1:], part.dtype.kind in "iub"
            if whole and part.size:
                ends += [int(part.min()), int(part.max())]
            elif part.dtype.kind in "fc":
                finite = finite and bool(np.isfinite(part).all())
            binary = binary and part.dtype.kind in "biuf" and bool(((part == 0) | (part == 1)).all())
        return cls(shape, min(ends, default=0), max(ends, default=0), finite, binary, whole)

    @classmethod
    def shared(cls, arrays: Arrays) -> Self:
        """Return what `arrays` has made arrays of."""
        values = json.loads(arrays["facts"].tobytes())
        return cls(**values | {"shape": tuple(values["shape"])})

    def arrays(self) -> Arrays:
        return {"facts": np.frombuffer(json.dumps(asdict(self)).encode(), np.uint8)}

    @property
    def outputs(self) -> int:
        """The width of a model's output: of class indices the greatest plus one; of other numbers 1; of vectors their
        length."""
        if self.shape:
            return prod(self.shape)
        return self.greatest + 1 if self.whole else 1
