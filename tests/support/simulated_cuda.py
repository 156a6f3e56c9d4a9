"""CUDA tensors without a GPU: `SimulatedCuda` computes on the CPU, and notes where the host would wait for a device.

The tensors of host_syncs.py have no values; these do. Every operation that torch dispatches inside the block is seen,
in its CUDA branch where it has one, and gives its true values. The autograd engine does not know such tensors: no
backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)

READS = {aten._local_scalar_dense, aten.item, aten.equal, aten.is_nonzero, aten.allclose}
"""Operations whose result is a Python value."""
SIZED_BY_VALUES = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount,
    aten.argwhere, aten.repeat_interleave,
}  # fmt: skip
"""Operations whose result has a shape that depends on the values."""


MASKS = (torch.bool, torch.uint8)


class OnCuda(torch.Tensor):
    """A tensor that has a CUDA device, and its values in `host`, on the CPU."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> OnCuda:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=CUDA,
        )  # fmt: skip
        made.host = host
        return made

    def __repr__(self) -> str:
        return f"OnCuda({self.host!r})"

    def tolist(self) -> Any:
        """torch's own refuses subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of SimulatedCuda")


class SimulatedCuda(TorchDispatchMode):
    """Inside it, `device="cuda"` works, and `found` lists where the host would have waited for a GPU.

    Attributes:
        found: descriptions, in order.
        copies: copies from pinned memory, which are asynchronous.
    """

    # With this key torch starts no CUDA for `device="cuda"`.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.copies = 0
        self._pinned: dict[int, torch.Tensor] = {}
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> SimulatedCuda:
        if not torch.cuda.is_available():
            torch._C._ensureCUDADeviceGuardSet()  # indexing looks for a guard of the device
            self._patches.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self._patches.setattr(torch.backends.cudnn, "enabled", False)  # its kernels have no CPU branch
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._patches.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        if packet in (aten._pin_memory, aten.is_pinned):
            return self._pin(packet, args[0])
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_cuda = [leaf for leaf in leaves if isinstance(leaf, OnCuda)]
        to_cuda = bool(on_cuda)
        if kwargs.get("device") is not None:
            to_cuda = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = "cpu"
        pin = kwargs.pop("pin_memory", False)
        if packet is aten._to_copy and to_cuda != bool(on_cuda):
            self._note_copy(args[0], kwargs.pop("non_blocking", False), to_cuda)
        elif packet is aten.copy_ and isinstance(args[0], OnCuda) != isinstance(args[1], OnCuda):
            unwaited = (*args[2:], kwargs.get("non_blocking", False))[0]
            self._note_copy(args[1], unwaited, isinstance(args[0], OnCuda))
        elif on_cuda:
            self._note(func, args, kwargs, leaves)
        result = func(*tree_map(_host, args), **tree_map(_host, kwargs))

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if to_cuda:
                return next((known for known in on_cuda if known.host is value), OnCuda(value))
            if pin:
                self._pinned[value.untyped_storage().data_ptr()] = value
            return value

        return tree_map(wrapped, result)

    def _pin(self, packet: Any, tensor: torch.Tensor) -> Any:
        if packet is aten.is_pinned:
            return tensor.untyped_storage().data_ptr() in self._pinned
        copy = tensor.clone()
        self._pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    def _note(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> None:
        """Of an operation on CUDA tensors that is not a copy."""
        packet = func.overloadpacket
        indices = tree_leaves(args[1]) if packet in (aten.index, aten.index_put, aten.index_put_) else []
        if packet in READS:
            self.found.append(f"{func}: the host reads the device")
        elif any(isinstance(one, torch.Tensor) and one.dtype in MASKS for one in indices):
            self.found.append(f"{func}: indexed by a mask, whose true entries the host counts")
        elif packet in SIZED_BY_VALUES and kwargs.get("output_size") is None:
            self.found.append(f"{func}: the result's shape is read from the device")
        else:
            # A number may be on the CPU: it goes with the kernel.
            scalars = packet is not aten.where
            mixed = [one for one in leaves if not isinstance(one, OnCuda) and (one.dim() or not scalars)]
            self.found += [f"{func}: {tuple(one.shape)} on the CPU among CUDA tensors" for one in mixed]

    def _note_copy(self, source: torch.Tensor, non_blocking: bool, to_cuda: bool) -> None:
        if not source.numel():
            return
        pinned = to_cuda and source.untyped_storage().data_ptr() in self._pinned
        if pinned and non_blocking:
            self.copies += 1
        else:
            what = "to the device" if to_cuda else "from the device"
            self.found.append(f"a copy of {tuple(source.shape)} {what} that the host waits for")


def _host(value: Any) -> Any:
    return value.host if isinstance(value, OnCuda) else value


def put_on_cuda(model: nn.Module) -> nn.Module:
    """The model's parameters and buffers as `OnCuda`, in place. Inside `SimulatedCuda`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = nn.Parameter(OnCuda(parameter.detach()), parameter.requires_grad)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnCuda(buffer)
    return model
