"""The package as users install it: the content of the wheel, and the files of the repository."""

import contextlib
import json
import os
import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from places import GPU, ROOT, SUPPORT, load_script
from process_state import output_of, run

pytestmark = pytest.mark.process

build_wheel = load_script("build_wheel")
checks = load_script("release_checks")
release = load_script("release")

Fresh = tuple[Path, Path]
STAGES = ("common", "loaders", "pipeline", "strategies", "transforms")
BARE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES, EXTRAS = (PROJECT["project"][name] for name in ("dependencies", "optional-dependencies"))


def _pins(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in ("#", " ", "")]


def _required(entries: Iterable[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ]", entry)[0].lower() for entry in entries} - {"drivetrain"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would give to a new clone, in a folder whose name is not a package's."""
    return release.copy_tree(tmp_path_factory.mktemp("clone") / "clone-with-another-name")


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the clone."""
    return build_wheel.package("sdist", clone, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make wheel` builds from it."""
    folder = tmp_path_factory.mktemp("wheel")
    made = build_wheel.build_from(sdist, folder)
    assert [*folder.iterdir()] == [made]
    return made


@pytest.mark.slow
def test_the_tests_run_in_a_folder_of_any_name(clone: Path) -> None:
    told = output_of(sys.executable, "-m", "pytest", "-q", "tests/common/test_checks.py", cwd=clone)
    assert " passed" in told


def test_the_listed_packages_are_those_of_the_tree() -> None:
    rooms = [path.parent for stage in STAGES for path in (ROOT / stage).rglob("__init__.py")]
    found = {"drivetrain"} | {".".join(["drivetrain", *room.relative_to(ROOT).parts]) for room in rooms}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_the_source_distribution_has_the_files_of_the_tree(sdist: Path, clone: Path, tmp_path: Path) -> None:
    tree = shutil.copytree(clone, tmp_path / "tree")
    assert "loaders/native/load.c" in checks.sources(tree)
    assert "pipeline/apps/cli/__init__.py" in checks.sources(tree)
    assert checks.check_sdist(sdist, tree) == []
    (tree / "loaders" / "native" / "new.h").touch()
    (tree / "common/errors.py").write_text("")
    (tree / "common/names.py").unlink()
    assert set(checks.check_sdist(sdist, tree)) == {
        "The source distribution lacks loaders/native/new.h.",
        "common/errors.py of the source distribution differs from the repository's.",
        "The source distribution has common/names.py, which is not in the repository.",
    }


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_libraries_and_nothing_else(wheel: Path) -> None:
    assert re.fullmatch(r"drivetrain-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    listed = zipfile.ZipFile(wheel).namelist()
    names = {name for name in listed if name[-1] != "/" and ".dist-info/" not in name}
    (jpeg,) = (name for name in names if re.fullmatch(r"drivetrain\.libs/libjpeg-[0-9a-f]+\.so[\d.]*", name))
    sources = [ROOT / "py.typed", *ROOT.glob("*.py")]
    sources += [path for stage in STAGES for path in (ROOT / stage).rglob("*.py")]
    sources += [path for path in ROOT.glob("pipeline/apps/projects/[!_]*/*") if path.is_file()]
    native = [ROOT / "loaders" / "native" / name for name in ("libdrivetrain.so", "libjpeg-turbo.txt")]
    listed = {f"drivetrain/{path.relative_to(ROOT).as_posix()}" for path in [*sources, *native]}
    assert names == listed - {"drivetrain/setup.py"} | {jpeg}
    license = zipfile.ZipFile(wheel).read("drivetrain/loaders/native/libjpeg-turbo.txt").decode()
    assert "Independent JPEG Group" in license


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An environment with the wheel and the packages of requirements-run.txt, and its site-packages.

    The packages are lent from this environment, by a folder of links to them.
    """
    folder = tmp_path_factory.mktemp("fresh")
    environment, lent = folder / "environment", folder / "lent"
    output_of(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    python = environment / "bin" / "python"
    command = Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--offline", "--no-deps"
    output_of(*command, "--python", python, wheel, cwd=folder)
    lent.mkdir()
    for package in {line.split("==")[0] for line in _pins("requirements-run.txt")}:
        with contextlib.suppress(PackageNotFoundError):  # of another version of Python, or another processor
            found = distribution(package)
            for name in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
                if not (lent / name).is_symlink():  # several packages are in the folder nvidia
                    (lent / name).symlink_to(found.locate_file(name))
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(output_of(python, "-c", program, cwd=folder).strip())
    (site / "lent.pth").write_text(f"{lent}\n")
    return environment, site


def printed_by(fresh: Fresh, folder: Path, program: str, *arguments: str | Path) -> str:
    """What a program of the fresh environment prints, in a folder of its own."""
    return output_of(fresh[0] / "bin" / program, *arguments, cwd=folder, env=BARE)


def found_by(fresh: Fresh, folder: Path, *extras: str) -> dict[str, Any]:
    printed = printed_by(fresh, folder, "python", SUPPORT / "wheel_program.py", folder, *extras)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.slow
def test_the_wheel_converts_loads_and_trains_with_the_libjpeg_inside(fresh: Fresh, tmp_path: Path) -> None:
    """The libraries that are mapped into the process belong to the wheel, or to the wheels of other packages."""
    found, site = found_by(fresh, tmp_path), fresh[1]
    assert Path(found["drivetrain"]).is_relative_to(site)
    assert found["batch"] == [[8, 3, 32, 32], [8]]
    assert found["epochs"] == 1
    assert found["modules"] == []
    assert "cifar10-quickstart" in printed_by(fresh, tmp_path, "drivetrain", "recipes")
    libraries = [Path(file) for file in found["libraries"]]
    assert [file for file in libraries if file.name == "libdrivetrain.so"] == [
        site / "drivetrain" / "loaders" / "native" / "libdrivetrain.so"
    ]
    (jpeg,) = (file for file in libraries if file.parent == site / "drivetrain.libs")
    assert jpeg.name.startswith("libjpeg-")
    assert [file for file in libraries if "site-packages" not in file.parts] == []


@pytest.mark.slow
def test_the_quickstart_needs_no_reference(fresh: Fresh, tmp_path: Path) -> None:
    """What `make quickstart` runs, on small data, with the packages that it installs."""
    lacking = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, sys.argv[1:])))"
    references = "ffcv", "numba", "cv2", "composer", "deepspeed", "fairscale", "lightning"
    printed_by(fresh, tmp_path, "python", "-c", lacking, *references)
    found = found_by(fresh, tmp_path, "quickstart")
    assert {"model.safetensors", "ledger.json", "ledger.png", "curves.png"} <= set(found["files"])
    assert found["losses"][0] == pytest.approx(found["losses"][1], abs=1e-4)
    assert found["prediction"]


@pytest.mark.slow
def test_the_gpu_kits_wheel_needs_no_library_that_a_machine_may_lack(wheel: Path, tmp_path: Path) -> None:
    load_script("kit", GPU).check_complete(wheel, tmp_path)


REFUSED = {
    "no compiler": (
        {"CC": "/nowhere/cc"},
        "install a C compiler (Debian and Ubuntu: apt-get install gcc libc6-dev), or set CC to yours.",
    ),
    "no headers": (
        {"CFLAGS": "-nostdinc"},
        "install libjpeg-turbo's headers (Debian: apt-get install libjpeg62-turbo-dev; Ubuntu: libjpeg-turbo8-dev), "
        "or set CPATH and LIBRARY_PATH to where they are; of version 2 or later.",
    ),
}


@pytest.mark.parametrize("lacking", REFUSED)
def test_a_build_without_its_tools_ends_with_what_to_install(lacking: str, clone: Path, tmp_path: Path) -> None:
    environment, remedy = REFUSED[lacking]
    command = [sys.executable, clone / "setup.py", "bdist_wheel", "--dist-dir", tmp_path / "dist"]
    done = run(*command, cwd=tmp_path, env=os.environ | environment)
    assert done.returncode == 1
    last = (done.stdout + done.stderr).splitlines()[-1]
    assert last == f"Drivetrain's native library cannot be built: {remedy}"
    assert "Traceback" not in done.stderr
    assert len((done.stdout + done.stderr).splitlines()) < 10
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_is_free_of_heavy_imports() -> None:
    program = "import sys, drivetrain; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    output_of(sys.executable, "-c", program, cwd=ROOT.parent)


def test_install_files_name_no_address_and_no_path_of_a_machine() -> None:
    forbidden = ("http://", "https://", "file:", str(ROOT), str(Path.home()))
    for name in (
        "requirements.txt", "requirements-run.txt", "pyproject.toml", "Makefile", ".ci/run", ".ci/native",
        ".ci/build_wheel.py", ".ci/release.py", ".ci/release_checks.py", ".ci/find-python",
    ):  # fmt: skip
        text = (ROOT / name).read_text()
        assert not [word for word in forbidden if word in text], name


def test_requirements_pin_every_dependency_exactly() -> None:
    lines = _pins("requirements.txt")
    assert all(re.match(r"^[A-Za-z0-9_.-]+==[^ ;]+( ; .+)?$", line) for line in lines)
    wanted = _required([*DEPENDENCIES, *chain(*EXTRAS.values())])
    assert wanted <= {line.split("==")[0].lower() for line in lines}


def test_the_quickstart_installs_the_same_versions_and_no_references() -> None:
    lines = _pins("requirements-run.txt")
    ours, all_pins = ({line.split(" ")[0] for line in each} for each in (lines, _pins("requirements.txt")))
    assert ours <= all_pins
    pinned = {line.split("==")[0].lower() for line in lines}
    assert _required([*DEPENDENCIES, *EXTRAS["plot"]]) <= pinned
    others = _required(entry for name, entries in EXTRAS.items() if name != "plot" for entry in entries)
    assert others & pinned <= {"fsspec", "setuptools"}  # torch needs them
