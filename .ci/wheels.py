"""Build the wheel of each platform that this machine can build, try each, and put those that pass into `dist/`.

    python .ci/wheels.py

    Linux x86_64    built and tried here.
    Linux aarch64   built here by a cross-compiler, and tried on QEMU's emulation of the processor. The C library,
                    libjpeg-turbo and Python are Debian's for arm64, unpacked into a temporary folder.
    macOS           not built: it needs a Mac. The steps are printed.
    Alpine (musl)   not built: torch has no wheels for it.

A trial installs the wheel with the oldest dependencies that pyproject.toml promises, converts, loads and trains, and
runs the tests of `PIXELS`: the same pixels and checksums on every platform, bit for bit. The quickstart is left to
`.ci/release.py`, because its ledger takes too long under emulation.

Ends with status 0 if both wheels passed, 1 if one failed, and 2 if one could not be built or tried.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

import build_wheel
import release

ROOT = build_wheel.ROOT
PIXELS = ("tests/loaders/decode/test_same_pixels.py", "tests/loaders/native/test_crc32.py")
ROW = "{:<16}{:>7}  {}"
TOOLS = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "apt-get": "apt",
    "dpkg": "dpkg",
}
"""The programs that the aarch64 wheel needs, and Debian's packages of them."""
ARM64 = ("libjpeg62-turbo-dev", "libpython3.11-stdlib", "libstdc++6", "python3.11-minimal")
"""Debian 12's packages: the headers and libraries of the build, and what the trial runs on."""
MACOS = """needs a Mac, and has never been built. For each architecture it would be:
  brew install jpeg-turbo
  export CPATH="$(brew --prefix jpeg-turbo)/include" LIBRARY_PATH="$(brew --prefix jpeg-turbo)/lib"
  cp "$(brew --prefix jpeg-turbo)/LICENSE.md" loaders/native/libjpeg-turbo.txt
  python -m build --wheel && delocate-wheel --wheel-dir dist dist/drivetrain-*.whl"""


class MissingError(Exception):
    """A wheel cannot be built on this machine; the message is what it needs."""


def main() -> int:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        sys.exit("Run .ci/wheels on Linux x86_64, or `make release-check` for the wheel of another Linux machine.")
    results = []
    with tempfile.TemporaryDirectory(prefix="drivetrain-wheels-") as temporary:
        scratch = Path(temporary)
        tree = release.copy_tree(scratch / "tree")
        for machine in ("x86_64", "aarch64"):
            began, result, output = time.monotonic(), "passed", ""
            try:
                result += f": {build_and_try(machine, tree, scratch / machine)}"
            except MissingError as error:
                result = f"not tried: {error}"
            except release.FailedError as error:
                reason, _, output = str(error).partition("\n")
                result = f"failed: {reason}"
            print(ROW.format(f"Linux {machine}", f"{time.monotonic() - began:.0f} s", result), flush=True)
            print(output, end="")
            results.append(result.partition(":")[0])
    print(ROW.format("macOS", "", f"not tried: {MACOS}"))
    if "failed" in results:
        return 1
    return 2 if "not tried" in results else 0


def build_and_try(machine: str, tree: Path, scratch: Path) -> str:
    """Build the wheel of a tree for a machine, try it, move it into `dist/`, and return what it was tried on."""
    scratch.mkdir()
    native = machine == platform.machine()
    python, settings = (sys.executable, []) if native else prepare_aarch64(scratch / "root")
    release.call(
        "env", *settings, sys.executable, tree / ".ci" / "build_wheel.py", scratch / "wheel",
        cwd=tree, title="build_wheel.py",
    )  # fmt: skip
    (wheel,) = (scratch / "wheel").glob(f"drivetrain-*_{machine}.whl")
    versions: dict[str, str] = {}
    release.check_environment(scratch, python, "oldest", wheel, versions, quickstart=False)
    check_pixels(scratch / "environment" / "bin" / "python", tree)
    (ROOT / "dist").mkdir(exist_ok=True)
    for earlier in (ROOT / "dist").glob(f"drivetrain-*_{machine}.whl"):
        earlier.unlink()
    shutil.move(wheel, ROOT / "dist")
    return f"dist/{wheel.name}, with torch {versions['torch']}"


def prepare_aarch64(root: Path) -> tuple[str, list[str]]:
    """Unpack Debian's packages for arm64 into `root`; return its Python, and the build's environment variables.

    apt-get keeps its state in the temporary folder, too, so the packages of this machine remain as they are.
    """
    if missing := [package for tool, package in TOOLS.items() if not shutil.which(tool)]:
        raise MissingError(f"on Debian, run `apt-get install {' '.join(missing)}` as root")
    apt = root.parent / "apt"
    (apt / "state" / "lists" / "partial").mkdir(parents=True)
    (apt / "cache" / "archives" / "partial").mkdir(parents=True)
    (apt / "state" / "status").touch()
    options = ["APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Install-Recommends=false"]
    options += ["APT::Sandbox::User=root", "Debug::NoLocking=true", f"Dir::Cache={apt / 'cache'}"]
    options += [f"Dir::State={apt / 'state'}", f"Dir::State::status={apt / 'state' / 'status'}"]
    get = ("apt-get", "--yes", *(f"--option={option}" for option in options))
    try:
        release.call(*get, "update", cwd=apt, title="apt-get update")
        release.call(*get, "--download-only", "install", *ARM64, cwd=apt, title="apt-get install")
    except release.FailedError as error:
        raise MissingError(f"needs apt's list of Debian 12, for the packages {', '.join(ARM64)}\n{error}") from error
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        release.call("dpkg", "--extract", package, root, cwd=apt, title=f"dpkg --extract {package.name}")
    python = root / "usr" / "bin" / "python"
    # argv[0] remains this script's path: the interpreters that Python starts are emulated, too.
    python.write_text(f'#!/bin/sh\nexec qemu-aarch64-static -L {root} -0 "$0" {python}3.11 "$@"\n')
    python.chmod(0o755)
    compiler = f"aarch64-linux-gnu-gcc --sysroot={root}"
    return str(python), [
        f"CC={compiler}",
        f"LDSHARED={compiler} -shared",
        "_PYTHON_HOST_PLATFORM=linux-aarch64",  # the wheel's tag
        f"AUDITWHEEL_LD_LIBRARY_PATH={root / 'usr' / 'lib' / 'aarch64-linux-gnu'}",
    ]


def check_pixels(python: Path, tree: Path) -> None:
    """Run the tests of `PIXELS` with the Drivetrain that is installed in an environment."""
    tools = ("pytest", "pytest-timeout")
    release.call(release.uv(), "pip", "install", "--python", python, *tools, cwd=tree.parent, title="uv pip install")
    report = release.call(python, "-m", "pytest", "-p", "no:cacheprovider", *PIXELS, cwd=tree, title="pytest")
    if "skipped" in report:
        raise release.FailedError(f"tests were skipped\n{report}")


if __name__ == "__main__":
    sys.exit(main())
