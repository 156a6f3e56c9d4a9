"""`drivetrain new`: a project that trains in two commands."""

import shlex
from pathlib import Path

import click

from ..projects.project import FILES, TEMPLATES, write_project
from .options import Command, File, Text, argument, option


@click.command(cls=Command)
@argument("name", "Folder to create, e.g. flowers. Its name is the project's.", File())
@option(
    "--task TASK", "What the model is for: classification, a class per image; segmentation, a class per pixel.",
    Text(*TEMPLATES), default="classification",
)  # fmt: skip
def new(name: Path, task: str) -> None:
    """Write a project that trains on your images.

    It is a folder with a recipe, a model of your own to change, and a README. Nothing needs to be edited: the number of
    classes is that of the data, a tenth of which is held out for validation. For masks, --classes of convert names the
    classes in the order of the masks' values.

    \b
    drivetrain new flowers
    cd flowers
    drivetrain convert ../photos train.beton
    drivetrain train recipe.yaml
    """
    write_project(name, task)
    print(
        f"{name}: {', '.join(FILES.values())}. Next, with your own data:\n\n"
        f"  cd {shlex.quote(str(name))}\n  drivetrain convert {TEMPLATES[task]}\n  drivetrain train recipe.yaml\n\n"
        "README.md describes the data. To see each step of the training first: drivetrain plan recipe.yaml"
    )
