"""Read recipes from YAML or JSON, as data only, with errors that name the line; import the modules beside them."""

import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ...common.errors import RecipeError
from .schema import Origin

SUFFIXES = (".yaml", ".yml", ".json")


def is_file_name(recipe: object) -> bool:
    return isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.lower().endswith(SUFFIXES))


def read_recipe(path: str | Path) -> tuple[dict[str, Any], Origin]:
    """Return the recipe and the lines of its keys. By YAML 1.2's core schema, `1e-4` is a number, `no` and `on` are
    strings, and `010` is ten; in YAML 1.1, PyYAML's default, they are a string, booleans, and eight."""
    file = Path(path)
    text = _text(file)
    try:
        if file.suffix.lower() == ".json":
            recipe, lines = _json(text), dict[str, int]()
        else:
            recipe, lines = _yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = error.problem or error.context
        raise RecipeError(f"Recipe {file}{line}: {problem}. Write plain YAML.") from None
    except yaml.YAMLError as error:  # a control character
        raise RecipeError(f"Recipe {file}: {error}. Write plain YAML.") from None
    except json.JSONDecodeError as error:
        raise RecipeError(f"Recipe {file}, line {error.lineno}: {error.msg}. Write plain JSON.") from None
    except ValueError as error:  # a number of thousands of digits
        raise RecipeError(f"Recipe {file}: {error}. Write plain values.") from None
    except RecursionError:
        raise RecipeError(f"Recipe {file}: it is nested too deeply to be a recipe.") from None
    except _Twice as error:
        where = f"Recipe {file}{error.line}"
        raise RecipeError(f"{where}: the key {error.key!r} appears twice. Remove one.") from None
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


class _Twice(Exception):
    """A duplicate key in a mapping."""

    def __init__(self, key: str, line: int | None = None) -> None:
        super().__init__(key)
        self.key, self.line = key, "" if line is None else f", line {line}"


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise _Twice(key)
        mapping[key] = value
    return mapping


def json_or_text(key: str, text: str) -> Any:
    """Parse a value of the command line. A duplicate key, of which JSON would keep the last, raises RecipeError."""
    try:
        return _json(text)
    except _Twice as error:
        raise RecipeError(f"{key}={text:.200}: the key {error.key!r} appears twice. Remove one.") from None
    except (ValueError, RecursionError):
        return text


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with only the scalars and tags of YAML 1.2's core schema."""

    # These replace PyYAML's, which are those of YAML 1.1.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":str", ":seq"))
    }


def _problem(text: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)


def _construct_mapping(loader: _Loader, node: yaml.Node) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    if not isinstance(node, yaml.MappingNode):
        raise _problem("the tag !!map is not on a mapping", node)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise _problem(f"the key {key!r} is not a string", key_node)
        if key == "<<":  # YAML 1.1's merge key; in YAML 1.2, it is a plain key
            raise _problem("YAML 1.2 has no merge key (<<); write its values out", key_node)
        if key in mapping:
            raise _Twice(key, key_node.start_mark.line + 1)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


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
        if not matches.match(text):  # an explicit tag on a value of another type
            raise _problem(f"{text!r} is not a valid {tag}", node)
        return make(text)

    name = f"tag:yaml.org,2002:{tag}"
    starts = [*first, ""] if tag == "null" else [*first]  # null may be empty
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
        recipe = loader.construct_document(node)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        return recipe, {str(key.value): key.start_mark.line + 1 for key, _ in pairs}
    finally:
        loader.dispose()


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
