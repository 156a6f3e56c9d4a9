"""Which tests start Python interpreters, each of which imports torch: `make quick` leaves those out.

With `DRIVETRAIN_INTERPRETERS=refuse` a test that starts one fails; with the path of a file, its name is written there.
"""

from __future__ import annotations

import multiprocessing.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MODE = os.environ.get("DRIVETRAIN_INTERPRETERS", "")
ADVICE = "starts a Python interpreter: mark it with @pytest.mark.process, or start none"


def _is_python(program: object) -> bool:
    return Path(os.fsdecode(program)).name.startswith(("python", "drivetrain", "torchrun"))  # type: ignore[arg-type]


class Watch:
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


def register(config: pytest.Config) -> None:
    if MODE:
        config.pluginmanager.register(Watch())
