"""A value as text that is the same in every process, by which a checkpoint compares the settings of its run.

`repr` of a function, or of an object without its own `__repr__`, contains an address, which differs between processes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..training.model_identity import attributes, digest, is_filled

_ADDRESS = re.compile(r"\b0x[0-9a-f]{4,}\b", re.IGNORECASE)
_DEEPEST = 20  # levels of containers and objects; below, only the class is named
_ATTRIBUTES = object()  # in `inside`: marks the attributes of an object without its own repr
_SAMPLED = 1 << 24  # bytes; of a larger array, only the beginning and the end are hashed


def identity(value: object) -> str:
    """Return the value as text, without addresses.

    - Numbers, strings, containers and dataclasses: their `repr`, with each element by its own identity. Fields with
      `repr=False` are omitted.
    - Classes and functions: module and qualified name, whatever their code, so that a function stays the same after
      a fix. A lambda or an inner function has no importable name, so a digest of its bytecode, defaults and closure
      is added, which may differ between versions of Python.
    - Methods and `functools.partial`: the function and what it is bound to.
    - Tensors and arrays: type, shape and a digest of their bytes; `nn.Module`s: their `repr`, their state and a digest
      of their public attributes, such as a loss's `label_smoothing`.
    - Other objects: their own `__repr__` if it contains no address, else their class and public attributes. Objects
      of this kind among these attributes: only their class.
    """
    return _text(value, ())


def _text(value: Any, inside: tuple[object, ...]) -> str:
    """`inside` lists the objects that contain the value, outermost first."""
    if any(value is each for each in inside) or len(inside) > _DEEPEST:
        return f"<{_name(type(value))}>"
    inside = (*inside, value)
    for kind, text_of in _KINDS.items():
        if isinstance(value, kind):
            return text_of(value, inside)
    if type(value) in (list, tuple):
        return _of_sequence(value, inside)
    if isinstance(value, type) or inspect.isroutine(value):
        return _name(value)
    return _of_object(value, inside)


def _of_object(value: Any, inside: tuple[object, ...]) -> str:
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value) if f.repr}
        return _called(type(value).__qualname__, fields, inside)
    shown = _shown(value)
    if isinstance(value, nn.Module):
        return f"{shown or _name(type(value))}{_of_module(value, inside)}"
    if shown is not None:
        return shown
    if isinstance(value, list | tuple):  # such as a named tuple, whose fields are not instance attributes
        return f"{_name(type(value))}{_of_sequence(value, inside)}"
    if any(each is _ATTRIBUTES for each in inside):
        return f"<{_name(type(value))}>"
    public = {name: v for name, v in sorted(attributes(value).items()) if not name.startswith("_")}
    return _called(_name(type(value)), public, (*inside, _ATTRIBUTES))


def _of_module(value: nn.Module, inside: tuple[object, ...]) -> str:
    """Return the state of a module, and a digest of what its `repr` may omit: the public attributes of its layers."""
    state = value.state_dict()
    settings = {
        f"{path}.{name}": _text(each, inside)
        for path, layer in value.named_modules()
        for name, each in sorted(vars(layer).items())
        if not name.startswith("_") and name != "training"
    }
    texts = [_text(dict(state), inside)] if state else []
    texts += [digest(repr(settings))] if settings else []
    return "".join(f" {text}" for text in texts)


def _called(name: str, values: Mapping[str, Any], inside: tuple[object, ...]) -> str:
    return f"{name}({', '.join(f'{key}={_text(value, inside)}' for key, value in values.items())})"


def _of_sequence(value: list[Any] | tuple[Any, ...], inside: tuple[object, ...]) -> str:
    parts = ", ".join(_text(each, inside) for each in value)
    if isinstance(value, list):
        return f"[{parts}]"
    return f"({parts},)" if len(value) == 1 else f"({parts})"


def _of_mapping(value: Mapping[Any, Any], inside: tuple[object, ...]) -> str:
    return "{" + ", ".join(f"{_text(k, inside)}: {_text(v, inside)}" for k, v in value.items()) + "}"


def _of_partial(value: functools.partial[Any], inside: tuple[object, ...]) -> str:
    given = [_text(each, inside) for each in (value.func, *value.args)]
    given += [f"{name}={_text(each, inside)}" for name, each in sorted(value.keywords.items())]
    return f"partial({', '.join(given)})"


def _of_tensor(value: torch.Tensor) -> str:
    kind = f"tensor(shape={tuple(value.shape)}, dtype={value.dtype}"
    try:
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # on the meta device, sparse, or a subclass
        return f"{kind})"
    return f"{kind}, {_of_bytes(data)})"


def _of_array(value: NDArray[Any], inside: tuple[object, ...]) -> str:
    if value.dtype.hasobject:  # its bytes are addresses
        return f"array(dtype={value.dtype}, {_text(value.tolist(), inside)})"
    return f"array(shape={value.shape}, dtype={value.dtype}, {_of_bytes(value)})"


def _of_function(function: FunctionType, inside: tuple[object, ...]) -> str:
    name = _name(function)
    if "<" not in function.__qualname__:  # neither <lambda> nor <locals>
        return name
    cells = [each.cell_contents if is_filled(each) else "<empty>" for each in function.__closure__ or ()]
    enclosed = [_text(each, inside) for each in cells]
    defaults = _text([function.__defaults__, function.__kwdefaults__], inside)
    return f"{name} {digest(repr((_of_code(function.__code__), defaults, enclosed)))}"


def _of_code(code: CodeType) -> tuple[Any, ...]:
    """Return what the code does, without its file and line numbers."""
    constants = [_of_code(c) if isinstance(c, CodeType) else _text(c, ()) for c in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_flags


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__qualname__)
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def _of_bytes(array: NDArray[Any]) -> str:
    """Return a digest of the bytes; of both ends for a large array, which may be a memory-mapped file."""
    flat = array.reshape(-1)
    if array.nbytes > _SAMPLED:
        rows = max(1, _SAMPLED // array.itemsize // 16)
        flat = np.concatenate([flat[:rows], flat[-rows:]])
    return digest(flat.tobytes())


def _shown(value: object) -> str | None:
    """Return the object's own `repr`, or None if it has none, contains an address, or fails."""
    if type(value).__repr__ is object.__repr__:
        return None
    try:
        text = repr(value)
    except Exception:
        return None
    return None if _ADDRESS.search(text) else text


_KINDS: dict[Any, Callable[[Any, tuple[object, ...]], str]] = {
    enum.Enum: lambda value, _: f"{_name(type(value))}.{value.name}",
    NoneType | bool | int | float | complex | str | bytes: lambda value, _: repr(value),
    PurePath: lambda value, _: repr(str(value)),
    ModuleType: lambda value, _: str(value.__name__),
    torch.Tensor: lambda value, _: _of_tensor(value),
    np.ndarray: _of_array,
    Mapping: _of_mapping,
    set | frozenset: lambda value, inside: f"{{{', '.join(sorted(_text(each, inside) for each in value))}}}",
    functools.partial: _of_partial,
    MethodType: lambda value, inside: f"{_text(value.__self__, inside)}.{value.__func__.__name__}",
    FunctionType: _of_function,
}
"""The text of each kind of values, the first that fits; see `identity`."""
