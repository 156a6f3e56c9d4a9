"""Composer as a test reference. Importing it takes seconds, warns, and replaces two signal handlers."""

import importlib
import signal
import warnings
from types import ModuleType

import pytest


def load(module: str) -> ModuleType:
    """Import a module of Composer quietly, and restore the signal handlers; skip if it is missing."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ImportError as error:
            pytest.skip(f"Composer, the reference, is not installed: {error}")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
