"""BlurPool alone: what it changes in full models, what it preserves, its numbers and its reports."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchvision
from drivetrain.transforms import BlurPool, NothingChanged
from drivetrain.transforms.blurpool import blur
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

# ---- Models, and the filter by itself ----


class Arbitrary(nn.Module):
    """A convolution registered twice, a pool, a linear layer, and a functional call in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.again = self.down
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.relu(self.down(self.stem(x))))
        return self.head(self.pool(x).mean((2, 3)))


def small_resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 32, 32)), generator=torch.Generator().manual_seed(0))


def strided(**options: object) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(16, 16, **{"kernel_size": 3, "stride": 2, "padding": 1, **options})  # type: ignore[arg-type]


def dense_blur(x: Tensor, stride: int = 1) -> Tensor:
    """The filter written as nine shifted sums."""
    padded, height, width = F.pad(x, (1, 1, 1, 1)), x.shape[-2], x.shape[-1]
    out = torch.zeros_like(x)
    for i, a in enumerate((1, 2, 1)):
        for j, b in enumerate((1, 2, 1)):
            out += a * b / 16 * padded[..., i : i + height, j : j + width]
    return out[..., ::stride, ::stride]


# ---- What changes, and the reports ----


def test_resnet18_report() -> None:
    report = BlurPool().apply(torchvision.models.resnet18())
    assert report.changed[:2] == ("maxpool", "layer2.0.conv1")
    assert report.skipped == (("conv1", "3 input channels, fewer than min_channels=16"),)
    assert "changed 7 module(s)" in str(report)
    assert "left alone: conv1: 3 input channels" in str(report)


def test_options() -> None:
    kinds = BlurPool(replace_maxpools=False), BlurPool(replace_convs=False)
    widths = BlurPool(min_channels=3), BlurPool(min_channels=65)
    assert [len(each.apply(small_resnet()).changed) for each in (*kinds, *widths)] == [6, 1, 8, 5]


class OwnForward(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def instance_forward() -> nn.Module:
    conv = strided()
    conv.forward = conv._conv_forward  # type: ignore[method-assign, assignment]
    return conv


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: OwnForward(16, 16, 3, 2), "OwnForward is a subclass of Conv2d"),
    (lambda: nn.LazyConv2d(16, 3, 2), "LazyConv2d is a subclass of Conv2d"),
    (lambda: nn.utils.parametrizations.spectral_norm(strided()), "ParametrizedConv2d is a subclass of Conv2d"),
    (instance_forward, "its forward was replaced on the instance"),
    (lambda: nn.Conv2d(15, 16, 3, 2), "15 input channels, fewer than min_channels=16"),
    (lambda: nn.MaxPool2d(3, 1, 1), "stride 1 does not subsample"),
    (lambda: nn.MaxPool2d(2, return_indices=True), "return_indices=True"),
])  # fmt: skip
def test_left_alone_and_reported(make: Callable[[], nn.Module], reason: str) -> None:
    odd = make()
    kind = type(odd)
    report = BlurPool().apply(nn.Sequential(strided(), odd))
    assert report.changed == ("0",)
    assert [name for name, _ in report.skipped] == ["1"]
    assert report.skipped[0][1].startswith(reason)
    assert type(odd) is kind


def test_what_came_later_is_changed_too() -> None:
    model = nn.Sequential(strided())
    BlurPool().apply(model)
    report = BlurPool().apply(model.append(nn.MaxPool2d(2)))
    assert report.changed == ("1",)
    assert len(report.notes) == 1


