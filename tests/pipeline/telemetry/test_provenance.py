"""The revision in a provenance, if git does not answer, and texts that no file could keep."""

import sys
from pathlib import Path

import pytest
from drivetrain.pipeline import History
from drivetrain.pipeline.telemetry import provenance
from drivetrain.pipeline.telemetry.history import read_history


def test_a_slow_git_is_an_unknown_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(provenance, "PATIENCE", 0.1)
    provenance._git_revision.cache_clear()
    try:
        assert provenance.provenance()["git_revision"] is None
    finally:
        provenance._git_revision.cache_clear()


def test_arguments_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads each byte that is none as half of a pair of characters, which UTF-8 cannot encode."""
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", "été/caf\udce9.beton"])
    monkeypatch.setenv("LD_PRELOAD", "\udcff.so")
    History(facts={"provenance": provenance.provenance()}).save(tmp_path / "history.json")
    kept = read_history(tmp_path)
    assert kept is not None
    assert kept.facts["provenance"]["command"] == r"train.py 'été/caf\udce9.beton'"
    assert kept.facts["provenance"]["environment"]["LD_PRELOAD"] == r"\udcff.so"
