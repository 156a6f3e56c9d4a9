"""The crops of evaluation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def central_squares(heights: NDArray[np.int64], widths: NDArray[np.int64], ratio: float) -> NDArray[np.int64]:
    """Return the central squares `(n, 4)`, top, left, height and width, with a side of `ratio` times the
    shorter one."""
    side = np.maximum(np.rint(np.minimum(heights, widths) * ratio).astype(np.int64), 1)
    return np.stack([(heights - side) // 2, (widths - side) // 2, side, side], axis=1)
