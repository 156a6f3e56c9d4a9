"""What `.ci/release.py` checks without installing anything. Each check returns sentences, one per problem."""

from __future__ import annotations

import re
import runpy
import tarfile
import tomllib
import zipfile
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

CATEGORIES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
"""The sections of a release in the changelog (keepachangelog.com, 1.1.0)."""
RELEASE = re.compile(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})")
LICENSES = ("LICEN[CS]E*", "COPYING*", "NOTICE*")
GENERATED = ("PKG-INFO", "setup.cfg", "drivetrain.egg-info/")
"""What setuptools writes into a source distribution."""
REPAIRED = ("drivetrain.libs/", "drivetrain/loaders/native/libjpeg-turbo.txt")
"""What `.ci/build_wheel.py` adds to a wheel: libjpeg-turbo and its license."""
RECORDS = ("/RECORD", "/WHEEL", "/sboms/auditwheel.cdx.json")
"""What a repaired wheel's metadata has otherwise than the first wheel's, or in addition."""


def releases(changelog: str) -> list[tuple[str, str]]:
    """Return version and date of the releases, in the order of the text."""
    return [
        (match[1], match[2])
        for line in changelog.splitlines()
        if line.startswith("## ") and (match := RELEASE.fullmatch(line[3:]))
    ]


def check_changelog(changelog: str) -> list[str]:
    """Check the headings: Unreleased, then releases from new to old, each with categories that have content."""
    lines = changelog.splitlines()
    problems = [] if lines[:1] == ["# Changelog"] else ["CHANGELOG.md must begin with '# Changelog'."]
    headings = [line[3:] for line in lines if line.startswith("## ")]
    if headings[:1] != ["[Unreleased]"]:
        problems.append("The first section of CHANGELOG.md must be '## [Unreleased]'.")
    wrong = [heading for heading in headings[1:] if not RELEASE.fullmatch(heading)]
    problems += [f"CHANGELOG.md: write '## {heading}' as '## [1.2.3] - 2026-01-31'." for heading in wrong]
    dated = [(_number(version), day) for version, day in releases(changelog) if _is_date(day)]
    if len(dated) < len(releases(changelog)):
        problems.append("CHANGELOG.md: a release has a date that does not exist.")
    for (newer, later), (older, earlier) in pairwise(dated):
        if newer <= older or later < earlier:
            problems.append("CHANGELOG.md must list its releases from new to old.")
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        problems += _check_section(section)
    return problems


def _check_section(section: str) -> list[str]:
    title, *parts = re.split(r"^### ", section, flags=re.MULTILINE)
    name, _, stray = title.partition("\n")
    problems = []
    if "\n- " in f"\n{stray}" or (not parts and name != "[Unreleased]"):
        problems.append(f"CHANGELOG.md, {name}: entries belong under one of {', '.join(CATEGORIES)}.")
    names = [part.partition("\n")[0] for part in parts]
    problems += [
        f"CHANGELOG.md, {name}: '### {other}' is none of {', '.join(CATEGORIES)}."
        for other in names
        if other not in CATEGORIES
    ]
    if len(set(names)) < len(names):
        problems.append(f"CHANGELOG.md, {name}: a category occurs twice.")
    empty = [part.partition("\n")[0] for part in parts if "\n- " not in part]
    return problems + [f"CHANGELOG.md, {name}: '### {category}' is empty." for category in empty]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def check_versions(root: Path) -> list[str]:
    """Check that version and date are the same wherever they are written."""
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    newest = releases((root / "CHANGELOG.md").read_text())[:1] or [("none", "none")]
    versions = {
        "pyproject.toml": project(root)["version"],
        "common/version.py": runpy.run_path(str(root / "common/version.py"))["__version__"],
        "CHANGELOG.md": newest[0][0],
        "CITATION.cff": str(citation.get("version", "none")),
    }
    dates = {"CHANGELOG.md": newest[0][1], "CITATION.cff": str(citation.get("date-released", "none"))}
    return [
        f"The {name} differs: " + ", ".join(f"{file} has {value}" for file, value in places.items()) + "."
        for name, places in {"version": versions, "date of the release": dates}.items()
        if len(set(places.values())) > 1
    ]


def project(root: Path) -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return table


def sources(root: Path) -> set[str]:
    """Return the files of a clean tree that its source distribution must have."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = [root.joinpath(*name.split(".")[1:]) for name in setuptools["packages"]]
    files = [root / name for name in ("README.md", "pyproject.toml", "py.typed")]
    files += [file for room in rooms for file in room.glob("*.py")]
    files += [file for file in root.glob("pipeline/apps/projects/[!_]*/*") if file.is_file()]
    files += [file for kind in ("*.c", "*.h") for file in root.joinpath("loaders", "native").glob(kind)]
    files += [file for pattern in LICENSES for file in root.glob(pattern)]
    return {file.relative_to(root).as_posix() for file in files}


def check_sdist(archive: Path, root: Path) -> list[str]:
    """Check that a source distribution has the sources of the clean tree that it was built from, and no other files."""
    with tarfile.open(archive) as tar:
        contents = {
            member.name.partition("/")[2]: tar.extractfile(member).read()  # type: ignore[union-attr]
            for member in tar.getmembers()
            if member.isfile()
        }
    problems = [f"The source distribution lacks {name}." for name in sorted(sources(root) - set(contents))]
    for name in sorted(name for name in contents if not name.startswith(GENERATED)):
        file = root / name
        if not file.is_file():
            problems.append(f"The source distribution has {name}, which is not in the repository.")
        elif file.read_bytes() != contents[name]:
            problems.append(f"{name} of the source distribution differs from the repository's.")
    return problems


def check_wheel(wheel: Path, direct: Path) -> list[str]:
    """Compare the wheel that was built from the source distribution with one that was built from the tree.

    The compiled library contains paths of its build, so only its presence is compared.
    """
    made, expected = contents(wheel), contents(direct)
    problems = [f"The wheel lacks {name}." for name in sorted(set(expected) - set(made))]
    for name in sorted(set(made) - set(expected)):
        if not name.startswith(REPAIRED) and not name.endswith(RECORDS):
            problems.append(f"The wheel has {name}, which a build from the repository does not have.")
    for name in sorted(set(made) & set(expected)):
        if made[name] != expected[name] and not name.endswith((*RECORDS, ".so")):
            problems.append(f"{name} of the wheel differs from a build from the repository.")
    if REPAIRED[1] not in made:
        problems.append("The wheel lacks the license of libjpeg-turbo, which it contains.")
    return problems


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def has_license(root: Path) -> bool:
    """Whether the repository has a license of its own."""
    return any(file for pattern in LICENSES for file in root.glob(pattern))


def example(readme: str) -> str:
    """Return the README's first Python block: what a user runs after installing."""
    return readme.partition("```python\n")[2].partition("```")[0]
