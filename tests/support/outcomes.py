"""Plugins of pytest, which note what becomes of each test.

`Outcomes`, for `.ci/test_all.py`, which continues where it was stopped: a line of JSON is appended to a file when a
test begins and when it has ended, so nothing is lost if the process is killed. Without the environment variable
`DRIVETRAIN_OUTCOMES` nothing is noted.

`Durations`: how long each test took the last time, kept in pytest's cache; `make quick` leaves out the longer ones. In
a new clone `make quick` runs all that its markers leave, and remembers.

`Interpreters`: which tests start Python interpreters, each of which imports torch; `make quick` leaves those out. With
`DRIVETRAIN_INTERPRETERS=refuse` a test that starts one fails; with the path of a file, its name is written there."""

import json
import multiprocessing.util
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest

VARIABLE = "DRIVETRAIN_OUTCOMES"
"""JSON: `{"file": journal, "phase": name, "tests": file with the list of tests to run; "" only lists them}`."""
_END = 3000  # characters of a failure that are kept
QUICK = bool(os.environ.get("DRIVETRAIN_QUICK"))
LIMIT = 0.05
"""Seconds. Three quarters of the tests that start no process take less, and together half a minute."""
_SECONDS = "drivetrain/seconds"
MODE = os.environ.get("DRIVETRAIN_INTERPRETERS", "")
ADVICE = "starts a Python interpreter: mark it with @pytest.mark.process, or start none"


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


class Durations:
    """Notes the duration of each test; with `QUICK`, deselects those above `LIMIT`."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._seen = config, dict[str, float]()
        self._cache = getattr(config, "cache", None)  # missing with -p no:cacheprovider
        self._known: dict[str, float] = {} if self._cache is None else self._cache.get(_SECONDS, {})

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
            self._cache.set(_SECONDS, {**self._known, **self._seen})


def _is_python(program: object) -> bool:
    return Path(os.fsdecode(program)).name.startswith(("python", "drivetrain", "torchrun"))  # type: ignore[arg-type]


class Interpreters:
    """Sees interpreters that this process starts, by subprocess or by multiprocessing."""

    def __init__(self) -> None:
        self.test = ""
        popen, spawn = subprocess.Popen.__init__, multiprocessing.util.spawnv_passfds

        def started(program: object) -> None:
            if not self.test or not _is_python(program):  # outside of tests it is a worker of pytest-xdist
                return
            if MODE == "refuse":
                raise AssertionError(f"{self.test} {ADVICE}")
            with Path(MODE).open("a") as file:
                file.write(f"{self.test}\n")

        def init(self: Any, args: Any, *more: Any, **named: Any) -> None:
            started(args if isinstance(args, str | os.PathLike) else args[0])
            popen(self, args, *more, **named)

        def spawnv(path: Any, *more: Any) -> int:
            started(path)
            return int(spawn(path, *more))

        subprocess.Popen.__init__ = init  # type: ignore[method-assign]
        multiprocessing.util.spawnv_passfds = spawnv

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Fixtures count as the test that first needs them."""
        self.test = item.nodeid
        return (yield)


def register(config: pytest.Config, ranks: Callable[[], int]) -> None:
    config.pluginmanager.register(Durations(config))
    if MODE:
        config.pluginmanager.register(Interpreters())
    if VARIABLE not in os.environ:
        return
    config.pluginmanager.register(Outcomes(config, json.loads(os.environ[VARIABLE]), ranks))
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        del os.environ[VARIABLE]  # a pytest that a test starts has tests of its own
