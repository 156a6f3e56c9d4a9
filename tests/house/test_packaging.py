"""The package as users install it: the content of the wheel, and the files of the repository."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.process

STAGES = ("loaders", "pipeline", "strategies", "transforms")


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would give to a new clone, in a folder whose name is not a package's."""
    source = tmp_path_factory.mktemp("clone") / "clone-with-another-name"
    source.mkdir()
    listed = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built there."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, clone, cwd=folder)
    return next(folder.glob("*.whl"))


def test_the_tests_run_in_a_folder_of_any_name(clone: Path) -> None:
    told = _run(sys.executable, "-m", "pytest", "-q", "tests/root/test_checks.py", cwd=clone)
    assert " passed" in told


def test_the_listed_packages_are_those_of_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = [path.parent for stage in STAGES for path in (ROOT / stage).rglob("__init__.py")]
    found = {"drivetrain"} | {".".join(["drivetrain", *room.relative_to(ROOT).parts]) for room in rooms}
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [ROOT / "py.typed", *ROOT.glob("*.py")]
    sources += [path for stage in STAGES for path in (ROOT / stage).rglob("*.py")]
    assert names == {f"drivetrain/{path.relative_to(ROOT).as_posix()}" for path in sources}


def test_the_wheel_works_in_a_fresh_environment_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "fresh"
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    uv = Path(sys.executable).parent / "uv"
    _run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel, cwd=tmp_path)
    # Its dependencies are lent from this environment, whose own editable Drivetrain stays invisible:
    # a folder named in a .pth file has its own .pth files ignored.
    lent = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    site = Path(
        _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    (site / "lent.pth").write_text(f"{lent}\n")
    program = (
        "import drivetrain, drivetrain.loaders, drivetrain.strategies, drivetrain.transforms\n"
        "assert drivetrain.Pipeline and drivetrain.RECIPES\n"
        "assert issubclass(drivetrain.BetonError, drivetrain.DataError)\n"
        "print(drivetrain.__file__)"
    )
    assert Path(_run(python, "-c", program, cwd=tmp_path).strip()).is_relative_to(site)
    recipes = _run(environment / "bin" / "drivetrain", "recipes", cwd=tmp_path)
    assert "cifar10-quickstart" in recipes


def test_importing_the_package_is_free_of_heavy_imports() -> None:
    program = "import sys, drivetrain; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    _run(sys.executable, "-c", program, cwd=ROOT.parent)


def test_install_files_name_no_address_and_no_path_of_a_machine() -> None:
    forbidden = ("http://", "https://", "file:", str(ROOT), str(Path.home()))
    for name in (
        "requirements.txt",
        "pyproject.toml",
        "Makefile",
        ".ci/run",
        ".ci/native",
        ".ci/find-python",
    ):
        text = (ROOT / name).read_text()
        assert not [word for word in forbidden if word in text], name


def test_requirements_pin_every_dependency_exactly() -> None:
    lines = [
        line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line[:1] not in ("#", " ", "")
    ]
    assert all(re.match(r"^[A-Za-z0-9_.-]+==[^ ;]+( ; .+)?$", line) for line in lines)
    pinned = {line.split("==")[0].lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    names = {re.split(r"[\[<>=~! ]", entry)[0].lower() for entry in wanted} - {"drivetrain"}
    assert names <= pinned
