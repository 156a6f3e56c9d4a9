"""Whether anybody looks at progress bars."""

import sys
from io import StringIO
from types import ModuleType

import ipykernel.zmqshell  # as jupyter_client does, without a notebook
import pytest
from drivetrain.common.terminal import in_cell, is_interactive


def test_an_imported_kernel_is_not_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ipykernel.zmqshell.ZMQInteractiveShell.initialized() is False
    monkeypatch.setattr("sys.stderr", StringIO())
    assert not in_cell()
    assert not is_interactive()  # as in a log file


def test_a_module_that_is_being_imported_is_not_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    assert not in_cell()
