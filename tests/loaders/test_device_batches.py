"""Batches for a GPU: who waits for whom, in which order they come, and what they hold. No GPU is needed.

`LateStreams` does every copy as late as its stream allows, so that a missing wait gives a wrong number.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common import machine
from drivetrain.common.errors import BetonError, DataError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, device, open_beton
from drivetrain.loaders.device import CudaStreams, DeviceFeed
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.training import build as building
from late_streams import WRONG, LateStreams
from loader_pictures import make as make_loader
from loader_pictures import raw_pictures
from pipeline_data import Toy

COUNT, SIDE, BATCH = 11, 12, 4
FIELDS = ("weight", "box", "note")
LOADERS = [FFCVLoader, TorchLoader]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images, labels = raw_pictures(COUNT, SIDE)
    data = [
        {
            "image": image,
            "label": int(label),
            "weight": label / 7,
            "box": np.arange(6.0) + label,
            "note": b"abc",
        }
        for image, label in zip(images, labels, strict=True)
    ]
    out = tmp_path_factory.mktemp("device") / "fields.beton"
    convert(data, out, fields=FIELDS)
    return out


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices, as far as loaders look, with `LateStreams`."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # Lightning has torch ask for this number whether a GPU is there; a DataLoader would then pin its batches.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(device, "CudaStreams", LateStreams)


pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


def make(kind: Any, path: Path, **options: Any) -> Any:
    return make_loader(kind, path, **{"image_size": SIDE, **options})


def streams_of(loader: Any) -> LateStreams:
    streams: LateStreams = loader._feed.streams
    return streams


def trained_on(loader: Any, *, copies_first: bool = False) -> list[list[Any]]:
    """Training queues its work and releases its batches before any of the work is done.

    Then the copies are done as late as they may be, or as early.
    """
    seen, streams = [], streams_of(loader)
    done = streams.computing.done
    for batch in loader:
        assert streams.current == 0, "the loader left its device or its stream current"
        seen.append([streams.compute(v) if isinstance(v, torch.Tensor) else v for v in batch])
        del batch
    gc.collect()
    assert streams.computing.done == done, "the host has waited"
    if copies_first:
        streams.copies.run()
    streams.computing.run()
    return [[v if isinstance(v[0], bytes) else v[0] for v in values] for values in seen]


@pytest.mark.long
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((FFCVLoader, dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8)),
        (TorchLoader, torch.uint8),
        *(pytest.param(TorchLoader, dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_batches_are_those_of_the_cpu(kind: Any, path: Path, dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "fields": FIELDS}
    with make(kind, path, **options) as cpu, make(kind, path, **options, device="cuda:1") as gpu:
        for copies_first in (False, True):
            expected = [list(batch) for batch in cpu]
            given = trained_on(gpu, copies_first=copies_first)
            assert streams_of(gpu).device == torch.device("cuda", 1)
            assert [len(images) for images, *_ in given] == [4, 4, 3]
            for one, other in zip(given, expected, strict=True):
                assert [v.stride() for v in one[:4]] == [v.stride() for v in other[:4]]
                rtol = 2**-7 if dtype == torch.bfloat16 else 0
                torch.testing.assert_close(one[0], other[0], rtol=rtol, atol=2e-6 if dtype != torch.uint8 else 0)
                torch.testing.assert_close(one[1:4], other[1:4], rtol=0, atol=0)
                assert one[4] == other[4] == [b"abc"] * len(one[0])


def no_wait(self: LateStreams, _: Any, tensors: Any) -> None:
    self._recorded.update(tensor.untyped_storage().data_ptr() for tensor in tensors)


def no_record(self: LateStreams, event: Any, _: Any) -> None:
    self.computing.queue.append(event.finish)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("broken", "copies_first"), [(no_wait, False), (no_record, True)])
def test_the_streams_show_a_missing_wait_and_memory_used_too_early(
    path: Path, broken: Any, copies_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateStreams, "hand_over", broken)
    with make(FFCVLoader, path, device="cuda", dtype=torch.uint8) as gpu:
        given = trained_on(gpu, copies_first=copies_first)
        assert all((labels == WRONG).all() for _, labels in given)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", LOADERS)
def test_one_batch_is_ahead_and_is_not_counted(kind: Any, path: Path) -> None:
    with make(kind, path, device="cuda") as whole, make(kind, path, device="cuda") as loader:
        expected = trained_on(whole)
        batches = iter(loader)
        first = next(batches)
        assert loader.state_dict()["position"] == 1
        streams = streams_of(loader)
        del first
        second = next(batches)
        if kind is TorchLoader:  # FFCVLoader's threads may not have finished the third
            assert len(streams.copies.queue) == 6, "images and labels of the third are on their way"
        state = loader.state_dict()
        assert state["position"] == 2
        seen = streams.compute(second[1])
        streams.computing.run()
        assert torch.equal(seen[0], expected[1][1])
        batches.close()
    with make(kind, path, device="cuda") as resumed:
        resumed.load_state_dict(state)
        (rest,) = trained_on(resumed)
        for one, other in zip(rest, expected[2], strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("two_gpus")
def test_a_ready_batch_is_copied_before_the_one_before_it_is_given_out() -> None:
    ready = [True]
    feed, taken = DeviceFeed(torch.device("cuda", 0)), []

    def batches() -> Iterator[Any]:
        for number in range(4):
            taken.append(number)
            yield torch.full((2, 3, 1, 1), float(number)), torch.tensor([number])

    delivered = feed.deliver(batches(), lambda: ready[0])
    next(delivered)
    assert taken == [0, 1]
    ready[0] = False
    next(delivered)
    assert taken == [0, 1]
    next(delivered)
    assert taken == [0, 1, 2], "not taken before it was ready"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", LOADERS)
def test_an_error_comes_after_the_batches_before_it(kind: Any, path: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.beton"
    for suffix in (".beton", ".beton.json"):
        source = path.with_suffix(suffix) if suffix == ".beton" else path.with_name(path.name + ".json")
        if source.exists():
            (tmp_path / ("damaged" + suffix)).write_bytes(source.read_bytes())
    beton = open_beton(path)
    with damaged.open("r+b") as file:
        file.seek(int(beton.pointers[5]))
        file.write(b"\xff\x00\xff")
    with make(kind, damaged, train=False, verify=True, device="cuda") as loader:
        given = iter(loader)
        assert len(next(given)[0]) == BATCH
        with pytest.raises(BetonError, match="ample 5"):
            next(given)
        assert loader.state_dict()["position"] == 1
        loader.set_epoch(0)
        assert len(next(iter(loader))[0]) == BATCH


@pytest.mark.usefixtures("two_gpus")
def test_an_error_of_a_copy_comes_after_the_batch_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, send = DeviceFeed(torch.device("cuda", 0)), LateStreams.send

    def failing(streams: LateStreams, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.flatten()[0] == 1:
            raise RuntimeError("out of memory")
        return send(streams, tensor)

    monkeypatch.setattr(LateStreams, "send", failing)
    delivered = feed.deliver((torch.full((2, 3, 1, 1), float(n)), torch.tensor([n])) for n in range(3))
    assert len(next(delivered)) == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        next(delivered)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", LOADERS)
def test_leaving_early_waits_for_copies_under_way(kind: Any, path: Path) -> None:
    with make(kind, path, device="cuda", batch_size=2) as loader:
        for _ in loader:
            break
        gc.collect()
        streams = streams_of(loader)
        assert streams.copies.done == (len(streams.copies.queue) if streams.finished else 0)
        if kind is TorchLoader:
            assert streams.finished == 1
        loader.set_image_size(8)
        assert {tuple(images.shape[1:]) for images, _ in trained_on(loader)} == {(3, 8, 8)}
        loop = iter(loader)
        next(loop)
        loader.close()
        with pytest.raises(DataError, match="closed"):
            next(loop)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", LOADERS)
def test_the_last_batch_of_a_rank(kind: Any, path: Path) -> None:
    options = {"batch_size": 8, "train": False, "world_size": 2, "rank": 1}
    with make(kind, path, **options) as cpu, make(kind, path, **options, device="cuda") as gpu:
        for one, other in zip(trained_on(gpu), cpu, strict=True):
            torch.testing.assert_close(one, list(other), rtol=0, atol=2e-6)


@pytest.mark.usefixtures("two_gpus")
def test_a_batch_of_nothing() -> None:
    feed = DeviceFeed(torch.device("cuda", 0), (0.5,) * 3, (0.5,) * 3, torch.bfloat16)
    batches = ((feed.pinned((0, 3, 4, 4), torch.uint8), torch.empty(0)) for _ in range(1))
    ((images, labels),) = feed.deliver(batches)
    assert (images.shape, images.dtype, labels.shape) == ((0, 3, 4, 4), torch.bfloat16, (0,))


@pytest.mark.usefixtures("two_gpus")
def test_memory_is_that_of_bytes_for_a_gpu_and_of_floats_for_the_cpu(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch_size": 8, "batches_ahead": 5}
    with make(FFCVLoader, path, **options) as cpu, make(FFCVLoader, path, **options, device="cuda") as gpu:
        pixels = 8 * SIDE * SIDE * 3
        assert cpu.memory - gpu.memory == 8 * (4 * pixels - 4096), "torch rounds 3456 bytes up to 4096"
        monkeypatch.setattr(machine, "rank_free_memory", lambda: cpu.memory - 1)
        make(FFCVLoader, path, **options, device="cuda").close()
        with pytest.raises(DataError, match="batches_ahead=1"):
            make(FFCVLoader, path, **options)


def test_the_device_is_given_to_the_constructor(path: Path) -> None:
    for kind in LOADERS:
        with make(kind, path) as loader, pytest.raises(AttributeError):
            loader.device = torch.device("cuda")


@pytest.mark.usefixtures("two_gpus")
def test_a_pipeline_makes_its_loaders_for_the_engines_device(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make_loader = building.make_loader
    monkeypatch.setattr(building, "make_loader", lambda *a, **k: made.append(k["device"]) or make_loader(*a, **k))
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    with building.build(resolve(toy.pipeline().distribute("single", device="cpu"))) as built:
        assert (built.train.device, built.val.device, built.engine.device) == (cpu, cpu, cpu)
    assert made == [cpu, cpu]
    # A strategy that trains elsewhere than it was expected to.
    monkeypatch.setattr(building, "expected_device", lambda _: gpu)
    with building.build(resolve(toy.pipeline().distribute("single", device="cpu"))) as built:
        assert (built.train.device, built.val.device) == (cpu, cpu)
        assert len(list(built.train)) == len(built.train)
    assert made[2:] == [gpu, gpu, cpu, cpu]


class Recorded:
    """Streams and events of `torch.cuda`, which note what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def stream(self, name: Any) -> Any:
        calls = self.calls

        class Stream:
            def __repr__(self) -> str:
                return f"stream of {name}"

            def wait_event(self, event: Any) -> None:
                calls.append((self, "waits for", event))

        return Stream()


def test_what_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that waits is the batch's device's current one, also where another device is current."""
    cuda, computing = Recorded(), {}

    class Event:
        def record(self, stream: Any) -> None:
            cuda.calls.append(("event", "after", repr(stream)))

    class Tensor:
        def record_stream(self, stream: Any) -> None:
            cuda.calls.append(("used by", repr(stream)))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda at: cuda.stream(f"copies to {at}"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda at: computing.setdefault(at, cuda.stream(f"work on {at}")))
    streams = CudaStreams(torch.device("cuda"))
    assert streams.device == torch.device("cuda", 1)
    event = streams.record()
    streams.hand_over(event, [Tensor(), Tensor()])
    work = computing[torch.device("cuda", 1)]
    assert cuda.calls == [
        ("event", "after", "stream of copies to cuda:1"), (work, "waits for", event),
        ("used by", "stream of work on cuda:1"), ("used by", "stream of work on cuda:1"),
    ]  # fmt: skip
