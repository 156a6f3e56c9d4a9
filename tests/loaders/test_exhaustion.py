"""If the system refuses memory, threads or processes during loading, a DataError names the remedy."""

import errno
import gc
import resource
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.common import exhaustion as exhaustion_module
from drivetrain.common.errors import DataError
from drivetrain.common.exhaustion import exhaustion, is_exhaustion, more_descriptors
from drivetrain.loaders import TorchLoader, convert, open_beton
from drivetrain.loaders.decode.preprocess import Evaluation
from drivetrain.loaders.native import jpegs
from drivetrain.loaders.options import LoaderOptions
from loader_pictures import jpeg_beton, jpeg_bytes, make, picture, run_python
from PIL import Image
from torch.utils.data import Dataset

STARVED = r"""
import multiprocessing.popen_spawn_posix, multiprocessing.queues, os, resource, sys
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, verify

path, MB = sys.argv[1], 1 << 20
hard = resource.getrlimit(resource.RLIMIT_AS)[1]

def memory(extra):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (hard if extra is None else used + extra, hard))

def starved(name, function):
    try:
        function()
    except DataError as error:
        print(name, type(error.__cause__).__name__, error, sep="|")
    except BaseException as error:
        print(name, "UNTYPED", type(error).__name__, error, sep="|")
    else:
        print(name, "NO ERROR", sep="|")

def make(kind, side, batch, workers):
    return kind(path, batch_size=batch, image_size=side, workers=workers, batches_ahead=1)

def usable(loader):
    assert sum(len(labels) for _, labels in loader) == 18
    loader.close()

small, large = make(FFCVLoader, 32, 3, 2), make(FFCVLoader, 1024, 18, 2)
wide = make(TorchLoader, 2048, 18, 0)
usable(small)                       # everything is compiled and imported
next(iter(make(TorchLoader, 32, 3, 0)))
verify(path, workers=2)
memory(100 * MB)                    # a batch takes 226
starved("batch", lambda: list(large))
starved("set_image_size", lambda: large.set_image_size(12_000_000))
starved("collate", lambda: list(wide))
memory(None)
usable(small)
usable(large)

from multiprocessing import resource_tracker
resource_tracker.ensure_running()
if os.geteuid() == 0:               # the number of root's threads is not limited; nobody reads no more modules
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
starved("threads", lambda: list(small))
starved("processes", lambda: list(make(TorchLoader, 32, 3, 1)))
starved("verify", lambda: verify(path, workers=2))
"""


@pytest.fixture
def photos() -> Iterator[Path]:
    """In a folder that another user can read."""
    with tempfile.TemporaryDirectory() as folder:
        path = jpeg_beton(Path(folder) / "photos.beton")
        for one, mode in ((path, 0o644), (Path(f"{path}.json"), 0o644), (Path(folder), 0o755)):
            one.chmod(mode)
        yield path


@pytest.mark.slow
@pytest.mark.process
def test_what_the_system_refuses_is_a_data_error(photos: Path) -> None:
    run = run_python(STARVED, photos, timeout=250)
    assert run.returncode == 0, (run.returncode, run.stdout, run.stderr)
    assert "UNTYPED" not in run.stdout, run.stdout
    found = {line.split("|")[0]: line.split("|")[1:] for line in run.stdout.splitlines()}
    assert set(found) == {"batch", "set_image_size", "collate", "threads", "processes", "verify"}, run.stdout
    assert "226,492,416 bytes, 18 images of 1024 × 1024 pixels" in found["batch"][1]
    assert found["threads"][0] == "RuntimeError"
    assert "can't start new thread" in found["threads"][1]
    assert "workers=2" in found["threads"][1]
    assert "workers=1" in found["processes"][1]
    assert "Required: 2 threads. Use fewer workers." in found["verify"][1]
    for name in ("batch", "threads", "processes"):
        assert found[name][1].endswith("Use a smaller batch_size or image_size, batches_ahead=1, or fewer workers.")


