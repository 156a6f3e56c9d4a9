"""What a model is, as text: its structure and settings, and a digest of the user's code that it runs.

Models with equal names and shapes can be different functions (another dropout, activation, forward). By this text, of
the model before surgery, on the CPU, a run that resumes, and the ranks of a run, know that they have the same one. What
differs between two builds or machines is not in it: addresses, absolute paths, values of tensors, devices, last digits
of floats, the order of dicts and sets; and of code comments and blank lines. It cannot see literals in code made by
`exec`, what packages keep in private attributes, or C extensions, or what a forward looks up by a computed name or in a
file.
"""

import ast
import functools
import hashlib
import inspect
import io
import linecache
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

CODE, LIBRARY = "code of ", "version of "  # beginnings of keys; those of code have digests
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}", re.IGNORECASE)
_MANGLED = re.compile(r"___torch_mangle_\d+\.")  # TorchScript numbers classes of equal names
_DEEPEST = 4  # levels of a setting at which objects are looked into; containers, at four times as many
_LONGEST = 200  # characters of a setting; a longer one is replaced by its digest
_INSTALLED = {"site-packages", "dist-packages"}
_CODE = (type, FunctionType, MethodType, functools.partial)
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_compiled_call_impl", "dynamo_ctx"})


def model_identity(model: nn.Module, factory: object = None) -> dict[str, str]:
    """Return what a model is, by module path, name of the user's code (the `factory`'s, too), and package."""
    modules = dict[str, str]()
    for path, one in model.named_modules():
        name = f"model.{path}" if path else "model"
        modules[name] = _of_module(one)
        if isinstance(one, torch.jit.ScriptModule):
            modules[f"{CODE}{name}"] = digest(_MANGLED.sub("", str(getattr(one, "code", ""))))
    owners: list[Any] = []
    for one in model.modules():
        hooks = [*one._forward_pre_hooks.values(), *one._forward_hooks.values()]
        owners += [type(one), *(each for each in [*vars(one).values(), *hooks] if isinstance(each, _CODE))]
    if factory is not None and not isinstance(factory, nn.Module):
        owners.append(factory)
    return modules | code_identity(owners)


def difference(
    saved: Mapping[str, str],
    own: Mapping[str, str],
    *,
    libraries: bool = False,
    names: tuple[str, str] = ("the checkpoint", "this run"),
) -> str:
    """Return a sentence part on the first three differences. Code that could not be read in one of the two (in a
    notebook, say) is not compared, nor are packages' versions unless `libraries`."""
    changed = []
    for key in dict.fromkeys([*own, *saved]):
        one, other = saved.get(key), own.get(key)
        if one == other or (key.startswith(LIBRARY) and not libraries):
            continue
        if not key.startswith(CODE):
            changed.append(f"{key} is {one or 'not there'} in {names[0]} and {other or 'not there'} in {names[1]}")
        elif one is not None and other is not None:
            changed.append(f"{key} is not the same in {names[0]} and {names[1]}")
    more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    return "; ".join(changed[:3]) + more


def _of_module(module: nn.Module) -> str:
    try:
        shown = _ADDRESS.sub("", module.extra_repr())
    except Exception:
        shown = ""
    ours = {*vars(module)} - _OF_EVERY_MODULE
    settings = [name for name in sorted(ours) if not name.startswith("_torchdynamo")]  # wrappers are numbered
    texts = [f"{name}={_short(_setting(vars(module)[name]))}" for name in settings]
    texts = [text for text in texts if text not in shown]
    return f"{type(module).__qualname__}({_short(shown)}){' ' * bool(texts)}{', '.join(texts)}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:40]}… {digest(text)}"


def _setting(value: Any, within: tuple[int, ...] = ()) -> str:
    """`within`: ids of the containers and objects around it, which are not repeated."""
    if isinstance(value, bool | int | bytes) or value is None:
        return repr(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return "<path>" if PurePath(value).is_absolute() else repr(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__}{tuple(value.shape)} {value.dtype}"
    is_container = isinstance(value, Mapping | set | frozenset | Sequence)
    if id(value) in within or len(within) >= _DEEPEST * (4 if is_container else 1):
        return type(value).__name__
    return (_of_container if is_container else _of_object)(value, (*within, id(value)))


def _of_container(value: Any, within: tuple[int, ...]) -> str:
    if isinstance(value, Mapping):
        items = sorted((str(key), _setting(each, within)) for key, each in value.items())
        return "{" + ", ".join(f"{key}: {each}" for key, each in items) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_setting(each, within) for each in value)) + "}"
    return "[" + ", ".join(_setting(each, within) for each in value) + "]"


