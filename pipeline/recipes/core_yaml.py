"""YAML 1.2's core schema, as data only, on PyYAML's parser: `1e-4` is a number, `no` and `on` are strings, and `010` is
ten; in YAML 1.1, PyYAML's default, they are a string, booleans, and eight."""

import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import yaml

from ...common.errors import RecipeError

_LIMIT = 10_000_000  # characters, and ten per node; the names of 21,841 classes take less than a tenth


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with only the scalars and tags of YAML 1.2's core schema."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Bound the size with all aliases written out: ten nested ones of ten each would take all memory."""
        node: yaml.Node | None = super().compose_node(parent, index)
        if node is None or node in self._sizes:
            return node
        inside = [*chain(*node.value)] if isinstance(node, yaml.MappingNode) else node.value
        text = isinstance(node, yaml.ScalarNode)
        size = 10 + (len(inside) if text else sum(self._sizes.get(one, 0) for one in inside))  # 0: it contains itself
        if size > _LIMIT:
            raise _problem(f"with its aliases written out, it has more than {_LIMIT:,} characters", node)
        self._sizes[node] = size
        return node

    # These replace PyYAML's, which are those of YAML 1.1.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.endswith((":str", ":seq"))
    }


class _Dumper(yaml.SafeDumper):
    """Also quotes the texts that are something else by the core schema: PyYAML's would write a class named 08, or 1e3,
    as it is, which is a number there."""


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
            line = key_node.start_mark.line + 1
            raise RecipeError(f"{loader.name}, line {line}: the key {key!r} appears twice. Remove one.")
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
    _Dumper.add_implicit_resolver(name, matches, starts)
    _Loader.add_constructor(name, construct)


for _scalar in _SCALARS:
    _add_scalar(*_scalar)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def dump(values: Any, **options: Any) -> str:
    """Return values as YAML, from which `parse`, and readers of YAML 1.1, take the same; `options` are PyYAML's."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)
    return text


def parse(text: str, name: str) -> tuple[Any, dict[str, int]]:
    """Return the values of a document and the lines of its keys. Raise RecipeError, which begins with `name`."""
    try:
        return _parsed(text, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = error.problem or error.context
        raise RecipeError(f"{name}{line}: {problem}. Write plain YAML.") from None
    except yaml.YAMLError as error:  # a control character
        raise RecipeError(f"{name}: {error}. Write plain YAML.") from None


def _parsed(text: str, name: str) -> tuple[Any, dict[str, int]]:
    loader = _Loader(text)
    loader.name = name  # which its errors begin with
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        recipe = loader.construct_document(node)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        return recipe, {str(key.value): key.start_mark.line + 1 for key, _ in pairs}
    finally:
        loader.dispose()
