"""The native core on damaged JPEGs and tables, under the sanitizers, and its memory. `make fuzz` runs millions."""

from pathlib import Path

import native_fuzz
import pytest

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.mark.parametrize(
    ("kind", "threads"), [("address", 1), pytest.param("thread", 2, marks=pytest.mark.slow)]
)
def test_damaged_files_are_refused_or_read_right(kind: str, threads: int, tmp_path: Path) -> None:
    result = native_fuzz.run(kind, 20_000, 7, threads, tmp_path)
    assert result.executions == 20_000
    assert 1_000 < result.decoded < 3_000  # of about a quarter; both happen
    assert 4_000 < result.loaded < 12_000


@pytest.mark.slow
def test_nothing_is_leaked(tmp_path: Path) -> None:
    """A hundred thousand samples, sound and damaged, with every method; and recoded. `make fuzz` loads ten million."""
    result = native_fuzz.run("leaks", 100_000, 7, 2, tmp_path, rounds=10)
    assert result.loaded > 20_000
    assert result.leaked == 0
    assert result.grown < native_fuzz.GROWTH
