"""Which of a transform's methods the training loop calls, by its kind; one that defines none would do nothing."""

from __future__ import annotations

from ..errors import PlanError
from ..transforms import (
    SAM,
    GradientClipping,
    LayerFreezing,
    ProgressiveResizing,
    TestTimeFlip,
    Transform,
)
from ..transforms.base import missing_hook

CALLED_BY_CLASS = (SAM, GradientClipping, LayerFreezing, ProgressiveResizing, TestTimeFlip)
"""Transforms whose own methods the loop calls; see `methods.py`."""


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
