"""GPU tests without a GPU: skipped with a reason, or rehearsed on the CPU."""

import os
import re
import sys

import pytest
from places import ROOT, TESTS
from process_state import output_of

pytestmark = pytest.mark.process

FOLDER = TESTS / "gpu"
FILES = sorted(str(path) for path in FOLDER.glob("test_gpu_*.py"))
REHEARSED = {
    "test_gpu_loaders.py": "test_batches_are_those_of_the_cpu and uint8 and FFCV",
    "test_gpu_precision.py": "test_an_overflow or test_the_forward",
    "test_gpu_transforms.py": "test_every_kind or test_a_loss or (test_a_session and EMA) or (surgery and ALiBi)",
}
"""A few of each kind, by pytest's -k; `run.py --stage tests --rehearse` runs them all."""


def pytest_without_a_gpu(*arguments: str, rehearse: bool) -> str:
    environment = {"CUDA_VISIBLE_DEVICES": "", "DRIVETRAIN_REHEARSE_GPU": "1" if rehearse else "0"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "gpu", *arguments]
    return output_of(*command, cwd=ROOT, env=os.environ | environment, timeout=280)


@pytest.mark.slow
def test_all_are_skipped_with_a_reason_where_there_is_no_device() -> None:
    output = pytest_without_a_gpu(*FILES, rehearse=False)
    assert re.search(r"^\d+ skipped in", output, re.MULTILINE), output[-500:]  # and none passed or failed
    assert {line.rsplit(": ", 1)[-1] for line in output.splitlines() if line.startswith("SKIPPED")}
    assert all("CUDA" in line for line in output.splitlines() if line.startswith("SKIPPED"))


@pytest.mark.slow
def test_some_of_each_kind_run_on_the_cpu() -> None:
    chosen = " or ".join(f"({name.removesuffix('.py')} and ({words}))" for name, words in REHEARSED.items())
    output = pytest_without_a_gpu(*(str(FOLDER / name) for name in REHEARSED), "-k", chosen, rehearse=True)
    found = re.search(r"^(\d+) passed, \d+ deselected in", output, re.MULTILINE)  # nothing is skipped
    assert found, output[-800:]
    assert int(found[1]) >= 11
