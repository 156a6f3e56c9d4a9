"""Install a GPU kit on a machine without a network, from parts that may arrive over several calls.

    python3 install.py add     [--store FOLDER]        check the parts next to this file, and keep them in the store
    python3 install.py install [--store FOLDER]        add; once all parts are there, unpack and install them
    python3 install.py run     [--store FOLDER] ARGS   install; then run.py with ARGS (--stage tests --seconds 480)

`make gpu-kit` writes the kit; see docs/gpu.md. This file uses only the standard library. The machine's Python
provides torch and most packages; pip installs those of the kit into a folder of the store, and nowhere else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MANIFEST = "kit.json"
DEFAULT_STORE = Path.home() / "drivetrain-gpu"
DONE = "installed.json"


class KitError(Exception):
    """The kit cannot be installed; the message names the part or file, and the remedy."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the kit's table of parts: `{"id", "revision", "python", "parts": [{"name", "bytes", "sha256"}]}`.

    Raises:
        KitError: if it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        parts = [(str(part["name"]), int(part["bytes"]), str(part["sha256"])) for part in manifest["parts"]]
        complete = bool(parts) and all(manifest[key] for key in ("id", "python"))
    except OSError as error:
        raise KitError(f"{path} cannot be read: {error}. Every call needs {MANIFEST} next to install.py.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise KitError(f"{path} is damaged ({error}). Copy it from the kit again.") from error
    if not complete:
        raise KitError(f"{path} is damaged: it lists no parts. Copy it from the kit again.")
    return dict(manifest)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()


def check_part(path: Path, part: dict[str, Any]) -> None:
    """Compare a part with the manifest.

    Raises:
        KitError: if its size or checksum differs.
    """
    size = path.stat().st_size
    if size != part["bytes"]:
        raise KitError(
            f"{path} has {size:,} bytes, expected {part['bytes']:,}: it was truncated, or belongs to another kit. "
            f"Copy {part['name']} again."
        )
    if (actual := digest(path)) != part["sha256"]:
        raise KitError(
            f"{path} is damaged: its SHA-256 is {actual}, expected {part['sha256']}. Copy {part['name']} again."
        )


def add(source: Path, store: Path) -> list[str]:
    """Check each part in `source`, keep it in `store`, and return the names of those that are still missing.

    Raises:
        KitError: if a part is damaged, or the store holds parts of another kit.
    """
    manifest, parts = read_manifest(source), store / "parts"
    if (parts / MANIFEST).exists() and (other := read_manifest(parts)["id"]) != manifest["id"]:
        raise KitError(
            f"{store} holds parts of another kit ({other}; this one is {manifest['id']}). Delete that folder, or "
            f"pass another with --store."
        )
    parts.mkdir(parents=True, exist_ok=True)
    _copy(source / MANIFEST, parts / MANIFEST)
    for part in manifest["parts"]:
        arrived, kept = source / part["name"], parts / part["name"]
        if arrived.exists() and not kept.exists():
            check_part(arrived, part)
            _copy(arrived, kept)
    return [part["name"] for part in manifest["parts"] if not (parts / part["name"]).exists()]


def assemble(store: Path) -> Path:
    """Check all parts again, unpack them into `store / "kit"`, and return that folder.

    Raises:
        KitError: naming the missing or damaged parts.
    """
    parts, target = store / "parts", store / "kit"
    manifest = read_manifest(parts)
    missing = [part["name"] for part in manifest["parts"] if not (parts / part["name"]).exists()]
    if missing:
        raise KitError(
            f"{len(missing)} of {len(manifest['parts'])} parts are missing in {parts}: {', '.join(missing)}. Put them "
            f"next to install.py and run: python3 install.py add."
        )
    if target.exists():
        return target
    for part in manifest["parts"]:
        check_part(parts / part["name"], part)
    fresh = store / "kit.unpacking"
    shutil.rmtree(fresh, ignore_errors=True)  # left by a killed call
    for part in manifest["parts"]:
        with tarfile.open(parts / part["name"]) as tar:
            tar.extractall(fresh, filter="data")
    fresh.replace(target)
    return target


def install(store: Path) -> Path:
    """Install the kit's wheels into `store / "site"`, and its data into `store / "data"`; return `store / "kit"`.

    Do nothing if that is done already.

    Raises:
        KitError: for missing or damaged parts, a Python for which the wheels are not built, or a failure of pip.
    """
    kit = assemble(store)
    manifest = read_manifest(store / "parts")
    if (store / DONE).exists():
        return kit
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if here != manifest["python"] or platform.machine() != "x86_64":
        raise KitError(
            f"The kit's wheels are for Python {manifest['python']} on x86_64; this is Python {here} on "
            f"{platform.machine()}. Run install.py with python{manifest['python']}, or build a kit for this one: "
            f"make gpu-kit GPU_PYTHON=python{here}."
        )
    site, wheels = store / "site", sorted(map(str, (kit / "wheels").glob("*.whl")))
    shutil.rmtree(site, ignore_errors=True)  # left by a killed call
    _run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
         "--no-cache-dir", "--disable-pip-version-check", "--target", str(site), *wheels],
        "pip cannot install the kit's wheels",
    )  # fmt: skip
    if (kit / "cifar10").exists():
        program = (
            "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import cifar10_pack;"
            "cifar10_pack.unpack(Path(sys.argv[2]), Path(sys.argv[3]))"
        )
        folders = [kit / "source" / ".ci" / "gpu", kit / "cifar10", store / "data" / "cifar10"]
        command = [sys.executable, "-c", program, *map(str, folders)]
        _run(command, "CIFAR-10 cannot be unpacked", environment(store))
    check = (
        "import json, torch, drivetrain, drivetrain.loaders.native.library as native; native.library();"
        "print(json.dumps([drivetrain.__version__, torch.__version__, torch.cuda.is_available()]))"
    )
    line = _run([sys.executable, "-c", check], "The installed packages do not work", environment(store))
    drivetrain, torch, cuda = json.loads(line.splitlines()[-1])
    text = json.dumps({"drivetrain": drivetrain, "torch": torch, "cuda": cuda, "id": manifest["id"]})
    (store / f"{DONE}.new").write_text(text)
    (store / f"{DONE}.new").replace(store / DONE)
    return kit


