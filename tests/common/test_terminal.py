"""Whether anybody looks at progress bars, and where they end."""

import sys
from io import StringIO
from types import ModuleType
from typing import Any

import ipykernel.zmqshell  # as jupyter_client does, without a notebook
import pytest
from drivetrain.common.terminal import in_cell, is_interactive
from drivetrain.loaders.native import stop
from tqdm import tqdm


def test_an_imported_kernel_is_not_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ipykernel.zmqshell.ZMQInteractiveShell.initialized() is False
    monkeypatch.setattr("sys.stderr", StringIO())
    assert not in_cell()
    assert not is_interactive()  # as in a log file


def test_a_module_that_is_being_imported_is_not_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    assert not in_cell()


def test_a_bar_ends_with_the_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five samples in two items."""
    bars: list[Any] = []

    def shown(total: int, progress: bool, **options: Any) -> Any:
        bars.append(tqdm(total=total, disable=not progress, file=StringIO(), **options))
        return bars[-1]

    monkeypatch.setattr(stop, "progress_bar", shown)
    lengths = stop.stoppable(len, ["abc", "de"], 1, "test", title="Test", progress=True, total=5, wanted="1 thread")
    assert list(lengths) == [3, 2]
    assert (bars[0].n, bars[0].total) == (5, 5)