def test_which_errors_are_the_systems_refusals() -> None:
    refused = [
        MemoryError(),
        OSError(errno.EAGAIN, "x"),
        OSError(errno.EMFILE, "x"),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ]
    others = [
        RuntimeError("shapes differ"),
        ValueError("MemoryError"),
        OSError(errno.ENOENT, "x"),
        KeyError("x"),
    ]
    assert all(map(is_exhaustion, refused))
    assert not any(map(is_exhaustion, others))
    assert str(exhaustion(MemoryError(), "2 threads")).startswith(
        "The system has too little memory, or too few threads or processes, to load the data (MemoryError). Required"
    )


@pytest.mark.parametrize("words", ["a\nb", "", "…" * 1000])
def test_its_message_is_short(words: str) -> None:
    assert len(str(exhaustion(RuntimeError(words), "x"))) < 500


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENFILE, "x"),
        RuntimeError("unable to open shared memory object: Too many open files (24)"),
    ],
)
def test_too_many_open_files_are_named(error: Exception) -> None:
    assert is_exhaustion(error)
    message = str(exhaustion(error, "2 threads"))
    assert message.startswith("The system has too many open files to load the data")
    assert "ulimit -n" in message
    assert "memory, or" not in message


def test_a_garbage_collection_within_the_lock_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is put back when a data set is collected, wherever that happens."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    class Owner:
        def __init__(self) -> None:
            self.itself = self  # freed by the garbage collector only

    def collect() -> None:
        monkeypatch.setattr(exhaustion_module, "_free", lambda: 0)
        with more_descriptors(1) as keep:
            keep(Owner())
        with exhaustion_module._lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before


def test_the_limit_stays_raised_for_the_last_data_set_that_needs_it() -> None:
    """Also for one that has found enough, because another one had raised the limit before."""

    class Owner:
        pass

    def limit() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = before[0] - exhaustion_module._free() + 150
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
    try:
        first, second = Owner(), Owner()
        with more_descriptors(600) as keep:
            keep(first)
        raised = limit()
        with more_descriptors(300) as keep:
            keep(second)
        del first
        assert low < raised == limit()
        del second
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Pictures(Dataset[Any]):
    """Six pictures; reading the fourth raises what the system refuses."""

    def __init__(self, refusal: Exception) -> None:
        self.refusal = refusal

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise self.refusal
        return np.zeros((4, 4, 3), np.uint8), index


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("refusal", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
def test_conversion_does_not_blame_a_sample(refusal: Exception, on_error: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^The system has too .*Required: 2 threads"):
        convert(Pictures(refusal), tmp_path / "x.beton", on_error=on_error, workers=2)
    assert not any(tmp_path.iterdir())


def test_conversion_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    images = np.zeros((3, 4, 4, 3), np.uint8)
    with pytest.raises(DataError, match=r"can't start new thread.*Use fewer workers"):
        convert((images, np.arange(3)), tmp_path / "x.beton")
    assert not any(tmp_path.iterdir())


def test_a_jpeg_for_which_there_is_no_memory_is_not_damaged() -> None:
    """Else `verify` reports it, and `convert` compresses it again. All coefficients of this one would take 1.2 GB."""
    small, side = jpeg_bytes(picture(0, 64, 64), progressive=True, subsampling=2), 20_000
    at = small.index(b"\xff\xc2") + 5  # its height and width
    large = small[:at] + 2 * side.to_bytes(2, "big") + small[at + 4 :]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        with pytest.raises(MemoryError, match="no memory to decode a JPEG"):
            jpegs.decodes(large, side, side)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_picture_for_which_pillow_has_no_memory_is_not_damaged(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise MemoryError

    folder = photos.parent / "photos-images"
    beton, prepare = open_beton(photos), Evaluation(LoaderOptions(batch_size=1, image_size=16))
    monkeypatch.setattr(Image, "open", refused)
    for read in (lambda: beton.image(0), lambda: prepare(next(folder.glob("*/*.jpg")))):
        with pytest.raises(MemoryError):
            read()
    for source in (photos, folder):
        with make(TorchLoader, source) as loader, pytest.raises(DataError, match=r"^The system has too little memory"):
            next(iter(loader))
