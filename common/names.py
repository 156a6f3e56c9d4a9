"""Objects of Python modules by name, `"package.module:attribute"`, as a recipe writes them."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from .errors import DrivetrainError, PlanError

SCRIPTS = ("__main__", "__mp_main__")
_script_named = ContextVar("script_named", default=False)


@contextmanager
def script_named() -> Iterator[None]:
    """Inside the block, what the running script defines has names, too: `__main__:Net`."""
    token = _script_named.set(True)
    try:
        yield
    finally:
        _script_named.reset(token)


def imported(what: str, name: str, error: type[DrivetrainError] = PlanError) -> Any:
    """Return the object that `"package.module:attribute"` names, in a module that other processes can import, which
    runs its code. `what` is the role of the object, such as `"model"`, for messages."""
    module, _, path = name.partition(":")
    if module == "__main__" and not _script_named.get():
        raise error(
            f"The {what} {name!r} is defined in the running script, which other processes cannot import. Move it to a "
            "separate module, and write module:name."
        )
    # A recipe could call any of its functions.
    if module != "__main__" and module.split(".")[0] in sys.stdlib_module_names:
        kinds = f"{what}{'es' if what.endswith('s') else 's'}"
        raise error(
            f"The {what} {name!r} names Python's standard library, which has no {kinds}. Write package.module:name."
        )
    try:
        target: Any = importlib.import_module(module)
        for attribute in path.split("."):
            target = getattr(target, attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as reason:  # TypeError: ".module" is relative
        raise error(
            f"The {what} {name!r} cannot be imported: {reason}. Write package.module:name with an importable module. "
            "The command line also searches the working directory and the folder of the recipe file."
        ) from reason
    return target


def name_of(target: object) -> str | None:
    """Return the name for which `imported` returns exactly this object; None for a lambda, a function defined inside
    another, and a class or function of the running script or of the standard library."""
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    package = module.rpartition(".")[0]
    # torch.optim:NAdam is the documented name of torch.optim.nadam:NAdam.
    for place in [package, module] if package.startswith("torch") else [module]:
        with suppress(PlanError):
            if imported("object", f"{place}:{name}") is target:
                return f"{place}:{name}"
    return None


def title(target: object) -> str:
    return str(getattr(target, "__qualname__", None) or f"{target!r:.80}")


def unnamed(target: object) -> str:
    """Return why `name_of` has no name for it, and the remedy, as sentences that follow its role."""
    name = getattr(target, "__qualname__", None)
    if isinstance(target, partial):
        return "It is a partial object. Pass its function, and the arguments beside it."
    if name is None:
        kind = type(target).__name__
        return f"It is a {kind} object. Write a function or class at the top level of a module."
    outer, _, inner = name.rpartition(".<locals>.")
    if (inner or name) == "<lambda>":
        return "It is a lambda. Write it as a function, def …, at the top level of a module."
    if outer:
        return f"It is defined inside {outer}. Define it at the top level of a module."
    if getattr(target, "__module__", None) in SCRIPTS:
        return (
            "It is defined in the script or notebook that is running. Move it to a file of its own, such as net.py, "
            f"and write from net import {name}; its name in a recipe is then net:{name}. Only the recipe.yaml that "
            "fit(out=…) writes can name it where it is, because its source is saved with it."
        )
    return "Define it at the top level of a module, under its own name."
