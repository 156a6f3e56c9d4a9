"""Files at an address: the samples and order of the local file, each fetched once; and what a source can do wrong."""

import errno
import fcntl
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import nfs
import numpy as np
import pytest
import torch
from drivetrain import DataError
from drivetrain.common import terminal
from drivetrain.common.errors import BetonError
from drivetrain.common.storage import addresses as sources
from drivetrain.common.storage import cache
from drivetrain.common.storage.addresses import RemoteFile, stamp
from drivetrain.common.storage.cache import BLOCK, BLOCKS, FACTS, Mirror, Remote, local_copy, runs
from drivetrain.common.storage.files import LockError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, inspect, open_beton, verify
from drivetrain.loaders.beton import data_set
from hypothesis import given
from hypothesis import strategies as st
from range_server import RangeServer, serving

SAMPLES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 60 raw images of about 100 KB."""
    made = tmp_path_factory.mktemp("served")
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 180, 190, 3), dtype=np.uint8)
    convert((images, np.arange(SAMPLES) % 5), made / "train.beton", progress=False)
    return made


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Path:
    """A copy of the file, which a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "served")) / "train.beton"


@pytest.fixture
def server(served: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:  # noqa: ARG001
    """It serves that; the cache is empty."""
    monkeypatch.setattr(sources, "_PAUSE", 0.01)
    with serving(served.parent) as one:
        yield one


@pytest.fixture
def address(server: RangeServer) -> str:
    return server.address("train.beton")


def epochs(loader: Any, number: int = 2) -> list[torch.Tensor]:
    with loader:
        return [torch.cat([images.float().sum((1, 2, 3)) for images, _ in loader]) for _ in range(number)]


OPTIONS: dict[str, Any] = {"batch_size": 10, "image_size": 32, "workers": 2, "dtype": torch.uint8}
SMALL = OPTIONS | {"batch_size": 2, "batches_ahead": 1}


@pytest.fixture
def local(folder: Path) -> torch.Tensor:
    """What one epoch of the local file has."""
    return epochs(FFCVLoader(folder / "train.beton", **OPTIONS), 1)[0]


@pytest.mark.parametrize("order", ["random", "quasi_random"])
def test_the_samples_of_the_local_file_each_fetched_once(
    server: RangeServer, address: str, folder: Path, order: str
) -> None:
    local = epochs(FFCVLoader(folder / "train.beton", order=order, **OPTIONS))
    loader = FFCVLoader(address, order=order, **OPTIONS)
    size = len(loader.beton.files[0].data)
    tables = server.bytes
    assert tables < 8 * BLOCK < size / 8
    assert all(torch.equal(one, other) for one, other in zip(local, epochs(loader), strict=True))
    needed = int(loader.beton.sizes.sum())
    assert needed <= server.bytes <= 1.1 * needed + tables
    before = len(server.requests)
    again = epochs(FFCVLoader(address, order=order, **OPTIONS))  # the next job
    assert torch.equal(again[0], local[0])
    assert [size for _, _, size in server.requests[before:] if size > 0] == []


def test_the_first_batch_needs_little(server: RangeServer, address: str) -> None:
    with FFCVLoader(address, **SMALL) as loader:
        next(iter(loader))
        assert server.bytes < int(loader.beton.sizes.sum()) / 3


def test_torchs_loader_reads_it_too(address: str, folder: Path) -> None:
    options = OPTIONS | {"dtype": torch.float32, "train": False, "workers": 0}
    local = epochs(TorchLoader(folder / "train.beton", **options | {"workers": 0}), 1)
    assert torch.equal(epochs(TorchLoader(address, **options), 1)[0], local[0])
    assert pickle.loads(pickle.dumps(open_beton(address).file)).mirror.address == address


@pytest.mark.process
@pytest.mark.slow
def test_masks_and_boxes_come_with_their_images(server: RangeServer, tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (12, 40, 50, 3), dtype=np.uint8)
    samples = [(image, image[..., 0] % 5, [[1, 2, 30, 20 + n]]) for n, image in enumerate(images)]
    local = tmp_path / "served" / "masks.beton"
    convert(samples, local, fields={"boxes": "boxes"}, progress=False)
    options = {**OPTIONS, "batch_size": 12, "fields": ("boxes",)}
    with FFCVLoader(server.address("masks.beton"), **options) as far, FFCVLoader(local, **options) as near:
        (_, masks, boxes), (_, expected, known) = next(iter(far)), next(iter(near))
    assert torch.equal(masks, expected)
    assert all(torch.equal(one, other) for one, other in zip(boxes, known, strict=True))


@pytest.mark.slow
@pytest.mark.process
def test_worker_processes_share_the_copy(server: RangeServer, address: str, folder: Path) -> None:
    options = OPTIONS | {"dtype": torch.float32, "train": False}
    local = epochs(TorchLoader(folder / "train.beton", **options | {"workers": 0}), 1)
    loader = TorchLoader(address, **options)
    tables = server.bytes
    remote = epochs(loader, 1)
    assert torch.equal(local[0], remote[0])
    assert server.bytes - tables <= (folder / "train.beton").stat().st_size  # no block is fetched twice


def test_two_jobs_share_what_each_fetches(server: RangeServer, address: str, folder: Path) -> None:
    """Each of the loaders has a descriptor and locks of its own, like one of another process."""
    loaders = [FFCVLoader(address, **OPTIONS) for _ in range(2)]
    tables, server.delay = server.bytes, 0.02
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda loader: epochs(loader, 1)[0], loaders)
    assert torch.equal(first, second)
    assert server.bytes - tables <= (folder / "train.beton").stat().st_size


