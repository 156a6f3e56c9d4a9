"""Fixtures of the tests of `pipeline`."""

from __future__ import annotations

import pytest
from pipeline_data import Toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A converted toy data set, made once."""
    return Toy(tmp_path_factory.mktemp("toy"))
