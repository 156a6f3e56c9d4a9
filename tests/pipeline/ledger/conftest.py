"""Ledgers train on few images: what they measure is time."""

import pytest
from ledgers import FewImages


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> FewImages:
    return FewImages(tmp_path_factory.mktemp("few"))


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which each sentence is a line."""
    monkeypatch.setenv("COLUMNS", "1000")
