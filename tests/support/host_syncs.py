"""What would make a GPU wait for the host, or the host for it: counted without a GPU.

Two instruments. `HostSyncs` watches operations on the CPU: a value that is read (`.item()`, `.tolist()`, `if tensor`),
and operations whose result's shape depends on values. `SimulatedCuda` has tensors of the device "cuda", and computes on
the CPU: every operation that torch dispatches inside the block is seen, in its CUDA branch where it has one, and gives
its true values. The autograd engine does not know such tensors: no backward.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
READS = {"_local_scalar_dense", "is_nonzero", "equal", "item", "allclose"}
"""Operations that give the host a value."""
SHAPES = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "argwhere", "bincount",
    "repeat_interleave",
}  # fmt: skip
"""Operations that give the host a shape which depends on values."""
HOST_ONLY = ("torch/optim/", "torch/_tensor_str")
"""Where reads are of tensors that are on the host also with a GPU: an optimizer's counts of steps."""


class HostSyncs(TorchDispatchMode):
    """Inside it, `found` gets a line for each operation that would wait: its name, and the innermost lines of code.

    Reads by torch's optimizers are left out: they are of counters in the host's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._lists = _Lists(self.found)

    def __enter__(self) -> HostSyncs:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        waits = name in READS or _is_sized_by_values(name, kwargs) or _is_by_mask(name, args)
        if waits and (place := _place()):
            self.found.append(f"{name} at {place}")
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Records `.tolist()` and `.numpy()`, which dispatch no operation on the CPU."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and (place := _place()):
            self._found.append(f"{func.__name__} at {place}")
        return func(*args, **(kwargs or {}))


def _is_by_mask(name: str, args: Any) -> bool:
    if name not in ("index", "index_put_", "index_put"):
        return False
    return any(getattr(one, "dtype", None) in (torch.bool, torch.uint8) for one in tree_leaves(args[1]))


def _is_sized_by_values(name: str, kwargs: Any) -> bool:
    return name in SHAPES and (kwargs or {}).get("output_size") is None


def _place() -> str:
    """The innermost lines of code outside of torch; empty where the read is of the host's own."""
    instruments = ("host_syncs.py", "_python_dispatch.py")
    frames = [f for f in traceback.extract_stack() if Path(f.filename).name not in instruments]
    own = [number for number, frame in enumerate(frames) if "site-packages" not in frame.filename]
    within = frames[own[-1] + 1 :]  # of torch, below the innermost line of ours
    if any(part in frame.filename for part in HOST_ONLY for frame in within[-3:]):
        return ""
    return " < ".join(f"{Path(frames[n].filename).name}:{frames[n].lineno}" for n in reversed(own[-3:]))


class OnCuda(torch.Tensor):
    """A tensor that has a CUDA device, and its values in `host`, on the CPU."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device = CUDA) -> OnCuda:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=device,
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
    """Inside it, `device="cuda"` works, and `found` lists where the host would have waited for a GPU. `copies` counts
    those from pinned memory, which are asynchronous."""

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
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes its values on the CPU, and copies them
        self._patches.setattr(torch.backends.cudnn, "enabled", False)  # its kernels have no CPU branch
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(False)
        self._patches.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        if packet in (aten._pin_memory, aten.is_pinned):
            return self._pin(packet, args[0])
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_cuda = [leaf for leaf in leaves if isinstance(leaf, OnCuda)]
        to_cuda, device = bool(on_cuda), on_cuda[0].device if on_cuda else CUDA
        if kwargs.get("device") is not None:
            given = torch.device(kwargs["device"])
            to_cuda, device = given.type == "cuda", given if given.index is not None else device
            kwargs["device"] = "cpu"
        pin = kwargs.pop("pin_memory", False)
        if packet is aten._to_copy and to_cuda != bool(on_cuda):
            self._note_copy(args[0], kwargs.pop("non_blocking", False) and to_cuda, to_cuda)
        elif packet is aten.copy_ and isinstance(args[0], OnCuda) != isinstance(args[1], OnCuda):
            unwaited = (*args[2:], kwargs.get("non_blocking", False))[0]
            to_device = isinstance(args[0], OnCuda)
            self._note_copy(args[to_device], unwaited, to_device)
        elif on_cuda:
            self._note(func, args, kwargs, leaves)
        result = func(*tree_map(_host, args), **tree_map(_host, kwargs))

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if to_cuda:
                return next((known for known in on_cuda if known.host is value), OnCuda(value, device))
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
        name = func.overloadpacket.__name__
        if name in READS:
            self.found.append(f"{func}: the host reads the device")
        elif _is_by_mask(name, args):
            self.found.append(f"{func}: indexed by a mask, whose true entries the host counts")
        elif _is_sized_by_values(name, kwargs):
            self.found.append(f"{func}: the result's shape is read from the device")
        else:
            # A number may be on the CPU: it goes with the kernel.
            scalars = func.overloadpacket is not aten.where
            mixed = [one for one in leaves if not isinstance(one, OnCuda) and (one.dim() or not scalars)]
            self.found += [f"{func}: {tuple(one.shape)} on the CPU among CUDA tensors" for one in mixed]

    def _note_copy(self, host: torch.Tensor, non_blocking: bool, to_cuda: bool) -> None:
        """Between a device and `host`, or new memory of the host."""
        if not host.numel():
            return
        if non_blocking and host.untyped_storage().data_ptr() in self._pinned:
            self.copies += 1
        else:
            what = "to the device" if to_cuda else "from the device"
            self.found.append(f"a copy of {tuple(host.shape)} {what} that the host waits for")


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
