"""`drivetrain advise`: its table, its JSON and its errors."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import call
from loader_pictures import jpeg_folder

OPTIONS = ["--image-size", "32", "--seconds", "0.8", "--workers", "1", "--quiet"]


def test_advise_prints_a_table_or_json(tmp_path: Path) -> None:
    folder = str(jpeg_folder(tmp_path / "photos"))
    shown = call("advise", folder, *OPTIONS, "--wanted", "1", "--scratch", str(tmp_path))
    assert (shown.code, shown.err) == (0, "")
    assert "18 images, loaded as random crops of 32 × 32 pixels" in " ".join(shown.out.split())
    assert "'as stored' loses the least quality of the formats that reach 1.0 images/s" in shown.out
    found = json.loads(call("advise", folder, *OPTIONS, "--samples", "5", "--json").out)
    assert (found["images"], found["sampled"], found["image_size"]) == (18, 5, [32, 32])
    assert [name for name in found["rows"][0] if name.endswith("workers")] == ["all_workers"]
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_advise_reports_errors_as_one_line(tmp_path: Path) -> None:
    assert "contains no images" in call("advise", str(tmp_path)).line
    jpeg_folder(tmp_path / "photos")
    assert "seconds=-1" in call("advise", str(tmp_path), "--seconds", "-1").line
    assert "--scratch" in call("advise", str(tmp_path), "--scratch", str(tmp_path / "none")).line
