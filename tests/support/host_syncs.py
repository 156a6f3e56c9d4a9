"""What would make a GPU wait for the host, or the host for it: counted without a GPU.

Two instruments. `HostSyncs` watches operations on the CPU: a value that is read (`.item()`, `.tolist()`, `if tensor`),
and operations whose result's shape depends on values. `pretend_cuda` has tensors of the device "cuda" that have shapes
and no values: to read one raises, and a copy between it and the host's memory is noted. Autograd does not run on them.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"_local_scalar_dense", "is_nonzero", "equal", "item"}
"""Operations that give the host a value."""
SHAPES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "argwhere", "bincount"}
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
        by_mask = name in ("index", "index_put_", "index_put") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in tree_leaves(args[1])
        )
        if name in READS | SHAPES or by_mask:
            place = _place()
            if place:
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


def _place() -> str:
    """The innermost lines of code outside of torch; empty where the read is of the host's own."""
    instruments = ("host_syncs.py", "_python_dispatch.py")
    frames = [f for f in traceback.extract_stack() if Path(f.filename).name not in instruments]
    own = [number for number, frame in enumerate(frames) if "site-packages" not in frame.filename]
    within = frames[own[-1] + 1 :]  # of torch, below the innermost line of ours
    if any(part in frame.filename for part in HOST_ONLY for frame in within[-3:]):
        return ""
    return " < ".join(f"{Path(frames[n].filename).name}:{frames[n].lineno}" for n in reversed(own[-3:]))


class Copies(TorchDispatchMode):
    """Notes the copies between the pretended GPU and the host's memory for which one of them waits."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.found: list[str] = []
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        on_gpu = any(isinstance(leaf, FakeTensor) for leaf in leaves) or any(
            isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves
        )
        on_gpu = on_gpu or bool(kwargs.get("pin_memory"))  # which needs a GPU that is there
        if not on_gpu:
            with unset_fake_temporarily():  # the host computes with values
                return func(*args, **kwargs)
        with self._fake:
            result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_", "_copy_from", "lift_fresh_copy"):
            source = args[1] if name == "copy_" else args[0]
            target = args[0] if name == "copy_" else result
            waits = source.device != target.device and not kwargs.get(
                "non_blocking", len(args) > 2 and args[2]
            )
            # A single number travels with the kernel that uses it.
            if waits:
                self.found.append(f"{name} {source.device} to {target.device} at {_place()}")
        return result


@contextmanager
def pretend_cuda() -> Iterator[Copies]:
    """Inside it `torch.zeros(3, device="cuda")` gives a tensor without values on a GPU that is not there.

    Tensors of the host have values, also random ones. To read a value of the GPU raises torch's
    `DataDependentOutputException`. Gives the notes of copies that wait.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, Copies(fake) as copies:
        yield copies
