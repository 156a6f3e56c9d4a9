"""Samples with a field of every kind, without FFCV, whose import compiles for seconds."""

from typing import Any

import numpy as np
from loader_pictures import picture

COUNT = 7


def values(index: int) -> dict[str, Any]:
    """The fields of a sample other than its image, each of a different kind."""
    return {
        "label": np.arange(index, index + 3, dtype=np.float32) / 4,
        "score": index / 8,
        "rank": index * 1_000_000_007 * 1_000,
        "box": np.arange(6, dtype=np.int16).reshape(2, 3) * (index + 1),
        "text": bytes(range(65, 66 + index)),
        "meta": {"name": f"größe {index}", "tags": [index, None, True]},
    }


def sample(index: int) -> tuple[Any, ...]:
    """A picture with these fields, in their order."""
    further = values(index)
    further["text"] = np.frombuffer(further["text"], np.uint8)
    return picture(index, 20, 24), *further.values()
