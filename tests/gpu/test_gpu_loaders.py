"""Loaders that deliver to a GPU: the same batches as on the CPU, whatever its streams are doing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import gpu_device
import pytest
import torch
from drivetrain.loaders import FFCVLoader, TorchLoader
from gpu_device import Device
from pipeline_data import BATCH, SIDE, TRAIN, Toy

pytestmark = gpu_device.MARKS
LOADERS = pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "image_size": SIDE}
EXACT = {"rtol": 0, "atol": 1e-5}
WORKERS = {FFCVLoader: 1, TorchLoader: 0}
"""A process of TorchLoader's imports torch first: that is one test's subject alone."""
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def loaders(kind: type, toy: Toy, *devices: str, **options: Any) -> Iterator[list[Any]]:
    """A loader that delivers to the CPU, and one for each device."""
    options = {**OPTIONS, "workers": WORKERS[kind], **options}
    with ExitStack() as stack:
        made = [kind(toy.train, **options), *(kind(toy.train, **options, device=name) for name in devices)]
        yield [stack.enter_context(loader) for loader in made]


def same(found: Batches, expected: Batches) -> None:
    assert len(found) == len(expected) == TRAIN // BATCH
    for (images, labels), (cpu_images, cpu_labels) in zip(found, expected, strict=True):
        torch.testing.assert_close(images.cpu().float(), cpu_images.float(), **EXACT)
        assert torch.equal(labels.cpu(), cpu_labels)


@LOADERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_batches_are_those_of_the_cpu(device: Device, toy: Toy, kind: type, dtype: torch.dtype) -> None:
    with loaders(kind, toy, device.name, dtype=dtype) as (cpu, gpu):
        for _ in range(2):  # epochs: memory is used again
            expected, found = list(cpu), list(gpu)
            for (images, labels), (cpu_images, _) in zip(found, expected, strict=True):
                device.holds(images, labels)
                assert images.dtype == cpu_images.dtype == dtype
                assert images.stride() == cpu_images.stride()
            same(found, expected)


def test_batches_of_a_worker_process(device: Device, toy: Toy) -> None:
    with loaders(TorchLoader, toy, device.name, workers=1) as (cpu, gpu):
        found = list(gpu)
        device.holds(*(images for images, _ in found))
        same(found, list(cpu))


@LOADERS
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=gpu_device.TWO)])
def test_a_device_by_its_number(device: Device, toy: Toy, kind: type, index: int) -> None:
    name = f"cuda:{index}" if device.real else "cpu"
    with loaders(kind, toy, name) as (cpu, gpu):
        found = list(gpu)
        assert {tensor.device for batch in found for tensor in batch} == {torch.device(name)}
        same(found, list(cpu))
    if device.real:
        assert torch.cuda.current_device() == 0  # as before


@LOADERS
def test_batches_are_whole_while_the_device_is_busy(device: Device, toy: Toy, kind: type) -> None:
    """A copy that does not wait for the batch, or memory that is given out too early, would show here."""
    with loaders(kind, toy, device.name) as (cpu, gpu):
        for _ in range(2):
            doubled = []
            for images, labels in gpu:
                if device.real:
                    torch.cuda._sleep(20_000_000)  # cycles, some 10 ms, before what follows
                doubled.append((images * 2, labels.clone()))
                del images, labels
            same(doubled, [(images * 2, labels) for images, labels in cpu])


@gpu_device.CUDA_ONLY
@LOADERS
def test_batches_can_be_used_on_another_stream(device: Device, toy: Toy, kind: type) -> None:
    assert device.real
    stream = torch.cuda.Stream()
    with loaders(kind, toy, "cuda") as (cpu, gpu):
        with torch.cuda.stream(stream):
            doubled = []
            for images, labels in gpu:
                torch.cuda._sleep(20_000_000)
                doubled.append((images * 2, labels.clone()))
                del images, labels
        stream.synchronize()
        same(doubled, [(images * 2, labels) for images, labels in cpu])


@LOADERS
def test_an_epoch_that_is_left_early_and_the_next(device: Device, toy: Toy, kind: type) -> None:
    with loaders(kind, toy, device.name) as (cpu, gpu):
        for loader in (cpu, gpu):
            loader.set_epoch(0)
            assert len(list(islice(loader, 2))) == 2
            loader.set_epoch(1)
        found = list(gpu)
        device.holds(*(images for images, _ in found))
        same(found, list(cpu))


@LOADERS
def test_two_loaders_in_turn(device: Device, toy: Toy, kind: type) -> None:
    with loaders(kind, toy, device.name, device.name) as (cpu, one, other):
        pairs = list(zip(one, other, strict=True))
        expected = list(cpu)
        same([left for left, _ in pairs], expected)
        same([right for _, right in pairs], expected)