def environment(store: Path) -> dict[str, str]:
    """Return the environment in which the kit's packages and data are used."""
    # Only this folder precedes the machine's packages: torch and the rest stay the machine's.
    added = {"PYTHONPATH": str(store / "site"), "DRIVETRAIN_DATA": str(store / "data")}
    if (store / "parts" / MANIFEST).exists():
        added["DRIVETRAIN_REVISION"] = str(read_manifest(store / "parts").get("revision"))
    return {**os.environ, **added}


def _copy(source: Path, target: Path) -> None:
    """Copy a file atomically."""
    fresh = target.with_name(f"{target.name}.new")
    shutil.copyfile(source, fresh)
    fresh.replace(target)


def _run(command: list[str], failure: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise KitError(f"{failure} (exit {done.returncode}):\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Run a command of this script, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("add", "install", "run"))
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    store = options.store.resolve()
    try:
        missing = add(HERE, store)
        total = len(read_manifest(HERE)["parts"])
        print(f"{total - len(missing)} of {total} parts are in {store}.", flush=True)
        if options.command == "add":
            if missing:
                print(f"Still missing: {', '.join(missing)}.")
            return 0
        kit = install(store)
        print(f"Installed: {(store / DONE).read_text()}", flush=True)
    except KitError as error:
        print(f"KitError: {error}", file=sys.stderr)
        return 1
    if options.command == "install":
        return 0
    script = [sys.executable, str(kit / "source" / ".ci" / "gpu" / "run.py"), "--state", str(store / "state")]
    photos = ["--photos", str(kit / "photos")] if (kit / "photos").exists() else []
    return subprocess.run([*script, *photos, *rest], env=environment(store), cwd=kit / "source", check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
