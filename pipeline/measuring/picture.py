"""Write matplotlib figures in the formats of a ledger and a tuning."""

from __future__ import annotations

import io
from typing import Any


def render(figure: Any, form: str) -> bytes:
    """Return a matplotlib figure in a format (`"png"`, `"svg"`, `"pdf"`)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150, bbox_inches="tight")
    return buffer.getvalue()
