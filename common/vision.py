"""torchvision, imported without torch's compiler: that takes 2 s more in each process, such as a loader's worker."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo.utils"


class _Later(ModuleType):
    """Stands for the module that torchvision's `roi_align` takes one function from, and is it as soon as anything else
    is asked of it."""

    @staticmethod
    def is_compile_supported(device: str) -> bool:
        return bool(import_module(_COMPILER).is_compile_supported(device))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system
            raise AttributeError(name)
        _forget(self)
        return getattr(import_module(_COMPILER), name)


def _forget(later: ModuleType) -> None:
    if sys.modules.get(_COMPILER) is later:
        del sys.modules[_COMPILER]


def _disabled_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.compiler.disable`, once there is a compiler."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")
        return (compiler.disable(function) if compiler else function)(*args, **kwargs)

    return call


@contextmanager
def _without_compiler() -> Iterator[None]:
    later, disable = _Later(_COMPILER), torch.compiler.disable
    if "torchvision" in sys.modules or sys.modules.setdefault(_COMPILER, later) is not later:
        yield
        return
    torch.compiler.disable = _disabled_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = disable
        _forget(later)


with _without_compiler():
    from torchvision import datasets, models, tv_tensors
    from torchvision.transforms import v2

__all__ = ["datasets", "models", "tv_tensors", "v2"]
