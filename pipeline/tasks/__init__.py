"""What a pipeline trains for: the tasks by name, imported on use, because that imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...common.errors import PlanError, suggest
from ...common.names import imported, name_of, title, unnamed

if TYPE_CHECKING:
    from .task import Task

TASKS = {
    "Classification": "standard", "Contrastive": "contrastive", "MultiLabel": "standard", "Regression": "standard",
    "Segmentation": "standard",
}  # fmt: skip
"""The tasks by name, with the file of each."""


def get(name: str, **options: Any) -> Task:
    """Return the task of this name, or of `"package.module:Class"`."""
    kind = _imported(name) if ":" in name else _known(name)
    if kind is None:
        raise PlanError(f"No task is named {name!r}.{suggest(name, TASKS)}")
    try:
        return kind(**options)
    except TypeError as error:
        raise PlanError(f"{name} does not take {options}: {error}.") from error


def to_dict(task: Task) -> dict[str, Any]:
    """Return the name and arguments with which `get` returns an equal task; PlanError if there are none."""
    kind = type(task)
    name = kind.__name__ if _known(kind.__name__) is kind else name_of(kind)
    options = {key: _by_name(value) for key, value in task.options.items()}
    nameless = [each for value in options.values() for each in _flat(value) if callable(each)]
    if name is None:
        nameless.insert(0, kind)
    if nameless:
        raise PlanError(
            f"The task {task!r:.120} cannot be named in a recipe: {title(nameless[0])} cannot be imported by name. "
            f"{unnamed(nameless[0])} Metrics and losses may be names, classes and functions."
        )
    try:
        known = get(str(name), **options) == task
    except PlanError:
        known = False
    if not known:
        raise PlanError(f"The task {task!r:.120} cannot be named in a recipe: {name} with {options} is another one.")
    return {"name": name, **options}


def _by_name(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _by_name(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [*map(_by_name, value)]
    return value if isinstance(value, str) else name_of(value) or value


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _flat(each)
    else:
        yield value


def _known(name: str) -> type[Task] | None:
    if name not in TASKS:
        return None
    kind: type[Task] = getattr(import_module(f".{TASKS[name]}", __package__), name)
    return kind


def _imported(name: str) -> type[Task]:
    from .task import Task

    target = imported("task", name)
    if not (isinstance(target, type) and issubclass(target, Task)):
        raise PlanError(f"The task {name!r} is {target!r:.80}, not a class derived from drivetrain.Task.")
    return target
