"""How a trial stands for a whole training whose images grow or whose layers freeze on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...transforms import LayerFreezing, ProgressiveResizing, Transform
from ..spec.kinds import find


@dataclass(frozen=True)
class Phase:
    """A part of a training: the images' side, how far it has come (what is frozen), and its share, 0 to 1."""

    image_size: int
    progress: float
    share: float


def phases(transforms: Sequence[Transform], image_size: int) -> list[Phase]:
    """The phases that a trial runs, for a trial to cost what a step costs on average over the training.

    Between the points where a schedule starts and stops to change, Simpson's rule weighs its beginning,
    middle and end, which is exact where the time of a step is a polynomial of the side up to the third
    degree (it grows with the square), and linear in what is frozen. Without such a schedule there is one
    phase. Equal phases are one.
    """
    resizing = find(transforms, ProgressiveResizing)
    freezing = find(transforms, LayerFreezing)
    points = {0.0, 1.0}
    points |= {resizing.delay, 1 - resizing.finetune} if resizing else set()
    points |= {freezing.freeze_start} if freezing else set()
    shares: dict[tuple[int, float], float] = defaultdict(float)
    for begin, end in pairwise(sorted(points)):
        if end - begin < 1e-9:  # two points that are one, but for the last bit
            continue
        for progress, weight in ((begin, 1 / 6), ((begin + end) / 2, 4 / 6), (end, 1 / 6)):
            inside = min(progress, end - 1e-6)  # at the end itself the size may jump to that of the next part
            size = resizing.size(image_size, inside) if resizing else image_size
            frozen = progress if freezing and freezing.level(progress) > 0 else 0.0
            shares[size, frozen] += weight * (end - begin)
    return [Phase(size, progress, share) for (size, progress), share in sorted(shares.items())]
