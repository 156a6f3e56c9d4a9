"""Write a project from its template: all of its files, or none."""

import os
import re
import shutil
from pathlib import Path

from ....common.errors import DrivetrainError, PlanError, suggest

TEMPLATES = {
    "classification": "photos/train train.beton",
    "segmentation": "photos/train train.beton --labels masks/train --classes ground,car,tree",
}
"""The templates by task, each a folder here, and what `drivetrain convert` takes there."""
# Names in a template, and in the project: here, model.py would be a module of the package, and .gitignore be obeyed.
FILES = {
    "README.md": "README.md", "recipe.yaml": "recipe.yaml", "model.py.txt": "model.py", "gitignore": ".gitignore",
}  # fmt: skip
_NAME = re.compile(r"[^\W\d_][\w-]*")


def write_project(folder: Path, task: str) -> None:
    """Write the files of a new project; an empty folder of that name is replaced."""
    name = folder.name
    if not _NAME.fullmatch(name):
        near = re.sub(r"\W+", "-", name).strip("-_0123456789")
        hint = f" Did you mean {near!r}?" if near else ""
        raise PlanError(
            f"{str(folder)!r} cannot be a project's folder: its name must begin with a letter, and have only letters, "
            f"digits, - and _.{hint}"
        )
    if task not in TEMPLATES:
        raise PlanError(f"There is no template for the task {task!r:.80}.{suggest(task, TEMPLATES)}")
    partial = folder.with_name(f".{name}.{os.getpid()}.partial")
    try:
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise DrivetrainError(f"{folder} exists already. Pass another name, or move it.")
        partial.mkdir()
        for kept, written in FILES.items():
            text = Path(__file__).with_name(task).joinpath(kept).read_text("utf-8")
            text = text.replace("@name@", name).replace("@data@", TEMPLATES[task])
            (partial / written).write_text(text, "utf-8")
        partial.rename(folder)  # fails if somebody else has put a file into it
    except OSError as error:
        raise DrivetrainError(f"{folder} could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
