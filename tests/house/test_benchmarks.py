"""The benchmarks still run, and write their results; figures of such short runs mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
OURS = ["by hand", "Drivetrain", "Drivetrain, no guard", "Drivetrain, all extras"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("loop", ["--rounds", "2", "--steps", "50", "--only", *OURS]),
        ("transforms", ["--rounds", "2", "--seconds", "0.05", "--mode", "eager", "--only", "BlurPool"]),
        ("strategies", ["--rounds", "2", "--steps", "1", "--ranks", "1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_short_run(script: str, arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments, "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert results
    assert all("provenance" in each for each in results)
