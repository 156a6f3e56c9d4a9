"""The loader's threads under the thread sanitizer, in real epochs: it sees the native library, and who waits for whom.

Python, numpy and torch are not compiled for it, so their own accesses to memory are not seen.
"""

import os
import subprocess
import sys
from pathlib import Path

import native_fuzz
import pytest
from loader_pictures import jpeg_beton

pytestmark = [pytest.mark.process, pytest.mark.long]
PROGRAM = Path(native_fuzz.__file__).with_name("loader_races.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the library, and a file of 96 photographs."""
    made = tmp_path_factory.mktemp("races")
    native_fuzz.build_library(made / "libdrivetrain.so", native_fuzz.FLAGS["thread"])
    jpeg_beton(made / "photos.beton", 32)
    return made


def run(folder: Path, workspaces: str) -> subprocess.CompletedProcess[str]:
    """Run the program; the sanitizer ends it at the first race, with status 66."""
    runtime = subprocess.run(
        ["gcc", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = os.environ | {"LD_PRELOAD": runtime, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    command = [sys.executable, PROGRAM, folder / "libdrivetrain.so", folder / "photos.beton", workspaces]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)


@pytest.mark.slow
def test_no_thread_writes_what_another_uses(folder: Path) -> None:
    done = run(folder, "kept")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "480 images\n"


@pytest.mark.slow
def test_a_shared_workspace_is_noticed(folder: Path) -> None:
    """So the sanitizer does see the loader's threads."""
    done = run(folder, "shared")
    assert done.returncode == 66
    assert "data race" in done.stderr
    assert "dt_load" in done.stderr