def _of_object(value: Any, within: tuple[int, ...]) -> str:
    if isinstance(value, functools.partial):
        return f"partial({_setting([value.func, *value.args, value.keywords], within)})"
    if isinstance(value, MethodType):
        return value.__func__.__qualname__
    if isinstance(value, nn.Module):
        return _of_module(value) if len(within) < 3 else type(value).__qualname__
    if isinstance(value, type) or inspect.isroutine(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    if isinstance(value, torch.device | torch.Generator):
        return type(value).__name__
    if isinstance(value, torch.dtype):
        return str(value)
    # a package's private ones may be caches, and change with its version
    is_own = _library(type(value)) is None
    shown = {name: each for name, each in attributes(value).items() if is_own or not name.startswith("_")}
    return f"{type(value).__qualname__}({_setting(shown, within) if shown else ''})"


def attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, Enum):
        return {"name": value.name}
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def code_identity(owners: Sequence[Any]) -> dict[str, str]:
    """Return a digest of each class and function of the user's that these use, and the versions of other packages."""
    found: dict[str, set[str]] = {}  # several lambdas of a function have one name
    versions: dict[str, str] = {}
    seen: set[int] = set()
    waiting = list(owners)
    while waiting:
        one = waiting.pop()
        one = inspect.unwrap(one) if callable(one) else one
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            waiting.append(one.__func__)
        elif isinstance(one, type | FunctionType):
            package = _library(one)
            if package is not None:
                if package:
                    version = getattr(sys.modules.get(package), "__version__", "")
                    versions[f"{LIBRARY}{package}"] = str(version)
                continue
            text = _source(one)
            if text is not None:
                module = str(one.__module__).replace("__mp_main__", "__main__")  # the same in every process
                own = digest(text + _setting(dict(_constants(one))))
                found.setdefault(f"{CODE}{module}.{one.__qualname__}", set()).add(own)
            waiting += _used(one)
    return {key: " ".join(sorted(found[key])) for key in sorted(found)} | dict(sorted(versions.items()))


def _library(one: Any) -> str | None:
    """Return the package of installed code, "" for Python's and ours; None for the user's own."""
    name = str(getattr(one, "__module__", None) or "")
    top = name.partition(".")[0]
    if top in ("", __name__.partition(".")[0]) or (top in sys.stdlib_module_names and top != "__main__"):
        return ""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # __main__ of a notebook, or a class that was sent to another process by value
        return None
    return top if top == "torch" or _INSTALLED & set(Path(file).parts) or _is_recorded(top) else None


@functools.cache
def _is_recorded(package: str) -> bool:
    """Whether an installer put it there, as `pip install --target` does. An editable installation is the user's own."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return False
    path = Path(file)
    folder = path.parent.parent if path.name == "__init__.py" else path.parent
    listed = re.compile(rf"^{re.escape(package)}[/.]", re.MULTILINE)
    records = folder.glob("*.dist-info/RECORD")
    return any(listed.search(record.read_text(errors="replace")) for record in records)


def _source(one: Any) -> str | None:
    """Without comments and blank lines; None if it cannot be read."""
    if getattr(one, "__name__", "") == "<lambda>":  # its source would be the whole statement around it
        return _source_of_lambda(one)
    try:
        text = textwrap.dedent(inspect.getsource(one))
        lines = text.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    except (OSError, TypeError, SyntaxError, tokenize.TokenError, IndentationError):
        return None
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _source_of_lambda(one: FunctionType) -> str:
    """Found by its place; without it, the names and constants of its code."""
    code = one.__code__
    text = "".join(linecache.getlines(code.co_filename, one.__globals__))
    places = [(line, column) for line, _, column, _ in code.co_positions() if line and column is not None]
    try:
        lambdas = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]
    except (SyntaxError, ValueError):
        lambdas = []
    last = max(places, default=(0, 0))
    around = [node for node in lambdas if _place(node) <= last < (node.end_lineno or 0, node.end_col_offset or 0)]
    if around:
        return " ".join((ast.get_source_segment(text, max(around, key=_place)) or "").split())
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    return repr((code.co_names, constants, code.co_varnames))


def _place(node: ast.Lambda) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _functions(one: Any) -> Iterator[FunctionType]:
    if isinstance(one, FunctionType):
        yield one
        return
    for value in vars(one).values():
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if isinstance(inner, FunctionType):
            yield inner


def _names(code: CodeType) -> set[str]:
    inside = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*(_names(each) for each in inside))


def _used(one: Any) -> list[Any]:
    used: list[Any] = list(one.__bases__) if isinstance(one, type) else []
    for function in _functions(one):
        cells = _closure(function).values()
        scope, names = function.__globals__, sorted(_names(function.__code__))
        looked_up = [scope[name] for name in names if name in scope]
        for module in [each for each in looked_up if isinstance(each, ModuleType)]:
            looked_up += [vars(module)[name] for name in names if name in vars(module)]
        used += [each for each in (*cells, *looked_up) if isinstance(each, _CODE)]
    return used


def _constants(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain global values that it uses, and those in its closure."""
    for function in _functions(one):
        scope = function.__globals__
        values = {name: scope[name] for name in _names(function.__code__) if name in scope}
        values |= _closure(function)
        for name, value in values.items():
            if (isinstance(value, tuple) or _is_plain(value)) and not name.startswith("__"):
                yield name, value


def _is_plain(value: Any) -> bool:
    """Whether it contains nothing but numbers, texts and members of enumerations. A registry of functions or a cache of
    tensors may depend on what the process did before."""
    if isinstance(value, dict):
        return bool(value) and all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return bool(value) and all(_is_plain(each) for each in value)
    return isinstance(value, bool | int | float | str | Enum)


def _closure(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells if is_filled(cell)}


def is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def digest(value: str | bytes) -> str:
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16]
