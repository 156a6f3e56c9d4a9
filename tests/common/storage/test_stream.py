"""Files at an address that are larger than the disk: the local file's pixels, within the room, and what is fetched."""

import errno
import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import DataError, Pipeline
from drivetrain.common.errors import BetonError
from drivetrain.common.storage import addresses, cache, stream
from drivetrain.common.storage.cache import FACTS, Remote, local_copy
from drivetrain.common.storage.holes import STREAM_BLOCK as BLOCK
from drivetrain.common.storage.holes import room_for_streams
from drivetrain.common.storage.stream import Stream
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.beton import data_set
from drivetrain.loaders.ffcv_loader import Coming
from process_state import run
from range_server import RangeServer, serving

SAMPLES, SIDE = 120, 180
OPTIONS: dict[str, Any] = {
    "batch_size": 2, "batches_ahead": 1, "image_size": 32, "workers": 2, "dtype": torch.uint8,
}  # fmt: skip
LIMIT = 0.004  # GB; a third of the file
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="holes in files are Linux's")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of 120 raw images of about 100 KB, and the same in three shards."""
    made = tmp_path_factory.mktemp("served")
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, SIDE, SIDE, 3), dtype=np.uint8)
    data = images, np.arange(SAMPLES) % 5
    convert(data, made / "train.beton", write_mode="raw", progress=False)
    convert(data, made / "part-{0..2}.beton", write_mode="raw", progress=False)
    return made


@pytest.fixture
def server(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:  # noqa: ARG001
    monkeypatch.setattr(addresses, "_PAUSE", 0.01)
    monkeypatch.setattr(stream, "_rooms", {})
    with serving(folder) as one:
        yield one


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*.beton"))


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("random", "train.beton"),
        ("quasi_random", "part-{0..2}.beton"),
        pytest.param("random", "part-{0..2}.beton", marks=pytest.mark.slow),
        pytest.param("quasi_random", "train.beton", marks=pytest.mark.slow),
    ],
)
def test_the_pixels_of_the_local_file_in_a_third_of_its_size(
    server: RangeServer, folder: Path, tmp_path: Path, order: str, name: str
) -> None:
    size, most = SAMPLES * SIDE * SIDE * 3, 0
    with (
        FFCVLoader(folder / name, order=order, **OPTIONS) as local,
        FFCVLoader(server.address(name), order=order, stream=True, cache_limit=LIMIT, **OPTIONS) as far,
    ):
        tables = server.bytes
        for epoch in range(4):
            for near, (images, labels) in zip(local, far, strict=True):
                assert torch.equal(near[0], images), epoch
                assert torch.equal(near[1], labels)
                most = max(most, on_disk(tmp_path / "cache"))
        room = far.beton.room
    assert room == LIMIT * 1e9
    assert size / 6 < most <= room + 64 * BLOCK, "of those that are being decoded"
    fetched = (server.bytes - tables) / size
    # 4.3 times without a cache, since a sample ends within a block; 3.4 if what was used last were kept.
    assert 1 < fetched < 3.4
    del far
    assert not list((tmp_path / "cache").rglob("*.beton")), "nothing is left"


@pytest.mark.parametrize("name", [pytest.param("train.beton", marks=pytest.mark.slow), "part-{0..2}.beton"])
def test_samples_that_are_checked_when_used(
    server: RangeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The checksums are read from the manifest next to the copy, which is no copy itself."""
    monkeypatch.setattr(data_set, "CHECKED", 0)
    options = OPTIONS | {"stream": True, "cache_limit": LIMIT, "patience": 1}
    with (
        FFCVLoader(folder / name, **OPTIONS) as local,
        FFCVLoader(server.address(name), **options) as far,
    ):
        assert far.beton.lazy
        for _ in range(2):
            for near, (images, labels) in zip(local, far, strict=True):
                assert torch.equal(near[0], images)
                assert torch.equal(near[1], labels)
        for file in (tmp_path / "cache").rglob("*.beton.json"):
            assert file.read_bytes() == (folder / file.name).read_bytes()


