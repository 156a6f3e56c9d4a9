"""The parts of `make release-check` that need no network and install nothing."""

import shutil
from pathlib import Path

import pytest
from places import ROOT, load_script

checks = load_script("release_checks")

NEW = "## [0.2.0] - 2027-01-31\n\n### Added\n- A.\n\n### Fixed\n- B.\n\n"
OLD = "## [0.1.0] - 2026-11-23\n\n### Added\n#### Data\n- C.\n"
GOOD = f"# Changelog\n\nOf what changes.\n\n## [Unreleased]\n\n{NEW}{OLD}"
PLACES = ("pyproject.toml", "common/version.py", "CHANGELOG.md", "CITATION.cff")


def copy_places(folder: Path) -> None:
    for name in PLACES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def test_the_version_and_the_date_are_the_same_everywhere() -> None:
    assert checks.check_versions(ROOT) == []


@pytest.mark.parametrize("place", PLACES)
def test_another_version_in_one_place_is_found(place: str, tmp_path: Path) -> None:
    copy_places(tmp_path)
    version = checks.project(ROOT)["version"]
    text = (tmp_path / place).read_text()
    assert version in text
    (tmp_path / place).write_text(text.replace(version, "7.8.9", 1))
    (problem,) = checks.check_versions(tmp_path)
    assert problem.startswith("The version differs: ")
    assert f"{place} has 7.8.9" in problem


def test_another_date_is_found(tmp_path: Path) -> None:
    copy_places(tmp_path)
    ((_, day), *_) = checks.releases((ROOT / "CHANGELOG.md").read_text())
    (tmp_path / "CITATION.cff").write_text((ROOT / "CITATION.cff").read_text().replace(day, "2001-02-03"))
    assert checks.check_versions(tmp_path) == [
        f"The date of the release differs: CHANGELOG.md has {day}, CITATION.cff has 2001-02-03."
    ]


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    assert checks.check_changelog((ROOT / "CHANGELOG.md").read_text()) == []


def test_a_changelog_with_several_releases() -> None:
    assert checks.check_changelog(GOOD) == []
    assert checks.releases(GOOD) == [("0.2.0", "2027-01-31"), ("0.1.0", "2026-11-23")]
    assert checks.check_changelog(GOOD.replace("[Unreleased]\n", "[Unreleased]\n\n### Changed\n- D.\n")) == []


WRONG = {
    "no title": ("# Changelog", "# Changes", "must begin with"),
    "nothing unreleased": ("## [Unreleased]\n\n", "", "The first section"),
    "no date": ("[0.2.0] - 2027-01-31", "[0.2.0]", "write '## [0.2.0]' as"),
    "no brackets": ("[0.2.0] -", "0.2.0 -", "write '## 0.2.0 - 2027-01-31' as"),
    "a date that does not exist": ("2027-01-31", "2027-02-31", "does not exist"),
    "old before new": ("[0.2.0]", "[0.0.9]", "from new to old"),
    "dates that go up": ("2027-01-31", "2026-01-31", "from new to old"),
    "another category": ("### Fixed", "### Improved", "'### Improved' is none of"),
    "a category twice": ("### Fixed", "### Added", "occurs twice"),
    "an empty category": ("- B.\n", "", "'### Fixed' is empty"),
    "entries without a category": ("### Fixed\n", "## [0.1.5] - 2027-01-30\n\n", "entries belong under"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_changelog_of_another_form(case: str) -> None:
    before, after, reason = WRONG[case]
    assert before in GOOD
    problems = checks.check_changelog(GOOD.replace(before, after, 1))
    assert [problem for problem in problems if reason in problem], problems


wheels = load_script("wheels")


def test_missing_programs_are_named_by_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apt-get", "dpkg"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(wheels.MissingError, match="apt-get install gcc-aarch64-linux-gnu qemu-user-static"):
        wheels.prepare_aarch64(tmp_path / "root")
    assert not (tmp_path / "apt").exists()


def test_the_tests_of_a_trial_exist() -> None:
    assert all((wheels.ROOT / name).is_file() for name in wheels.PIXELS)


def test_the_example_that_a_release_runs_is_the_readmes() -> None:
    text = checks.example((ROOT / "README.md").read_text())
    assert '"cifar10:train", "cifar10:test"' in text  # replaced by a few images there
    assert "batch_size=500" in text
    assert "print(pipeline.plan())" in text
