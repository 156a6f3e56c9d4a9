"""The kinds of transforms: the order in which they apply."""

from __future__ import annotations

from ...common.errors import PlanError
from ...transforms import Transform
from ...transforms.base import missing_hook

# Surgery replaces modules, so it comes before everything that uses their parameters. New modules would lose a memory
# format set before surgery (BlurPool after ChannelsLast: 3 weights of a ResNet). An algorithm of Composer's may be
# surgery.
KINDS = (
    "image",
    "surgery",
    "algorithm",
    "memory_format",
    "optimizer",
    "schedule",
    "batch",
    "loss",
    "loop",
    "evaluation",
)
KIND_ORDER = {kind: number for number, kind in enumerate(KINDS)}


def sort_transforms(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Sort transforms by kind and `after`; ties keep the user's order.

    Raises:
        PlanError: if a transform appears twice, or two must each follow the other.
    """
    names = [type(transform).__name__ for transform in transforms]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"{name} appears {names.count(name)} times in the pipeline. Keep only one.")
    waiting = sorted(transforms, key=lambda transform: KIND_ORDER[transform.kind])
    ordered: list[Transform] = []
    while waiting:
        pending = {type(transform).__name__ for transform in waiting}
        ready = next((t for t in waiting if not pending.intersection(t.after)), None)
        if ready is None:
            raise PlanError(f"{' and '.join(sorted(pending))} must each follow the other. Remove one.")
        ordered.append(ready)
        waiting.remove(ready)
    return tuple(ordered)


def check_hook(transform: Transform) -> None:
    """Raise PlanError if a transform lacks the method of its kind, and so would do nothing."""
    if lacking := missing_hook(type(transform)):
        raise PlanError(lacking)
