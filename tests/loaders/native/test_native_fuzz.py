"""The native core on damaged JPEGs and tables, under the sanitizers, and its memory. `make fuzz` runs millions."""

from pathlib import Path

import native_fuzz
import pytest

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.mark.parametrize(
    ("kind", "threads", "count"),
    [
        ("address", 1, 1_000),
        *(pytest.param(*each, 20_000, marks=pytest.mark.slow) for each in (("address", 1), ("thread", 2))),
    ],
)
def test_damaged_files_are_refused_or_read_right(kind: str, threads: int, count: int, tmp_path: Path) -> None:
    result = native_fuzz.run(kind, count, 7, threads, tmp_path)
    assert result.executions == count
    assert 0.05 < result.decoded / count < 0.15  # of about a quarter; both happen
    assert 0.2 < result.loaded / count < 0.6


@pytest.mark.slow
def test_nothing_is_leaked(tmp_path: Path) -> None:
    """A hundred thousand samples, sound and damaged, with every method; and recoded. `make fuzz` loads ten million."""
    result = native_fuzz.run("leaks", 100_000, 7, 2, tmp_path, rounds=10)
    assert result.loaded > 20_000
    assert result.leaked == 0
    assert result.grown < native_fuzz.GROWTH
