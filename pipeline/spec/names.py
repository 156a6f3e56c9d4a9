"""Objects of Python modules by name, `"package.module:attribute"`, as a recipe writes them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ...errors import PlanError


def imported(what: str, name: str) -> Callable[..., Any]:
    """Return the function or class that `"package.module:attribute"` names; `what` is its role, for messages.

    Importing a module runs its code: read a recipe from others before you use it.

    Raises:
        PlanError: if it cannot be imported by other processes, or is not callable.
    """
    module, _, path = name.partition(":")
    if module == "__main__":
        raise PlanError(
            f"The {what} {name!r} is defined in the running script, which other processes cannot import. Move it to a "
            "separate module, and write module:name."
        )
    if module.split(".")[0] in sys.stdlib_module_names:
        raise PlanError(
            f"The {what} {name!r} names Python's standard library, which has none. Write package.module:name."
        )
    try:
        target: Any = importlib.import_module(module)
        for attribute in path.split("."):
            target = getattr(target, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"The {what} {name!r} cannot be imported: {error}. Write package.module:name with an importable module. "
            "The command line also searches the working directory and the folder of the recipe file."
        ) from error
    if not callable(target):
        raise PlanError(f"The {what} {name!r} is {target!r:.80}, not a function or a class.")
    named: Callable[..., Any] = target
    return named


def name_of(what: str, target: Callable[..., Any]) -> str | None:
    """Return the name for which `imported` returns exactly this object; None if there is none.

    None for a lambda, a function defined inside another, and a class or function of the running script.
    """
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    package = module.rpartition(".")[0]
    # torch.optim:NAdam is the documented name of torch.optim.nadam:NAdam.
    places = [package, module] if package.startswith("torch") else [module]
    for place in places:
        try:
            if imported(what, f"{place}:{name}") is target:
                return f"{place}:{name}"
        except PlanError:
            pass
    return None
