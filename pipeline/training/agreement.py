"""What ranks tell each other, through any engine."""

from __future__ import annotations

import torch

from ...strategies import Engine


def broadcast_text(engine: Engine, text: str, source: int = 0) -> str:
    """Return the text of rank `source`; every rank must call it, with the same `source`.

    Args:
        engine: reduces a length and then the bytes, on the CPU's or the device's process group.
        text: ignored on the other ranks.
        source: the rank that has it.
    """
    data = list(text.encode()) if engine.rank == source else []
    length = int(engine.reduce(torch.tensor(len(data)), "sum").item())
    values = torch.tensor(data or [0] * length, dtype=torch.int64)
    return bytes(engine.reduce(values, "sum").tolist()).decode()
