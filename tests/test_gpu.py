"""What only a CUDA device can show: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from drivetrain.loaders import FFCVLoader, TorchLoader
from pipeline_data import BATCH, SIDE, Toy, batch_norm_model, numbers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", [FFCVLoader, TorchLoader])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_batches_on_the_gpu_are_those_of_the_cpu(toy: Toy, kind: type, dtype: torch.dtype) -> None:
    options = {"batch_size": BATCH, "image_size": SIDE, "workers": 1, "dtype": dtype}
    with kind(toy.train, **options) as cpu, kind(toy.train, **options, device="cuda") as gpu:
        for (images, labels), (gpu_images, gpu_labels) in zip(cpu, gpu, strict=True):
            assert gpu_images.device.type == gpu_labels.device.type == "cuda"
            assert gpu_images.stride() == images.stride()
            torch.testing.assert_close(gpu_images.cpu(), images, rtol=0, atol=1e-5)
            assert torch.equal(gpu_labels.cpu(), labels)


def test_training_takes_the_gpu_and_agrees_with_the_cpu(toy: Toy) -> None:
    before = torch.cuda.max_memory_allocated()
    gpu = toy.pipeline(batch_norm_model).fit(epochs=2, progress=False)
    assert torch.cuda.max_memory_allocated() > before
    cpu = toy.pipeline(batch_norm_model).distribute("single", device="cpu").fit(epochs=2, progress=False)
    for one, other in zip(numbers(gpu), numbers(cpu), strict=True):
        assert one == pytest.approx(other, rel=1e-2)
    assert next(gpu.model.parameters()).device.type == "cpu"


def test_bf16_trains_on_the_gpu(toy: Toy) -> None:
    result = (
        toy.pipeline(batch_norm_model).distribute("single", precision="bf16").fit(epochs=3, progress=False)
    )
    assert result.history.epochs[-1].loss < result.history.epochs[0].loss


def test_the_ledger_runs_on_the_gpu(toy: Toy) -> None:
    ledger = toy.pipeline(batch_norm_model, batch_size=16).ledger(seconds=5, progress=False)
    assert ledger.facts["provenance"]["hardware"]["gpus"]
    assert ledger.rows[0].ratio.value == 1.0
