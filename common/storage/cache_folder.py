"""The folder of downloaded data."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$DRIVETRAIN_DATA`, else `$XDG_CACHE_HOME/drivetrain`, else `~/.cache/drivetrain`."""
    if chosen := os.environ.get("DRIVETRAIN_DATA"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drivetrain"
