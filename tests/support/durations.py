"""How long each test took the last time, kept in pytest's cache: `make quick` leaves out the longer ones.

In a new clone `make quick` runs all that its markers leave, and remembers.
"""

from __future__ import annotations

import os

import pytest

QUICK = bool(os.environ.get("DRIVETRAIN_QUICK"))
LIMIT = 0.05
"""Seconds. Three quarters of the tests that start no process take less, and together half a minute."""
_KEY = "drivetrain/seconds"


class Durations:
    """Notes the duration of each test; with `QUICK`, deselects those above `LIMIT`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._seen = config, dict[str, float]()
        self._cache = getattr(config, "cache", None)  # missing with -p no:cacheprovider
        self._known: dict[str, float] = {} if self._cache is None else self._cache.get(_KEY, {})

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not QUICK:
            return
        long = [item for item in items if self._known.get(item.nodeid, 0) > LIMIT]
        items[:] = [item for item in items if self._known.get(item.nodeid, 0) <= LIMIT]
        self._config.hook.pytest_deselected(items=long)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a duration. What fixtures take may be of another test."""
        if report.when == "call" and report.passed:
            self._seen[report.nodeid] = round(report.duration, 2)

    def pytest_sessionfinish(self) -> None:
        if self._cache is not None and not hasattr(self._config, "workerinput"):
            self._cache.set(_KEY, {**self._known, **self._seen})
