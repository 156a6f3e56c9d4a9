"""`StockFFCVLoader`: FFCV's pixels in Drivetrain's batches, without FFCV's side effects.

FFCV compiles each loader for seconds, one of several workers for ten, so the tests share three of one worker. A test
for `make test-all` has two.
"""

import gc
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from drivetrain.common import machine
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, StockFFCVLoader, convert, device, stock_loader
from held import grown, settled
from late_streams import LateStreams
from loader_pictures import raw_pictures

COUNT, SIDE = 23, 12
PHOTOS: dict[str, Any] = {"batch_size": 4, "image_size": 32, "train": False, "dtype": torch.uint8}
NUMBERED: dict[str, Any] = {"batch_size": 4, "image_size": SIDE, "seed": 3, "scale": (1, 1), "ratio": (1, 1)}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def evaluation(photos: Path) -> Iterator[StockFFCVLoader]:
    with StockFFCVLoader(photos, workers=1, **PHOTOS) as loader:
        yield loader


@pytest.fixture(scope="module")
def training(numbered: Path) -> Iterator[StockFFCVLoader]:
    """Its crops are always the full image, mirrored or not."""
    with StockFFCVLoader(numbered, workers=1, **NUMBERED) as loader:
        yield loader


def test_evaluation_pixels_are_those_of_area_bit_for_bit(photos: Path, evaluation: StockFFCVLoader) -> None:
    with FFCVLoader(photos, workers=1, interpolation="area", **PHOTOS) as ours:
        for size in (32, 20, 32):
            ours.set_image_size(size)
            evaluation.set_image_size(size)
            for (one, labels), (other, expected) in zip(evaluation, ours, strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
                assert torch.equal(labels, expected)
    assert (evaluation.classes, evaluation.num_classes) == (["ant", "bee", "cat"], 3)
    assert np.array_equal(evaluation.labels, ours.labels)


def test_evaluation_stays_square(evaluation: StockFFCVLoader) -> None:
    with pytest.raises(DataError, match=r"image_size=\(20, 32\) is not available .* FFCV evaluates on central squares"):
        evaluation.set_image_size((20, 32))
    assert evaluation.settings.image_size == 32
    assert next(iter(evaluation))[0].shape == (4, 3, 32, 32)


def assert_pixels(numbered: Path, training: StockFFCVLoader) -> None:
    """FFCV's table and our multiplication round differently: 1e-6 apart, of values up to 2.7."""
    with FFCVLoader(numbered, workers=1, **NUMBERED | {"train": False, "eval_ratio": 1.0}) as ours:
        images = torch.cat([images for images, _ in ours])
    mirrored = 0
    for batch, labels in training:
        for image, label in zip(batch, labels.tolist(), strict=True):
            plain, flipped = (
                torch.allclose(image, each, rtol=0, atol=1e-6) for each in (images[label], images[label].flip(-1))
            )
            assert plain != flipped
            mirrored += flipped
    assert 0 < mirrored < COUNT  # by chance false once in 4 million times


def test_training_pixels(numbered: Path, training: StockFFCVLoader) -> None:
    assert_pixels(numbered, training)


def test_each_sample_once_per_epoch_in_our_order(numbered: Path, training: StockFFCVLoader) -> None:
    training.set_epoch(0)
    with FFCVLoader(numbered, workers=1, **NUMBERED) as ours:
        assert len(training) == len(ours) == 6
        epochs = [[labels.tolist() for _, labels in training] for _ in range(2)]
        assert epochs == [[labels.tolist() for _, labels in ours] for _ in range(2)]
    assert [sorted(label for batch in epoch for label in batch) for epoch in epochs] == [list(range(COUNT))] * 2


def test_a_saved_position_continues_with_the_next_sample(training: StockFFCVLoader) -> None:
    training.set_epoch(4)
    whole = [labels.tolist() for _, labels in training]
    training.set_epoch(4)
    for number, _ in enumerate(training):
        if number == 1:
            state = training.state_dict()
            break
    training.load_state_dict(state)
    assert [labels.tolist() for _, labels in training] == whole[2:]


def test_a_subset(training: StockFFCVLoader) -> None:
    training.set_indices(range(5, 15))
    try:
        assert sorted(label for _, labels in training for label in labels.tolist()) == list(range(5, 15))
    finally:
        training.set_indices(None)


def test_kept_batches_stay(training: StockFFCVLoader) -> None:
    """FFCV would overwrite them after five batches."""
    kept, copies = [], []
    for _ in range(3):
        for images, _ in training:
            kept.append(images)
            copies.append(images.clone())
    assert all(torch.equal(*pair) for pair in zip(kept, copies, strict=True))
    assert len({images.data_ptr() for images in kept}) == len(kept) == 18


def leave_early(loader: StockFFCVLoader) -> None:
    for _ in range(10):
        for number, _ in enumerate(loader):
            if number == 1:
                break
    waiting = iter(loader)
    next(waiting)
    loader.close()  # while an iterator is there
    with pytest.raises(DataError, match="closed or iterated again"):
        next(waiting)


@pytest.mark.slow
def test_two_workers_give_the_same_pixels_and_leave_nothing(numbered: Path) -> None:
    with StockFFCVLoader(numbered, workers=2, **NUMBERED) as loader:
        assert_pixels(numbered, loader)
        leave_early(loader)  # numba and torch start pools of their own at first use
        before = settled()
        leave_early(loader)
        assert not grown(before)
        assert len(list(loader)) == 6


@numba.njit(numba.void(numba.uint8[::1]))
def write_before(array: Any) -> None:
    array[0] = 7


def test_global_state_is_restored(photos: Path) -> None:
    """FFCV sets the number of threads of torch and numba, and makes numba's byte arrays read-only."""
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(2)
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    try:
        before = torch.get_num_threads(), numba.get_num_threads()
        with StockFFCVLoader(photos, workers=1, **PHOTOS) as loader:
            assert (torch.get_num_threads(), numba.get_num_threads()) == before
            found = []
            for _ in loader:
                other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
                other.start()
                other.join()
            assert (torch.get_num_threads(), numba.get_num_threads()) == before
        assert set(found) == {2}
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)
    assert numba.uint8[::1].mutable
    for write in (write_before, numba.njit(numba.void(numba.uint8[::1]))(write_before.py_func)):
        array = np.zeros(2, dtype=np.uint8)
        write(array)
        assert array.tolist() == [7, 0]


