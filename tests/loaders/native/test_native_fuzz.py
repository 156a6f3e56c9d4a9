"""The native core on damaged JPEGs and tables, under the sanitizers. `make fuzz` runs a million."""

from __future__ import annotations

from pathlib import Path

import native_fuzz
import pytest

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.mark.parametrize(("kind", "threads"), [("address", 1), ("thread", 2)])
def test_damaged_files_are_refused_or_read_right(kind: str, threads: int, tmp_path: Path) -> None:
    told = native_fuzz.run(kind, 20_000, 7, threads, tmp_path)
    executions, decoded = (int(told.split()[place]) for place in (0, 2))
    assert executions == 20_000
    assert 4_000 < decoded < 12_000  # both happen
