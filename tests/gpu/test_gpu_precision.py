"""fp32, bf16 and fp16 on the GPU, with and without clipping; overflow of the loss scale; torch.compile."""

import copy
from typing import Any

import gpu_device
import pytest
import torch
from drivetrain import strategies
from drivetrain.transforms import TestTimeFlip
from gpu_device import Device, agree, fitted
from pipeline_data import Toy, batch_norm_model, numbers, plain_model
from torch import nn
from torch.nn.functional import cross_entropy

pytestmark = gpu_device.MARKS
PRECISIONS = ("fp32", "bf16", "fp16")
TOLERANCE = {"fp32": 1e-2, "bf16": 6e-2, "fp16": 3e-2}
"""Relative, of the losses of two epochs against fp32 on the CPU."""


def prepared(device: Device, model: nn.Module, **options: Any) -> Any:
    return strategies.get("single", device=device.name).prepare(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9), **options
    )


def stepped(engine: Any, device: Device, factor: float = 1.0) -> Any:
    """One step on a fixed batch, its loss multiplied by `factor`; what `step` returned."""
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(device.name)
    with engine.forward_context():
        logits = engine.model(images)
    device.holds(logits)
    engine.backward(cross_entropy(logits.float(), torch.arange(8, device=device.name) % 4) * factor)
    return engine.step()


CLIPS = pytest.mark.parametrize("clip_norm", [None, 0.1])


@CLIPS
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_precision_trains_as_fp32_on_the_cpu(
    device: Device, toy: Toy, precision: Any, clip_norm: float | None
) -> None:
    found = fitted(toy, device=device.name, precision=precision, clip_norm=clip_norm)
    expected = fitted(toy, device="cpu", clip_norm=clip_norm)
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=TOLERANCE[precision])
    assert next(found.model.parameters()).device.type == "cpu"  # what comes back can be used anywhere


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_forward_computes_in_that_type(device: Device, precision: Any) -> None:
    engine = prepared(device, plain_model(), precision=precision)
    with engine.forward_context():
        logits = engine.model(torch.randn(2, 3, 16, 16, device=device.name))
    device.holds(logits, *engine.plain_model.parameters())
    assert logits.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {parameter.dtype for parameter in engine.plain_model.parameters()} == {torch.float32}


@CLIPS
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_norm_is_that_of_the_true_gradients(device: Device, precision: Any, clip_norm: Any) -> None:
    """Not of those that fp16's scale has multiplied."""
    model = plain_model()
    reference = prepared(Device("cpu", False), copy.deepcopy(model), clip_norm=clip_norm)
    norm = stepped(prepared(device, model, precision=precision, clip_norm=clip_norm), device)
    expected = stepped(reference, Device("cpu", False))
    if clip_norm is None:
        assert norm is expected is None
    else:
        assert float(norm) == pytest.approx(float(expected), rel=5e-2)


@CLIPS
def test_an_overflow_of_fp16_skips_the_step_and_lowers_the_scale(device: Device, clip_norm: Any) -> None:
    engine = prepared(device, plain_model(), precision="fp16", clip_norm=clip_norm)
    stepped(engine, device)
    before, scale = copy.deepcopy(engine.export_state()), engine._scaler.get_scale()
    assert stepped(engine, device, 1e30) is None  # it has no norm
    assert engine.skipped
    assert all(torch.equal(value, before[name]) for name, value in engine.export_state().items())
    assert engine._scaler.get_scale() < scale
    stepped(engine, device)
    assert not engine.skipped
    assert any(not torch.equal(value, before[name]) for name, value in engine.export_state().items())


@pytest.mark.timeout(1200)  # a rehearsal compiles C++
def test_compiled_training_agrees_with_eager(device: Device, toy: Toy) -> None:
    eager = fitted(toy, batch_norm_model, device=device.name)
    torch._dynamo.reset()
    compiled = fitted(toy, batch_norm_model, device=device.name, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    agree(compiled, eager, rel=1e-2)


@gpu_device.CUDA_ONLY
@pytest.mark.parametrize("factor", [1.0, 1e30])
def test_offloaded_gradients_are_unscaled_as_others(factor: float) -> None:
    """The scale is on the GPU, and the gradients are not: the CPU must not look at it before it is there."""
    plain, offloaded = (
        strategies.launch(gpu_device.behind_others, name, factor, devices=1)[0] for name in ("fsdp", "fsdp_cpu_offload")
    )
    assert plain[0] == offloaded[0] == (factor > 1)
    assert offloaded[1] == pytest.approx(plain[1], rel=1e-4)


@gpu_device.TWO
def test_the_copies_of_dp_compute_in_the_precision() -> None:
    engine = strategies.get("dp").prepare(nn.Linear(4, 4), lambda p: torch.optim.SGD(p, lr=0.1), precision="bf16")
    with engine.forward_context():
        assert engine.model(torch.ones(8, 4, device="cuda")).dtype == torch.bfloat16


@gpu_device.CUDA_ONLY
@pytest.mark.timeout(600)
def test_cuda_graphs_agree_with_eager_code(device: Device, toy: Toy) -> None:
    made = toy.pipeline(batch_norm_model).transform(TestTimeFlip())
    eager, graphs = (
        made.distribute("single", device=device.name, compile=how).fit(epochs=2, progress=False)
        for how in (False, "reduce-overhead")
    )
    agree(graphs, eager, rel=1e-2)
