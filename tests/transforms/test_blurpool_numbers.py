"""BlurPool alone: its results for each kind of convolution and pool."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from blurpool_models import dense_blur, images, strided
from drivetrain.transforms import BlurPool
from drivetrain.transforms.blurpool import blur
from torch import nn


@pytest.mark.parametrize("shape", [(2, 3, 7, 6), (3, 7, 6), (1, 4, 1, 1), (2, 1, 2, 9)])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_blur_is_the_binomial_filter(shape: tuple[int, ...], stride: int) -> None:
    x = images(*shape)
    torch.testing.assert_close(blur(x, (stride, stride)), dense_blur(x, stride))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_blur_keeps_dtype_and_layout(dtype: torch.dtype) -> None:
    x = images(2, 8, 6, 6).to(dtype, memory_format=torch.channels_last)
    assert blur(x).dtype == dtype
    assert blur(x).is_contiguous(memory_format=torch.channels_last)


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
    "plain": {},
    "no bias": {"bias": False},
    "1x1": {"kernel_size": 1, "padding": 0},
    "dilated": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 4},
    "depthwise": {"groups": 16},
    "reflect": {"padding_mode": "reflect"},
    "circular": {"padding_mode": "circular", "padding": (1, 2), "kernel_size": (3, 5)},
    "stride (2, 1)": {"stride": (2, 1)},
    "valid": {"padding": "valid"},
    "stride 3": {"stride": 3, "kernel_size": 5},
}


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
    assert exact.grad is not None
    assert half.grad is not None
    assert torch.equal(half.grad, exact.grad.to(dtype))
