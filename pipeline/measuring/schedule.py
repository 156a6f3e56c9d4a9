"""Make a trial represent a full run whose image size or frozen layers change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...loaders.image_size import ImageSize
from ...transforms import Transform


@dataclass(frozen=True)
class Phase:
    """A phase of a run: the side of the images, the progress, which determines the frozen layers, and the phase's share
    of the run, 0 to 1."""

    image_size: ImageSize
    progress: float
    share: float


def phases(transforms: Sequence[Transform], image_size: ImageSize) -> list[Phase]:
    """Return the phases that a trial runs, so that its time per step is the run's average.

    Between the points where a schedule starts and stops changing, Simpson's rule weights start, middle and end. It is
    exact if the time of a step is a polynomial of up to third degree in the side (it grows with the square) and linear
    in the frozen fraction. Without such a schedule there is one phase. Equal phases are merged.
    """
    points = {0.0, 1.0}.union(*(transform.turning_points for transform in transforms))
    shares: dict[tuple[ImageSize, float], float] = defaultdict(float)
    for begin, end in pairwise(sorted(points)):
        if end - begin < 1e-9:  # equal up to rounding
            continue
        for progress, weight in ((begin, 1 / 6), ((begin + end) / 2, 4 / 6), (end, 1 / 6)):
            inside = min(
                progress, end - 1e-6
            )  # at the end itself, the size may jump to that of the next interval
            size = image_size
            for transform in transforms:
                size = transform.size(size, inside)
            frozen = progress if any(transform.level(progress) > 0 for transform in transforms) else 0.0
            shares[size, frozen] += weight * (end - begin)
    return [Phase(size, progress, share) for (size, progress), share in sorted(shares.items())]
