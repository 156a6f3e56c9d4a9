"""Rehearse a release: build it, check what was built, and install and run it as users will.

    python .ci/release.py

1. The version and the date are the same everywhere, and the changelog has its form.
2. The source distribution has the repository's sources, and the wheel that is built from it has the same files as one
   that is built from the repository. twine checks the metadata and the README.
3. In an empty environment for each Python, with the oldest dependencies that pyproject.toml promises and with the
   newest: install the wheel, convert, load, train on one device and on two ranks, run the quickstart and the README's
   example on a few images, and predict. Once per Python: install the source distribution, which compiles the library,
   convert, load and train.

Ends with status 0 if everything passed, 1 if something failed, and 2 if a Python could not be had, so that a row was
not tested. uv finds the Pythons on the PATH, or fetches them. Environments are deleted; what uv downloads stays in its
cache (`uv cache clean`).

It has been run on Linux x86_64. A wheel's oldest glibc is that of its name, manylinux_2_NN: of the build machine's
libjpeg-turbo, libm. `.ci/wheels` builds and tries the wheels of all platforms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import build_wheel
import release_checks
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = build_wheel.ROOT
PROGRAM = ROOT / "tests" / "support" / "wheel_program.py"
PYTHONS = ("3.11", "3.12", "3.13")
EXTRA = "plot"  # as in `make quickstart`
ROW = "{:<8}{:<14}{:<10}{:<8}{:>7}  {}"
FILES = {"model.safetensors", "recipe.yaml", "history.json", "curves.png", "ledger.json", "ledger.png"}
"""What the quickstart writes."""
BARE = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
}


class FailedError(Exception):
    """A step failed; the message is its reason in one line, and its output follows."""


class NoPythonError(Exception):
    """A Python could not be had."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="drivetrain-release-") as temporary:
        scratch = Path(temporary)
        tree = copy_tree(scratch / "tree")
        problems = [*release_checks.check_versions(tree)]
        problems += release_checks.check_changelog((tree / "CHANGELOG.md").read_text())
        sdist = build_wheel.package("sdist", tree, scratch / "sdist")
        made = build_wheel.build(scratch / "wheel", tree)
        problems += release_checks.check_sdist(sdist, tree)
        problems += release_checks.check_wheel(made, build_wheel.package("wheel", tree, scratch / "direct"))
        try:
            call(
                uv(),
                "tool",
                "run",
                "twine",
                "check",
                "--strict",
                sdist,
                made,
                cwd=scratch,
                title="twine check",
            )
        except FailedError as error:
            problems.append(str(error))
        print(f"{made.name}, {sdist.name}: {'built and checked' if not problems else 'built'}")
        print("\n".join(problems), end="\n" if problems else "", flush=True)
        if not release_checks.has_license(tree):
            print("Note: the repository has no license file. Without one, nobody may use what is published.")
        results = list(matrix(made, sdist, scratch))
    if problems or "failed" in results:
        return 1
    return 2 if "not tested" in results else 0


def matrix(made: Path, sdist: Path, scratch: Path) -> Iterator[str]:
    """Test each combination, print it as a row of a table, and yield its result; print outputs of failures below."""
    print(ROW.format("Python", "dependencies", "torch", "from", "seconds", "result"), flush=True)
    rows = [*product(PYTHONS, ("oldest", "newest"), (made,)), *product(PYTHONS, ("newest",), (sdist,))]
    outputs = []
    for python, age, archive in rows:
        kind = "wheel" if archive is made else "sdist"
        versions: dict[str, str] = {}
        began, result, reason = time.monotonic(), "passed", ""
        with tempfile.TemporaryDirectory(prefix="environment-", dir=scratch) as folder:
            try:
                check_environment(Path(folder), python, age, archive, versions, quickstart=kind == "wheel")
            except NoPythonError as error:
                result, reason = "not tested", f": {error}"
            except FailedError as error:
                first, _, output = str(error).partition("\n")
                result, reason = "failed", f": {first}"
                outputs.append(f"\nPython {python}, {age}, {kind}:\n{output}")
        seconds = f"{time.monotonic() - began:.0f}"
        print(ROW.format(python, age, versions.get("torch", "-"), kind, seconds, result + reason), flush=True)
        yield result
    print("".join(outputs), end="")


