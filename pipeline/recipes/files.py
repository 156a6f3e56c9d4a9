"""Recipes in files: YAML or JSON, read as data only, with errors that name the file and the line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ...errors import RecipeError
from .schema import Origin

SUFFIXES = (".yaml", ".yml", ".json")


def is_file_name(recipe: object) -> bool:
    """Whether a recipe is given as a file: a Path, or text that ends as a recipe's file does."""
    return isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.lower().endswith(SUFFIXES))


def read_recipe(path: str | Path) -> tuple[dict[str, Any], Origin]:
    """The recipe in a file, and where its keys stand.

    YAML is read by the rules of YAML 1.2's core schema, in which `1e-4` is a number, `no` and `on` are words,
    and `010` is ten; by those of 1.1, which PyYAML has, they are a word, booleans, and eight. Nothing but
    plain data is built. Paths in it are relative to the working directory, not to the file.

    Raises:
        RecipeError: naming file, line and remedy: if it cannot be read, is no mapping, or has a key twice.
    """
    file = Path(path)
    text = _text(file)
    try:
        found, lines = _json(text) if file.suffix.lower() == ".json" else _yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise RecipeError(
            f"Recipe {file}{line}: {error.problem or error.context}. Write plain YAML."
        ) from None
    except yaml.YAMLError as error:  # a character that no text has
        raise RecipeError(f"Recipe {file}: {error}. Write plain YAML.") from None
    except json.JSONDecodeError as error:
        raise RecipeError(f"Recipe {file}, line {error.lineno}: {error.msg}. Write plain JSON.") from None
    except ValueError as error:  # a number of thousands of digits
        raise RecipeError(f"Recipe {file}: {error}. Write plain values.") from None
    except RecursionError:
        raise RecipeError(f"Recipe {file}: it is nested too deeply to be a recipe.") from None
    except _Twice as error:
        raise RecipeError(
            f"Recipe {file}{error.line}: the key {error.key!r} is there twice. Remove one."
        ) from None
    if not isinstance(found, dict):
        raise RecipeError(f"Recipe {file}: it holds {found!r:.40}, not keys such as 'model: resnet50'.")
    try:
        json.dumps(found, allow_nan=False)
    except (ValueError, TypeError) as error:  # infinite, or an alias that contains itself
        raise RecipeError(f"Recipe {file}: its values must be those of JSON: {error}.") from None
    return found, Origin(str(file), lines)


def _text(file: Path) -> str:
    if file.suffix.lower() not in SUFFIXES:
        raise RecipeError(f"Recipe {file}: a recipe's file ends in {', '.join(SUFFIXES)}. Rename it.")
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(
            f"Recipe {file} does not exist. drivetrain recipes lists those with a name."
        ) from None
    except OSError as error:
        raise RecipeError(f"Recipe {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"Recipe {file} is no text in UTF-8: {error.reason} at byte {error.start}."
        ) from None
    except ValueError:  # a zero byte
        raise RecipeError(f"Recipe {str(file)!r} is no name of a file.") from None


class _Twice(Exception):
    """A key that a mapping has twice."""

    def __init__(self, key: str, line: int | None = None) -> None:
        super().__init__(key)
        self.key, self.line = key, "" if line is None else f", line {line}"


def _json(text: str) -> tuple[Any, dict[str, int]]:
    return json.loads(text, object_pairs_hook=_unique), {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def json_or_text(key: str, text: str) -> Any:
    """A value of the command line: JSON where it is JSON, else the text itself.

    Raises:
        RecipeError: naming `key`, if a dict in it has a key twice, of which JSON would keep the last.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _Twice as error:
        raise RecipeError(f"{key}={text:.200}: the key {error.key!r} is there twice. Remove one.") from None
    except (ValueError, RecursionError):
        return text


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema, and no other tags than those."""

    # Instead of PyYAML's own, which are those of YAML 1.1.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":str", ":seq"))
    }


def _construct_mapping(loader: _Loader, node: yaml.Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not isinstance(node, yaml.MappingNode):
        raise yaml.MarkedYAMLError(problem="the tag !!map stands at no mapping", problem_mark=node.start_mark)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.MarkedYAMLError(
                problem=f"the key {key!r} is no word", problem_mark=key_node.start_mark
            )
        if key == "<<":  # of YAML 1.1: it would be an option of that name
            raise yaml.MarkedYAMLError(
                problem="YAML 1.2 has no merge key (<<); write its values out",
                problem_mark=key_node.start_mark,
            )
        if key in found:
            raise _Twice(key, key_node.start_mark.line + 1)
        found[key] = loader.construct_object(value_node, deep=True)
    return found


_SCALARS: tuple[tuple[str, str, str, Callable[[str], Any]], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN", lambda text: None),  # noqa: ARG005
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    ("int", r"[-+]?[0-9]+", "-+0123456789", int),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789", float),
)


def _add_scalar(tag: str, pattern: str, first: str, make: Callable[[str], Any]) -> None:
    matches = re.compile(f"(?:{pattern})$")

    def construct(loader: _Loader, node: yaml.ScalarNode) -> Any:
        text = loader.construct_scalar(node)
        if not matches.match(text):  # the tag was written out, and the value is of another kind
            raise yaml.MarkedYAMLError(problem=f"{text!r} is no {tag}", problem_mark=node.start_mark)
        return make(text)

    name = f"tag:yaml.org,2002:{tag}"
    starts = [*first, ""] if tag == "null" else [*first]  # null may be nothing at all
    _Loader.add_implicit_resolver(name, matches, starts)
    _Loader.add_constructor(name, construct)


for _scalar in _SCALARS:
    _add_scalar(*_scalar)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _yaml(text: str) -> tuple[Any, dict[str, int]]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        found = loader.construct_document(node)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        return found, {str(key.value): key.start_mark.line + 1 for key, _ in pairs}
    finally:
        loader.dispose()