def test_an_error_inside_ffcv_arrives(evaluation: StockFFCVLoader) -> None:
    """FFCV's own iterator would wait for the next batch without end."""
    loader, code = evaluation._loader, evaluation._loader.code
    loader.code = (code[0], [-1])
    try:
        evaluation.set_epoch(2)
        message = r"failed in batch 0 of epoch 2, on .*photos\.beton \(KeyError: 'result_-1'\)\. Check the file with "
        with pytest.raises(DataError, match=message):
            list(evaluation)
    finally:
        loader.code = code
    assert len(list(evaluation)) == 5


def test_ffcv_that_hangs(evaluation: StockFFCVLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_loader, "PATIENCE", 0.1)
    loader, code, wake = evaluation._loader, evaluation._loader.code, threading.Event()
    monkeypatch.setattr(stock_loader, "_STOPPING", 0.1)
    loader.code = ([(lambda **_: wake.wait(), ())], code[1])
    try:
        with pytest.raises(DataError, match=r"in batch 0 of epoch \d+, .*nothing for 0\.1 seconds"):
            list(evaluation)
    finally:
        wake.set()
        loader.code = code


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": "padded"}, r"crop='padded' is not .* Use crop='resized', or use loader='ffcv'"),
        ({"flip": "alternating"}, "flip='alternating' is not .* Use flip=True, or"),
        ({"color_jitter": (0.4, 0, 0)}, r"color_jitter=\(0.4, 0, 0\) is not .* Leave it out, or"),
        ({"policy": {"name": "rand_augment"}}, "policy=.*rand_augment.* is not .* Leave it out"),
        ({"cutout": 4}, "cutout=4 is not .* Leave it out"),
        ({"interpolation": "bilinear"}, "interpolation='bilinear' is not .* because FFCV resizes by area"),
        ({"verify": True}, "verify=True is not .* drivetrain verify before training"),
        ({"workers": 10_000}, "workers=10000 is more than numba's .*NUMBA_NUM_THREADS"),
        ({"workers": 0}, "workers=0 must be a positive integer"),
        ({"scale": (0, 1)}, "scale="),
        (
            {"ratio": (100, 100)},
            r"ratio=\(100, 100\) leaves .* no pixel of sample 0 .* has 12 × 12\. Use a ratio",
        ),
        ({"train": False, "eval_ratio": 0.05}, r"eval_ratio=0\.05 leaves .* no pixel of sample 0"),
        ({"batch_size": 24}, "batch_size=24 is larger"),
        ({"batchsize": 2}, "batchsize"),
        ({"fields": ["weight"]}, "'weight' is not a field"),
    ],
)
def test_what_ffcv_does_not_have_is_rejected(numbered: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        StockFFCVLoader(numbered, **{"batch_size": 4, "image_size": SIDE, "workers": 1} | settings)


def test_training_settings_do_not_matter_in_evaluation() -> None:
    settings = {"crop": "padded", "flip": "alternating", "cutout": 4, "policy": {"name": "aug_mix"}}
    made = stock_loader.stock_options({"batch_size": 4, "image_size": 16, "train": False, **settings})
    assert made.interpolation == "area"


def test_sources_that_ffcv_does_not_read(numbered: Path, tmp_path: Path) -> None:
    sources = {
        "s3://bucket/train.beton": r"s3://bucket/train\.beton is at an address, .* Download it, or",
        str(tmp_path / "part-{0..3}.beton"): "is 4 files, but FFCV's own loader reads one file. Convert to one, or",
    }
    for source, message in sources.items():
        with pytest.raises(DataError, match=message):
            StockFFCVLoader(source, batch_size=4, image_size=SIDE)
    with pytest.raises(DataError, match="is a mix, but"):
        StockFFCVLoader({str(numbered): 1}, batch_size=4, image_size=SIDE)


def test_damaged_files_do_not_reach_ffcv(numbered: Path, tmp_path: Path) -> None:
    data = numbered.read_bytes()
    for name, content in (
        ("short", data[:-100]),
        ("pointers", data[: 24 + 2 * 1041] + bytes(99) + data[2205:]),
    ):
        path = tmp_path / f"{name}.beton"
        path.write_bytes(content)
        with pytest.raises(BetonError, match=re.escape(path.name)):
            StockFFCVLoader(path, batch_size=4, image_size=SIDE)


def test_a_file_that_shrinks_is_noticed_before_ffcv_reads_it(evaluation: StockFFCVLoader, photos: Path) -> None:
    data = photos.read_bytes()
    try:
        with photos.open("r+b") as file:
            file.truncate(len(data) - 1)
        with pytest.raises(BetonError, match="another program changed it"):
            list(evaluation)
    finally:
        photos.write_bytes(data)
    assert len(list(evaluation)) == 5


def test_memory_is_checked_first(evaluation: StockFFCVLoader, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "rank_free_memory", lambda: 10_000_000)
    with pytest.raises(DataError, match=r"FFCV's own loader would need .* Use a smaller batch_size"):
        StockFFCVLoader(photos, workers=1, **PHOTOS | {"batch_size": 18, "image_size": 500})
    with pytest.raises(DataError, match="would need"):
        evaluation.set_image_size(2000)
    assert evaluation.settings.image_size == 32
    assert 0 < evaluation.memory < 10_000_000


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_share_each_batch(numbered: Path, rank: int) -> None:
    """Of 9 samples the last one is merged into the batch before it, which is larger than FFCV's batches."""
    options = {"batch_size": 4, "image_size": SIDE, "train": False, "dtype": torch.uint8, "workers": 1}
    options |= {"rank": rank, "world_size": 2, "indices": range(9)}
    with (
        StockFFCVLoader(numbered, **options) as one,
        FFCVLoader(numbered, interpolation="area", **options) as other,
    ):
        shares = [(images, labels) for images, labels in one]
        assert [len(labels) for _, labels in shares] == [2, 3 - rank]
        for (images, labels), (expected, numbers) in zip(shares, other, strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(labels, numbers)


@pytest.mark.slow
def test_batches_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFCV's bytes, normalized on the device; `LateStreams` does each copy as late as it may be."""
    images, labels = raw_pictures(11, SIDE)
    data = [
        {"image": image, "label": int(label), "weight": label / 7, "note": b"abc"}
        for image, label in zip(images, labels, strict=True)
    ]
    path = tmp_path / "fields.beton"
    convert(data, path, fields=["weight", "note"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(device, "CudaStreams", LateStreams)
    options: dict[str, Any] = {"batch_size": 4, "image_size": SIDE, "train": False, "workers": 1}
    options |= {"fields": ["weight", "note"]}
    with (
        FFCVLoader(path, interpolation="area", **options) as ours,
        StockFFCVLoader(path, device="cuda:1", **options) as loader,
    ):
        streams, seen = loader._feed.streams, []  # type: ignore[union-attr]
        for batch in loader:
            assert streams.current == 0
            seen.append([streams.compute(v) if isinstance(v, torch.Tensor) else v for v in batch])  # type: ignore[attr-defined]
            del batch
        gc.collect()
        streams.computing.run()  # type: ignore[attr-defined]
        for (one, labels_, weights, notes), expected in zip(seen, ours, strict=True):
            torch.testing.assert_close(one[0], expected[0], rtol=0, atol=2e-6)
            assert one[0].stride() == expected[0].stride()
            assert torch.equal(labels_[0], expected[1])
            assert torch.equal(weights[0], expected[2])
            assert notes == expected[3]


@pytest.mark.slow
def test_a_file_replaced_while_ffcv_opened_it(numbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.beton"
    shutil.copy(numbered, path)
    shutil.copy(numbered, tmp_path / "other.beton")
    start = StockFFCVLoader._start

    def late(self: StockFFCVLoader, *indices: Any) -> Any:
        (tmp_path / "other.beton").rename(path)
        return start(self, *indices)

    monkeypatch.setattr(StockFFCVLoader, "_start", late)
    with pytest.raises(BetonError, match="no longer the file that the loader opened"):
        StockFFCVLoader(path, workers=1, **NUMBERED)