def check_environment(
    folder: Path, python: str, age: str, archive: Path, versions: dict[str, str], *, quickstart: bool
) -> None:
    """Install the archive in an empty environment, fill in `versions` of what is there, and run it."""
    environment, work = folder / "environment", folder / "work"
    interpreter = environment / "bin" / "python"
    work.mkdir()
    try:
        call(uv(), "venv", "--python", python, environment, cwd=work, title="uv venv")
    except FailedError as error:
        raise NoPythonError(f"no Python {python} on the PATH, and uv cannot fetch it") from error
    install = [f"drivetrain[{EXTRA}] @ {archive.as_uri()}"]
    if archive.suffix == ".whl":  # nothing is compiled, as for users without a compiler
        install += ["--only-binary", ":all:"]
    if age == "oldest":  # of direct requirements, which are those of the command line
        install += ["--resolution", "lowest-direct", *map(str, requirements(archive))]
    call(uv(), "pip", "install", "--python", interpreter, *install, cwd=work, title="uv pip install")
    listed = call(uv(), "pip", "list", "--format", "json", "--python", interpreter, cwd=work, title="uv pip list")
    versions |= {package["name"]: package["version"] for package in json.loads(listed)}
    if age == "oldest":
        check_oldest(archive, versions)
    extras = ("quickstart",) if quickstart else ()
    printed = call(interpreter, PROGRAM, work, *extras, cwd=work, title="the smoke run")
    check_run(json.loads(printed.splitlines()[-1]), environment, archive, quickstart)
    if quickstart:
        check_example(work, interpreter)


def check_example(work: Path, interpreter: Path) -> None:
    """Run the README's example, the third command after that which creates the environment and `pip install`. Its data
    are the few images of the smoke run, because CIFAR-10 may not be at hand."""
    text = release_checks.example((ROOT / "README.md").read_text())
    data = '"cifar10:train", "cifar10:test"'
    if data not in text:
        raise FailedError(f"the README's example no longer loads {data}\n{text}")
    small = text.replace(data, '"small.beton", "small.beton"').replace("batch_size=500", "batch_size=40")
    (work / "example.py").write_text(f"{small}print(result.history.epochs[-1].val_loss)\n")
    printed = call(interpreter, "example.py", cwd=work, title="the README's example")
    if "why here" not in printed:
        raise FailedError(f"the README's example does not print its plan\n{printed}")


def requirements(archive: Path) -> list[Requirement]:
    """Return what a wheel requires, with the extra of the quickstart."""
    (text,) = (data for name, data in release_checks.contents(archive).items() if name.endswith("/METADATA"))
    required = Metadata.from_email(text, validate=False).requires_dist or []
    chosen = [one for one in required if one.marker is None or one.marker.evaluate({"extra": EXTRA})]
    for one in chosen:
        one.marker = None
    return chosen


def check_oldest(archive: Path, versions: dict[str, str]) -> None:
    """Check that the lower bounds were installed: uv takes a newer version where the oldest has no wheel."""
    for one in requirements(archive):
        (bound,) = (part.version for part in one.specifier if part.operator == ">=")
        if Version(bound) != Version(versions[one.name]):
            raise FailedError(
                f"pyproject.toml promises {one.name} {bound}; the oldest with a wheel is {versions[one.name]}"
            )


def check_run(found: dict[str, Any], environment: Path, archive: Path, quickstart: bool) -> None:
    """Check what the smoke run reports: that it ran the installed package, and which libraries that used."""
    version = release_checks.project(ROOT)["version"]
    libraries = [Path(file) for file in found["libraries"]]
    expectations = {
        "another Drivetrain was imported": Path(found["drivetrain"]).is_relative_to(environment),
        f"it imports {found['modules']}": not found["modules"],
    }
    if archive.suffix == ".whl":
        expectations |= {
            "the libjpeg-turbo of the wheel is not in use": any(
                file.parent.name == "drivetrain.libs" for file in libraries
            ),
            "a library of the system is in use": all(file.is_relative_to(environment) for file in libraries),
        }
    if quickstart:
        expectations |= {
            f"--version prints {found['version']!r}": found["version"] == f"drivetrain {version}",
            f"the quickstart wrote only {found['files']}": set(found["files"]) >= FILES,
            "there is no prediction": bool(found["prediction"]),
            "two ranks and one device train to other losses": max(found["losses"]) - min(found["losses"]) < 1e-4,
        }
    if failed := [reason for reason, holds in expectations.items() if not holds]:
        raise FailedError(f"{'; '.join(failed)}\n{json.dumps(found, indent=1)}\n")


def copy_tree(folder: Path, root: Path = ROOT) -> Path:
    """Copy what git would give to a new clone after a commit of everything, and return the folder."""
    listing = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    for name in call(*listing, cwd=root, title="git ls-files").splitlines():
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((root / name).read_bytes())
    return folder


def uv() -> Path:
    return build_wheel.BIN / "uv"


def call(*command: str | Path, cwd: Path, title: str) -> str:
    """Run a command in a folder outside the repository, whose settings it must not read; return its output."""
    try:
        done = subprocess.run(command, cwd=cwd, env=BARE, capture_output=True, text=True, timeout=1200, check=False)
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"{title} took more than {error.timeout:.0f} s\n") from error
    if done.returncode:
        raise FailedError(f"{title} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