def test_nothing_changed_names_the_obstacle() -> None:
    with pytest.warns(NothingChanged, match=r"Left alone: 0: 16 input channels, fewer than min_channels=99"):
        BlurPool(min_channels=99).apply(nn.Sequential(strided()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NothingChanged, match="And 2 more"):
            BlurPool(min_channels=99).apply(nn.Sequential(*(strided() for _ in range(5))))


# ---- What must stay ----


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
    conv, pool = "BlurConv2d", "BlurMaxPool2d"
    forward = [f"{moment} {name}" for name in (conv, pool) for moment in ("before", "after")]
    assert seen == [*forward, f"back {pool}", f"back {conv}"]


def test_shared_module_stays_shared() -> None:
    model = Arbitrary()
    assert BlurPool().apply(model).changed == ("down", "pool")
    assert model.again is model.down


@pytest.mark.long
@pytest.mark.parametrize("blur_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiles_without_a_break(blur_first: bool) -> None:
    torch._dynamo.reset()
    layers = (
        nn.Conv2d(3, 16, 3),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.BatchNorm2d(16),
        BasicBlock(16, 16),
    )
    model = nn.Sequential(*layers, strided(padding_mode="reflect"))
    assert len(BlurPool(blur_first=blur_first).apply(model).changed) == 2
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    for size in (16, 20):  # the second size makes the shapes symbolic
        torch.testing.assert_close(compiled(images(2, 3, size, size)), model(images(2, 3, size, size)))


# ---- The numbers ----


@pytest.mark.parametrize("shape", [(2, 3, 7, 6), (3, 7, 6), (1, 4, 1, 1), (2, 1, 2, 9)])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_blur_is_the_binomial_filter(shape: tuple[int, ...], stride: int) -> None:
    x = images(*shape)
    torch.testing.assert_close(blur(x, (stride, stride)), dense_blur(x, stride))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_blur_keeps_dtype_and_layout(dtype: torch.dtype) -> None:
    blurred = blur(images(2, 8, 6, 6).to(dtype, memory_format=torch.channels_last))
    assert blurred.dtype == dtype
    assert blurred.is_contiguous(memory_format=torch.channels_last)


def test_less_aliasing_than_before() -> None:
    """What it is for: a shift of one pixel changes the subsampled output less."""
    x = images(1, 16, 64, 64)
    pool = nn.MaxPool2d(2)

    def change() -> float:
        return (pool(x) - pool(x.roll(1, -1))).abs().mean().item() / pool(x).std().item()

    before = change()
    BlurPool().apply(pool)
    assert change() < 0.9 * before


CONVOLUTIONS: dict[str, dict[str, object]] = {
    "plain": {}, "no bias": {"bias": False}, "1x1": {"kernel_size": 1, "padding": 0},
    "dilated": {"dilation": 2, "padding": 2}, "grouped": {"groups": 4}, "depthwise": {"groups": 16},
    "reflect": {"padding_mode": "reflect"},
    "circular": {"padding_mode": "circular", "padding": (1, 2), "kernel_size": (3, 5)},
    "stride (2, 1)": {"stride": (2, 1)}, "valid": {"padding": "valid"},
    "stride 3": {"stride": 3, "kernel_size": 5},
}  # fmt: skip


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("batched", [True, False])
def test_convolution_blurs_its_input(options: dict[str, object], batched: bool) -> None:
    conv, x = strided(**options), images(2, 16, 13, 12)
    x = x if batched else x[0]
    expected = conv(dense_blur(x))
    BlurPool().apply(conv)
    torch.testing.assert_close(conv(x), expected)


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolution_blurs_its_output(options: dict[str, object]) -> None:
    conv, x = strided(**options), images(2, 16, 13, 12)
    shape = conv(x).shape
    dense = copy.deepcopy(conv)
    dense.stride = (1, 1)
    rows, columns = conv.stride
    expected = dense_blur(dense(x))[..., ::rows, ::columns]
    BlurPool(blur_first=False).apply(conv)
    torch.testing.assert_close(conv(x), expected)
    assert conv(x).shape == shape
    assert conv.stride == (rows, columns)
    assert "blur_first=False" in repr(conv)


@pytest.mark.parametrize("blur_first", [True, False])
def test_gradients(blur_first: bool) -> None:
    conv = strided(padding_mode="reflect", groups=4).double()
    BlurPool(blur_first=blur_first).apply(conv)
    x = images(1, 16, 5, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(conv, x, fast_mode=True)


@pytest.mark.parametrize("kernel", [2, 3, (3, 2)])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dilation", [1, 2])
def test_maxpool(kernel: int | tuple[int, int], padding: int, dilation: int) -> None:
    pool, x = nn.MaxPool2d(kernel, 2, padding, dilation), images(2, 4, 9, 10)
    shape = pool(x).shape
    BlurPool().apply(pool)
    torch.testing.assert_close(pool(x), dense_blur(F.max_pool2d(x, kernel, 1, padding, dilation), 2))
    assert pool(x).shape == shape


@pytest.mark.parametrize("size", range(5, 12))
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [
    (2, 2, 0, 1), (3, 2, 0, 1), (3, 2, 1, 1), (3, 3, 1, 1), (2, 3, 0, 1), (2, 3, 1, 2), (2, 4, 1, 1),
])  # fmt: skip
def test_ceil_mode_keeps_the_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> None:
    pool = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=True)
    x = images(1, 2, size, size + 1)
    shape = pool(x).shape
    # The maximum at every pixel, where a window may also reach over the edge, as ceil_mode allows.
    far = F.max_pool2d(F.pad(x, (0, 9, 0, 9), value=-1e9), kernel, 1, padding, dilation)
    rows, columns = ((n - 1) * stride + 1 for n in shape[-2:])
    floor = F.max_pool2d(x, kernel, 1, padding, dilation)
    far = far[..., : max(rows, floor.shape[-2]), : max(columns, floor.shape[-1])]
    expected = dense_blur(far, stride)[..., : shape[-2], : shape[-1]]
    BlurPool().apply(pool)
    assert pool(x).shape == shape
    assert pool(x).isfinite().all()
    torch.testing.assert_close(pool(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_the_cpu_is_the_fp32_filter_rounded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 9, 11).to(dtype).contiguous(memory_format=torch.channels_last)
    exact = x.float().requires_grad_()
    half = x.clone().requires_grad_()
    wanted = blur(exact, (2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = blur(half, (2, 2))
    assert found.dtype == dtype
    assert torch.equal(found, wanted.to(dtype))
    assert found.is_contiguous(memory_format=torch.channels_last)
    wanted.sum().backward()
    found.float().sum().backward()
    assert torch.equal(half.grad, exact.grad.to(dtype))
