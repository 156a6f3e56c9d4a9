"""BlurPool alone: what it must preserve."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from blurpool_models import Arbitrary, images, small_convnext, small_resnet, strided
from drivetrain.transforms import BlurPool
from torch import nn
from torchvision.models.resnet import BasicBlock


@pytest.mark.parametrize("blur_first", [True, False])
def test_dtype_device_grad_mode_and_layout(blur_first: bool) -> None:
    conv = strided(padding_mode="reflect", dtype=torch.bfloat16).requires_grad_(False).eval()
    meta = strided(device="meta")
    BlurPool(blur_first=blur_first).apply(nn.ModuleList([conv, meta]))
    x = images(2, 16, 8, 8).bfloat16().to(memory_format=torch.channels_last)
    out = conv(x)
    assert conv.weight.dtype == out.dtype == torch.bfloat16
    assert not conv.weight.requires_grad
    assert not conv.training
    assert conv.padding_mode == "reflect"
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert meta(images(2, 16, 8, 8).to("meta")).is_meta


def test_meta_weights_then_to_empty() -> None:
    """The way FSDP builds large models: nothing but the weights may need to be filled in."""
    with torch.device("meta"):
        made = nn.Sequential(strided(), nn.MaxPool2d(2))
    BlurPool().apply(made)
    plain = nn.Sequential(strided(), nn.MaxPool2d(2))
    made.to_empty(device="cpu").load_state_dict(plain.state_dict())
    BlurPool().apply(plain)
    x = images(2, 16, 8, 8)
    torch.testing.assert_close(made(x), plain(x))


@pytest.mark.parametrize("blur_first", [True, False])
def test_autocast(blur_first: bool) -> None:
    conv = strided()
    BlurPool(blur_first=blur_first).apply(conv)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(images(2, 16, 8, 8)).dtype == torch.bfloat16


def test_hooks_run() -> None:
    seen: list[str] = []
    conv, pool = strided(), nn.MaxPool2d(2)
    for module in (conv, pool):
        module.register_forward_pre_hook(lambda module, _: seen.append(f"before {type(module).__name__}"))
        module.register_forward_hook(lambda module, *_: seen.append(f"after {type(module).__name__}"))
        module.register_full_backward_hook(lambda module, *_: seen.append(f"back {type(module).__name__}"))
    model = nn.Sequential(conv, pool)
    BlurPool().apply(model)
    model(images(2, 16, 8, 8).requires_grad_()).sum().backward()
    both = ("BlurConv2d", "BlurMaxPool2d")
    assert seen == [f"{moment} {name}" for name in both for moment in ("before", "after")] + [
        f"back {name}" for name in reversed(both)
    ]


def test_optimizer_made_before_still_steps() -> None:
    model = Arbitrary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    BlurPool().apply(model)
    weight = model.down.weight.detach().clone()
    model(images()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.down.weight, weight)


def test_shared_module_stays_shared() -> None:
    model = Arbitrary()
    report = BlurPool().apply(model)
    assert report.changed == ("down", "pool")
    assert model.again is model.down


@pytest.mark.parametrize("factory", [small_convnext, Arbitrary])
def test_deepcopy_and_pickle(factory: Callable[[], nn.Module]) -> None:
    model = factory().eval()
    BlurPool(blur_first=False).apply(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    ):
        torch.testing.assert_close(other(images()), model(images()), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("blur_first", [True, False])
def test_compiles_without_a_break(blur_first: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.BatchNorm2d(16), BasicBlock(16, 16)
    )
    model.append(strided(padding_mode="reflect"))
    assert len(BlurPool(blur_first=blur_first).apply(model).changed) == 2
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    for size in (16, 20):  # the second size makes the shapes symbolic
        torch.testing.assert_close(compiled(images(2, 3, size, size)), model(images(2, 3, size, size)))
    explanation = torch._dynamo.explain(model)(images(2, 3, 16, 16))
    assert explanation.graph_break_count == 0


@pytest.mark.usefixtures("one_process_group")
def test_fsdp2_around_each_convolution() -> None:
    """Composer's BlurConv2d fails here: it calls the inner forward, past the hooks that gather weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = small_resnet()
    BlurPool().apply(model)
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    out = model(images())
    torch.testing.assert_close(out, reference(images()))
    out.sum().backward()
    reference(images()).sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name].grad)
