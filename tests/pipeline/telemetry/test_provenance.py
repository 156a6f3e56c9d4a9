"""The revision in a provenance, if git does not answer."""

from pathlib import Path

import pytest
from drivetrain.pipeline.telemetry import provenance


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
