"""Note what becomes of each test, for `.ci/test_all.py`, which continues where it was stopped.

A line of JSON is appended to a file when a test begins and when it has ended, so nothing is lost if the process is
killed. Without the environment variable `DRIVETRAIN_OUTCOMES` nothing is noted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest

VARIABLE = "DRIVETRAIN_OUTCOMES"
"""JSON: `{"file": journal, "phase": name, "tests": file with the list of tests to run; "" only lists them}`."""
_END = 3000  # characters of a failure that are kept


class Outcomes:
    """Selects the tests of a phase, as `VARIABLE` says, and notes each one's outcome."""

    def __init__(self, config: pytest.Config, order: dict[str, str], ranks: Callable[[], int]) -> None:
        self._order, self._ranks, self._before = order, ranks, 0
        self._call, self._start = time(), monotonic()
        self._worker = hasattr(config, "workerinput")
        self._reports: dict[str, list[pytest.TestReport]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests of the phase; without any, note all that there are, with their markers."""
        if not self._order["tests"]:
            for item in items:
                self._note(test=item.nodeid, marks=sorted({mark.name for mark in item.iter_markers()}))
            return
        wanted = set(json.loads(Path(self._order["tests"]).read_text()))
        left_out = [item for item in items if item.nodeid not in wanted]
        items[:] = [item for item in items if item.nodeid in wanted]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._before = self._ranks()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """The report of the teardown has the number of ranks."""
        item.user_properties.append(("ranks", self._ranks() - self._before))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test that ends the process leaves nothing but this."""
        if not self._worker:
            self._note(test=nodeid, outcome="began")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome with the last report; pytest-xdist makes one of another kind for a lost process."""
        if self._worker:
            return
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when in ("setup", "call"):
            return
        failed = [one for one in reports if one.failed]
        skipped = [one for one in reports if one.skipped and not hasattr(one, "wasxfail")]
        why = str(failed[0].longrepr)[-_END:] if failed else _reason(skipped[0]) if skipped else ""
        self._note(
            test=report.nodeid, outcome="failed" if failed else "skipped" if skipped else "passed", why=why,
            seconds=round(sum(one.duration for one in reports), 2),
            ranks=dict(report.user_properties).get("ranks", 0),
        )  # fmt: skip
        del self._reports[report.nodeid]

    def _note(self, **what: Any) -> None:
        at = round(monotonic() - self._start, 1)
        line = {"phase": self._order["phase"], "call": self._call, "at": at, **what}
        with Path(self._order["file"]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    told = report.longrepr
    return str(told[2] if isinstance(told, tuple) else told).removeprefix("Skipped: ")


def register(config: pytest.Config, ranks: Callable[[], int]) -> None:
    if VARIABLE not in os.environ:
        return
    config.pluginmanager.register(Outcomes(config, json.loads(os.environ[VARIABLE]), ranks))
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        del os.environ[VARIABLE]  # a pytest that a test starts has tests of its own
