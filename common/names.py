"""Objects of Python modules by name, `"package.module:attribute"`, as a recipe writes them."""

import importlib
import sys
from contextlib import suppress
from typing import Any

from .errors import DrivetrainError, PlanError


def imported(what: str, name: str, error: type[DrivetrainError] = PlanError) -> Any:
    """Return the object that `"package.module:attribute"` names, in a module that other processes can import, which
    runs its code. `what` is the role of the object, such as `"model"`, for messages."""
    module, _, path = name.partition(":")
    if module == "__main__":
        raise error(
            f"The {what} {name!r} is defined in the running script, which other processes cannot import. Move it to a "
            "separate module, and write module:name."
        )
    if module.split(".")[0] in sys.stdlib_module_names:  # a recipe could call any of its functions
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
