"""`.ci/wheels`: what it needs of the machine. It takes minutes itself, so the tests do not run it."""

from pathlib import Path

import pytest
from places import load_script

wheels = load_script("wheels")


def test_missing_programs_are_named_by_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("apt-get", "dpkg"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(wheels.MissingError, match="apt-get install gcc-aarch64-linux-gnu qemu-user-static"):
        wheels.prepare_aarch64(tmp_path / "root")
    assert not (tmp_path / "apt").exists()


def test_the_tests_of_a_trial_exist() -> None:
    assert all((wheels.ROOT / name).is_file() for name in wheels.PIXELS)