def test_a_loader_takes_the_options_of_its_address(address: str, tmp_path: Path) -> None:
    with FFCVLoader(address, cache=tmp_path / "own", cache_limit=1, **OPTIONS) as loader:
        assert loader.beton.files[0].path.is_relative_to(tmp_path / "own")
        kept = list(Path("/proc/self/fd").iterdir())
        assert sum(str(tmp_path / "own") in os.path.realpath(each) for each in kept) == 1
    for wrong in ({"cache": 5}, {"cache_limit": 0}, {"patience": -1}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            TorchLoader(address, **wrong, **OPTIONS)


def test_headers_that_are_configured_are_in_each_request(
    server: RangeServer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "Bearer key"
    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"Authorization": server.key}})
    assert open_beton(address).is_unchanged(0)


def test_an_outage_is_waited_for_and_reported(
    server: RangeServer, address: str, local: torch.Tensor, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(terminal, "_SILENT", 0.1)
    loader = FFCVLoader(address, **OPTIONS)
    server.fail = 10**6
    back = threading.Timer(0.6, lambda: setattr(server, "fail", 0))
    back.start()
    assert torch.equal(epochs(loader, 1)[0], local)
    back.join()
    lines = [line for line in capfd.readouterr().err.splitlines() if "does not answer, its requests" in line]
    assert 1 <= len(lines) < 8, lines
    assert "503" in lines[0]
    assert lines[0].endswith("s of at most 300 s)")


def test_two_versions_are_not_mixed(address: str, served: Path) -> None:
    """Also where no manifest could tell."""
    served.with_name("train.beton.json").unlink()
    with FFCVLoader(address, **SMALL) as loader:
        batches = iter(loader)
        next(batches)
        os.utime(served, (1, 1))
        with pytest.raises(DataError, match=r"train.beton was replaced while it was in use.*same command again"):
            list(batches)


def test_reading_without_a_loader(address: str, folder: Path) -> None:
    beton, local = open_beton(address), open_beton(folder / "train.beton")
    assert beton.stored(7) == local.stored(7)
    assert beton.manifest == local.manifest
    assert inspect(address).samples == SAMPLES
    assert verify(address, progress=False).sound


def test_requests_that_fail_or_break_off_are_repeated(server: RangeServer, address: str, local: Any) -> None:
    server.fail = 2
    loader = FFCVLoader(address, **OPTIONS)
    server.fail, server.cut = 3, 3
    assert torch.equal(epochs(loader, 1)[0], local)


def test_an_answer_that_breaks_off_is_no_refusal(server: RangeServer, address: str, served: Path) -> None:
    """As of a server that restarts: it is asked for as long as one that does not answer."""
    server.cut = sources.ATTEMPTS
    assert RemoteFile(address).read(0, 1000) == served.read_bytes()[:1000]
    assert len(server.requests) == sources.ATTEMPTS + 1


def test_a_source_that_fails_for_good(server: RangeServer, address: str) -> None:
    with FFCVLoader(address, patience=0.2, **OPTIONS) as loader:
        server.fail = 10**6
        with pytest.raises(DataError, match=r"train.beton cannot be read: \d+ requests failed in 0 s, .*503"):
            list(loader)
        server.fail = 0
        assert len(list(loader)) == SAMPLES // 10


def test_a_source_that_stalls(server: RangeServer, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = FFCVLoader(address, patience=0.3, **OPTIONS)
    monkeypatch.setattr(sources, "SECONDS", 0.2)
    server.delay = 1.0
    with loader, pytest.raises(DataError, match=r"2 requests failed.*Timeout"):
        list(loader)


def test_a_server_that_goes_away(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PAUSE", 0.01)
    with serving(folder) as server:
        copy = local_copy(server.address("train.beton"), Remote(tmp_path / "cache"))
        loader = FFCVLoader(copy, patience=0.2, **OPTIONS)
    with loader, pytest.raises(DataError, match="requests failed in 0 s"):
        list(loader)


def test_closing_does_not_wait_for_a_server_that_is_away(server: RangeServer, address: str) -> None:
    server.delay = 0.2
    with FFCVLoader(address, patience=60, **SMALL | {"batches_ahead": 20}) as loader:
        batches = iter(loader)
        next(batches)
        server.fail = 10**6
        while server.fail == 10**6:
            time.sleep(0.01)
        begin = time.monotonic()
        loader.close()
        assert time.monotonic() - begin < 30, "but does not wait for as long as the loader would"


@pytest.mark.process
def test_nor_does_the_end_of_the_process(server: RangeServer, address: str) -> None:
    program = textwrap.dedent("""
        import sys, threading, time
        from drivetrain.loaders import FFCVLoader
        loader = FFCVLoader(sys.argv[1], batch_size=2, image_size=32, patience=60)
        print("ready", flush=True)
        input()
        threading.Thread(target=next, args=(iter(loader),), daemon=True).start()
        input()
    """)
    command = [sys.executable, "-c", program, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        server.fail = 10**6
        process.stdin.write("\n")
        process.stdin.flush()
        while server.fail == 10**6:
            time.sleep(0.01)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(30) == 0, "it does not wait for as long as the loader would"


def test_changed_bytes_are_noticed_and_fetched_again(address: str, served: Path) -> None:
    """While the file is read; with the same size and, by a careless server, the same version."""
    loader = FFCVLoader(address, **OPTIONS)
    at, status, good = int(loader.beton.pointers[5]) + 100, served.stat(), served.read_bytes()

    def write(data: bytes) -> None:
        served.write_bytes(data)
        os.utime(served, ns=(status.st_atime_ns, status.st_mtime_ns))

    write(good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :])
    with loader:
        with pytest.raises(BetonError, match=r"sample 5: what http.*train.beton sends has another CRC-32"):
            list(loader)
        write(good)  # repaired: the wrong block does not stay
        assert len(list(loader)) == SAMPLES // 10


def test_another_version_is_another_copy(address: str, served: Path) -> None:
    first = local_copy(address)
    assert local_copy(address) == first
    os.utime(served, (1, 1))
    assert local_copy(address) != first


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("missing.beton", "missing.beton does not exist"),
        ("nowhere://bucket/train.beton", "nowhere://bucket/train.beton cannot be read: Protocol not known"),
    ],
)
def test_addresses_of_nothing(server: RangeServer, address: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_beton(address if "://" in address else server.address(address))


class Refused(OSError):
    """Its status is in the answer, as in errors of huggingface_hub, or its code, as in those of gcsfs."""

    def __init__(self, status: int, where: str) -> None:
        super().__init__(str(status))
        vars(self)[where] = SimpleNamespace(status_code=status) if where == "response" else status


@pytest.mark.parametrize("where", ["response", "code"])
@pytest.mark.parametrize(
    ("status", "requests", "words"),
    [(401, 5, "5 requests failed in 0 s, the last one with: Refused: 401"), (404, 1, "train.beton does not exist")],
)
def test_a_store_that_refuses_is_not_waited_for(
    status: int, requests: int, words: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def refuse(_: Any, path: str) -> None:
        seen.append(path)
        raise FileNotFoundError(path) from Refused(status, where)

    system = type("Refusing", (fsspec.AbstractFileSystem,), {"info": refuse})
    fsspec.register_implementation("refusing", system, clobber=True)
    monkeypatch.setattr(sources, "_PAUSE", 0.01)
    with pytest.raises(DataError, match=words):
        RemoteFile("refusing://data/train.beton", patience=1).facts()
    assert len(seen) == requests


class Numbered(Exception):
    """Its code is one of SFTP, as in errors of asyncssh, from which sshfs raises Python's."""

    def __init__(self, code: int) -> None:
        super().__init__("No such file")
        self.code = code


def test_a_code_of_sftp_is_no_status_of_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not exist is not waited for."""

    def missing(_: Any, path: str) -> None:
        raise FileNotFoundError(path) from Numbered(2)

    system = type("Numbering", (fsspec.AbstractFileSystem,), {"info": missing})
    fsspec.register_implementation("numbering", system, clobber=True)
    monkeypatch.setattr(sources, "_PAUSE", 0.01)
    with pytest.raises(DataError, match=r"train\.beton does not exist"):
        RemoteFile("numbering://data/train.beton", patience=0.2).facts()


def test_a_server_without_ranges_is_refused(server: RangeServer, address: str) -> None:
    server.ranges = False
    with pytest.raises(DataError, match="cannot be read in ranges"):
        open_beton(address)


@pytest.mark.parametrize("name", ["empty", "short", "noise", "cut"])
def test_what_is_no_beton(server: RangeServer, served: Path, name: str) -> None:
    whole = served.read_bytes()
    kinds = {"empty": b"", "short": b"x" * 9, "noise": b"noise" * 40_000, "cut": whole[: len(whole) // 2]}
    served.with_name(f"{name}.beton").write_bytes(kinds[name])
    with pytest.raises(BetonError, match="truncated" if name == "cut" else f"{name}.beton"):
        open_beton(server.address(f"{name}.beton"))


def test_without_a_manifest(address: str, served: Path) -> None:
    served.with_name("train.beton.json").unlink()
    assert open_beton(address).checksums is None


def test_a_manifest_that_is_denied_is_none(server: RangeServer, address: str, served: Path) -> None:
    """As of S3, where a file that is not there is denied to those who may not list the others."""
    served.with_name("train.beton.json").unlink()
    server.missing = 403
    assert open_beton(address).checksums is None
    with pytest.raises(DataError, match=r"gone.beton cannot be read: .*403"):
        open_beton(server.address("gone.beton"))


def test_threads_that_ask_for_the_same_fetch_it_once(server: RangeServer, address: str) -> None:
    mirror = Mirror(local_copy(address))
    server.delay = 0.2
    barrier = threading.Barrier(8)

    def fetch(_: int) -> None:
        barrier.wait()
        mirror.fetch(np.array([5 * BLOCK]), 3 * BLOCK)

    before = len(server.requests)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch, range(8)))
    assert len(server.requests) == before + 1
    mirror.close()


def test_only_the_blocks_of_a_range_are_filled(address: str, folder: Path) -> None:
    copy = local_copy(address)
    mirror = Mirror(copy)
    mirror.fetch(np.array([4 * BLOCK + 5]), 8 * BLOCK - 5)
    assert np.flatnonzero(np.fromfile(copy.parent / BLOCKS, np.uint8)).tolist() == [*range(4, 12)]
    own, original = copy.read_bytes(), (folder / "train.beton").read_bytes()
    assert len(own) == len(original)
    assert own[4 * BLOCK : 12 * BLOCK] == original[4 * BLOCK : 12 * BLOCK]
    assert not any(own[: 4 * BLOCK])
    mirror.close()


def test_the_folder_keeps_to_its_limit(server: RangeServer, served: Path, tmp_path: Path) -> None:
    cache, size = tmp_path / "small", served.stat().st_size
    for name in ("one.beton", "two.beton", "three.beton"):
        shutil.copy(served, served.with_name(name))
    limit = 1.5 * size / 1e9
    used = open_beton(local_copy(server.address("one.beton"), Remote(cache, limit)))
    used.file.mirror.fetch(np.array([0]), size)
    with pytest.raises(DataError, match=r"does not fit into .*small.*cache_limit is"):
        local_copy(server.address("two.beton"), Remote(cache, limit))
    del used
    with pytest.raises(DataError, match="does not fit"):  # somebody has asked for it, and will open it
        local_copy(server.address("two.beton"), Remote(cache, limit))
    ahead = time.time() + 3600  # a clock that has been corrected since
    for facts in cache.glob("*/mirror.json"):
        os.utime(facts, (ahead, ahead))
    two = local_copy(server.address("two.beton"), Remote(cache, limit))
    assert [path.parent for path in cache.glob("*/blocks")] == [two.parent]
    with pytest.raises(DataError, match="does not fit"):
        local_copy(server.address("three.beton"), Remote(cache, size / 2e9))


def test_a_full_copy_without_a_manifest_needs_no_more_room(
    address: str, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.with_name("train.beton.json").unlink()
    copy = local_copy(address)
    mirror = Mirror(copy)
    mirror.fetch(np.array([0]), served.stat().st_size)
    mirror.close()
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert local_copy(address) == copy


def test_a_folder_that_cannot_be_written(address: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be made in .*Pass cache=FOLDER"):
        local_copy(address, Remote(tmp_path / "file"))


@given(st.sets(st.integers(0, 1000), max_size=200))
def test_runs_cover_the_blocks(blocks: set[int]) -> None:
    found = list(runs(sorted(blocks)))
    covered = [block for run in found for block in run]
    assert covered == sorted(set(covered))
    assert blocks <= set(covered)
    assert all(run.start in blocks and run[-1] in blocks and len(run) <= 128 for run in found)


@pytest.mark.parametrize("fact", ["ETag", "mtime", "blob_id", "modify", "modificationTime"])
def test_the_version_of_a_file(fact: str) -> None:
    """By s3, the file system, hf, ftp and webhdfs."""
    assert sources.version_of({"name": "train.beton", "size": 3, fact: "one"}) == f"{fact}=one"


def test_a_removal_that_was_killed_is_completed_by_the_next_job(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = local_copy(address, Remote(tmp_path / "own"))
    os.utime(copy.parent / FACTS, (0, 0))

    def killed(path: Path, **_: object) -> None:
        (path / FACTS).unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            cache._remove_unused(copy.parent / FACTS)
    assert local_copy(address, Remote(tmp_path / "own")) == copy
    assert [path.name for path in (tmp_path / "own").iterdir() if path.is_dir()] == [copy.parent.name]


def test_a_copy_whose_making_was_killed_is_removed_by_the_next_job(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr(cache.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            local_copy(address, Remote(tmp_path / "own"))
    assert len([*(tmp_path / "own").glob(".new-*/blocks")]) == 1
    copy = local_copy(address, Remote(tmp_path / "own"))
    assert [path.name for path in (tmp_path / "own").iterdir() if path.is_dir()] == [copy.parent.name]


def test_a_copy_whose_facts_were_lost_in_a_crash(address: str, tmp_path: Path) -> None:
    """It was made, and its files were not on the disk yet."""
    lost = tmp_path / "own" / "0123456789abcdef"
    lost.mkdir(parents=True)
    for name in ("train.beton", FACTS):
        (lost / name).touch()
    copy = local_copy(address, Remote(tmp_path / "own"))
    os.utime(lost / FACTS, (0, 0))
    assert cache._remove_unused(lost / FACTS)
    assert [path.name for path in (tmp_path / "own").iterdir() if path.is_dir()] == [copy.parent.name]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("where", ["header", "metadata", "allocations", "manifest", "checksums", "cut"])
def test_wrong_bytes_of_tables_do_not_stay_in_the_copy(
    address: str, served: Path, where: str, lazily: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store that sent them once, under the same version."""
    monkeypatch.setattr(data_set, "CHECKED", 10 if lazily else SAMPLES)
    good, status, manifest = served.read_bytes(), served.stat(), served.with_name("train.beton.json")
    text = manifest.read_bytes()
    bad = {
        "header": flipped(good, 0), "metadata": flipped(good, 300), "allocations": flipped(good, len(good) - 20)
    }.get(where, good)  # fmt: skip
    served.write_bytes(bad)
    os.utime(served, ns=(status.st_atime_ns, status.st_mtime_ns))
    if where == "manifest":
        manifest.write_bytes(b"<html>")
    elif where == "checksums":
        at = text.index(b'"crc32"') + 20
        manifest.write_bytes(text[:at] + b"123" + text[at + 3 :])
    elif where == "cut":
        manifest.write_bytes(text[:-99])
    with pytest.raises(BetonError, match=r"train\.beton"):
        list(FFCVLoader(address, **OPTIONS))
    served.write_bytes(good)
    os.utime(served, ns=(status.st_atime_ns, status.st_mtime_ns))
    manifest.write_bytes(text)
    with FFCVLoader(address, **OPTIONS) as loader:
        assert len(list(loader)) == SAMPLES // 10
        assert loader.beton.has_checksums


def test_a_manifest_that_is_uploaded_later_is_read(address: str, served: Path) -> None:
    manifest = served.with_name("train.beton.json")
    text = manifest.read_bytes()
    manifest.unlink()
    assert open_beton(address).checksums is None
    manifest.write_bytes(text)
    assert open_beton(address).checksums is not None


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_copy_that_is_about_to_be_opened_stays_whatever_the_time(
    server: RangeServer, served: Path, tmp_path: Path, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine whose clock is not that of the file server."""
    shutil.copy(served, served.with_name("two.beton"))
    own = Remote(tmp_path / "own", 1.5 * served.stat().st_size / 1e9)
    copy, now = local_copy(server.address("train.beton"), own), time.time
    monkeypatch.setattr(time, "time", lambda: now() + hours * 3600)
    with pytest.raises(DataError, match="does not fit"):
        local_copy(server.address("two.beton"), own)
    assert copy.exists()


def test_a_folder_without_locks(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Lustre without the option flock."""
    copy = local_copy(address, Remote(tmp_path / "own"))

    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    for opened in (copy, address):
        with pytest.raises(LockError, match=r"cannot be locked: Function not implemented.*cache="):
            open_beton(opened, Remote(tmp_path / "other"))


def test_over_nfs_two_jobs_share_a_copy(server: RangeServer, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That both have it open does not keep one from fetching what the other does not."""
    monkeypatch.setattr(fcntl, "flock", nfs.flock)
    monkeypatch.setattr(cache, "_STALLED", 3.0)
    copy = local_copy(address)
    one, other = Mirror(copy), Mirror(copy)
    begin = time.monotonic()
    one.fetch(np.array([0]), BLOCK)
    other.fetch(np.array([0]), 2 * BLOCK)
    assert time.monotonic() - begin < 2
    assert [start // BLOCK for _, start, size in server.requests if size > 0] == [0, 1]
    one.close()
    other.close()


def test_over_nfs_a_copy_that_nobody_uses_is_removed(
    server: RangeServer, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", nfs.flock)
    shutil.copy(served, served.with_name("two.beton"))
    own = Remote(tmp_path / "own", 1.5 * served.stat().st_size / 1e9)
    first = local_copy(server.address("train.beton"), own)
    used = Mirror(first)
    os.utime(first.parent / FACTS, (0, 0))
    with pytest.raises(DataError, match="does not fit"):
        local_copy(server.address("two.beton"), own)
    del used
    second = local_copy(server.address("two.beton"), own)
    assert [path.parent for path in (tmp_path / "own").glob("*/blocks")] == [second.parent]


def test_a_download_that_fails_does_not_wait_again(
    server: RangeServer, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its other ranges nor to ask whether the file was replaced."""
    monkeypatch.setattr(sources, "_RANGE", served.stat().st_size // 20)
    read = RemoteFile.read

    def failing(self: RemoteFile, start: int, size: int) -> bytes:
        if start == 0:
            server.fail = 10**6
            time.sleep(0.2)
            raise DataError("the first range")
        return read(self, start, size)

    monkeypatch.setattr(RemoteFile, "read", failing)
    begin = time.monotonic()
    with pytest.raises(DataError, match="the first range"):
        sources.download(RemoteFile(server.address("train.beton"), 40), tmp_path / "copy")
    assert time.monotonic() - begin < 20
    assert not (tmp_path / "copy").exists()


def test_a_stamp_counts_files_in_folders_that_are_links(tmp_path: Path) -> None:
    """As loaders do. A link to a folder that it is in has no further ones."""
    data, elsewhere = tmp_path / "train", tmp_path / "elsewhere"
    data.mkdir()
    elsewhere.mkdir()
    (data / "cat").symlink_to(elsewhere)
    (data / "again").symlink_to(data)
    stamps = []
    for content in (b"a", b"bc"):
        (elsewhere / "1.jpg").write_bytes(content)
        stamps.append(stamp(data))
    assert stamps[0] != stamps[1]
