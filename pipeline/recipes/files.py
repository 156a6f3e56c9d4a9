"""Read recipes from YAML or JSON, as data only, with errors that name the line; import the modules beside them."""

import json
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...common.errors import RecipeError
from .schema import Origin

SUFFIXES = (".yaml", ".yml", ".json")
RECIPE = "recipe.yaml"
"""The recipe in the folder of its run."""


def is_file_name(recipe: object) -> bool:
    return isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.lower().endswith(SUFFIXES))


def read_recipe(path: str | Path) -> tuple[dict[str, Any], Origin]:
    """Return the recipe and the lines of its keys."""
    file = Path(path)
    text = _text(file)
    try:
        if file.suffix.lower() == ".json":
            recipe, lines = _json(text, f"Recipe {file}"), dict[str, int]()
        else:
            from .core_yaml import parse  # here: PyYAML takes 30 ms

            recipe, lines = parse(text, f"Recipe {file}")
    except RecipeError:  # which is a ValueError
        raise
    except json.JSONDecodeError as error:
        raise RecipeError(f"Recipe {file}, line {error.lineno}: {error.msg}. Write plain JSON.") from None
    except ValueError as error:  # a number of thousands of digits
        raise RecipeError(f"Recipe {file}: {error}. Write plain values.") from None
    except RecursionError:
        raise RecipeError(f"Recipe {file}: it is nested too deeply to be a recipe.") from None
    if not isinstance(recipe, dict):
        raise RecipeError(f"Recipe {file}: it contains {recipe!r:.40}, not keys such as 'model: resnet50'.")
    try:
        json.dumps(recipe, allow_nan=False)
    except (ValueError, TypeError) as error:  # infinite, or an alias that contains itself
        raise RecipeError(f"Recipe {file}: its values must be valid in JSON: {error}.") from None
    return recipe, Origin(str(file), lines)


def _text(file: Path) -> str:
    if file.suffix.lower() not in SUFFIXES:
        raise RecipeError(f"Recipe {file}: a recipe file ends in {', '.join(SUFFIXES)}. Rename it.")
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        remedy = "List the named recipes with: drivetrain recipes."
        raise RecipeError(f"Recipe {file} does not exist. {remedy}") from None
    except OSError as error:
        raise RecipeError(f"Recipe {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"Recipe {file} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except ValueError:  # a null byte
        raise RecipeError(f"Recipe {str(file)!r} is not a file name.") from None


def _json(text: str, place: str) -> Any:
    """Raise RecipeError, which begins with `place`, for a duplicate key, of which JSON would keep the last."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                raise RecipeError(f"{place}: the key {key!r} appears twice. Remove one.")
            mapping[key] = value
        return mapping

    return json.loads(text, object_pairs_hook=unique)


def json_or_text(key: str, text: str) -> Any:
    """Parse a value of the command line."""
    try:
        return _json(text, f"{key}={text:.200}")
    except RecipeError:  # which is a ValueError
        raise
    except (ValueError, RecursionError):
        return text


@contextmanager
def modules_of(recipe: str | None = None) -> Iterator[None]:
    """Make the modules of a recipe's folder and of the working directory importable: before installed packages, but
    after the standard library, which Python itself needs. Ranks and loader processes inherit the path."""
    folders = [Path(recipe).parent] if recipe is not None and is_file_name(recipe) else []
    before = list(sys.path)
    added = [str(folder.resolve()) for folder in (*folders, Path.cwd())]
    added = [folder for folder in dict.fromkeys(added) if folder not in before]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    place = next((number for number, path in enumerate(before) if path in installed), len(before))
    sys.path[place:place] = added
    try:
        yield
    finally:
        sys.path[:] = [path for path in sys.path if path not in added]