@pytest.fixture(scope="module")
def many(folder: Path) -> str:
    """One of 6,000 raw images of 192 bytes, whose manifest and tables take many blocks."""
    images = np.random.default_rng(0).integers(0, 256, (6000, 8, 8, 3), dtype=np.uint8)
    convert((images, np.arange(6000) % 5), folder / "many.beton", write_mode="raw", progress=False)
    return "many.beton"


REMOTES = pytest.mark.parametrize("remote", [Remote(patience=1), Remote(patience=1, stream=True)])


@REMOTES
def test_a_manifest_longer_than_what_has_been_fetched(server: RangeServer, many: str, remote: Remote) -> None:
    beton = open_beton(server.address(many), remote, most=0)
    assert beton.tables is not None
    assert beton.is_unchanged(len(beton) - 1)


@REMOTES
def test_the_parts_of_tables_that_a_batch_needs_are_fetched_together(
    server: RangeServer, folder: Path, many: str, remote: Remote
) -> None:
    beton = open_beton(server.address(many), remote, most=0)
    before = len(server.requests)
    rows = beton.rows(np.arange(100, 6000, 512))
    assert len(server.requests) - before <= 2, "one for each table"
    expected = open_beton(folder / many).rows(np.arange(100, 6000, 512))
    assert np.array_equal(rows.pointers, expected.pointers)


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_more_files_than_are_open_at_a_time(
    server: RangeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(data_set, "MOST_OPEN", most)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = OPTIONS | {"stream": True, "cache_limit": LIMIT, "patience": 1}
    with (
        FFCVLoader(folder / "part-{0..2}.beton", **OPTIONS) as local,
        FFCVLoader(server.address("part-{0..2}.beton"), **options) as far,
    ):
        for near, (images, labels) in zip(local, far, strict=True):
            assert torch.equal(near[0], images)
            assert torch.equal(near[1], labels)
    del far
    assert not list((tmp_path / "cache").rglob("*.beton"))


def test_a_file_at_an_address_among_many_others(
    server: RangeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_set, "MOST_OPEN", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    near, far, last = str(folder / "part-0.beton"), server.address("part-1.beton"), str(folder / "part-2.beton")
    remote = Remote(tmp_path, LIMIT, stream=True)
    for _ in range(2):  # the second time, as another process, which has not looked at all of them
        files = data_set.open_files({near: 1, far: 1, last: 1}, remote)
        assert files.remote
        assert files.room


def test_many_files_at_addresses_are_looked_at_once(
    server: RangeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_set, "MOST_OPEN", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for path in folder.glob("part-*"):
        shutil.copy(path, tmp_path)
    server.folder = tmp_path
    remote, address = Remote(tmp_path / "cache", LIMIT, stream=True), server.address("part-{0..2}.beton")

    def opened() -> tuple[data_set.BetonFiles, set[str]]:
        before = len(server.requests)
        files = data_set.open_files(address, remote)
        return files, {Path(path).name for path, _, _ in server.requests[before:]}

    first, asked = opened()
    assert {f"part-{number}.beton" for number in range(3)} <= asked
    second, asked = opened()
    assert asked <= {"part-0.beton", "part-0.beton.json"}
    assert second.checksum == first.checksum
    assert second.read("label", np.arange(30, 90)).tolist() == first.read("label", np.arange(30, 90)).tolist()
    # Another conversion to the same addresses: the next process looks again.
    data = np.zeros((60, 8, 8, 3), np.uint8), np.arange(60) % 3
    convert(data, tmp_path / "part-{0..2}.beton", progress=False)
    third, asked = opened()
    assert {f"part-{number}.beton" for number in range(3)} <= asked
    assert len(third) == 60
    # Only the last one: it is noticed when it is used, and the next process looks again.
    convert((data[0][:20], np.full(20, 2)), tmp_path / "part-2.beton", progress=False)
    fourth, _ = opened()
    with pytest.raises(BetonError, match=r"part-2.beton is no longer the file that the loader opened"):
        fourth.read("label", np.arange(55, 60))
    fifth, _ = opened()
    assert fifth.read("label", np.arange(55, 60)).tolist() == [2] * 5


def test_a_loop_that_is_left_and_epochs_that_are_skipped(server: RangeServer, folder: Path) -> None:
    options = OPTIONS | {"stream": True, "cache_limit": LIMIT}
    with (
        FFCVLoader(server.address("train.beton"), **options) as far,
        FFCVLoader(folder / "train.beton", **OPTIONS) as local,
    ):
        for epoch in (0, 3, 1, 2):
            far.set_epoch(epoch)
            for number, _ in enumerate(far):
                if number == 20:
                    break
        for loader in (far, local):
            loader.set_epoch(5)
        assert all(torch.equal(one[0], other[0]) for one, other in zip(local, far, strict=True))


@pytest.mark.parametrize("times", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_threads_that_want_more_than_there_is_room_for_read_what_the_file_has(
    server: RangeServer, folder: Path, times: int
) -> None:
    """Prefetches of some drop what others have just fetched; what is being read stays."""
    path = local_copy(server.address("train.beton"), Remote(stream=True, cache_limit=0.5))
    one = Stream(path)
    one.room.size = 8 * BLOCK
    content = (folder / "train.beton").read_bytes()

    def read(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for number in range(times):
            starts = draw.integers(0, len(content) - 3 * BLOCK, 3)
            soon, later = np.full(2, number, np.float32), np.zeros(2, np.float32)
            one.expect(draw.integers(0, len(content) - BLOCK, 2), np.full(2, BLOCK), soon, later)
            with one.pinned(starts, 2 * BLOCK):
                for start in starts.tolist():
                    assert os.pread(one.descriptor, 2 * BLOCK, start) == content[start : start + 2 * BLOCK]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(6)))
    assert one.room.blocks <= 8, "nothing is in use any more"
    assert on_disk(path.parent) <= 12 * BLOCK
    one.close()


def test_what_was_dropped_while_its_request_ended_is_fetched_again(
    server: RangeServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefetch brings a block for which there is no room, and has not returned when somebody wants to read it."""
    one, content = (
        Stream(local_copy(server.address("train.beton"), Remote(stream=True))),
        (folder / "train.beton").read_bytes(),
    )
    start = len(content) // 2 // BLOCK * BLOCK
    assert any(content[start : start + BLOCK])
    one.room.size = 0
    arrived, returns = threading.Event(), threading.Event()
    monkeypatch.setattr(Stream, "_arrived", lambda *_: (arrived.set(), returns.wait(30)))
    one.prefetch(np.array([start]), BLOCK)
    assert arrived.wait(30)
    assert one.room.blocks == 0

    def read() -> bytes:
        with one.pinned(np.array([start]), BLOCK):
            return os.pread(one.descriptor, BLOCK, start)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read)
        time.sleep(0.2)
        returns.set()
        assert found.result(30) == content[start : start + BLOCK]
    one.close()


def test_a_block_of_several_samples_stays_until_the_last_was_used(server: RangeServer) -> None:
    one = Stream(local_copy(server.address("train.beton"), Remote(stream=True, cache_limit=0.5)))
    one.room.size = 2 * BLOCK
    again = np.full(2, 100, np.float32)
    one.expect(np.array([0, 100]), np.array([50, 50]), np.array([0, 5], np.float32), again)
    with one.pinned(np.array([0]), 50, announced=True), one.pinned(np.array([0]), 50):
        pass  # to compare it with its checksum, it is read, which is no use that was announced
    for block, soon in ((10, 7), (20, 6)):
        one.expect(np.array([block * BLOCK]), np.array([50]), np.array([soon], np.float32), again[:1])
        one.fetch(np.array([block * BLOCK]), 50)
    assert [one.is_kept(block) for block in (0, 10, 20)] == [True, False, True]
    with one.pinned(np.array([100]), 50, announced=True):  # after its last sample, it is wanted in the next epoch only
        pass
    one.fetch(np.array([10 * BLOCK]), 50)
    assert [one.is_kept(block) for block in (0, 10, 20)] == [False, True, True]
    assert one.room.clock == 6, "the first batch of those that were announced last"
    one.close()


def test_what_is_noted_of_a_stream_that_is_gone_is_of_no_other(server: RangeServer) -> None:
    """Not even if the other one has its place in memory."""
    long, short = (local_copy(server.address(name), Remote(stream=True)) for name in ("train.beton", "part-0.beton"))
    one, others = Stream(long), list[Stream]()
    room, place = one.room, id(one)
    with one.pinned(np.array([one.size - 1]), 1):
        pass
    one.close()
    del one
    while len(others) < 100 and place not in map(id, others):
        others.append(Stream(short))
    others[-1].fetch(np.array([0]), 1)
    room.size = 0
    room.trim()


def test_what_streams_keep_is_not_taken_from_their_room(server: RangeServer) -> None:
    """Without a limit, half of the disk that was free before."""
    one = Stream(local_copy(server.address("train.beton"), Remote(stream=True)))
    room = one.room.size
    one.fetch(np.array([0]), one.size)
    other = Stream(local_copy(server.address("part-0.beton"), Remote(stream=True)))
    assert other.room is one.room
    assert one.room.size == room
    one.close()
    other.close()


def test_a_file_that_is_replaced_is_noticed_when_its_blocks_are_fetched_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a server that does not compare versions."""
    monkeypatch.setattr(stream, "_rooms", {})
    served = Path(shutil.copytree(folder, tmp_path / "served")) / "train.beton"
    with serving(served.parent) as server:
        server.tags = False
        options = OPTIONS | {"stream": True, "cache": tmp_path / "cache", "cache_limit": LIMIT, "patience": 1}
        with FFCVLoader(server.address("train.beton"), **options) as far:
            assert len(list(far)) == SAMPLES // 2
            served.write_bytes(bytes(served.stat().st_size))
            with pytest.raises(BetonError, match=r"train.beton sends has another CRC-32"):
                list(far)


def test_what_a_rank_has_in_memory_is_of_the_blocks_it_keeps_or_wants(server: RangeServer) -> None:
    one = Stream(local_copy(server.address("train.beton"), Remote(stream=True)))
    one.room.size = 8 * BLOCK
    for number in range(400):
        place, times = np.array([number * BLOCK]), np.array([number, 1000 + number], np.float32)
        one.expect(place, np.array([BLOCK]), times[:1], times[1:])
        if number % 2:  # the others are of loops that were left
            with one.pinned(place, BLOCK, announced=True):
                pass
    one.room.advance(1000)
    one.close()
    assert one.room.blocks <= 8
    assert len(one._uses) <= 8
    assert len(one._later) <= 8
    assert not one._wanted
    assert not one._pins


def test_a_long_file_takes_little_memory(tmp_path: Path) -> None:
    """A byte for each block, of which a terabyte has 61 million; what is noted of one takes twelve more."""
    size, blocks = 1 << 34, 1 << 20
    own = {"process": os.getpid(), "bytes": 10**9}
    facts: dict[str, object] = {
        "address": "http://127.0.0.1/x.beton",
        "size": size,
        "version": "",
        "stream": own,
    }
    cache._make(tmp_path / "made", "x.beton", size, blocks, facts, None)
    tracemalloc.start()
    try:
        one = Stream(tmp_path / "made/x.beton")
        one.settle(1.0)
        assert tracemalloc.get_traced_memory()[0] < 2 * blocks
    finally:
        tracemalloc.stop()


def furthest_first(order: list[list[int]], keeps: int) -> int:
    """How often Belady's rule has to fetch a sample, one batch after the other, as it is written."""
    kept: set[int] = set()
    fetched = 0
    for number, batch in enumerate(order):
        rest = order[number + 1 :]
        for sample in batch:
            fetched += sample not in kept
            kept.add(sample)
        while len(kept) > keeps:
            uses = {one: next((n for n, later in enumerate(rest) if one in later), len(rest)) for one in kept}
            kept.remove(max(sorted(uses), key=uses.__getitem__))
    return fetched


@pytest.mark.usefixtures("own_cache")
def test_it_fetches_what_beladys_rule_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With images of exactly one block each."""
    monkeypatch.setattr(stream, "_rooms", {})
    side, samples, epochs = 148, 90, 3  # 65,712 bytes: four blocks and a part of one
    images = np.random.default_rng(0).integers(0, 256, (samples, side, side, 3), dtype=np.uint8)
    (tmp_path / "served").mkdir()
    convert((images, np.arange(samples) % 5), tmp_path / "served/train.beton", write_mode="raw", progress=False)
    options = OPTIONS | {"workers": 1}
    with serving(tmp_path / "served") as server:
        loader = FFCVLoader(server.address("train.beton"), stream=True, cache_limit=0.0024, **options)
        tables = server.bytes
        with loader:
            order = [share.tolist() for epoch in range(epochs) for share in loader.shares(epoch)]
            for _ in range(epochs):
                for _ in loader:
                    pass
        blocks = (server.bytes - tables) / BLOCK
        room = loader.beton.room
        assert room is not None
    per_sample = side * side * 3 / BLOCK + 1
    best = furthest_first(order, int(room / BLOCK / per_sample)) * per_sample
    assert 0.8 * best < blocks < 1.25 * best, "batches in preparation take a part of the room"


def test_what_does_not_work_is_refused(server: RangeServer) -> None:
    address = server.address("train.beton")
    with pytest.raises(DataError, match=r"may keep 0.001 GB of .* Pass a larger cache_limit="):
        FFCVLoader(address, stream=True, cache_limit=0.0005, **OPTIONS)
    for loader in (TorchLoader, StockFFCVLoader):
        with pytest.raises(DataError, match="stream=True is"):
            loader(address, batch_size=2, image_size=32, stream=True)


KILLED = textwrap.dedent("""
    import os, sys
    from drivetrain import DataError
    from drivetrain.loaders import FFCVLoader, open_beton
    address, copy = sys.argv[1:]
    try:
        open_beton(copy)
    except DataError as error:
        print(error, flush=True)
    loader = FFCVLoader(address, batch_size=2, batches_ahead=1, image_size=32, stream=True, cache_limit=0.004)
    next(iter(loader))
    os.kill(os.getpid(), 9)
""")


def left_by_a_killed_process(address: str, copy: Path) -> set[Path]:
    """Return the folders that there are now, of which nobody was asked for in the last minute; but for that of a copy
    of this process, which the other one must not read."""
    done = run(sys.executable, "-c", KILLED, address, copy)
    assert "is streamed by another process. Load it with FFCVLoader" in done.stdout
    found = set(copy.parent.parent.rglob(FACTS))
    for facts in found:
        os.utime(facts, (0, 0))
    return found - {copy.parent / FACTS}


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_process_leaves_what_the_next_stream_or_copy_removes(server: RangeServer, folder: Path) -> None:
    address = server.address("train.beton")
    own = open_beton(address, Remote(stream=True))
    used = own.path.parent / FACTS
    (first,) = left_by_a_killed_process(address, own.path)
    (second,) = left_by_a_killed_process(address, own.path)
    assert first != second
    assert not first.exists()
    assert used.exists(), "it is in use"
    size = (folder / "train.beton").stat().st_size
    del own
    local_copy(address, Remote(cache_limit=(size + 1000) / 1e9))
    assert not second.exists()
    assert not used.exists()


@pytest.mark.parametrize("step", ["_bytes", "_remove_unused"])
def test_a_stream_that_ends_while_another_job_makes_room(
    server: RangeServer, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    address, real = server.address("train.beton"), getattr(cache, step)
    ending = local_copy(address, Remote(stream=True)).parent
    os.utime(ending / FACTS, (0, 0))

    def ends_meanwhile(path: Path) -> Any:
        shutil.rmtree(ending)
        return real(path)

    monkeypatch.setattr(cache, step, ends_meanwhile)
    limit = ((folder / "train.beton").stat().st_size + 1000) / 1e9
    assert local_copy(address, Remote(cache_limit=limit)).exists()
    assert not ending.exists()


@pytest.mark.process
def test_a_pipeline_trains_from_a_stream_as_from_the_file(server: RangeServer, folder: Path) -> None:
    """On two ranks, each of which has its own half of the room."""
    pipeline = Pipeline("cifar_resnet", num_classes=5, width=4)
    options: dict[str, Any] = {"batch_size": 8, "image_size": 16, "batches_ahead": 1}
    local = pipeline.load(folder / "train.beton", **options).fit(epochs=2, progress=False)
    far = pipeline.load(server.address("train.beton"), stream=True, cache_limit=0.02, **options)
    assert far.fit(epochs=2, progress=False).history.epochs[-1].loss == local.history.epochs[-1].loss
    two = far.distribute("ddp", devices=2, device="cpu")
    assert len(two.fit(epochs=1, progress=False).history.epochs) == 1


def test_ranks_in_quasi_random_order_fetch_the_data_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of a kilobyte, of which sixteen are in a block: in random order, each rank would fetch nearly all blocks,
    and several times in half of their size."""
    monkeypatch.setattr(stream, "_rooms", {})
    side, samples, ranks = 18, 4096, 4
    images = np.random.default_rng(0).integers(0, 256, (samples, side, side, 3), dtype=np.uint8)
    (tmp_path / "served").mkdir()
    file = tmp_path / "served/train.beton"
    convert((images, np.arange(samples) % 5), file, write_mode="raw", progress=False)
    size = samples * side * side * 3
    options = OPTIONS | {"batch_size": 32, "image_size": side, "world_size": ranks, "order": "quasi_random"}
    fetched, seen = [], []
    with serving(tmp_path / "served") as server:
        for rank in range(ranks):
            address, cache = server.address("train.beton"), tmp_path / f"cache-{rank}"
            with FFCVLoader(address, **options, rank=rank, stream=True, cache=cache, cache_limit=size / 2e9) as loader:
                tables = server.bytes
                seen += [int(label) for _, labels in loader for label in labels]
                fetched.append((server.bytes - tables) / size)
    assert len(seen) == samples
    assert sum(fetched) < 1.2, fetched
    assert max(fetched) < 1.2 / ranks, "each its share"


def test_when_a_rank_uses_a_sample_next() -> None:
    coming = Coming([np.array([5, 2]), np.array([7]), np.array([2 + 10])], 10)
    assert coming.batches(np.array([2, 5, 7, 1])).tolist() == [0.0, 0.0, 1.0, np.inf]
    assert Coming([], 10).batches(np.array([3])).tolist() == [np.inf]


def test_the_ranks_of_a_machine_share_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the limit, or of half of the free disk if that is less."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8 * 10**9))
    for ranks in (1, 4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        rooms = [room_for_streams(tmp_path, limit) for limit in (0.5, 100.0, None)]
        assert rooms == [5 * 10**8 // ranks, 4 * 10**9 // ranks, 4 * 10**9 // ranks]


@pytest.mark.parametrize("stream", [False, True])
def test_a_disk_that_is_full_until_space_is_freed(
    server: RangeServer, tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = OPTIONS | {"cache": tmp_path / "own", "stream": stream}
    with FFCVLoader(server.address("train.beton"), **options) as loader:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(DataError, match=r"copy of .* cannot be written: No space left on device\. Free space"):
            list(loader)
        monkeypatch.setattr(os, "pwrite", pwrite)
        assert sum(len(labels) for _, labels in loader) == SAMPLES
