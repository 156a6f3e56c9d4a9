"""The crops of evaluation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def central_crops(
    heights: NDArray[np.int64], widths: NDArray[np.int64], size: tuple[int, int], ratio: float
) -> NDArray[np.int64]:
    """Return central crops `(n, 4)`: top, left, height and width.

    Args:
        heights, widths: of the images, `(n,)`.
        size: height and width of the output, whose shape the crops have.
        ratio: their size relative to the largest such crop; a square's side relative to the image's shorter one.
    """
    height, width = size
    if height == width:
        tall = wide = np.minimum(heights, widths) * ratio
    else:
        scale = np.minimum(heights / height, widths / width) * ratio
        tall, wide = scale * height, scale * width
    h, w = (np.maximum(np.rint(sides).astype(np.int64), 1) for sides in (tall, wide))
    return np.stack([(heights - h) // 2, (widths - w) // 2, h, w], axis=1)
