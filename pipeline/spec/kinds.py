"""The kinds of transforms: in which order they are applied, and which method of each the training loop calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from ...errors import PlanError
from ...transforms import SAM, GradientClipping, LayerFreezing, ProgressiveResizing, TestTimeFlip, Transform
from ...transforms.base import missing_hook

T = TypeVar("T", bound=Transform)

# Surgery replaces modules, so it precedes whatever touches their parameters; a memory format set before
# surgery would be lost on the new modules (BlurPool after ChannelsLast: 3 weights of a ResNet).
KINDS = ("image", "surgery", "memory_format", "optimizer", "schedule", "batch", "loss", "loop", "evaluation")
KIND_ORDER = {kind: number for number, kind in enumerate(KINDS)}
CALLED_BY_CLASS = (SAM, GradientClipping, LayerFreezing, ProgressiveResizing, TestTimeFlip)
"""Transforms whose own methods the loop calls; see `training/hooks.py`."""


def find(transforms: Iterable[Transform], kind: type[T]) -> T | None:
    """Return the transform of that class, or None; a pipeline has at most one of each."""
    return next((transform for transform in transforms if isinstance(transform, kind)), None)


def sort_transforms(transforms: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """The transforms in the order of their declared facts, else as the user wrote them.

    Raises:
        PlanError: if a transform appears twice, or two ask to follow one another.
    """
    names = [type(transform).__name__ for transform in transforms]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"{name} was asked for {names.count(name)} times; once is enough. Remove one.")
    waiting = sorted(transforms, key=lambda transform: KIND_ORDER[transform.kind])
    ordered: list[Transform] = []
    while waiting:
        pending = {type(transform).__name__ for transform in waiting}
        ready = next((t for t in waiting if not pending.intersection(t.after)), None)
        if ready is None:
            raise PlanError(f"{' and '.join(sorted(pending))} each ask to follow the other. Remove one.")
        ordered.append(ready)
        waiting.remove(ready)
    return tuple(ordered)


def check_hook(transform: Transform) -> None:
    """Refuses a transform that does not define what its kind is called by, and so would do nothing.

    Raises:
        PlanError: naming its class, its kind, and the method.
    """
    if isinstance(transform, CALLED_BY_CLASS):
        return
    lacking = missing_hook(type(transform))
    if not lacking and transform.kind in ("schedule", "evaluation"):
        base = "LayerFreezing" if transform.kind == "schedule" else "TestTimeFlip"
        lacking = (
            f"{type(transform).__name__} is a transform of kind {transform.kind!r}, of which the loop calls {base} "
            "only. Derive it from that, or use another kind."
        )
    if lacking:
        raise PlanError(lacking)
